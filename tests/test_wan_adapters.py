"""DoRA and LoKr on Wan: as peft computes them, on every kind of base weights, and in the files of other programs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import unisono
from many_runs import Outcome, Run, many_runs
from unisono.engine.export import export_run
from unisono.errors import ConfigError, UnisonoError
from unisono.quantize.layers import dequantize, frozen_linears, quantize
from unisono.recipes.wan.models.adapters import ADAPTER, adapter_layers, config_for
from unisono.recipes.wan.models.kernels.adapter import is_adapted
from unisono.recipes.wan.models.kernels.block import make_fast
from unisono.recipes.wan.models.load import build_meta
from unisono.recipes.wan.models.lora import add_lora, load_lora, lora_state, open_lora, save_lora
from unisono.recipes.wan.models.weight_names import native_name
from unisono.recipes.wan.models.weights import ExpertWeights, open_weights
from wan_models import SMALL, model, parts, save_data

KINDS = pytest.mark.parametrize("kind", ["dora", "lokr"])
TARGETS = ("to_q", "to_v", "ffn.net.2")
WHOLE: Any = {"dora": 4, "lokr": 64}  # a rank at which w2 is a whole matrix
Inputs = tuple[Tensor, Tensor, Tensor]


def changed(transformer: Any) -> Any:
    """The transformer with an adapter that has an effect."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in transformer.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return transformer


def adapted(kind: Any, rank: int = 2, alpha: float = 4.0, config: dict[str, Any] = SMALL, **options: Any) -> Any:
    transformer = model(config)
    add_lora(transformer, rank, alpha, TARGETS, kind=kind, **options)
    return changed(transformer)


