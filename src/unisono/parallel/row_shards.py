"""Operations on whole weights for optimizers whose weights are sharded by rows across ranks.

Most optimizers update every element on its own, so they work on shards. Some need more: the sum of a column, the norm
of a weight, or a whole matrix. `RowShards` provides these with one collective for all weights together, among the ranks
that hold the same copy of the weights. Where every rank holds whole weights (single, dp, ddp), nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor


def one_device(tensors: Sequence[Tensor]) -> torch.device:
    """Returns the device for a number that is combined with all of these tensors.

    With CPU offload, shards are on the CPU and replicated weights on the GPU. An operation on the GPU accepts a number
    on the CPU, but not the other way round.
    """
    return next((tensor.device for tensor in tensors if tensor.device.type == "cpu"), tensors[0].device)


@dataclass(frozen=True)
class RowShards:
    """Knows which weights are sharded, and sums or gathers them. All ranks must call its methods in the same order."""

    whole_shapes: Mapping[int, torch.Size] = field(default_factory=dict)
    """The shapes of the sharded weights before sharding, by id() of the shard."""
    rank: int = 0  # index among the ranks that hold one copy of the weights
    world: int = 1  # number of ranks that hold one copy of the weights
    device: torch.device | None = None  # where collectives run; offloaded shards are on the CPU
    group: dist.ProcessGroup | None = None  # the ranks that hold one copy of the weights; None: all ranks of the run
    has_replicas: bool = False  # other ranks hold further copies, which must stay equal bit for bit

    def is_sharded(self, weight: Tensor) -> bool:
        """Whether other ranks hold rows of this weight."""
        return self.world > 1 and id(weight) in self.whole_shapes

    def whole_shape(self, weight: Tensor) -> torch.Size:
        """Returns the shape of the weight before sharding."""
        return self.whole_shapes.get(id(weight), weight.shape)

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sums each tensor across ranks, with a single all-reduce; pass only tensors of sharded weights."""
        if self.world == 1 or not tensors:
            return list(tensors)
        flat = torch.cat([tensor.flatten() for tensor in tensors]).to(self.device)
        flat = self._sum_in_fixed_order(flat) if self.has_replicas else self._all_reduce(flat)
        parts = torch.split(flat.to(tensors[0].device), [tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]

    def _all_reduce(self, flat: Tensor) -> Tensor:
        dist.all_reduce(flat, group=self.group)
        return flat

    def _sum_in_fixed_order(self, flat: Tensor) -> Tensor:
        """Sums in rank order, because a library's all-reduce may add in a different order in each replica."""
        from_ranks = flat.new_empty(self.world * len(flat))
        dist.all_gather_into_tensor(from_ranks, flat, group=self.group)
        return from_ranks.view(self.world, -1).sum(dim=0)

    def map_whole(
        self, weights: Sequence[Tensor], shards: Sequence[Tensor], compute: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """Applies `compute` to whole matrices, given this rank's rows in `shards`; returns this rank's result rows.

        Ranks take turns: rank 0 gathers and computes the first matrix, rank 1 the second, and so on, so that every
        matrix is computed once. Matrices of similar size are computed at the same time.
        """
        order = sorted(range(len(shards)), key=lambda number: -self.whole_shape(weights[number]).numel())
        results: dict[int, Tensor] = {}
        for start in range(0, len(order), self.world):
            turn = order[start : start + self.world]  # turn[k] is computed by rank k
            shapes = [self.whole_shape(weights[number]) for number in turn]
            whole = self._exchange([shards[number] for number in turn], shapes, gather=True)
            computed = [compute(whole[0].view(shapes[self.rank]))] if self.rank < len(turn) else []
            rows = self._exchange(computed, shapes, gather=False, like=shards[turn[0]])
            results |= {
                number: part.view_as(shards[number]).to(shards[number].device)
                for number, part in zip(turn, rows, strict=True)
            }
        return [results[number] for number in range(len(shards))]

    def _exchange(
        self, tensors: Sequence[Tensor], shapes: Sequence[torch.Size], *, gather: bool, like: Tensor | None = None
    ) -> list[Tensor]:
        """Sends rows to the ranks that compute (`gather`), or results back to the rows' owners, in one all-to-all."""
        mine = [self._num_elements(shape, self.rank) for shape in shapes]  # this rank's rows of every matrix
        own = (
            [self._num_elements(shapes[self.rank], rank) for rank in range(self.world)]
            if self.rank < len(shapes)
            else [0] * self.world
        )  # every rank's rows of this rank's matrix
        per_matrix = mine + [0] * (self.world - len(mine))
        send, receive = (per_matrix, own) if gather else (own, per_matrix)
        template = tensors[0] if tensors else like
        assert template is not None
        flat = (
            torch.cat([tensor.flatten() for tensor in tensors]).to(self.device)
            if tensors
            else torch.empty(0, dtype=template.dtype, device=self.device)
        )
        received = torch.empty(sum(receive), dtype=flat.dtype, device=flat.device)
        dist.all_to_all_single(received, flat, receive, send, group=self.group)
        if gather:
            return [received] if self.rank < len(shapes) else []
        return list(torch.split(received, mine))

    def _num_elements(self, shape: torch.Size, rank: int) -> int:
        """Returns the number of elements in `rank`'s rows of a matrix, as torch.chunk and fully_shard split it."""
        rows = -(-shape[0] // self.world)
        held = max(0, min(shape[0], (rank + 1) * rows) - rank * rows)
        return held * (shape.numel() // shape[0] if shape[0] else 0)
