"""What fsdp communicates: how often it gathers weights and sums gradients, and that no order of blocks confuses it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ranks import run_ranks
from unisono.parallel.fsdp import FSDP
from unisono.parallel.strategy import Placement
from unisono.settings import ParallelSettings

CPU = torch.device("cpu")
NUM_BLOCKS, MICRO_BATCHES = 3, 2


class Layers(nn.Module):
    """Runs its blocks in any order; the first and the last layer are outside of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 1)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        x = self.first(x)
        for number in order:
            x = torch.tanh(self.blocks[number](x))
        return self.last(x).square().sum()


def loss(model: nn.Module, x: Tensor, order: Sequence[int]) -> dict[str, Tensor]:
    return {"total": model(x, order)}


class Collectives(TorchDispatchMode):
    """Counts the collectives of the code inside, and notes the order of gathering (g) and computing (c)."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.order = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::").strip("_")
            self.counts[name] += 1
            self.order += "g" if name == "allgather_base" else ""
        self.order += "c" if func is torch.ops.aten.addmm.default else ""
        return func(*args, **(kwargs or {}))


def make_strategy(shard_size: int, **settings: Any) -> tuple[FSDP, Layers]:
    """The model under fsdp, and a copy of it as a reference."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model, reference = Layers().double(), Layers().double()
    reference.load_state_dict(model.state_dict())
    placement = Placement(CPU, rank, world, [CPU], None, shard_size=shard_size)
    return FSDP(model, list(model.blocks), placement, ParallelSettings(strategy="fsdp", **settings)), reference


def step(strategy: FSDP, orders: Sequence[Sequence[int]], rank: int) -> None:
    strategy.begin_step(guarded=False)
    for number, order in enumerate(orders):
        total = strategy.train(loss, inputs(rank), order)["total"]
        if number == len(orders) - 1:
            strategy.reduce_in_backward()
        total.backward()


def inputs(rank: int) -> Tensor:
    return torch.arange(10.0).double().view(2, 5) / (rank + 3)


def count_on_rank() -> dict[str, Any]:
    dist.init_process_group("gloo")
    counts: dict[str, Any] = {}
    for sync in ("every", "last"):
        strategy, _ = make_strategy(2, fsdp_sync=sync)
        rank = strategy.placement.rank
        with Collectives() as collectives:
            step(strategy, [range(NUM_BLOCKS)] * MICRO_BATCHES, rank)
        counts[sync] = collectives.counts
    with Collectives() as collectives:
        total = strategy.train(loss, inputs(rank), range(NUM_BLOCKS))["total"]
    total.backward()
    counts["training"] = collectives.order
    with Collectives() as collectives:
        strategy.infer(loss, inputs(rank), range(NUM_BLOCKS))
    counts["evaluating"] = collectives.order
    dist.destroy_process_group()
    return counts


@pytest.fixture(scope="module")
def counts() -> list[dict[str, Any]]:
    return run_ranks("count_on_rank", __file__, 4)


@pytest.mark.parametrize(("sync", "sums"), [("every", MICRO_BATCHES), ("last", 1)])
def test_the_root_is_gathered_once_per_micro_batch_and_gradients_are_reduced_when_fsdp_sync_says(
    counts: list[dict[str, Any]], sync: str, sums: int
) -> None:
    groups = NUM_BLOCKS + 1  # and the root
    for rank in counts:
        # Blocks are freed after their forward pass and gathered again for backward; the root is not.
        assert rank[sync]["allgather_base"] == MICRO_BATCHES * (2 * NUM_BLOCKS + 1)
        assert rank[sync]["reduce_scatter_base"] == sums * groups, "within the groups"
        assert rank[sync]["allreduce"] == sums * groups, "between the replicas"


def test_the_next_block_is_gathered_while_a_block_computes(counts: list[dict[str, Any]]) -> None:
    # The root and its first layer; each block, and the one after it; the last layer.
    assert {rank["training"] for rank in counts} == {"gc" + "ggc" + "gc" + "c" + "c"}
    assert {rank["evaluating"] for rank in counts} == {"gc" + "gc" * NUM_BLOCKS + "c"}, "could become stale"


ORDERS = {
    "in order": [[0, 1, 2], [0, 1, 2]],
    "backwards": [[2, 1, 0], [2, 1, 0]],
    "some blocks twice": [[0, 1, 1, 2, 0], [2, 0, 1]],
    "the last micro-batch leaves a block out": [[0, 1, 2], [1]],
    "the first micro-batch leaves a block out": [[1], [0, 1, 2]],
}


