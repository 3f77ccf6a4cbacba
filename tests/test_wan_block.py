"""unisono's Wan block equals diffusers' in outputs, gradients and names; also with LoRA, recomputed and compiled."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import SDPBackend, sdpa_kernel

from unisono.parallel.blocks.repeated import recompute_activations
from unisono.quantize.reduced_layers import ReducedLinear, reduce_products
from unisono.quantize.reduced_products import Products
from unisono.recipes.wan.models.kernels import attention, fused, pieces
from unisono.recipes.wan.models.kernels import block as our_block
from unisono.recipes.wan.models.kernels.attention import use
from unisono.recipes.wan.models.kernels.block import make_fast
from unisono.recipes.wan.models.lora import TARGETS, add_lora
from wan_models import SMALL, model

CLOSE = 1e-5  # relative tolerance of each gradient, because sums have a different order


def fast_copy(plain: Any, together: bool = False) -> Any:
    """`together` computes q, k and v as if weights had to be cast to another dtype, but exactly."""
    fast = copy.deepcopy(plain)
    for block in fast.blocks:
        make_fast(block, ("cpu",))
        for part in (block.attn1, block.attn2) if together else ():
            for layer in (part.to_q, part.to_k, part.to_v):
                layer.double()
    return fast


TOGETHER = pytest.mark.parametrize("together", [True, False])


def step(model: Any, timestep: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    drawn = torch.Generator().manual_seed(1)
    noisy = torch.randn(2, model.config.in_channels, 3, 8, 4, generator=drawn)
    text = torch.randn(2, 7, model.config.text_dim, generator=drawn)
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        velocity = model(noisy, timestep, text, return_dict=False)[0]
    (velocity.float() * torch.randn(velocity.shape, generator=drawn)).sum().backward()
    return velocity.detach(), {name: part.grad for name, part in model.named_parameters() if part.grad is not None}


def assert_same(fast: Any, plain: Any, timestep: Tensor, close: float = CLOSE, dtype: Any = None) -> None:
    ours, our_gradients = step(fast, timestep, dtype)
    theirs, their_gradients = step(plain, timestep, dtype)
    torch.testing.assert_close(ours, theirs, rtol=close, atol=close)
    assert our_gradients.keys() == their_gradients.keys()
    whole = sum(gradient.norm() ** 2 for gradient in their_gradients.values()) ** 0.5
    for name, gradient in their_gradients.items():
        off = (our_gradients[name] - gradient).norm()
        assert off <= close * max(gradient.norm(), 1e-3 * whole), (name, off / gradient.norm())


def plain_model(**changed: Any) -> Any:
    made = model({**SMALL, "num_attention_heads": 3, **changed})
    with torch.no_grad():  # initially many weights are 0 or 1, which would hide errors
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return made


@pytest.mark.parametrize("name", ["auto", "math"])
def test_attention_is_computed_by_the_kernel_that_was_chosen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, kernels = plain_model(), []
    fast = fast_copy(plain)
    use(name, fast)

    def kernel(chosen: Any) -> Any:
        kernels.append(chosen)
        return sdpa_kernel(chosen)

    monkeypatch.setattr(attention, "sdpa_kernel", kernel)
    assert_same(fast, plain, torch.tensor([300.0, 700.0]))
    assert kernels == ([] if name == "auto" else [SDPBackend.MATH] * 2 * len(fast.blocks))


LEVELS = torch.tensor([100.0, 900.0])


def was_fast(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls, forward = [], our_block._forward

    def noted(*arguments: Any) -> Tensor:
        calls.append(1)
        return forward(*arguments)

    monkeypatch.setattr(our_block, "_forward", noted)
    return calls


@TOGETHER
def test_outputs_and_gradients_equal_diffusers(monkeypatch: pytest.MonkeyPatch, together: bool) -> None:
    calls, plain = was_fast(monkeypatch), plain_model()
    products, compute = [], fused._Linear.apply

    def noted(*given: Any) -> Any:
        products.append(len(given[1]) // given[1].shape[-1])  # number of layers in the block
        return compute(*given)

    monkeypatch.setattr(fused._Linear, "apply", noted)
    assert_same(fast_copy(plain, together), plain, LEVELS)
    assert len(calls) == SMALL["num_layers"]
    attentions = [3, 1, 1, 2, 1] if together else [1, 1, 1, 1, 1, 1, 1, 1]  # q, k, v, out; q, k, v of another, out
    assert products[: len(attentions)] == attentions


def test_no_copy_of_the_weights_is_kept_if_none_is_needed() -> None:
    """Otherwise fsdp would free its weights after the forward pass while the copy stays in memory."""
    made = fast_copy(plain_model()).to(torch.bfloat16)
    own = {part.untyped_storage().data_ptr() for part in made.parameters()}
    inner = made.blocks[0].attn1.to_q.weight.shape[0]
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.ndim == 2 and tensor.shape[-1] == inner and tensor.shape[0] % inner == 0:
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        x, text, time = torch.randn(2, 5, inner), torch.randn(2, 7, inner), torch.randn(2, 6, inner)
        angles = tuple(torch.randn(1, 5, 1, inner // 3) for _ in range(2))
        made.blocks[0](x.bfloat16(), text.bfloat16(), time, angles)
    assert len(kept) >= 8 and all(tensor.untyped_storage().data_ptr() in own for tensor in kept)


def test_in_16_bit_outputs_and_gradients_agree_up_to_rounding() -> None:
    plain = plain_model()
    exact = step(copy.deepcopy(plain), LEVELS)[1]
    ours, theirs = (step(one, LEVELS, torch.bfloat16)[1] for one in (fast_copy(plain), plain))

    def off(gradients: dict[str, Tensor]) -> float:
        squares = [((gradients[name] - exact[name]).norm() ** 2, exact[name].norm() ** 2) for name in exact]
        return float(sum(error for error, _ in squares) / sum(size for _, size in squares)) ** 0.5

    assert off(ours) < 1.2 * off(theirs)


def test_timesteps_per_token_use_diffusers_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, plain = was_fast(monkeypatch), plain_model()
    times = torch.rand(2, 3 * 4 * 2, generator=torch.Generator().manual_seed(2)) * 1000
    assert_same(fast_copy(plain), plain, times, close=0)
    assert not calls


def test_a_lora_trains_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, plain = was_fast(monkeypatch), plain_model()
    add_lora(plain, 2, None, TARGETS)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if "lora_B" in name:  # which starts at zero and would hide the gradient of lora_A
                parameter.normal_()
    fast = fast_copy(plain)
    assert_same(fast, plain, LEVELS)
    assert calls and all("lora" in name for name, part in fast.named_parameters() if part.grad is not None)


@TOGETHER
def test_recomputed_blocks_train_the_same(monkeypatch: pytest.MonkeyPatch, together: bool) -> None:
    calls, plain = was_fast(monkeypatch), plain_model()
    fast = fast_copy(plain, together)
    for block in fast.blocks:
        recompute_activations(block)
    assert_same(fast, plain, LEVELS)
    assert len(calls) == 2 * SMALL["num_layers"]


@TOGETHER
def test_blocks_compiled_as_one_graph_train_the_same(together: bool) -> None:
    plain = plain_model()
    fast = fast_copy(plain, together)
    for block in fast.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    assert_same(fast, plain, LEVELS)


def test_weights_keep_their_names_and_blocks_their_class_name() -> None:
    plain = plain_model()
    fast = fast_copy(plain)
    assert list(fast.state_dict()) == list(plain.state_dict())
    assert {type(block) for block in fast.blocks} == {type(fast.blocks[0])}
    assert type(fast.blocks[0]).__name__ == "WanTransformerBlock"


def test_blocks_with_image_input_or_without_norms_stay_as_they_are() -> None:
    image = plain_model(image_dim=8, added_kv_proj_dim=36)
    bare = plain_model(cross_attn_norm=False)
    for one in (image, bare):
        kind = type(one.blocks[0])
        make_fast(one.blocks[0], ("cpu",))
        assert type(one.blocks[0]) is kind


def test_on_a_cpu_results_are_identical_bit_for_bit() -> None:
    plain = plain_model()
    fast = copy.deepcopy(plain)
    for block in fast.blocks:
        make_fast(block)
    assert type(fast.blocks[0]) is not type(plain.blocks[0])
    assert_same(fast, plain, LEVELS, close=0)


def in_pieces(value: Any) -> Any:
    """The same tensor with another memory layout, as attention's backward pass returns it on some machines."""
    if isinstance(value, list):
        return list(map(in_pieces, value))
    return value.mT.contiguous().mT if isinstance(value, Tensor) and value.ndim > 1 else value