def output(transformer: Any, text_dim: int = 32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    noisy, text = (torch.randn(*shape, generator=generator) for shape in ((1, 16, 2, 4, 6), (1, 24, text_dim)))
    result: Tensor = transformer(noisy, torch.tensor([500.0]), text, return_dict=False)[0]
    return result


def gradients(transformer: Any, text_dim: int = 32) -> dict[str, Tensor]:
    output(transformer, text_dim).square().mean().backward()
    named = {name: weight.grad.clone() for name, weight in transformer.named_parameters() if weight.requires_grad}
    transformer.zero_grad(set_to_none=True)
    return named


def assert_close(some: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 1e-4) -> None:
    assert some.keys() == other.keys() and some
    for name, expected in other.items():
        assert (some[name] - expected).norm() <= tolerance * expected.norm() + 1e-9, name


@KINDS
def test_a_new_adapter_changes_nothing_and_is_all_that_trains(kind: Any) -> None:
    plain = output(model())
    transformer = model()
    add_lora(transformer, 2, 4.0, TARGETS, kind=kind)
    torch.testing.assert_close(output(transformer), plain, rtol=1e-5, atol=1e-6)
    trained = {name for name, weight in transformer.named_parameters() if weight.requires_grad}
    assert trained and all(".lora_" in name or ".lokr_" in name for name in trained)
    assert len(adapter_layers(transformer)) == 10


@KINDS
def test_an_adapter_is_the_same_on_meta_as_on_the_cpu(kind: Any, tmp_path: Path) -> None:
    """The norms that a DoRA starts from are read from the files, row by row, like the weights."""
    model().save_pretrained(tmp_path)
    files = ExpertWeights({"transformer": open_weights(tmp_path)})
    built, on_cpu = build_meta(SMALL), model()
    for transformer in (built, on_cpu):
        torch.manual_seed(3)
        add_lora(transformer, 2, 4.0, TARGETS, kind=kind)
    expected = {name: weight for name, weight in on_cpu.named_parameters() if weight.requires_grad}
    for name, weight in built.named_parameters():
        if weight.requires_grad:
            rows = files.rows(f"transformer.{name}", 0, 12) if weight.is_meta else weight[:12]
            torch.testing.assert_close(rows, expected[name][:12])
            assert not weight.is_meta or "lora_magnitude_vector" in name


@KINDS
@pytest.mark.parametrize("whole", [False, True])
def test_gradients_are_those_of_pefts_own_layers(kind: Any, whole: bool) -> None:
    rank = WHOLE[kind] if whole else 2
    ours = adapted(kind, rank)
    theirs = model()
    layers = list(adapter_layers(ours))
    theirs.add_adapter(config_for(kind, rank, 4.0, layers), adapter_name=ADAPTER)
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(output(ours), output(theirs), rtol=1e-4, atol=1e-5)
    assert_close(gradients(ours), gradients(theirs))


@KINDS
@pytest.mark.parametrize("base", ["bf16", "int8", "nf4", "fp8"])
def test_a_frozen_base_in_few_bits_computes_like_its_decoded_weights(kind: Any, base: str) -> None:
    quantised = adapted(kind)
    quantize(quantised, frozen_linears(quantised, list(quantised.blocks)), base)
    decoded = copy.deepcopy(quantised)
    dequantize(decoded)
    torch.testing.assert_close(output(quantised), output(decoded), rtol=2e-2, atol=1e-3)
    assert_close(gradients(quantised), gradients(decoded), 3e-2)


@KINDS
def test_fast_blocks_leave_these_adapters_to_their_own_layers(kind: Any) -> None:
    torch.manual_seed(0)
    plain = WanTransformer3DModel(num_attention_heads=2, attention_head_dim=64, ffn_dim=192, num_layers=2)
    add_lora(plain, 4, 6.0, kind=kind)
    changed(plain)
    fast = copy.deepcopy(plain)
    for block in fast.blocks:
        make_fast(block, ("cpu",))
    assert not any(is_adapted(layer) for layer in adapter_layers(fast).values())
    assert_close(gradients(fast, 4096), gradients(plain, 4096), 1e-3)


@pytest.mark.slow
@KINDS
def test_a_compiled_layer_gets_the_same_gradients(kind: Any) -> None:
    layer = adapter_layers(adapted(kind))["blocks.0.attn1.to_q"]
    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(2))

    def of(forward: Any) -> dict[str, Tensor]:
        forward(x).square().mean().backward()
        named = {name: weight.grad.clone() for name, weight in layer.named_parameters() if weight.requires_grad}
        layer.zero_grad(set_to_none=True)
        return named

    assert_close(of(torch.compile(layer)), of(layer), 1e-5)


def effective(transformer: Any) -> dict[str, Tensor]:
    """The weight that each adapted layer multiplies with, measured by its outputs for the unit vectors."""
    weights = {}
    with torch.no_grad():
        for name, layer in adapter_layers(transformer).items():
            base = layer.base_layer
            weights[name] = (layer(torch.eye(base.in_features)) - base.bias).T
    return weights


