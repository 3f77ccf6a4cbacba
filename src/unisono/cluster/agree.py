"""Ranks decide together.

Whether to skip, stop, save or make the batch smaller must be the same on every rank, or they wait for each other
forever. Each rank puts what it knows into a few numbers, and all get the largest of each. The exchange is one small
all-reduce on the CPU, started early in a step and read late, so that nobody waits for it; it has a gloo group of its
own, so that it never comes between the collectives of the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from unisono.cluster.processes import PATIENCE

T = TypeVar("T")


class Pending:
    """An exchange under way; `read` waits for the rest of it."""

    def __init__(self, names: list[str], values: list[float] | torch.Tensor, work: dist.Work | None) -> None:
        self._names = names
        self._values = values
        self._work = work

    def read(self) -> dict[str, float]:
        """The largest value of each flag over all ranks."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        values = self._values if isinstance(self._values, list) else self._values.tolist()
        return dict(zip(self._names, values, strict=True))


class Agreement:
    """The one place where ranks agree. Every rank makes it, and makes every call on it, at the same point."""

    def __init__(self, timeout: timedelta = PATIENCE, *, alone: bool = False) -> None:
        """`timeout` is how long a rank waits for the others; `alone`: it asks nobody, whoever else is there."""
        self._group: dist.ProcessGroup | None = None
        if not alone and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=timeout)

    def start(self, flags: Mapping[str, int | float]) -> Pending:
        """Starts to exchange this rank's flags; the names must be the same on all ranks.

        Not-a-number counts as infinity: compared with anything else it would win on some ranks and lose on others.
        """
        names = sorted(flags)  # a fixed order, however the flags were put together
        numbers = [math.inf if math.isnan(flags[name]) else float(flags[name]) for name in names]
        if self._group is None or not names:
            return Pending(names, numbers, None)
        values = torch.tensor(numbers, dtype=torch.float64)
        return Pending(names, values, dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group, async_op=True))

    def agree_all(self, value: T) -> list[T]:
        """What every rank says, by rank. For rare decisions: it waits for all of them."""
        if self._group is None:
            return [value]
        values: list[T | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values  # type: ignore[return-value]  # all filled now

    def main_says(self, value: T) -> T:
        """What rank 0 says; the values of the others are ignored."""
        if self._group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]
