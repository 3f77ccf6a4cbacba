"""A second start compiles nothing, and code that was compiled under other conditions is never used."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from command_line import TESTS, lines, unisono
from unisono.parallel.blocks import compile_cache
from unisono.parallel.blocks.compile_cache import compile_conditions, count_compilations, use_compile_cache
from unisono.parallel.blocks.repeated import compile_blocks

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture(autouse=True)
def conditions_as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(compile_cache, "_current", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    flash = torch.backends.cuda.flash_sdp_enabled()
    yield
    torch.backends.cuda.enable_flash_sdp(flash)


def test_the_cache_is_in_the_users_cache_folder_and_says_what_it_is_for(tmp_path: Path) -> None:
    folder = use_compile_cache()
    assert folder.parent == tmp_path / "unisono" / "compile" and os.environ[VARIABLE] == str(folder)
    assert json.loads((folder / "conditions.json").read_text()) == json.loads(json.dumps(compile_conditions()))
    assert folder.stat().st_mode & 0o077 == 0, "torch executes what is in it"
    assert use_compile_cache() == folder, "not a folder inside of the folder"


def test_each_choice_of_attention_kernels_and_optimizations_has_its_own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {use_compile_cache()}
    torch.backends.cuda.enable_flash_sdp(False)
    folders.add(use_compile_cache())
    torch.backends.cuda.enable_flash_sdp(True)
    import torch._inductor.config as inductor

    if hasattr(inductor.triton, "mix_order_reduction"):
        monkeypatch.setattr(inductor.triton, "mix_order_reduction", not inductor.triton.mix_order_reduction)
    monkeypatch.setattr(torch, "__version__", "2.9.9")
    folders.add(use_compile_cache())
    assert len(folders) == 3


def test_a_folder_set_by_the_user_replaces_torchs_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine"))
    assert use_compile_cache().parent == tmp_path / "mine"
    monkeypatch.setenv(VARIABLE, default_cache_dir())
    assert use_compile_cache().parent == tmp_path / "unisono" / "compile"


def test_if_no_folder_is_writable_torchs_default_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "torchinductor_" in str(use_compile_cache())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return F.scaled_dot_product_attention(x, x, x)


def test_a_process_does_not_reuse_what_it_compiled_for_other_attention_kernels() -> None:
    model = nn.Sequential(Attention(), Attention())
    compiled = []

    def compile_and_run() -> None:
        for block in model:
            block._compiled_call_impl = None
        compile_blocks(model, list(model))
        for block in model:
            block.compile(backend=lambda graph, inputs: compiled.append(1) or graph.forward)
            block(torch.randn(2, 3, 4, 8))

    compile_and_run()
    first = len(compiled)
    torch.backends.cuda.enable_flash_sdp(False)
    compile_and_run()
    assert first >= 1 and len(compiled) == 2 * first


@pytest.mark.slow
def test_the_second_start_of_a_run_compiles_nothing(tmp_path: Path) -> None:
    recipe = f"{TESTS / 'recipes_for_tests.py'}:PartlyFrozen"
    settings = ["--compile", "--max_steps", "1", "--num_blocks", "3", "--num_samples", "4", "--preview_every", "-1"]

    def start(name: str, *more: str) -> dict[str, Any]:
        words = ["train", recipe, *settings, "--output_dir", tmp_path / name, *more]
        ended = unisono(*words, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"), **{VARIABLE: ""})
        assert ended.code == 0, ended.err
        (event,) = [line for line in lines(tmp_path / name, "events.jsonl") if "compiled" in line]
        return event

    first, second = start("first"), start("second")
    assert first["compiled"] > 0
    assert second["compiled"] == 0 and second["cached"] == first["compiled"] + first["cached"]
    swapped = start("swapped", "--blocks_on_host", "3"), start("swapped again", "--blocks_on_host", "3")
    assert swapped[1]["compiled"] == 0 and swapped[1]["cached"] > 0
    assert set(count_compilations()) == {"compiled", "cached"}
