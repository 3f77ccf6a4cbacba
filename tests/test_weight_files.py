"""Weight files of any size are read by byte ranges; pickles are refused with a command that converts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from command_line import TINY, environment, unisono
from unisono.checkpoint.pickles import how_to_convert
from unisono.checkpoint.tensor_file import BadTensorFile, TensorFile

MORE_THAN_MAY_BE_MAPPED = """
import resource, sys
from pathlib import Path
from safetensors import safe_open
from unisono.recipes.wan.models.weights import Weights
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, resource.RLIM_INFINITY))
try:
    safe_open(sys.argv[1], framework="pt")
except (MemoryError, RuntimeError, OSError):
    print("cannot be mapped")
weights = Weights([Path(sys.argv[1])])
name = "patch_embedding.weight"
print(weights.shape(name), weights.rows(name, 2**29 - 1, 2**29 + 1).sum().item())
"""


def test_a_file_that_is_larger_than_memory_is_read_by_rows(tmp_path: Path) -> None:
    file, rows = tmp_path / "big.safetensors", 2**30
    entry = {"dtype": "BF16", "shape": [rows, 32], "data_offsets": [0, rows * 64]}
    header = json.dumps({"patch_embedding.weight": entry}).encode()
    start = 8 + len(header)
    with open(file, "wb") as out:  # 64 GiB, almost entirely a hole that takes no disk space
        out.write(len(header).to_bytes(8, "little") + header)
        out.truncate(start + rows * 64)
        os.pwrite(out.fileno(), torch.ones(32, dtype=torch.bfloat16).view(torch.uint8).numpy(), start + rows // 2 * 64)
    run = [sys.executable, "-c", MORE_THAN_MAY_BE_MAPPED, str(file)]
    done = subprocess.run(run, capture_output=True, text=True, env=environment())
    assert done.stdout.splitlines() == ["cannot be mapped", f"({rows}, 32) 32.0"], done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.complex64])
def test_tensors_equal_those_that_safetensors_reads(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "matrix": torch.arange(24).reshape(6, 4).to(dtype),
        "number": torch.ones(()).to(dtype),
        "empty": torch.zeros(0, 3).to(dtype),
    }
    save_file(tensors, tmp_path / "a.safetensors", metadata={"note": "x"})
    file = TensorFile(tmp_path / "a.safetensors")
    assert file.metadata == {"note": "x"} and file.entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        read = file.tensor(name)
        assert (read.shape, read.dtype) == (tensor.shape, dtype)
        assert torch.equal(read.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    assert torch.equal(file.rows("matrix", 2, 5).view(torch.uint8), tensors["matrix"][2:5].view(torch.uint8))
    assert file.rows("matrix", 4, 99).shape == (2, 4) and file.rows("empty", 0, 0).shape == (0, 3)


def test_a_file_that_is_replaced_or_cut_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(1000)}, path)
    file = TensorFile(path)
    os.truncate(path, 2000)
    with pytest.raises(BadTensorFile, match="replaced while"):
        file.tensor("a")
    with pytest.raises(BadTensorFile, match="bytes, but the file has 2000"):
        TensorFile(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadTensorFile, match="regular file"):
        TensorFile(tmp_path / "pipe")


def test_the_command_that_converts_a_pickle_works_as_it_is_printed(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    tensors = {"a": weight, "tied": weight, "across": weight.t(), "epoch": 3}
    file = tmp_path / "my model's.pt"
    torch.save({"state_dict": tensors}, file)
    text = how_to_convert(file)
    assert "\n" not in text
    command = text[text.index("python -c") :].replace("python", sys.executable, 1)
    subprocess.run(["bash", "-c", command], check=True)
    converted = load_file(tmp_path / "my model's.safetensors")
    assert converted.keys() == {"a", "tied", "across"} and torch.equal(converted["across"], weight.t())


def test_the_error_for_resuming_from_a_pickle_explains_how_to_convert_it(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(1)}, tmp_path / "old.pt")
    done = unisono("train", TINY, "--output_dir", "run", "--resume", "old.pt", cwd=tmp_path)
    assert done.code == 2 and len(done.err.splitlines()) == 1
    assert "is a pickle" in done.err and "weights_only=True" in done.err and "old.safetensors" in done.err
    assert not (tmp_path / "run").exists()