def kohya(state: dict[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """The state of an adapter by the names of kohya's scripts and LyCORIS, with an alpha that is not multiplied in."""
    named: dict[str, Tensor] = {}
    renamed = {"lora_A.weight": "lora_down.weight", "lora_B.weight": "lora_up.weight"}
    for name, tensor in state.items():
        mark = ".lora_" if ".lora_" in name else ".lokr_"
        layer, part = name[: name.index(mark)], name[name.index(mark) + 1 :]
        stem = "lora_unet_" + (native_name(layer) or "").replace(".", "_")
        named[f"{stem}.alpha"] = torch.tensor(alpha)
        if part == "lora_magnitude_vector":
            named[f"{stem}.dora_scale"] = tensor[:, None]
        else:
            rank = 2.0
            into = part in ("lora_B.weight", "lokr_w1")
            named[f"{stem}.{renamed.get(part, part)}"] = tensor * (rank / alpha if into else 1)
    return named


@KINDS
@pytest.mark.parametrize("naming", ["diffusers", "comfyui", "kohya"])
def test_training_continues_from_files_of_every_naming(kind: Any, naming: str, tmp_path: Path) -> None:
    trained = adapted(kind)
    state = lora_state(trained)
    if naming == "kohya":
        path = tmp_path / "kohya.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in kohya(state, 8.0).items()}, path)
    else:
        save_lora(tmp_path, state, file_format=naming)
        path = tmp_path / "comfyui_lora.safetensors" if naming == "comfyui" else tmp_path
    file = open_lora(model(), path)
    assert (file.kind, file.rank) == (kind, 2)
    again = model()
    load_lora(again, path, alpha=3.0)
    assert_close(effective(again), effective(trained), 1e-5)
    assert_close(lora_state(again), state, 1e-5)


def test_the_comfyui_files_mean_what_comfyui_computes(tmp_path: Path) -> None:
    """Deltas by LyCORIS' formulas, from nothing but the file and the base weights."""
    for kind in ("dora", "lokr"):
        trained = adapted(kind)
        (tmp_path / kind).mkdir()
        save_lora(tmp_path / kind, lora_state(trained), file_format="comfyui")
        file = load_file(tmp_path / kind / "comfyui_lora.safetensors")
        for name, weight in effective(trained).items():
            stem, base = f"diffusion_model.{native_name(name)}", adapter_layers(trained)[name].base_layer.weight
            if kind == "lokr":
                low = file[f"{stem}.lokr_w2_a"] @ file[f"{stem}.lokr_w2_b"]
                scale = file[f"{stem}.alpha"] / file[f"{stem}.lokr_w2_b"].shape[0]
                expected = base + scale * torch.kron(file[f"{stem}.lokr_w1"], low)
            else:
                merged = base + file[f"{stem}.lora_B.weight"] @ file[f"{stem}.lora_A.weight"]
                expected = merged * (file[f"{stem}.dora_scale"] / merged.norm(dim=1, keepdim=True))
            torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-5)


@KINDS
def test_diffusers_or_peft_load_what_was_written(kind: Any, tmp_path: Path) -> None:
    trained = adapted(kind)
    how = save_lora(tmp_path, lora_state(trained), file_format="diffusers")
    pipeline = WanPipeline(**parts()._asdict(), transformer=model())
    if kind == "lokr":
        from peft import PeftModel

        assert "PeftModel.from_pretrained" in how
        loaded: nn.Module = PeftModel.from_pretrained(pipeline.transformer, tmp_path)
    else:
        pipeline.load_lora_weights(tmp_path)
        loaded = pipeline.transformer
    torch.testing.assert_close(output(loaded), output(trained), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(output(model()), output(trained), atol=1e-3)


BAD: dict[str, tuple[str, str]] = {
    "tucker": ("lokr_t2", "only LoRA, DoRA and LoKr"),
    "loha": ("hada_w1_a", "only LoRA, DoRA and LoKr"),
    "incomplete": ("-lokr_w2_b", "has lokr_w1, lokr_w2_a; only"),
    "sizes": ("+lokr_w1", "another architecture"),
    "layer": ("blocks.9.attn1.to_q.lokr_w1", "no layer for"),
}


@pytest.mark.parametrize("name", BAD)
def test_files_that_do_not_fit_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    state = lora_state(adapted("lokr"))
    change, words = BAD[name]
    first = "blocks.0.attn1.to_q"
    if change.startswith("-"):
        del state[f"{first}.{change[1:]}"]
    elif change.startswith("+"):
        state[f"{first}.{change[1:]}"] = torch.zeros(5, 5)
    else:
        state[change if change.startswith("blocks") else f"{first}.{change}"] = torch.zeros(2, 2)
    save_file(state, tmp_path / "bad.safetensors")
    with pytest.raises(ConfigError, match=words) as refused:
        open_lora(model(), tmp_path / "bad.safetensors")
    assert "\n" not in str(refused.value)


SETTINGS: dict[str, Any] = {
    **{"mixed_precision": "no", "compile": False, "num_workers": 0, "log_every": 1, "warmup_steps": 0},
    **{"learning_rate": 1e-2, "fps": 8.0, "num_frames": 9, "tensorboard": False, "ema_decay": 0.0},
    **{"global_batch_size": 8, "batch_size": 8, "preview_every": -1, "max_steps": 2, "lora_rank": 2},
}
FSDP = {"strategy": "fsdp", "batch_size": 4}
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "dora": (1, {"adapter": "dora"}),
    "dora, 2 ranks": (2, {"adapter": "dora", **FSDP}),
    "dora, on the host": (1, {"adapter": "dora", "blocks_on_host": 1}),
    "dora, nf4": (1, {"adapter": "dora", "base_precision": "nf4"}),
    "dora, nf4, 2 ranks": (2, {"adapter": "dora", "base_precision": "nf4", **FSDP}),
    "lokr": (1, {"adapter": "lokr"}),
    "lokr, 2 ranks": (2, {"adapter": "lokr", **FSDP}),
    "lokr, on the host": (1, {"adapter": "lokr", "blocks_on_host": 1}),
    "lokr, nf4": (1, {"adapter": "lokr", "base_precision": "nf4"}),
    "lokr, nf4, 2 ranks": (2, {"adapter": "lokr", "base_precision": "nf4", "strategy": "ddp", "batch_size": 4}),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    WanPipeline(**parts()._asdict(), transformer=model()).save_pretrained(root / "model")
    save_data(root / "data")
    return root


def paths(root: Path) -> dict[str, Any]:
    return {"model_path": str(root / "model"), "dataset_path": str(root / "data"), "cache_dir": str(root / "cache")}


@pytest.fixture(scope="module")
def runs(root: Path) -> dict[str, Outcome]:
    planned = [
        Run(name, f"runs/{name}", world, {**SETTINGS, **paths(root), **changes}, recipe="wan-flow")
        for name, (world, changes) in RUNS.items()
    ]
    outcomes = many_runs(planned, root)
    for name, outcome in outcomes.items():
        assert "error" not in outcome.main, (name, outcome.main)
    return outcomes


@pytest.mark.parametrize("name", [name for name in RUNS if "," in name and name[5:] != " nf4" and name[4:] != ", nf4"])
def test_adapters_train_the_same_on_two_ranks_and_with_blocks_on_the_host(name: str, runs: dict[str, Outcome]) -> None:
    other = runs[name.removesuffix(", 2 ranks").removesuffix(", on the host")]
    torch.testing.assert_close(runs[name].losses(), other.losses(), rtol=2e-5, atol=0)
    assert runs[name].losses()[0] > 0 and len(runs[name].weights()) >= 20


@KINDS
def test_a_run_goes_on_from_its_exported_adapter(
    kind: str, runs: dict[str, Outcome], root: Path, tmp_path: Path
) -> None:
    export_run(runs[kind].folder, tmp_path / "adapter")
    values = {**SETTINGS, **paths(root), "lora_rank": 0, "max_steps": 1, "nproc": 1}
    values |= {"lora_path": str(tmp_path / "adapter"), "output_dir": str(tmp_path / "run")}
    with pytest.raises(UnisonoError, match=f"is a {kind}; continue it with --adapter {kind}"):
        unisono.train("wan-flow", **values)
    unisono.train("wan-flow", **values, adapter=kind)
    assert (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"adapter": "dora", "lora_rank": 0}, "adapter dora needs a rank"),
        ({"lokr_factor": 4}, "lokr_factor 4: expected"),
        ({"adapter": "lokr", "lokr_factor": 1}, "lokr_factor 1: expected"),
    ],
)
def test_settings_without_a_meaning_are_refused(
    changes: dict[str, Any], words: str, root: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnisonoError, match=words):
        unisono.train("wan-flow", **{**SETTINGS, **paths(root), **changes, "output_dir": str(tmp_path / "run")})
