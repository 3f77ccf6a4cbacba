"""Frozen weights in few bits in the Wan recipes: LoRAs, teachers, and files that are in scaled fp8 already."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import WanPipeline
from safetensors.torch import load_file, save_file
from torch import Tensor

import unisono
from many_runs import Outcome, Run, identical, largest_difference, many_runs
from test_wan_load import OF_128, native
from unisono.engine.export import export_run
from unisono.errors import ConfigError, UserError
from unisono.quantize.formats import FORMATS
from unisono.quantize.layers import FrozenLinear
from unisono.recipes.wan.models.load import build_meta, transformer_config
from unisono.recipes.wan.models.scaled_weights import check_formats
from unisono.recipes.wan.models.weights import fill, open_weights
from unisono.recipes.wan_distill.recipe import WanDistill
from unisono.recipes.wan_distill.settings import Config as DistillConfig
from wan_models import model, save_data, save_pipelines

pytestmark = pytest.mark.slow  # test_base_precision.py claims the same of a small recipe

NAMES = sorted(FORMATS)
COMMON: dict[str, Any] = {
    **{"mixed_precision": "no", "compile": False, "num_workers": 0, "log_every": 1, "warmup_steps": 0},
    **{"tensorboard": False, "ema_decay": 0.0, "global_batch_size": 4, "batch_size": 4, "save_every": 0},
}
FLOW = COMMON | {"max_steps": 3, "num_eval": 2, "learning_rate": 1e-2, "lora_rank": 4, "preview_every": -1}
DISTILL = COMMON | {
    **{"learning_rate": 1e-3, "height": 16, "width": 16, "num_eval": 0, "rollouts": 1, "rollout_batch": 3},
    **{"teacher_steps": 2, "pairs": 2, "num_previews": 1, "max_steps": 2, "preview_every": -1},
}
ONLINE = {"online": True, "flow_weight": 0.5}
FSDP = {"strategy": "fsdp", "batch_size": 2}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("wan")
    save_pipelines(root)
    save_data(root / "data")
    (root / "prompts.txt").write_text("a red ball\na ball\nball a\nred")
    return root


def paths(root: Path) -> dict[str, Any]:
    return {"model_path": str(root / "2.1"), "dataset_path": str(root / "data"), "cache_dir": str(root / "cache")}


@pytest.fixture(scope="module")
def runs(root: Path) -> dict[str, Outcome]:
    teacher = {"teacher_path": str(root / "2.1"), "data_path": str(root / "prompts.txt")}
    run_list = []
    for name in ("auto", *NAMES):
        base = {"base_precision": name}
        run_list.append(Run(f"lora {name}", f"runs/lora {name}", 1, FLOW | paths(root) | base, recipe="wan-flow"))
        teacher_run = DISTILL | teacher | base
        run_list.append(Run(f"teacher {name}", f"runs/teacher {name}", 1, teacher_run, recipe="wan-distill"))
    nf4 = {"base_precision": "nf4"}
    run_list.append(Run("lora, 2 ranks", "runs/lora, 2 ranks", 2, FLOW | paths(root) | nf4 | FSDP, recipe="wan-flow"))
    longer = FLOW | paths(root) | nf4 | {"max_steps": 4}
    run_list.append(Run("straight on", "runs/straight on", 1, longer, recipe="wan-flow"))
    run_list.append(Run("resumed", "runs/lora, 2 ranks", 1, longer, recipe="wan-flow"))
    online, shared = DISTILL | teacher | nf4 | ONLINE, {"teacher_device_strategy": "balanced", "strategy": "ddp"}
    run_list.append(Run("online", "runs/online", 1, online, recipe="wan-distill"))
    run_list.append(Run("shared", "runs/shared", 2, online | shared | {"batch_size": 2}, recipe="wan-distill"))
    full = FLOW | paths(root) | nf4 | {"lora_rank": 0}
    run_list.append(Run("nothing frozen", "runs/nothing frozen", 1, full, recipe="wan-flow"))
    both = DISTILL | teacher | nf4 | {"teacher_dtype": "float8"}
    run_list.append(Run("both", "runs/both", 1, both, recipe="wan-distill"))
    return many_runs(run_list, root)


@pytest.mark.parametrize("name", NAMES)
def test_a_lora_trained_on_a_quantised_base_is_exported_like_any_other(
    name: str, root: Path, runs: dict[str, Outcome], tmp_path: Path
) -> None:
    run, exact = runs[f"lora {name}"], runs["lora auto"]
    difference = (run.losses() - exact.losses()).abs().max()
    assert 0 < difference < 0.05
    assert all(".lora_" in weight for weight in run.weights())
    export_run(run.folder, tmp_path / "exported")
    weights = load_file(tmp_path / "exported" / "pytorch_lora_weights.safetensors")
    assert weights and all(".lora_" in weight and tensor.dtype == torch.float32 for weight, tensor in weights.items())
    pipeline = WanPipeline.from_pretrained(root / "2.1")
    pipeline.load_lora_weights(tmp_path / "exported")
    loaded = pipeline.transformer.blocks[1].ffn.net[2].lora_B
    trained = run.weights()["transformer.blocks.1.ffn.net.2.lora_B.default.weight"]
    assert identical({"": next(iter(loaded.values())).weight.detach()}, {"": trained}) and trained.abs().max() > 0


def test_a_lora_trains_the_same_on_shards_and_after_a_resume(runs: dict[str, Outcome]) -> None:
    one, two = runs["lora nf4"], runs["lora, 2 ranks"]
    torch.testing.assert_close(two.losses()[:3], one.losses(), rtol=2e-6, atol=0)
    torch.testing.assert_close(runs["resumed"].losses(), runs["straight on"].losses(), rtol=2e-6, atol=0)
    assert largest_difference(runs["resumed"].weights(4), runs["straight on"].weights(4)) < 2e-3


def test_the_base_of_a_lora_run_is_recorded_with_its_precision(
    root: Path, runs: dict[str, Outcome], tmp_path: Path
) -> None:
    shutil.copytree(runs["lora nf4"].folder, tmp_path / "run")
    recorded = json.loads((tmp_path / "run" / "prepared" / "base.json").read_text())
    assert recorded["base_precision"] == "nf4" and recorded["fingerprint"]
    file = tmp_path / "run" / "run.json"
    record = json.loads(file.read_text())
    del record["config"]["base_precision"]  # only what the recipe has recorded is left
    file.write_text(json.dumps(record))
    more = FLOW | paths(root) | {"base_precision": "int8", "max_steps": 4}
    with pytest.raises(UserError, match="base_precision int8: this run's LoRA was trained with base_precision nf4"):
        unisono.train("wan-flow", nproc=1, output_dir=str(tmp_path / "run"), **more)


@pytest.mark.parametrize("name", NAMES)
def test_samples_of_a_quantised_teacher_are_cached_separately(name: str, runs: dict[str, Outcome]) -> None:
    run, exact = runs[f"teacher {name}"], runs["teacher auto"]
    assert run.main["status"] == "done"
    assert 0 < (run.losses() - exact.losses()).abs().max() < 0.5 * exact.losses().max()
    files = [{file.name for file in (it.folder / "prepared" / "rollouts").rglob("*")} for it in (run, exact)]
    assert not {file for file in files[0] & files[1] if file.endswith(".safetensors")}


def test_a_quantised_online_teacher_is_the_same_with_and_without_sharding(runs: dict[str, Outcome]) -> None:
    torch.testing.assert_close(runs["shared"].losses(), runs["online"].losses(), rtol=1e-5, atol=0)


def test_a_precision_without_frozen_weights_and_two_formats_of_a_teacher_are_refused(runs: dict[str, Outcome]) -> None:
    for name, words in {"nothing frozen": "no frozen linear layers", "both": "remove one of them"}.items():
        assert runs[name].main["exit_code"] == 2 and words in runs[name].main["error"]
        assert not runs[name].folder.exists()


# Files in scaled fp8


def quantised(weight: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The weight in fp8, and the scales of parts that extend over these dimensions."""
    scale = weight.abs().amax(dim=dims, keepdim=True) / 448
    return (weight / scale).to(torch.float8_e4m3fn), scale


