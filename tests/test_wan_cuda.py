"""Wan on a GPU: compiled gradients equal the eager ones, and float32 weights stay float32, also when sharded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel

import unisono
from many_runs import Run, many_runs
from unisono.parallel.blocks.repeated import compile_blocks, recompute_activations
from unisono.parallel.blocks.selective import own_selective_class
from unisono.recipes.wan.models.kernels.attention import use
from unisono.recipes.wan.models.kernels.block import use_fast_blocks
from wan_models import save_data, save_pipelines

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# Wan 2.1 1.3B's blocks, only two of them.
BLOCKS = {"num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960, "num_layers": 2}


def gradients(model: Any, latent: tuple[int, ...], batch: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator("cuda").manual_seed(1)
    noisy = torch.randn(batch, *latent, device="cuda", generator=drawn)
    text = torch.randn(batch, 512, 4096, device="cuda", generator=drawn, dtype=torch.bfloat16)
    with torch.autocast("cuda", torch.bfloat16):
        velocity = model(noisy, torch.full((batch,), 500.0, device="cuda"), text, return_dict=False)[0]
    (velocity.float() - torch.randn(velocity.shape, device="cuda", generator=drawn)).square().mean().backward()
    gradients_by_name = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return gradients_by_name


SHAPES = pytest.mark.parametrize(
    ("latent", "batch"), [((16, 5, 60, 104), 1), ((16, 1, 64, 64), 16)], ids=["video", "images"]
)


def assert_same(compiled: dict[str, torch.Tensor], eager: dict[str, torch.Tensor]) -> None:
    whole = sum(gradient.norm() ** 2 for gradient in eager.values()) ** 0.5
    off = sum((compiled[name] - gradient).norm() ** 2 for name, gradient in eager.items()) ** 0.5
    assert off < 1e-2 * whole, f"off by {off / whole:.1e}"
    for name in eager:
        if "scale_shift_table" in name or "norm" in name:
            assert (compiled[name] - eager[name]).norm() < 5e-2 * eager[name].norm(), name


@SHAPES
@pytest.mark.parametrize("fast", [True, False], ids=["ours", "diffusers"])
def test_compiled_gradients_equal_eager_ones(latent: tuple[int, ...], batch: int, fast: bool) -> None:
    """Without the fix, sums over 7,800 tokens were garbage (pytorch#193061)."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = WanTransformer3DModel(**BLOCKS)
    eager = gradients(model, latent, batch)
    if fast:
        use_fast_blocks(model)
        assert_same(gradients(model, latent, batch), eager)
    compile_blocks(model, list(model.blocks))
    assert_same(gradients(model, latent, batch), eager)


@SHAPES
@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
def test_a_kernel_chosen_by_name_gets_the_same_inputs_as_torchs_choice(
    latent: tuple[int, ...], batch: int, kernel: str
) -> None:
    """Diffusers copies queries, keys and values for cuDNN."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = WanTransformer3DModel(**BLOCKS)
    eager = gradients(model, latent, batch)
    use_fast_blocks(model)
    compile_blocks(model, list(model.blocks))
    peaks = []
    for name in ("auto", kernel):
        use(name, model)
        gradients(model, latent, batch)
        torch.cuda.reset_peak_memory_stats()
        compiled = gradients(model, latent, batch)
        peaks.append(torch.cuda.max_memory_allocated())
        assert_same(compiled, eager)
        del compiled
    width = BLOCKS["num_attention_heads"] * BLOCKS["attention_head_dim"]
    tokens = batch * latent[1] * latent[2] * latent[3] // 4
    copy = tokens * width * 2  # bytes, of one of the three
    assert peaks[1] < peaks[0] + copy, f"{(peaks[1] - peaks[0]) / copy:.1f} copies more"


FORMS = ("none", "selective", "products", "whole")


def recompute(model: Any, form: str) -> None:
    for block in model.blocks:
        if form == "whole":
            recompute_activations(block)
        elif form != "none":
            own = own_selective_class(block, products=form == "products")
            assert isinstance(own, type), own
            block.__class__ = own


@SHAPES
@pytest.mark.parametrize("kernel", ["auto", "cudnn", "flash", "efficient"])
def test_blocks_that_recompute_less_train_the_same(latent: tuple[int, ...], batch: int, kernel: str) -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        plain = WanTransformer3DModel(**BLOCKS | {"num_layers": 6})
    use_fast_blocks(plain)
    use(kernel, plain)
    expected = gradients(plain, latent, batch)
    for compiles in (False, True):
        peaks = {}
        for form in FORMS:
            model = copy.deepcopy(plain)
            recompute(model, form)
            if compiles:
                compile_blocks(model, list(model.blocks))
            gradients(model, latent, batch)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            assert_same(gradients(model, latent, batch), expected)
            peaks[form] = (torch.cuda.max_memory_allocated() - before) / 2**20
            del model
        print(f"compiled {compiles}, {kernel}: " + ", ".join(f"{form} {peak:,.0f} MiB" for form, peak in peaks.items()))
        assert peaks["none"] > peaks["selective"] > peaks["products"], peaks
        assert peaks["selective"] > peaks["whole"], peaks


def test_kernels_compute_what_plain_torch_does_for_the_widths_of_every_wan() -> None:
    from unisono.recipes.wan.models.kernels import again, operations

    drawn = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=drawn)

    for width in (24, 1536, 3072, 5120):
        x, o, dh, dy = (random(2, 300, width) for _ in range(4))
        weight, bias, gate = (random(2, width) for _ in range(3))
        head = 12 if width == 24 else 128
        angles = (random(300, head), random(300, head))
        h, _, mean, rstd = operations.norm(x, o, gate, weight, bias, 1e-6)
        three, nothing = random(2, 300, 3 * width), (None, None)
        _, scale = operations.rotate(three, weight, *angles, head, 1e-6)
        _, plain = operations.rotate(x, weight[:1], *nothing, head, 1e-6)
        inputs: dict[str, list[tuple[Any, ...]]] = {
            "norm": [(x, o, gate, weight, bias, 1e-6), (x, o, None, weight, bias, 1e-6)],
            "norm_backward": [
                (dh, dy, h, o, gate, weight, mean, rstd, True),
                (dh, dy, h, None, None, weight, mean, rstd, True),
                (dh, dy, h, None, None, weight, mean, rstd, False),
            ],
            "gate_backward": [(dh, o, gate)],
            "rotate": [(three, weight, *angles, head, 1e-6), (x, weight[:1], *nothing, head, 1e-6)],
            "rotate_backward": [
                ([dy, dh, o], three, weight, *angles, scale, head),
                ([dy, dh], three[..., : 2 * width].contiguous(), weight[:1], *angles, scale[:1], head),
                ([dy], x, weight[:1], *nothing, plain, head),
                ([dy, dh], three[..., : 2 * width].contiguous(), weight[:1], *nothing, scale[:1], head),
            ],
            "gelu_backward": [(dy, x)],
            "norm_again": [(x, o, gate, weight, bias, 1e-6)],
            "norm_backward_again": [
                (dh, dy, x, o, gate, weight, bias, mean, rstd, True),
                (dh, dy, h, None, None, weight, bias, mean, rstd, True),
                (dh, dy, h, None, None, weight, bias, mean, rstd, False),
            ],
            "rotate_again": [(three, weight, *angles, head, 1e-6)],
            "gelu_backward_again": [(dy, x)],
        }
        for name, variants in inputs.items():
            operation = getattr(again if name.endswith("_again") else operations, name)
            for inside in variants:
                for result, expected in zip(operation(*on_gpu(inside)), operation(*inside), strict=True):
                    assert (result.cpu() - expected).norm() <= 1e-5 * expected.norm(), (name, width)


def on_gpu(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [on_gpu(part) for part in value]
    return value.cuda() if isinstance(value, torch.Tensor) else value


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("wan")
    save_pipelines(root)
    save_data(root / "data")
    return root


def test_float32_weights_are_used_in_float32_under_every_strategy(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from unisono.recipes.wan.models.kernels import block

    dtypes: dict[str, set[torch.dtype]] = {}
    forward = block._forward

    def noting(self: Any, *arguments: Any, **keywords: Any) -> Any:
        for name, parameter in self.named_parameters():
            dtypes.setdefault(name, set()).add(parameter.dtype)
        return forward(self, *arguments, **keywords)

    monkeypatch.setattr(block, "_forward", noting)
    settings = {"model_path": str(root / "2.1"), "dataset_path": str(root / "data"), "compile": False, "max_steps": 2}
    settings |= {"fps": 8.0, "num_frames": 9, "num_workers": 0, "gpus": "1", "strategy": "fsdp", "preview_every": -1}
    unisono.train("wan-flow", output_dir=str(root / "float32"), **settings)
    assert dtypes["scale_shift_table"] == dtypes["norm2.weight"] == {torch.float32}
    assert torch.bfloat16 in dtypes["ffn.net.2.weight"]


def test_ranks_strategies_and_recorded_steps_agree_in_16_bit(root: Path) -> None:
    common = {"model_path": str(root / "2.1"), "dataset_path": str(root / "data"), "cache_dir": str(root / "cache")}
    common |= {"fps": 8.0, "num_frames": 9, "num_workers": 0, "log_every": 1, "max_steps": 5, "global_batch_size": 8}
    common |= {"batch_size": 8, "compile": False, "preview_every": -1, "learning_rate": 1e-3, "warmup_steps": 0}
    planned = {
        "one": (1, {}),
        "ddp": (2, {"strategy": "ddp", "batch_size": 4}),
        "fsdp": (2, {"strategy": "fsdp", "batch_size": 4}),
    }
    planned["recorded"] = (1, {"cuda_graph": True})
    runs = many_runs(
        [Run(name, name, world, common | more, recipe="wan-flow") for name, (world, more) in planned.items()], root
    )
    for name, run in runs.items():
        assert "error" not in run.main, (name, run.main)
        torch.testing.assert_close(run.losses(), runs["one"].losses(), rtol=2e-2, atol=0, msg=name)
