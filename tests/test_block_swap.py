"""Frozen blocks in host memory: in whatever order blocks are used, results are those without swapping."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.nn.functional import gelu

from unisono.parallel.blocks import staging
from unisono.parallel.blocks import swap as swap_module
from unisono.parallel.blocks.repeated import recompute_activations
from unisono.parallel.blocks.staging import Slot, Transfers
from unisono.parallel.blocks.swap import BlockSwap, frozen_bytes
from unisono.planning.blocks_on_host import BlocksOnHost

WIDTH, DEPTH = 8, 8
NAN = 0xFF  # bytes of a number that is not a number, in every floating-point type


class Adapted(nn.Module):
    """A frozen layer with a LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.first, self.second = Adapted(), Adapted()
        # As 8-bit weights have it: a transposed matrix of whole numbers, and a scale in another type.
        self.packed = nn.Parameter(torch.randint(0, 9, (WIDTH, 3), dtype=torch.uint8).t(), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(3, 1, dtype=torch.float32), requires_grad=False)
        self.register_buffer("shift", torch.randn(WIDTH))
        self.calls = 0

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        self.calls += 1
        unpacked = (self.packed * self.scale).to(x.dtype)
        x = x + self.second(gelu(self.first(self.norm(x) * time + self.shift)))
        return x + gelu(x @ unpacked.t()) @ unpacked


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: Tensor, time: Tensor, order: Sequence[int] = range(DEPTH)) -> Tensor:
        x = self.first(x)
        for number in order:
            x = self.blocks[number](x, time)
        return x


class PoisonedSwap(BlockSwap):
    """Fills every slot with NaN as soon as it may be overwritten, so that nothing survives by luck."""

    def _slot_with(self, number: int) -> Slot:
        self._poison(keep=number)
        return super()._slot_with(number)

    def _copy_ahead(self, keep: int | None = None) -> None:
        self._poison(keep)
        super()._copy_ahead(keep)

    def _poison(self, keep: int | None) -> None:
        for slot in self._slots:
            if slot.holder != keep and not slot.is_referenced:
                slot.flat.fill_(NAN)
                slot.holder = None


class LateTransfers(Transfers):
    """Copies at the last moment that a side stream could: when the computation says that it waits."""

    def __init__(self) -> None:
        self.pending: dict[int, Tensor] = {}

    def start(self, source: Tensor, slot: Slot) -> None:
        slot.flat.fill_(NAN)
        self.pending[slot.address] = source

    def wait(self, slot: Slot) -> None:
        if (source := self.pending.pop(slot.address, None)) is not None:
            super().start(source, slot)


@pytest.fixture(autouse=True)
def double() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def build(num_on_host: int = 0, recompute: bool = False, kind: type[BlockSwap] = BlockSwap) -> tuple[Model, BlockSwap]:
    torch.manual_seed(0)
    model, swap = Model(), None
    blocks = list(model.blocks)
    if num_on_host:
        sizes = BlocksOnHost(frozen_bytes(model, blocks), 2, num_on_host)
        swap = kind(model, [blocks[number] for number in sizes.chosen], torch.device("cpu"))
        swap.attach(blocks, compiles=False)
    for block in blocks if recompute else ():
        recompute_activations(block)
    return model, swap  # type: ignore[return-value]


def inputs(seed: int = 1) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(3, WIDTH), torch.randn(WIDTH)


def gradients(model: Model) -> dict[str, Tensor]:
    result = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return result


def one_step(model: Model) -> Tensor:
    loss = model(*inputs()).square().sum()
    loss.backward()
    return loss.detach()


def two_micro_batches(model: Model) -> Tensor:
    """Both forward passes before either backward pass."""
    first, second = (model(*inputs(seed)).square().sum() for seed in (1, 2))
    first.backward()
    second.backward()
    return (first + second).detach()


def another_order(model: Model) -> Tensor:
    """Backwards, with two blocks twice and one left out, then forwards."""
    orders = [7, 6, 5, 5, 4, 3, 1, 0, 3], [0, 1, 2, 3, 4, 5, 6, 7], [2, 7, 2, 7, 2]
    loss = sum(model(*inputs(), order).square().mean() for order in orders)
    loss.backward()
    return loss.detach()


def twice_through_the_same_graph(model: Model) -> Tensor:
    loss = model(*inputs()).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return loss.detach()


def evaluated_in_between(model: Model) -> Tensor:
    loss = model(*inputs()).square().sum()
    with torch.no_grad():
        other = model(*inputs(3)).sum()
    loss.backward()
    with torch.inference_mode():
        return other + model(*inputs(4)).sum() + loss.detach()