@pytest.mark.parametrize("lay", [lambda value: value, in_pieces])
def test_the_operations_declare_the_right_output_shapes(lay: Any) -> None:
    """torch.compile relies on declared shapes and memory layouts."""
    from unisono.recipes.wan.models.kernels import operations

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape)

    x, o, weight, row = random(2, 5, 24), random(2, 5, 24), random(2, 24), random(10)
    angles = (random(5, 12), random(5, 12))
    cases = list(product((3, 2, 1), (2, 1), (angles, (None, None))))
    cases = [case for case in cases if case[0] - case[1] in (0, 1)]  # at most one part is not processed
    inputs: dict[str, list[tuple[Any, ...]]] = {
        "norm": [(x, o, weight, weight, weight, 1e-6), (x, None, None, weight, weight, 1e-6)],
        "norm_backward": [
            (x, x, x, *((o, weight) if gated else (None, None)), weight, row, row, added)
            for gated, added in product((True, False), repeat=2)
        ],
        "gate_backward": [(x, o, weight)],
        "rotate": [(random(2, 5, 24 * parts), weight[:turned], *which, 12, 1e-6) for parts, turned, which in cases],
        "rotate_backward": [
            ([x] * parts, random(2, 5, 24 * parts), weight[:turned], *which, random(turned, 10), 12)
            for parts, turned, which in cases
        ],
        "gelu_backward": [(x, x)],
    }
    for name, variants in inputs.items():
        for inside in variants:
            laid = tuple(map(lay, inside))
            torch.library.opcheck(getattr(operations, name), laid, test_utils=("test_schema", "test_faketensor"))
            for alone, whole in zip(getattr(operations, name)(*laid), getattr(operations, name)(*inside), strict=True):
                assert alone.is_contiguous() and torch.equal(alone, whole)


