"""Strategy, repeated blocks and initial weights are pure functions of the model, and choices come with reasons."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from unisono.errors import RecipeError
from unisono.parallel.blocks import repeated
from unisono.parallel.blocks.repeated import compile_blocks, recompute_activations, repeated_blocks
from unisono.parallel.materialize import materialize
from unisono.planning.choose import Demand, choose_strategy

GIB = 2**30
sizes = st.integers(0, 200 * GIB)


# ---- strategy ----


def demand(weights: int, **more: int | bool) -> Demand:
    values = {"other_bytes": 0, "optimizer_slots": 2, "ema": False} | more
    return Demand.of(trainable_bytes=weights, **values)  # type: ignore[arg-type]


def test_a_replica_consists_of_weights_gradients_optimizer_state_and_average() -> None:
    assert demand(10).total == 40
    assert demand(10, ema=True).total == 50
    assert demand(10, other_bytes=7, optimizer_slots=1).total == 37, "what is not trained has no gradient"


@given(weights=sizes, memory=sizes | st.none())
def test_one_device_uses_single_whatever_the_models_size(weights: int, memory: int | None) -> None:
    assert choose_strategy(ranks=1, demand=demand(weights), device_memory=memory)[0] == "single"


def test_several_devices_use_ddp_if_a_replica_fits_and_fsdp_otherwise() -> None:
    strategy, why = choose_strategy(ranks=2, demand=demand(10 * GIB), device_memory=80 * GIB)
    assert strategy == "ddp" and "40.0 GiB of 80.0 GiB per device" in why and "leaves room for activations" in why
    strategy, why = choose_strategy(ranks=2, demand=demand(15 * GIB), device_memory=80 * GIB)
    assert strategy == "fsdp" and "60.0 GiB, which leaves too little of 80.0 GiB per device" in why
    assert choose_strategy(ranks=2, demand=demand(11 * GIB), device_memory=80 * GIB)[0] == "ddp"
    assert choose_strategy(ranks=2, demand=demand(11 * GIB, ema=True), device_memory=80 * GIB)[0] == "fsdp"


def test_cpu_ranks_use_ddp() -> None:
    strategy, why = choose_strategy(ranks=2, demand=demand(500 * GIB), device_memory=None)
    assert strategy == "ddp" and "on the CPU" in why


@given(weights=sizes, memory=st.integers(1, 200 * GIB), ranks=st.integers(2, 64), more=st.integers(0, GIB))
def test_a_larger_model_never_needs_less(weights: int, memory: int, ranks: int, more: int) -> None:
    order = ["ddp", "fsdp"]
    smaller = choose_strategy(ranks=ranks, demand=demand(weights), device_memory=memory)[0]
    larger = choose_strategy(ranks=ranks, demand=demand(weights + more), device_memory=memory)[0]
    assert order.index(smaller) <= order.index(larger)


# ---- blocks ----


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Stacked(nn.Module):
    """A model with blocks in one list, small heads in another, and a large embedding outside."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(2))


def test_the_blocks_are_the_modules_of_the_repeated_class_with_most_weights() -> None:
    model = Stacked()
    assert repeated_blocks(model) == list(model.blocks)


def test_blocks_of_two_lists_are_found() -> None:
    model = nn.ModuleDict({"down": Stacked(2), "up": Stacked(3)})
    assert repeated_blocks(model) == [*model["down"].blocks, *model["up"].blocks]


def test_layers_inside_a_block_are_not_taken_for_blocks() -> None:
    model = nn.Sequential(Block(8), Block(8))
    assert repeated_blocks(model) == list(model)


def test_a_model_without_repetition_has_no_blocks() -> None:
    assert repeated_blocks(nn.Linear(2, 2)) == []
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.ReLU())) == []