def by_weight(name: str, weight: Tensor, scale_name: str = "scale_weight") -> dict[str, Tensor]:
    codes, scale = quantised(weight, (0, 1))
    return {f"{name}.weight": codes, f"{name}.{scale_name}": scale.reshape(())}


def by_row(name: str, weight: Tensor, scale_name: str = "scale_weight") -> dict[str, Tensor]:
    codes, scale = quantised(weight, (1,))
    return {f"{name}.weight": codes, f"{name}.{scale_name}": scale}


def by_block(name: str, weight: Tensor) -> dict[str, Tensor]:
    codes, scale = quantised(weight.view(len(weight), -1, 16), (2,))
    whole = scale.max()
    return {
        **{f"{name}.weight": codes.view(weight.shape), f"{name}.scale_weight": scale / whole},
        f"{name}.scale_weight_tensor": whole,
    }


def newer(name: str, weight: Tensor) -> dict[str, Tensor]:
    described = torch.frombuffer(bytearray(b'{"format": "float8_e4m3fn"}'), dtype=torch.uint8)
    return {
        **by_weight(name, weight, "weight_scale"),
        **{f"{name}.comfy_quant": described, f"{name}.input_scale": torch.ones(())},
    }


def scaled_file(path: Path, make: Callable[[str, Tensor], dict[str, Tensor]], prefix: str = "") -> dict[str, Tensor]:
    """Writes a native file whose blocks' linear layers are in scaled fp8; returns the original weights."""
    plain = native(model(OF_128).state_dict())
    state: dict[str, Tensor] = {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)} if make is by_weight else {}
    for name, tensor in plain.items():
        layer = name.removesuffix(".weight")
        is_scaled = name.startswith("blocks.") and name.endswith(".weight") and tensor.ndim == 2
        parts = make(layer, tensor) if is_scaled else {name: tensor}
        state |= {f"{prefix}{part}": value.contiguous() for part, value in parts.items()}
    save_file(state, path)
    return plain