def test_split_queries_attend_to_the_same_keys() -> None:
    split = [torch.randn(1, tokens, 3, 4, dtype=torch.float64, requires_grad=True) for tokens in (4800, 7, 7)]

    def attention(parts: list[Tensor]) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in parts)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return out.transpose(1, 2).reshape(1, 4800, 3, 4)

    weight = torch.randn(1, 4800, 3, 4, dtype=torch.float64)
    gradients = []
    for numbers in ((), (7, 8)):  # 7 does not divide 4800
        parts = pieces.in_pieces(split, numbers)
        assert len(parts[0]) == (8 if numbers else 1)
        gradients.append(torch.autograd.grad((attention(parts) * weight).sum(), split))
    for plain, cut in zip(*gradients, strict=True):
        torch.testing.assert_close(cut, plain)
    assert pieces.in_pieces(split, (16,)) is split, "pieces of 300 are too short"


def test_a_block_with_split_queries_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(our_block, "possible_pieces", lambda *_: (4,))
    monkeypatch.setattr(pieces, "_QUERIES", 2)
    cut, compute = [], pieces.in_pieces

    def noted(*arguments: Any) -> list[Tensor]:
        split = compute(*arguments)
        cut.append(len(split[0]))
        return split

    monkeypatch.setattr(our_block, "in_pieces", noted)
    plain = plain_model()
    drawn = torch.Generator().manual_seed(1)
    noisy = torch.randn(1, plain.config.in_channels, 3, 8, 4, generator=drawn)
    text = torch.randn(1, 7, plain.config.text_dim, generator=drawn)
    gradients = []
    for one in (fast_copy(plain), plain):
        velocity = one(noisy, torch.tensor([500.0]), text, return_dict=False)[0]
        velocity.square().sum().backward()
        gradients.append([velocity, *(parameter.grad for parameter in one.parameters())])
    assert cut == [4] * SMALL["num_layers"]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


def test_queries_are_split_if_a_gpu_would_be_idle_otherwise() -> None:
    """As measured on 132 multiprocessors: 12 heads with 512 keys keep 48 of them busy, 24 heads keep 96 busy."""
    assert pieces.possible_pieces(12, 512, 132)[:2] == (5, 8)
    assert pieces.possible_pieces(40, 512, 132)[:2] == (3, 4)
    assert pieces.possible_pieces(24, 512, 132) == ()
    assert pieces.possible_pieces(12, 7800, 132) == ()


def test_splitting_queries_does_not_break_a_compiled_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "multiprocessors", torch.compiler.assume_constant_result(lambda: 132))

    def cut(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        return pieces.in_pieces([q, k, v], pieces.possible_pieces(12, k.shape[1], pieces.multiprocessors()))

    counter = CompileCounter()
    compiled = torch.compile(cut, backend=counter, fullgraph=True)
    text = torch.randn(1, 512, 12, 4)
    for tokens in (7800, 32760, 3000, 15600, 4680):
        assert compiled(torch.randn(1, tokens, 12, 4), text, text)[0].shape[0] == 5
    assert counter.frame_count == 2, "once as it is, once for all lengths"


@TOGETHER
@pytest.mark.parametrize(
    "products",
    [Products("fp8"), Products("fp8", True), Products("int8"), Products(sparse=True)],
    ids=["fp8", "fp8 whole", "int8", "sparse"],
)
def test_quantised_products_keep_the_fast_path(
    products: Products, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = plain_model(attention_head_dim=32, ffn_dim=64)
    fast, called = fast_copy(plain, together), []
    for each in (plain, fast):
        assert len(reduce_products(each, each.blocks, products, 16).converted) == 10 * len(each.blocks)
    monkeypatch.setattr(ReducedLinear, "forward", lambda *_: called.append(1))
    ours = step(fast, torch.tensor([300.0, 700.0]))
    assert not called, "the fused functions call the products themselves"
    monkeypatch.undo()
    theirs = step(plain, torch.tensor([300.0, 700.0]))
    # A number next to the border between two codes may fall to its other side.
    close = CLOSE if products.sparse else 5e-2
    torch.testing.assert_close(ours[0], theirs[0], rtol=close, atol=close * float(theirs[0].abs().max()))
    whole = sum(gradient.norm() ** 2 for gradient in theirs[1].values()) ** 0.5
    off = sum((ours[1][name] - gradient).norm() ** 2 for name, gradient in theirs[1].items()) ** 0.5
    assert off < close * whole, off / whole