def test_recomputing_activations_changes_neither_names_nor_values_nor_gradients() -> None:
    torch.manual_seed(0)
    plain, saving = nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block())
    saving.load_state_dict(plain.state_dict())
    for block in repeated_blocks(saving):
        recompute_activations(block)
    calls: list[int] = []
    saving[0].inner[0].register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(5, 4)
    for model in (plain, saving):
        model(x).square().sum().backward()
    assert len(calls) == 2, "once forward, once again in backward"
    assert list(saving.state_dict()) == list(plain.state_dict())
    assert isinstance(saving[0], Block) and not isinstance(plain[1], type(saving[1]))
    for ours, theirs in zip(saving.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and torch.equal(ours.grad, theirs.grad)
    with torch.no_grad():
        assert torch.equal(saving(x), plain(x)) and len(calls) == 3


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * ctx.saved_tensors[0] * gradient  # type: ignore[no-any-return]


class OwnFunctions(Block):
    """A block that declares that it has an autograd function."""

    def forward(self, x: Tensor) -> Tensor:
        return Squared.apply(super().forward(x))  # type: ignore[no-any-return,no-untyped-call]


repeated.has_autograd_functions(OwnFunctions)


@pytest.fixture
def compiled_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Replaces torch.compile by a wrapper that counts calls."""
    calls, compile = list[int](), torch.compile
    repeated._recomputing.cache_clear()
    repeated._compiled.cache_clear()

    def noting(function: Any, **options: Any) -> Any:
        compiled = compile(function, **{**options, "backend": "eager"})

        def called(*given: Any, **named: Any) -> Any:
            calls.append(1)
            return compiled(*given, **named)

        return called

    monkeypatch.setattr(torch, "compile", noting)
    yield calls
    repeated._recomputing.cache_clear()
    repeated._compiled.cache_clear()


def pair(kind: type[nn.Module]) -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    plain, saving = nn.Sequential(kind(), kind()), nn.Sequential(kind(), kind())
    saving.load_state_dict(plain.state_dict())
    return plain, saving


def assert_trains_alike(plain: nn.Module, saving: nn.Module) -> None:
    for x in (torch.randn(5, 4), torch.randn(3, 4)):
        for model in (plain, saving):
            model(x).square().sum().backward()
    assert list(saving.state_dict()) == list(plain.state_dict())
    for ours, theirs in zip(saving.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize(("kind", "calls"), [(OwnFunctions, 8), (Block, 4)])
def test_blocks_with_autograd_functions_are_compiled_first_and_recomputed_from_outside(
    kind: type[nn.Module], calls: int, compiled_calls: list[int]
) -> None:
    """Otherwise the compiler would keep all tensors that such functions save (up to torch 2.11)."""
    plain, saving = pair(kind)
    for block in repeated_blocks(saving):
        recompute_activations(block)
    compile_blocks(saving, repeated_blocks(saving))
    assert_trains_alike(plain, saving)
    assert len(compiled_calls) == calls, "two blocks, two batches: forward, and where it is outside, again in backward"
    with torch.no_grad():
        x = torch.randn(2, 4)
        torch.testing.assert_close(saving(x), plain(x))


@pytest.mark.parametrize("kind", [OwnFunctions, Block])
def test_recomputing_what_is_recomputed_already_changes_nothing(
    kind: type[nn.Module], compiled_calls: list[int]
) -> None:
    """Two trainers use the same model one after the other."""
    plain, saving = pair(kind)
    for _ in range(2):
        for block in repeated_blocks(saving):
            recompute_activations(block)
    assert_trains_alike(plain, saving)
    for _ in range(2):
        compile_blocks(saving, repeated_blocks(saving))
    assert_trains_alike(plain, saving)


def test_a_layer_that_is_used_several_times_is_one_block() -> None:
    layer, other = Block(), Block()
    assert repeated_blocks(nn.Sequential(layer, other, layer)) == [layer, other]


# ---- initial weights ----


def on_meta(*names: str) -> nn.ModuleDict:
    with torch.device("meta"):
        return nn.ModuleDict({name: nn.Linear(3, 2) for name in names})


def test_weights_initialised_from_meta_depend_on_name_and_seed_only() -> None:
    forwards, backwards, other = on_meta("a", "b", "c"), on_meta("c", "a", "b"), on_meta("a", "b", "c")
    materialize(forwards, seed=5)
    torch.rand(7)  # whatever was drawn before
    materialize(backwards, seed=5)
    materialize(other, seed=6)
    for name in "abc":
        assert torch.equal(forwards[name].weight, backwards[name].weight)
        assert not torch.equal(forwards[name].weight, other[name].weight)
    assert not torch.equal(forwards["a"].weight, forwards["b"].weight)
    assert not any(parameter.is_meta for parameter in forwards.parameters())


def test_a_module_that_is_already_initialised_is_not_changed() -> None:
    model = on_meta("a")
    model["mine"] = nn.Linear(3, 2)
    before = model["mine"].weight.detach().clone()
    materialize(model, seed=0)
    assert torch.equal(model["mine"].weight, before) and not model["a"].weight.is_meta


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(2))


def test_a_module_that_cannot_initialise_itself_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Scale())
    with pytest.raises(RecipeError, match=r"1 is on meta but Scale has no reset_parameters\(\).*; add one, or build"):
        materialize(model, seed=0)


def test_buffers_are_initialised_too() -> None:
    with torch.device("meta"):
        model = nn.BatchNorm1d(3)
    materialize(model, seed=0)
    assert model.running_mean is not None and torch.equal(model.running_mean, torch.zeros(3))
    assert torch.equal(model.weight, torch.ones(3))
