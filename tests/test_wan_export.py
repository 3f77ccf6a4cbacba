"""Whole models in the formats of diffusers, the Wan repository and ComfyUI: loaded back, and by plain diffusers."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline
from safetensors.torch import load_file
from torch import Tensor

import unisono
from command_line import environment
from unisono.engine import export
from unisono.engine.export import export_run
from unisono.errors import UnisonoError
from unisono.recipes.common.tensor_writer import ToWrite, write_sharded, write_tensors
from unisono.recipes.wan import native_export
from unisono.recipes.wan.models.load import build_meta, describe, transformer_config
from unisono.recipes.wan.models.weights import fill
from wan_models import SMALL, model, parts, save_data

WIDE = {**SMALL, "num_attention_heads": 1, "attention_head_dim": 128, "rope_max_seq_len": 1024}  # heads as published
NARROW = {**SMALL, "rope_max_seq_len": 1024}
SETTINGS: dict[str, Any] = {
    **{"mixed_precision": "no", "compile": False, "num_workers": 0, "log_every": 1, "warmup_steps": 0},
    **{"learning_rate": 1e-3, "fps": 8.0, "num_frames": 5, "tensorboard": False, "max_steps": 1, "nproc": 1},
    **{"preview_every": -1, "global_batch_size": 2},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pipelines, and one trained step of each: one transformer, both experts, the high-noise expert alone."""
    root = tmp_path_factory.mktemp("export")
    save_data(root / "data")
    experts = {"transformer": model(WIDE), "transformer_2": model(WIDE, 1), "boundary_ratio": 0.875}
    WanPipeline(**parts()._asdict(), transformer=model(WIDE)).save_pretrained(root / "one")
    WanPipeline(**parts()._asdict(), transformer=model(NARROW)).save_pretrained(root / "narrow")
    WanPipeline(**parts()._asdict(), **experts).save_pretrained(root / "both")
    for name, source, changes in (
        ("one", "one", {}),
        ("narrow", "narrow", {}),
        ("both", "both", {}),
        ("high", "both", {"expert": "high"}),
        ("lora", "one", {"lora_rank": 2}),
    ):
        paths = {"model_path": str(root / source), "dataset_path": str(root / "data"), "cache_dir": str(root / "cache")}
        unisono.train("wan-flow", output_dir=str(root / "runs" / name), **{**SETTINGS, **paths, **changes})
    return root


def weights_in(path: Path, part: str = "transformer") -> dict[str, Tensor]:
    """A transformer's weights, read by unisono's own loader, by diffusers' names."""
    folder = describe(path)
    loaded = build_meta(transformer_config(folder, part=part))
    fill(loaded, folder.transformers[part])
    return dict(loaded.state_dict())


