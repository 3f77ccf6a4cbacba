"""Wan blocks that recompute what is cheap: the same gradients from as few stored numbers as `selective.py` lists."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName
from torch import Tensor, nn

from test_wan_block import LEVELS, assert_same, plain_model, step
from unisono.parallel.blocks.repeated import recompute_activations
from unisono.parallel.blocks.selective import own_selective_class, why_not_selective
from unisono.recipes.wan.models.kernels import block as our_block
from unisono.recipes.wan.models.kernels import pieces, selective
from unisono.recipes.wan.models.kernels.attention import use
from unisono.recipes.wan.models.kernels.block import make_fast
from unisono.recipes.wan.models.lora import TARGETS, add_lora

PRODUCTS = pytest.mark.parametrize("products", [False, True], ids=["cheap", "products too"])


def selective_copy(plain: Any, products: bool) -> Any:
    made = copy.deepcopy(plain)
    for block in made.blocks:
        make_fast(block, ("cpu",))
        form = own_selective_class(block, products=products)
        assert isinstance(form, type), form
        block.__class__ = form
    return made


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of a selective block recomputes products."""
    calls, compute = [], selective.forward

    def noted(*inputs: Any, products: bool) -> Tensor:
        calls.append(products)
        return compute(*inputs, products=products)

    monkeypatch.setattr(selective, "forward", noted)
    return calls


@PRODUCTS
@pytest.mark.parametrize("kernel", ["auto", "math"])
def test_outputs_and_gradients_equal_diffusers(computed: list[bool], products: bool, kernel: str) -> None:
    plain = plain_model()
    made = selective_copy(plain, products)
    use(kernel, made)
    assert_same(made, plain, LEVELS)
    assert computed == [products] * len(made.blocks)


@PRODUCTS
def test_blocks_compiled_as_one_graph_train_the_same(products: bool) -> None:
    plain = plain_model()
    made = selective_copy(plain, products)
    for block in made.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    assert_same(made, plain, LEVELS)


@PRODUCTS
def test_in_16_bit_outputs_and_gradients_agree_up_to_rounding(products: bool) -> None:
    plain = plain_model()
    exact = step(copy.deepcopy(plain), LEVELS)[1]

    def off(model: Any) -> float:
        gradients = step(model, LEVELS, torch.bfloat16)[1]
        squares = [((gradients[name] - exact[name]).norm() ** 2, exact[name].norm() ** 2) for name in exact]
        return float(sum(error for error, _ in squares) / sum(size for _, size in squares)) ** 0.5

    assert off(selective_copy(plain, products)) < 1.2 * off(plain)


def test_weights_in_16_bit_train_too() -> None:
    """As under fsdp, which gathers weights in the type of the computation."""
    plain = plain_model()
    gradients = []
    for made in (fast_copy(plain), selective_copy(plain, False)):
        made.to(torch.bfloat16)
        x, text = (torch.randn(2, n, 36, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (5, 7))
        time = torch.randn(2, 6, 36, generator=torch.Generator().manual_seed(1))
        angles = tuple(torch.randn(1, 5, 1, 12, generator=torch.Generator().manual_seed(2)) for _ in range(2))
        made.blocks[0](x, text, time, angles).float().square().sum().backward()
        gradients.append({name: part.grad for name, part in made.blocks[0].named_parameters()})
    for name, expected in gradients[0].items():
        assert gradients[1][name].dtype == torch.bfloat16
        assert (gradients[1][name] - expected).norm() < 2e-2 * expected.norm(), name


@PRODUCTS
def test_split_queries_train_the_same(monkeypatch: pytest.MonkeyPatch, products: bool) -> None:
    monkeypatch.setattr(selective, "possible_pieces", lambda *_: (4,))
    monkeypatch.setattr(pieces, "_QUERIES", 2)
    split = []
    compute = pieces.num_pieces
    monkeypatch.setattr(selective, "num_pieces", lambda *inputs: split.append(compute(*inputs)) or split[-1])
    plain = plain_model()
    drawn = torch.Generator().manual_seed(1)
    noisy = torch.randn(1, plain.config.in_channels, 3, 8, 4, generator=drawn)
    text = torch.randn(1, 7, plain.config.text_dim, generator=drawn)
    gradients = []
    for one in (selective_copy(plain, products), plain):
        velocity = one(noisy, torch.tensor([500.0]), text, return_dict=False)[0]
        velocity.square().sum().backward()
        gradients.append([velocity, *(parameter.grad for parameter in one.parameters())])
    assert split == [4] * len(plain.blocks)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.detach().abs().max()))


def fast_copy(plain: Any) -> Any:
    made = copy.deepcopy(plain)
    for block in made.blocks:
        make_fast(block, ("cpu",))
    return made


WIDTH, INNER, TOKENS, TEXT = 128, 640, 600, 64
FORMS = {"none": 17 + 2 * INNER / WIDTH, "selective": 10 + INNER / WIDTH, "products": 6, "whole": 1}