@pytest.mark.parametrize("make", [by_weight, by_row, by_block, newer])
def test_scaled_fp8_files_are_read_with_their_scales(make: Any, tmp_path: Path) -> None:
    file = tmp_path / "scaled.safetensors"
    prefix = "model.diffusion_model." if make is newer else ""
    scaled_file(file, make, prefix)
    transformer = build_meta(transformer_config(file))
    fill(transformer, file)
    original = model(OF_128).state_dict()
    for name, tensor in transformer.state_dict().items():
        is_scaled = name.startswith("blocks.") and name.endswith(".weight") and tensor.ndim == 2
        error = (tensor - original[name]).abs()
        assert (error <= (original[name].abs() * 2**-4 + 1e-3 if is_scaled else 0)).all(), name
        assert not is_scaled or error.max() > 0
    weights, name = open_weights(file), "blocks.1.ffn.net.0.proj.weight"
    assert torch.equal(weights.rows(name, 5, 17), weights.tensor(name)[5:17])
    assert weights.rows(name, 5, 17).dtype == torch.float32


def test_a_lora_trains_on_a_scaled_fp8_file(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "scaled.safetensors"
    scaled_file(file, by_row)
    settings = FLOW | paths(root) | {"model_path": str(file), "parts_path": str(root / "2.1"), "max_steps": 1}
    for name in ("auto", "fp8"):
        result = unisono.train("wan-flow", nproc=1, output_dir=str(tmp_path / name), base_precision=name, **settings)
        assert result.status == "done"


def test_files_in_other_formats_are_refused_with_the_reason(tmp_path: Path) -> None:
    layer, plain = "blocks.0.self_attn.q", native(model(OF_128).state_dict())
    other = torch.frombuffer(bytearray(b'{"format": "nvfp4"}'), dtype=torch.uint8)
    metadata = {"_quantization_metadata": json.dumps({"layers": {layer: {"format": "int8_blockwise"}}})}
    cases: list[tuple[dict[str, Tensor], dict[str, str], str]] = [
        ({f"{layer}.comfy_quant": other}, {}, "q has the format 'nvfp4', which unisono cannot read"),
        ({f"{layer}.comfy_quant": torch.zeros(3)}, {}, "has the format None"),
        ({f"{layer}.weight_scale_2": torch.ones(1)}, {}, "belongs to a format that unisono cannot read"),
        ({f"{layer}.comfy_quant": torch.zeros(2000)}, {}, "has the format None"),
        ({}, metadata, "has the format 'int8_blockwise'"),
        ({f"{layer}.scale_weight": torch.ones(3)}, {}, r"has shape \(3,\) for a weight of shape \(128, 128\)"),
        ({f"{layer}.scale_weight": torch.ones(128, 3, 1)}, {}, r"has shape \(128, 3, 1\)"),
        ({"blocks.0.nothing.scale_weight": torch.ones(1)}, {}, "but no blocks.0.nothing.weight"),
        ({f"{layer}.weight": torch.zeros(128, 128, dtype=torch.int8)}, {}, "dtype torch.int8; expected floating"),
    ]
    for more, notes, words in cases:
        save_file({**plain, **more}, tmp_path / "bad.safetensors", notes)
        with pytest.raises(ConfigError, match=words):
            open_weights(tmp_path / "bad.safetensors").tensor("blocks.0.attn1.to_q.weight")


def test_metadata_that_is_not_unicode_is_ignored() -> None:
    file: Any = SimpleNamespace(entries={}, metadata={"_quantization_metadata": '{"layers": "\ud800"}'})
    check_formats(file, "file")


def test_a_quantised_teacher_is_never_loaded_in_full_precision(root: Path) -> None:
    from unisono.recipes.wan_distill.models.teacher import load_teacher

    config = DistillConfig(teacher_path=str(root / "2.1"), data_path=str(root / "prompts.txt"))
    setup = WanDistill(config).setup
    teacher, line = load_teacher(
        setup.teacher, setup.guidance, "auto", "auto", "cpu", compiled=False, base_precision="nf4"
    )
    layers = [module for module in teacher.experts.modules() if isinstance(module, FrozenLinear)]
    assert len(layers) == 2 * 10 and "in nf4, computing in float32" in line
    assert all(layer.weight.dtype == torch.int8 and not layer.weight.is_meta for layer in layers)