def assert_equal(some: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert some.keys() == other.keys() and some
    for name, tensor in some.items():
        assert tensor.dtype == other[name].dtype and tensor.equal(other[name]), name


@pytest.mark.parametrize("run", ["one", "both", "high"])
def test_every_format_has_the_same_weights(run: str, root: Path, tmp_path: Path) -> None:
    for name in ("diffusers", "native", "comfyui"):
        export_run(root / "runs" / run, tmp_path / name, file_format=name)
    pipeline = WanPipeline.from_pretrained(tmp_path / "diffusers")
    for part in ("transformer",) if run == "one" else ("transformer", "transformer_2"):
        expected = dict(getattr(pipeline, part).state_dict())
        assert_equal(weights_in(tmp_path / "native", part), expected)
        level = {"transformer": "_high_noise", "transformer_2": "_low_noise"}[part] if run != "one" else ""
        assert_equal(weights_in(tmp_path / "comfyui" / f"diffusion_model{level}.safetensors"), expected)
    native = describe(tmp_path / "native")
    assert native.kind == "native" and native.boundary_ratio == (None if run == "one" else 0.875)
    before = weights_in(root / ("one" if run == "one" else "both"))
    assert any(not tensor.equal(before[name]) for name, tensor in weights_in(tmp_path / "native").items())


def test_training_goes_on_from_the_native_and_the_comfyui_format(root: Path, tmp_path: Path) -> None:
    losses = []
    for name, inside in (("diffusers", ""), ("native", ""), ("comfyui", "diffusion_model.safetensors")):
        export_run(root / "runs" / "one", tmp_path / name, file_format=name)
        paths = {"model_path": str(tmp_path / name / inside), "parts_path": str(root / "one")}
        paths |= {"dataset_path": str(root / "data"), "cache_dir": str(root / "cache")}
        unisono.train("wan-flow", output_dir=str(tmp_path / f"on {name}"), **{**SETTINGS, **paths})
        losses.append(json.loads((tmp_path / f"on {name}" / "metrics.jsonl").read_text().splitlines()[0])["loss"])
    assert losses[0] == losses[1] == losses[2]


PLAIN = """
import sys
import torch
from diffusers import WanPipeline, WanTransformer3DModel
folder, comfy, native = sys.argv[1:]
pipeline = WanPipeline.from_pretrained(folder)
expected = pipeline.transformer.state_dict()
for file in (comfy, native):
    where = {"config": folder, "subfolder": "transformer", "local_files_only": True}
    loaded = WanTransformer3DModel.from_single_file(file, torch_dtype=torch.float32, **where)
    state = loaded.state_dict()
    assert state.keys() == expected.keys() and all(state[name].equal(expected[name]) for name in expected)
pipeline.set_progress_bar_config(disable=True)
frames = pipeline("a ball", height=32, width=32, num_frames=5, num_inference_steps=2, max_sequence_length=24,
                  output_type="pt").frames
assert frames.isfinite().all()
assert not any(name.split(".")[0] == "unisono" for name in sys.modules)
print("loaded")
"""


def test_plain_diffusers_loads_every_format_without_unisono(root: Path, tmp_path: Path) -> None:
    for name in ("diffusers", "native", "comfyui"):
        export_run(root / "runs" / "one", tmp_path / name, file_format=name)
    files = [tmp_path / "comfyui" / "diffusion_model.safetensors"]
    files.append(tmp_path / "native" / "diffusion_pytorch_model.safetensors")
    words = [sys.executable, "-c", PLAIN, str(tmp_path / "diffusers"), *map(str, files)]
    ended = subprocess.run(words, capture_output=True, text=True, env=environment(), cwd=tmp_path)
    assert ended.returncode == 0 and ended.stdout.strip() == "loaded", ended.stderr


def test_the_native_config_says_how_many_heads_a_model_has(root: Path, tmp_path: Path) -> None:
    export_run(root / "runs" / "narrow", tmp_path / "native", file_format="native")
    config = json.loads((tmp_path / "native" / "config.json").read_text())
    assert config["num_heads"] == 2 and config["dim"] == 24 and config["_class_name"] == "WanModel"
    assert transformer_config(tmp_path / "native")["attention_head_dim"] == 12
    export_run(root / "runs" / "narrow", tmp_path / "diffusers")
    assert_equal(weights_in(tmp_path / "native"), weights_in(tmp_path / "diffusers"))
    config["num_heads"] = "two"
    (tmp_path / "native" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnisonoError, match="num_heads 'two'; expected a whole number"):
        transformer_config(tmp_path / "native")


def test_comfyui_gets_no_model_that_it_would_compute_wrongly(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UnisonoError, match="heads have width 12, but ComfyUI assumes 128") as refused:
        export_run(root / "runs" / "narrow", tmp_path / "out", file_format="comfyui")
    assert refused.value.exit_code == 2 and "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_formats_that_do_not_exist_are_refused_before_anything_is_read(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UnisonoError, match="--format gguf: choose diffusers, native, comfyui"):
        export_run(root / "runs" / "one", tmp_path / "out", file_format="gguf")
    with pytest.raises(UnisonoError, match="a LoRA has the formats diffusers and comfyui"):
        export_run(root / "runs" / "lora", tmp_path / "out", file_format="native")
    assert not (tmp_path / "out").exists()


def test_a_lora_is_written_in_one_format_or_in_both(root: Path, tmp_path: Path) -> None:
    names = {"comfyui": {"comfyui_lora.safetensors"}, "diffusers": {"pytorch_lora_weights.safetensors"}}
    names["both"] = names["comfyui"] | names["diffusers"]
    for name, files in names.items():
        export_run(root / "runs" / "lora", tmp_path / name, file_format=None if name == "both" else name)
        assert {file.name for file in (tmp_path / name).iterdir()} == files


def test_large_models_are_written_in_shards_that_load_back(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_run(root / "runs" / "one", tmp_path / "whole", file_format="native")
    monkeypatch.setattr(native_export, "_SHARD_BYTES", 300_000)
    export_run(root / "runs" / "one", tmp_path / "shards", file_format="native")
    files = sorted((tmp_path / "shards").glob("*.safetensors"))
    assert len(files) > 2 and all(file.stat().st_size < 400_000 for file in files)
    index = json.loads((tmp_path / "shards" / "diffusion_pytorch_model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    assert_equal(weights_in(tmp_path / "shards"), weights_in(tmp_path / "whole"))


def test_an_export_holds_the_checkpoints_tensors_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: dict[str, int] = {}
    load_whole = export.load_whole

    def loaded(*arguments: Any, **options: Any) -> dict[str, Tensor]:
        tensors = load_whole(*arguments, **options)
        assert not read.keys() & tensors.keys()  # the average replaces the weights, which are not read
        read.update({name: tensor.data_ptr() for name, tensor in tensors.items()})
        return tensors

    monkeypatch.setattr(export, "load_whole", loaded)
    _, trained, _ = export.load_trained(root / "runs" / "one")
    assert {name: weight.data_ptr() for name, weight in trained.named_parameters()} == read


def test_a_tensor_file_holds_one_tensor_at_a_time_and_is_what_safetensors_reads(tmp_path: Path) -> None:
    values = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).bfloat16(),
        "c": torch.randn(2, 2, 2).half(),
        "d": torch.ones(()),
    }
    alive: list[weakref.ref[Tensor]] = []

    def read(name: str) -> Tensor:
        assert not any(reference() is not None for reference in alive[:-1])
        copy = values[name].clone()
        alive.append(weakref.ref(copy))
        return copy

    tensors = {
        name: ToWrite(tuple(tensor.shape), tensor.dtype, lambda name=name: read(name))
        for name, tensor in values.items()
    }
    write_tensors(tmp_path / "all.safetensors", tensors)
    assert_equal(load_file(tmp_path / "all.safetensors"), values)
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "all.safetensors", tensors)
    write_sharded(tmp_path, "part", tensors, most_bytes=60)
    loaded = {}
    for file in tmp_path.glob("part-*.safetensors"):
        loaded |= load_file(file)
    assert_equal(dict(sorted(loaded.items())), values)