def stored_widths(form: str, compiles: bool) -> tuple[float, float]:
    """What a block stores for backward: multiples of its width per token in 16 bit, and bytes of weights' copies."""
    plain = plain_model(attention_head_dim=64, num_attention_heads=2, ffn_dim=INNER, num_layers=1)
    made = selective_copy(plain, form == "products") if form in ("selective", "products") else fast_copy(plain)
    (block,) = made.blocks
    if form == "whole":
        recompute_activations(block)
    elif compiles:
        block.compile(backend="aot_eager_decomp_partition", fullgraph=True)
    own = {part.untyped_storage().data_ptr() for part in made.parameters()}
    stored: dict[int, Tensor] = {}

    def store(tensor: Tensor) -> Tensor:
        stored[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x = torch.randn(1, TOKENS, WIDTH).bfloat16().requires_grad_()
    text, time = torch.randn(1, TEXT, WIDTH).bfloat16(), torch.randn(1, 6, WIDTH)
    angles = tuple(torch.randn(1, TOKENS, 1, 64) for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(store, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        out = block(x, text, time, angles)
    stored = {at: tensor for at, tensor in stored.items() if at not in own}
    for outside in (text, *angles):
        stored.pop(outside.untyped_storage().data_ptr(), None)
    sizes = {at: tensor.untyped_storage().nbytes() for at, tensor in stored.items()}
    of_weights = sum(
        sizes[at]
        for at, tensor in stored.items()
        if tensor.ndim == 2 and {*tensor.shape} <= {WIDTH, 2 * WIDTH, 3 * WIDTH, INNER}
    )
    out.float().sum().backward()
    return (sum(sizes.values()) - of_weights) / (2 * TOKENS * WIDTH), of_weights


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("form", list(FORMS))
def test_blocks_store_the_tensors_listed_in_the_table(
    form: str, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # diffusers makes the kernel that one model has chosen the default of all others.
    monkeypatch.setattr(attention_dispatch._AttentionBackendRegistry, "_active_backend", AttentionBackendName.NATIVE)
    widths, of_weights = stored_widths(form, compiles)
    of_text = {"none": 3, "selective": 2}.get(form, 0) * TEXT / TOKENS  # keys and values of the text
    small = 0.4  # per token in 32 bit: logarithms, means and deviations; the modulation
    assert FORMS[form] + of_text - 0.05 <= widths <= FORMS[form] + of_text + small
    squares = 6 if compiles else 8  # the compiler sees that no gradient of the text is needed, and so no weights for it
    copies = 2 * (squares * WIDTH * WIDTH + 2 * WIDTH * INNER)
    assert of_weights == (copies if form == "none" else 0)


def test_blocks_that_cannot_store_selectively_are_fully_recomputed_with_a_reason() -> None:
    plain = fast_copy(plain_model())
    assert why_not_selective(plain.blocks[0]) is None
    frozen = fast_copy(plain_model())
    frozen.blocks[0].ffn.net[2].weight.requires_grad_(False)
    assert "frozen weights or adapters" in str(why_not_selective(frozen.blocks[0]))
    add_lora(plain, 2, None, TARGETS)
    assert "frozen weights or adapters" in str(why_not_selective(plain.blocks[0]))
    random = fast_copy(plain_model())
    random.blocks[0].ffn.net[1] = nn.Dropout(0.1)
    assert "dropout" in str(why_not_selective(random.blocks[0]))


def test_blocks_without_our_kernels_use_torchs_selective_checkpointing(computed: list[bool]) -> None:
    plain = plain_model()
    made = copy.deepcopy(plain)
    stored: list[int] = []
    for block in made.blocks:
        make_fast(block)  # on a GPU only
        recompute_activations(block, selective=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: stored.append(1) or tensor, lambda tensor: tensor):
        assert_same(made, plain, LEVELS, close=0)
    assert not computed


@pytest.mark.parametrize("selective", [True, False])
def test_selective_recomputing_uses_the_blocks_own_implementation(computed: list[bool], selective: bool) -> None:
    plain = plain_model()
    made = fast_copy(plain)
    for block in made.blocks:
        recompute_activations(block, selective=selective)
        recompute_activations(block, selective=selective)  # once is enough
    assert_same(made, plain, LEVELS)
    assert computed == [False] * len(made.blocks) * selective


def test_without_gradients_nothing_is_stored_for_backward(
    computed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, calls, forward = selective_copy(plain_model(), False), [], our_block._forward

    def noted(*inputs: Any) -> Tensor:
        calls.append(1)
        return forward(*inputs)

    monkeypatch.setattr(our_block, "_forward", noted)
    with torch.no_grad():
        made(
            torch.randn(1, 16, 3, 8, 4)[:, : made.config.in_channels],
            torch.tensor([5.0]),
            torch.randn(1, 7, made.config.text_dim),
        )
    assert calls and not computed
