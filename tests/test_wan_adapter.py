"""The LoRA of a fast Wan block computes what peft's modules compute, and saves less for the backward pass."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch.autograd.graph import saved_tensors_hooks

from many_runs import slow_unless
from unisono.parallel.blocks.repeated import compile_blocks
from unisono.quantize.layers import frozen_linears, quantize
from unisono.recipes.wan.models.adapters import ADAPTER, activate
from unisono.recipes.wan.models.kernels import fused
from unisono.recipes.wan.models.kernels.adapter import is_adapted
from unisono.recipes.wan.models.kernels.block import make_fast
from unisono.recipes.wan.models.lora import add_lora

FORMATS = pytest.mark.parametrize("base", ["plain", "fp8", "int8", "nf4"])
TOKENS, WIDTH = 512, 128
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def model(base: str, targets: Any = None, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    transformer = WanTransformer3DModel(num_attention_heads=2, attention_head_dim=64, ffn_dim=192, num_layers=2)
    add_lora(transformer, 4, 6.0, **({"targets": targets} if targets else {}))
    for name, parameter in transformer.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.05)
    if base != "plain":
        quantize(transformer, frozen_linears(transformer, list(transformer.blocks)), base)
    return transformer.to(dtype) if dtype != torch.float32 else transformer


def fast(transformer: Any) -> Any:
    transformer = copy.deepcopy(transformer)
    for block in transformer.blocks:
        make_fast(block, ("cpu", "cuda"))
    return transformer


def trained(transformer: Any, *, mixed: bool) -> dict[str, torch.Tensor]:
    transformer.to(DEVICE)
    drawn = torch.Generator().manual_seed(1)
    noisy, text, target = (torch.randn(*shape, generator=drawn).to(DEVICE) for shape in SHAPES)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=mixed):
        velocity = transformer(noisy, torch.full((2,), 500.0, device=DEVICE), text, return_dict=False)[0]
    (velocity.float() - target).square().mean().backward()
    gradients = {name: weight.grad.clone() for name, weight in transformer.named_parameters() if weight.requires_grad}
    transformer.zero_grad(set_to_none=True)
    return {"velocity": velocity.detach().float(), **gradients}


SHAPES = ((2, 16, 2, 8, 12), (2, 24, 4096), (2, 16, 2, 8, 12))


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys() and len(ours) > 20
    for name, expected in theirs.items():
        assert (ours[name] - expected).norm() <= tolerance * expected.norm(), name


@pytest.mark.parametrize("active", [[ADAPTER], ["second"], [], [ADAPTER, "second"]])
def test_with_several_loras_only_the_active_ones_count(active: list[str]) -> None:
    plain = model("plain")
    add_lora(plain, 3, adapter="second")
    for name, parameter in plain.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter.requires_grad_(), std=0.05)
    quick = fast(plain)
    results = []
    for transformer in (quick, plain):
        activate(transformer, active)
        layer = transformer.blocks[0].attn1.to_q
        assert is_adapted(layer) == (len(active) == 1)
        if not active:
            transformer.proj_out.weight.requires_grad_()  # something must be trained
        results.append(trained_or_none(transformer))
    for name, expected in results[1].items():
        assert (results[0][name] - expected).norm() <= 1e-5 * expected.norm() + 1e-9, name
    of = {name for name in results[0] if any(f".{adapter}." in name for adapter in (ADAPTER, "second"))}
    assert {name.split(".")[-2] for name in of} == set(active)


def trained_or_none(transformer: Any) -> dict[str, torch.Tensor]:
    """Like `trained`, without the weights that got no gradient."""
    drawn = torch.Generator().manual_seed(1)
    noisy, text, target = (torch.randn(*shape, generator=drawn) for shape in SHAPES)
    velocity = transformer(noisy, torch.full((2,), 500.0), text, return_dict=False)[0]
    (velocity - target).square().mean().backward()
    gradients = {name: weight.grad for name, weight in transformer.named_parameters() if weight.grad is not None}
    return {"velocity": velocity.detach(), **gradients}


@FORMATS
def test_a_lora_gets_the_gradients_that_peft_computes(base: str) -> None:
    plain = model(base)
    assert_same(trained(fast(plain), mixed=False), trained(plain, mixed=False), 1e-5 if DEVICE == "cpu" else 1e-2)


def test_in_16_bit_the_gradients_agree_up_to_rounding() -> None:
    plain = model("plain")
    assert_same(trained(fast(plain), mixed=True), trained(plain, mixed=True), 6e-2)


def test_layers_with_and_without_a_lora_can_be_mixed() -> None:
    plain = model("plain", targets=["to_q", "ffn.net.2"])
    ours, theirs = trained(fast(plain), mixed=False), trained(plain, mixed=False)
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("base", "backend"), slow_unless([("plain", "aot_eager"), ("plain", ""), ("fp8", "")], [("plain", "aot_eager")])
)
def test_compiled_blocks_get_the_same_gradients(base: str, backend: str) -> None:
    plain = model(base)
    quick = fast(plain)
    eager = trained(quick, mixed=True)
    for block in quick.blocks if backend else ():
        block.compile(backend=backend)
    if not backend:
        compile_blocks(quick, list(quick.blocks))
    assert_same(trained(quick, mixed=True), eager, 6e-2)


def test_inputs_are_saved_once_and_in_the_type_of_the_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = fast(model("plain"))
    ours = _saved(quick)
    monkeypatch.setattr(fused, "is_adapted", lambda layer: False)
    assert _saved(quick) - ours > 3 * TOKENS * WIDTH * torch.bfloat16.itemsize


def _saved(transformer: Any) -> int:
    """Bytes that one block saves for the backward pass, without its weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in transformer.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage  # keeps it, so that no other tensor gets the same address
        return tensor

    block = transformer.blocks[0]
    x = torch.randn(1, TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    angles = [torch.randn(1, TOKENS, 1, 64) for _ in range(2)]
    with torch.autocast("cpu", torch.bfloat16), saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x, torch.randn(1, 24, WIDTH, dtype=torch.bfloat16), torch.randn(1, 6, WIDTH), angles)
    return sum(storage.nbytes() for storage in saved.values())


def test_layers_that_do_more_than_a_plain_lora_use_pefts_implementation() -> None:
    transformer = model("plain")
    layer = transformer.blocks[0].attn1.to_q
    assert is_adapted(layer)
    layer.lora_dropout["default"] = torch.nn.Dropout(0.1)
    assert not is_adapted(layer)
    other = transformer.blocks[1].attn1.to_q
    other.base_layer.bias.requires_grad_(True)
    assert not is_adapted(other)
    assert not is_adapted(other.base_layer)