def differ_on_rank() -> dict[str, float]:
    """The largest difference of a gradient from one device's, for each order of blocks and each way to sum."""
    differences = {}
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    for sync in ("every", "last"):
        for shard_size in (1, 2, 4):
            strategy, reference = make_strategy(shard_size, fsdp_sync=sync)
            for name, orders in ORDERS.items():
                strategy.infer(loss, inputs(rank), [0, 2])  # a pass without backward prefetches nothing
                with torch.no_grad():  # new weights: what was gathered before is stale
                    for parameter in [*reference.parameters(), *(local for _, local in strategy.parameters)]:
                        parameter.mul_(1.1)
                strategy.weights_changed()
                reference.zero_grad()
                for other in range(world):
                    for order in orders:
                        reference(inputs(other), order).backward()
                step(strategy, orders, rank)
                strategy.gradients()
                differences[f"{name}, {sync}, {shard_size}"] = max(
                    float((whole.grad.chunk(shard_size)[rank % shard_size] - local.grad).abs().max())
                    for whole, (_, local) in zip(reference.parameters(), strategy.parameters, strict=True)
                    if len(whole.grad.chunk(shard_size)) > rank % shard_size  # type: ignore[union-attr]
                )
                strategy.clear_gradients()
    dist.destroy_process_group()
    return differences


def test_any_order_of_blocks_gives_the_gradients_of_one_device() -> None:
    for differences in run_ranks("differ_on_rank", __file__, 4):
        assert len(differences) == len(ORDERS) * 2 * 3
        assert {name: number for name, number in differences.items() if not number < 1e-12} == {}


# Trials show whether a micro-batch fits. A rank that runs out of memory in a trial does not block the others.


class Fails(torch.autograd.Function):
    """Runs out of memory in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise torch.OutOfMemoryError("injected")


def failing(where: str, model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The loss, but memory runs out in the middle of a pass."""

    def run_out(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if where == "forward":
            raise torch.OutOfMemoryError("injected")
        return Fails.apply(output)  # type: ignore[no-untyped-call,no-any-return]

    hook = model.blocks[1].register_forward_hook(run_out)  # type: ignore[union-attr,operator]
    try:
        return loss(model, x, range(NUM_BLOCKS))
    finally:
        hook.remove()


def try_on_rank(by_hand: bool) -> dict[str, Any]:
    """Each rank tries a pass, in which rank 1 runs out of memory; then all of them train a step."""
    from torch.distributed.fsdp import FSDPModule

    if by_hand and hasattr(FSDPModule, "reset_iter_state"):
        del FSDPModule.reset_iter_state
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    orders = [range(NUM_BLOCKS)] * MICRO_BATCHES
    collectives, differences = 0, {}
    for sync in ("every", "last"):
        for shard_size in (1, 2, 4):
            strategy, reference = make_strategy(shard_size, fsdp_sync=sync)
            assert strategy.can_try_out
            for other in range(world):
                for order in orders:
                    reference(inputs(other), order).backward()
            for where in ("nowhere", "forward", "backward"):
                with Collectives() as seen, strategy.trying_out():
                    strategy.train(loss, inputs(rank), orders[0])["total"].backward()
                    if rank == 1 and where != "nowhere":
                        with pytest.raises(torch.OutOfMemoryError):
                            strategy.train(partial(failing, where), inputs(rank))["total"].backward()
                collectives += sum(seen.counts.values())
                strategy.clear_gradients()
                step(strategy, orders, rank)
                strategy.gradients()
                differences[f"{where}, {sync}, {shard_size}"] = max(
                    float((whole.grad.chunk(shard_size)[rank % shard_size] - local.grad).abs().max())
                    for whole, (_, local) in zip(reference.parameters(), strategy.parameters, strict=True)
                    if len(whole.grad.chunk(shard_size)) > rank % shard_size  # type: ignore[union-attr]
                )
                strategy.clear_gradients()
    dist.destroy_process_group()
    return {"collectives": collectives, "differences": differences}


@pytest.mark.parametrize("by_hand", [False, True], ids=["torch's reset", "our reset, for older versions"])
def test_a_trial_communicates_nothing_and_leaves_nothing_behind(by_hand: bool) -> None:
    for result in run_ranks("try_on_rank", __file__, 4, {"by_hand": by_hand}):
        assert result["collectives"] == 0
        assert len(result["differences"]) == 3 * 2 * 3
        assert {name: number for name, number in result["differences"].items() if not number < 1e-12} == {}
