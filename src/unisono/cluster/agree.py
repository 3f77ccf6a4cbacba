"""Lets all ranks make the same decision: skip a step, stop, save, or shrink the micro-batch.

If only some ranks took such a branch, ranks would wait for each other in a collective forever. Each rank therefore
contributes a few numbers, and every rank receives the maximum of each. The exchange is one small all-reduce on the CPU.
A step starts it early and reads it late, so no rank waits for it. It uses its own gloo group, so it never interleaves
with the collectives of the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from unisono.cluster.process_group import COLLECTIVE_TIMEOUT

T = TypeVar("T")


class Pending:
    """An exchange in progress; `read` waits for its result."""

    def __init__(self, names: list[str], values: list[float] | torch.Tensor, work: dist.Work | None) -> None:
        self._names = names
        self._values = values
        self._work = work

    def read(self) -> dict[str, float]:
        """Returns the maximum of each flag over all ranks."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        values = self._values if isinstance(self._values, list) else self._values.tolist()
        return dict(zip(self._names, values, strict=True))


class Agreement:
    """Exchanges values between ranks. Collective: every rank creates it and calls each method at the same point."""

    def __init__(self, timeout: timedelta = COLLECTIVE_TIMEOUT, *, alone: bool = False) -> None:
        """`timeout` limits how long a rank waits for the others. If `alone` is set, this rank exchanges nothing."""
        self._group: dist.ProcessGroup | None = None
        if not alone and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=timeout)

    def start(self, flags: Mapping[str, int | float]) -> Pending:
        """Starts the exchange of this rank's flags; all ranks must pass the same names.

        NaN counts as infinity, because a maximum with NaN could differ between ranks.
        """
        names = sorted(flags)  # the same order on every rank
        numbers = [math.inf if math.isnan(flags[name]) else float(flags[name]) for name in names]
        if self._group is None or not names:
            return Pending(names, numbers, None)
        values = torch.tensor(numbers, dtype=torch.float64)
        return Pending(names, values, dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group, async_op=True))

    def all_gather(self, value: T) -> list[T]:
        """Returns the values of all ranks, by rank. Blocks until every rank has called it: for rare decisions only."""
        if self._group is None:
            return [value]
        values: list[T | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values  # type: ignore[return-value]  # every entry is filled now

    def gather(self, value: T) -> list[T] | None:
        """Returns the values of all ranks, by rank, on rank 0, and None on other ranks. All ranks must call it."""
        if self._group is None:
            return [value]
        values: list[T | None] | None = [None] * self._group.size() if self._group.rank() == 0 else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return values  # type: ignore[return-value]  # all filled now

    def broadcast(self, value: T) -> T:
        """Returns the value of rank 0 on every rank; the values of the others are ignored."""
        if self._group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]