STEPS = [one_step, two_micro_batches, another_order, twice_through_the_same_graph, evaluated_in_between]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("recompute", [False, True])
def test_losses_and_gradients_equal_those_without_swapping_bit_for_bit(
    step: Callable[[Model], Tensor], recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = build(recompute=recompute)
    expected = [(step(plain), gradients(plain)) for _ in range(2)]
    for kind in (BlockSwap, PoisonedSwap, "late"):
        if kind == "late":
            monkeypatch.setattr(swap_module, "transfers_to", lambda device: LateTransfers())
        for num_on_host in range(1, DEPTH + 1) if kind is PoisonedSwap else (2, 3, 5, 8):
            model, swap = build(num_on_host, recompute, BlockSwap if kind == "late" else kind)  # type: ignore[arg-type]
            for loss, gradient in expected:
                assert torch.equal(step(model), loss), (kind, num_on_host)
                ours = gradients(model)
                assert list(ours) == list(gradient)
                assert all(torch.equal(ours[name], gradient[name]) for name in gradient), (kind, num_on_host)
            assert len(swap._slots) == min(2, num_on_host), "nothing kept a slot from being used again"


@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_copies_each_block_once_per_pass_and_reuses_the_blocks_at_the_turning_points(
    recompute: bool,
) -> None:
    for num_on_host in range(1, DEPTH + 1):
        model, swap = build(num_on_host, recompute)
        copies = []
        for _ in range(3):
            before = swap.num_copies
            one_step(model)
            copies.append(swap.num_copies - before)
        repeated = 2 * max(0, num_on_host - 2)
        assert copies == [repeated + min(2, num_on_host), repeated, repeated], num_on_host
        with torch.no_grad():
            model(*inputs())
            before = swap.num_copies
            model(*inputs())
        assert swap.num_copies - before == (num_on_host if num_on_host > 2 else 0)


def test_the_block_after_next_is_copied_as_soon_as_a_block_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    use, copy = BlockSwap._slot_with, BlockSwap._copy
    monkeypatch.setattr(BlockSwap, "_slot_with", lambda self, it: (log.append(f"use {it}"), use(self, it))[1])
    monkeypatch.setattr(BlockSwap, "_copy", lambda self, it, slot: (log.append(f"copy {it}"), copy(self, it, slot))[1])
    model, _ = build(DEPTH)
    one_step(model)
    log.clear()
    one_step(model)
    first_uses = [word for word, before in zip(log, ["", *log], strict=False) if word != before]
    forward = ["use 0", *(word for n in range(1, 7) for word in (f"copy {n + 1}", f"use {n}")), "use 7"]
    backward = [word for n in range(6, 0, -1) for word in (f"copy {n - 1}", f"use {n}")] + ["use 0"]
    assert first_uses == forward + backward


def test_the_device_holds_the_other_blocks_and_two_slots() -> None:
    model, swap = build(5)
    sizes = BlocksOnHost(frozen_bytes(model, list(model.blocks)), 2, 5)
    one_step(model)
    assert swap.device_bytes == 2 * sizes.movable_bytes[0] and swap.host_bytes == 5 * sizes.movable_bytes[0]
    assert sizes.device_bytes == (3 + 2) * sizes.movable_bytes[0]
    frozen = sum(it.numel() * it.element_size() for it in model.blocks[0].parameters() if not it.requires_grad)
    assert frozen <= sizes.movable_bytes[0] <= frozen + 256 * 8, "weights begin at multiples of 256 bytes"


def test_a_recomputed_swapped_block_stores_no_activations() -> None:
    model, _ = build(DEPTH, recompute=True)
    one_step(model)
    assert [block.calls for block in model.blocks] == [2] * DEPTH
    model, _ = build(DEPTH)
    one_step(model)
    assert [block.calls for block in model.blocks] == [1] * DEPTH


def test_between_uses_a_weight_is_its_copy_in_host_memory() -> None:
    plain, _ = build()
    model, swap = build(DEPTH)
    one_step(model)
    host = {host.flat.untyped_storage().data_ptr() for host in swap._hosts}
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, weight in plain.state_dict().items():
        assert torch.equal(state[name], weight) and state[name].stride() == weight.stride(), name
        is_swapped = name.startswith("blocks") and not any(part in name for part in (".down", ".up", "shift"))
        assert (state[name].untyped_storage().data_ptr() in host) is is_swapped, name


def test_weights_that_are_loaded_later_reach_the_device() -> None:
    plain, _ = build()
    model, _ = build(DEPTH)
    one_step(model)
    gradients(model)
    new = {
        name: weight * 2 if weight.is_floating_point() else weight + 1 for name, weight in plain.state_dict().items()
    }
    for it in (plain, model):
        it.load_state_dict(new)
    assert torch.equal(one_step(model), one_step(plain))
    ours, theirs = gradients(model), gradients(plain)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("kind", [BlockSwap, PoisonedSwap])
def test_an_exception_in_a_block_leaves_everything_usable(kind: type[BlockSwap]) -> None:
    plain, _ = build()
    model, swap = build(DEPTH, kind=kind)
    expected = one_step(plain)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    for number in (0, 3, 7):
        handle = model.blocks[number].second.base.register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            one_step(model)
        handle.remove()
        loss = model(*inputs()).square().sum()
        handle = model.blocks[number].second.up.weight.register_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            loss.backward()
        handle.remove()
        del loss
        model.zero_grad()
    assert torch.equal(one_step(model), expected)
    ours, theirs = gradients(model), gradients(plain)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert len(swap._slots) <= 3  # the last exception's frames may still hold a slot


class Revealing(Block):
    """Also returns views of its weights: the next block scales by one, and the model stores the other."""

    def forward(self, x: Tensor, time: Tensor) -> Any:
        return super().forward(x, time), {"weight": self.first.base.weight[0], "bias": [self.first.base.bias[1:]]}


@pytest.mark.parametrize("recompute", [False, True])
def test_a_view_of_a_weight_may_leave_its_block(recompute: bool) -> None:
    def step(on_host: bool) -> tuple[Tensor, list[Tensor]]:
        torch.manual_seed(0)
        blocks = nn.ModuleList(Revealing() for _ in range(DEPTH))
        if on_host:
            swap = PoisonedSwap(blocks, list(blocks), torch.device("cpu"))
            swap.attach(list(blocks), compiles=False)
        for block in blocks if recompute else ():
            recompute_activations(block)
        (x, time), kept = inputs(), []
        for block in blocks:
            x, values = block(x, time)
            time = time * values["weight"]
            kept.append(values["bias"][0])
        total = x.square().sum() + sum(bias.sum() for bias in kept)
        total.backward()
        assert not on_host or len(swap._slots) == 2, "a view was copied, so that it does not hold its slot"
        return total.detach(), [it.grad for it in blocks.parameters() if it.grad is not None]

    (ours, our_gradients), (theirs, their_gradients) = step(True), step(False)
    assert torch.equal(ours, theirs)
    assert all(torch.equal(one, other) for one, other in zip(our_gradients, their_gradients, strict=True))


def test_hooks_do_not_accumulate_on_an_input_that_is_a_parameter() -> None:
    model, _ = build(DEPTH)
    _, time = inputs()
    queries = nn.Parameter(torch.randn(2, WIDTH))
    for _ in range(3):
        model.blocks[0](queries, time).sum().backward()
    assert not queries._backward_hooks and queries.grad is not None


def test_weights_that_other_code_still_references_are_never_overwritten() -> None:
    """A cache, a debugger, an autograd graph without hooks: more slots are made, and every result stays right."""
    plain, _ = build()
    model, swap = build(DEPTH, kind=PoisonedSwap)
    kept: list[Tensor] = []
    for block in model.blocks:
        block.first.base.register_forward_hook(lambda layer, *_: kept.append(layer.weight.data[1]))
    assert torch.equal(one_step(model), one_step(plain))
    assert len(swap._slots) == DEPTH
    for block, weight in zip(plain.blocks, kept, strict=True):
        assert torch.equal(weight, block.first.base.weight[1])


def test_autograd_without_hooks_costs_memory_but_stays_correct(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = build()
    model, swap = build(DEPTH, kind=PoisonedSwap)
    monkeypatch.setattr(swap_module, "saved_tensors_hooks", lambda *_: disable_saved_tensors_hooks("not here"))
    assert torch.equal(one_step(model), one_step(plain))
    ours, theirs = gradients(model), gradients(plain)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert len(swap._slots) == DEPTH


def test_weights_that_are_used_elsewhere_too_stay_on_the_device() -> None:
    model, _ = build()
    model.blocks[1].first.base = model.blocks[0].first.base
    model.blocks[2].second.base.bias = model.first.bias
    swap = BlockSwap(model, list(model.blocks), torch.device("cpu"))
    moved = {parameter for host in swap._hosts for parameter in host.parameters}
    assert model.blocks[0].first.base.weight not in moved and model.first.bias not in moved
    assert model.blocks[2].second.base.weight in moved
    with swap.set_aside():
        names = {name for name, _ in model.named_parameters()}
        assert "blocks.0.first.base.weight" in names and "blocks.2.second.base.weight" not in names
    assert len(list(model.parameters())) > len(names)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_blocks_train_the_same_with_and_without_swapping(recompute: bool) -> None:
    torch._dynamo.reset()

    def train(num_on_host: int) -> tuple[Tensor, dict[str, Tensor], int]:
        torch.manual_seed(0)
        model = Model()
        blocks = list(model.blocks)
        sizes = BlocksOnHost(frozen_bytes(model, blocks), 2, num_on_host)
        swap = PoisonedSwap(model, [blocks[number] for number in sizes.chosen], torch.device("cpu"))
        swap.attach(blocks, compiles=True)
        for block in blocks if recompute else ():
            recompute_activations(block)
        two_micro_batches(model)
        gradients(model)
        with torch.no_grad():
            model(*inputs())
        return two_micro_batches(model), gradients(model), len(swap._slots)

    # The same code compiled with all weights resident: only one block is swapped, and it stays in its slot.
    loss, expected, _ = train(1)
    for num_on_host in (4, 8):
        other, ours, num_slots = train(num_on_host)
        assert torch.equal(other, loss) and num_slots == 2
        assert all(torch.equal(ours[name], expected[name]) for name in expected)
    eager, _ = build(recompute=recompute)
    two_micro_batches(eager)
    torch.testing.assert_close(gradients(eager), expected, rtol=1e-9, atol=1e-9)
    torch._dynamo.reset()


# ---- which blocks, and how many ----


def test_blocks_on_the_host_are_evenly_spaced() -> None:
    def chosen(num: int, blocks: int) -> list[int]:
        return BlocksOnHost([1] * blocks, 2, num).chosen

    assert chosen(8, 8) == list(range(8)) and chosen(0, 8) == [] and chosen(1, 8) == [4]
    assert chosen(4, 8) == [1, 3, 5, 7] and chosen(2, 40) == [10, 30]
    for num in range(1, 41):
        numbers = chosen(num, 40)
        gaps = {later - earlier for earlier, later in pairwise(numbers)}
        assert len(set(numbers)) == num and (not gaps or max(gaps) - min(gaps) <= 1)


def test_auto_chooses_the_fewest_blocks_that_make_the_model_fit() -> None:
    sizes = BlocksOnHost([10] * 40, 2)
    assert sizes.fewest(400).num == 0
    assert sizes.fewest(399).num == 3, "2 on the host save nothing: both are on the device too"
    assert sizes.fewest(200).num == 22 and sizes.fewest(200).device_bytes == 200
    assert sizes.fewest(20).num == 40 and sizes.fewest(0).num == 40, "even all may not be enough"
    assert BlocksOnHost([], 2).fewest(5).num == 0


# ---- calls to the GPU, with a fake torch.cuda that records them ----


class FakeStream:
    def __init__(self, name: Any) -> None:
        self.name = name

    def wait_stream(self, other: FakeStream) -> None:
        LOG.append((self.name, "waits for", other.name))

    def wait_event(self, event: FakeEvent) -> None:
        LOG.append((self.name, "waits for", event.name))


class FakeEvent:
    name = "copy"

    def record(self, stream: FakeStream) -> None:
        LOG.append((stream.name, "records", self.name))


LOG: list[tuple[Any, ...]] = []


def test_a_copy_waits_for_the_kernels_that_read_its_slot_and_the_next_kernels_wait_for_the_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    LOG.clear()
    current = [FakeStream("compute")]
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream("side"))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(LOG.append((stream.name, "copies"))))
    transfers, slot = staging.CudaTransfers(torch.device("cpu")), Slot(8, torch.device("cpu"))
    source = torch.arange(8, dtype=torch.uint8)
    transfers.start(source, slot)
    # The slot's memory may have belonged to a tensor that kernels on the compute stream still read.
    assert LOG == [("side", "waits for", "compute"), ("side", "copies"), ("side", "records", "copy")]
    assert torch.equal(slot.flat, source)
    LOG.clear()
    transfers.wait(slot)
    current[0] = FakeStream("another")
    transfers.wait(slot)
    assert LOG == [("compute", "waits for", "copy"), ("another", "waits for", "copy")]
    LOG.clear()
    transfers.start(source, slot)
    assert set(LOG[:2]) == {("side", "waits for", "compute"), ("side", "waits for", "another")}
    assert LOG[2:] == [("side", "copies"), ("side", "records", "copy")]


def test_host_memory_is_page_locked_at_its_exact_size_until_its_last_view_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    locked: dict[int, int] = {}

    class Runtime:
        @staticmethod
        def cudaHostRegister(address: int, num_bytes: int, flags: int) -> int:
            locked[address] = num_bytes
            return 0

        @staticmethod
        def cudaHostUnregister(address: int) -> int:
            del locked[address]
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    monkeypatch.setattr(Transfers, "pin", True)
    model, swap = build(3)
    assert list(locked.values()) == [host.num_bytes for host in swap._hosts]
    one_step(model)
    weight = model.blocks[6].first.base.weight.detach()
    del model, swap
    gc.collect()
    assert len(locked) == 1, "the view holds its memory"
    assert torch.isfinite(weight).all()
    del weight
    gc.collect()
    assert not locked
