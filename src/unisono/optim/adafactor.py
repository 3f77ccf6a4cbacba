"""Adafactor (Shazeer and Stern, 2018), as in torch.optim, but also for sharded weights.

The second moment of a matrix is stored as the means of its rows and columns. A weight with more than two dimensions is
flattened to a matrix that keeps its first dimension. If weights are sharded, the column means and the norms of weights
and updates are all-reduced, with two all-reduces per step for all weights together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from unisono.optim.base import ShardAwareOptimizer, step_counter
from unisono.parallel.row_shards import RowShards


class Adafactor(ShardAwareOptimizer):
    """Adafactor. Its state of a matrix is one row and one column instead of two full moments."""

    row_slots: ClassVar[frozenset[str]] = frozenset({"row_var"})
    whole_slots: ClassVar[frozenset[str]] = frozenset({"col_var"})

    def __init__(
        self,
        parameters: Iterable[Any],
        *,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        smallest_rms: float = 1e-3,
        clip_rms: float = 1.0,
        weight_decay: float = 0.0,
        shards: RowShards | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "smallest_rms": smallest_rms,
            "clip_rms": clip_rms,
            "weight_decay": weight_decay,
        }
        super().__init__(parameters, defaults, shards or RowShards())

    def _new_state(self, weight: nn.Parameter, group: dict[str, Any]) -> dict[str, Any]:
        if weight.dim() < 2:
            return {"step": step_counter(weight), "variance": torch.zeros_like(weight)}
        rows, columns = weight.shape[0], weight.shape[1:].numel()
        return {
            "step": step_counter(weight),
            "row_var": weight.new_zeros(rows, 1),
            "col_var": weight.new_zeros(1, columns),
        }

    def _step_group(self, group: dict[str, Any], weights: list[nn.Parameter]) -> None:
        factors = self._factors(group, weights)
        updates = [self._update(weight, *moments) for weight, moments in zip(weights, factors, strict=True)]
        squares = self._sums(weights, [[update.square().sum()] for update in updates])
        for weight, update, (_, _, size), (square,) in zip(weights, updates, factors, squares, strict=True):
            numel = self.shards.whole_shape(weight).numel()
            clip = torch.clamp((square / numel).sqrt() / group["clip_rms"], min=1)
            step = torch.clamp(self.state[weight]["step"], min=1).to(update.dtype)
            rate = torch.clamp(step.rsqrt(), max=group["lr"])
            scale = rate * torch.clamp((size / numel).sqrt(), min=group["smallest_rms"]) / clip
            decayed = weight * (1 - group["lr"] * group["weight_decay"])
            self._store(weight, decayed - scale * update.view_as(weight))

    def _factors(self, group: dict[str, Any], weights: list[nn.Parameter]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Updates the moments. Returns the column moments, sum of row moments and sum of squares of each weight."""
        partial: list[list[Tensor]] = []
        for weight in weights:
            state, gradient = self.state[weight], self._gradient(weight)
            shrink = self._count_step(state).to(gradient.dtype) ** group["beta2_decay"]
            square = gradient.square()
            size = weight.square().sum()
            if weight.dim() < 2:
                self._store(state["variance"], torch.lerp(state["variance"], square, shrink))
                partial.append([size, size, size])
                continue
            matrix = square.flatten(1)
            row_var = torch.lerp(state["row_var"], matrix.mean(dim=1, keepdim=True), shrink)
            self._store(state["row_var"], row_var)
            partial.append([matrix.sum(dim=0, keepdim=True), row_var.sum(), size])
        factors = []
        for weight, (columns, rows, size) in zip(weights, self._sums(weights, partial), strict=True):
            state = self.state[weight]
            if weight.dim() >= 2:
                shrink = torch.clamp(state["step"], min=1).to(columns.dtype) ** group["beta2_decay"]
                mean = columns / self.shards.whole_shape(weight)[0]
                self._store(state["col_var"], torch.lerp(state["col_var"], mean, shrink))
            factors.append((columns, rows, size))
        return factors

    def _update(self, weight: nn.Parameter, columns: Tensor, rows: Tensor, size: Tensor) -> Tensor:
        """Returns the gradient divided by the square root of its estimated second moment."""
        state: dict[str, Tensor] = self.state[weight]
        gradient = self._gradient(weight)
        tiny = torch.finfo(weight.dtype).eps
        if weight.dim() < 2:
            return state["variance"].clamp(min=tiny**2).rsqrt() * gradient
        mean_of_rows = (rows / self.shards.whole_shape(weight)[0]).clamp(min=tiny)
        variance = state["row_var"] @ state["col_var"] / mean_of_rows
        return variance.clamp(min=tiny**2).rsqrt() * gradient.flatten(1)

    def _sums(self, weights: list[nn.Parameter], partial: list[list[Tensor]]) -> list[list[Tensor]]:
        """Sums the values of sharded weights across ranks. The values of other weights are already complete."""
        sharded = [number for number, weight in enumerate(weights) if self.shards.is_sharded(weight)]
        summed = iter(self.shards.sum([tensor for number in sharded for tensor in partial[number]]))
        return [
            [next(summed) for _ in tensors] if number in set(sharded) else tensors
            for number, tensors in enumerate(partial)
        ]
