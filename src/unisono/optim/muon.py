"""Muon, which orthogonalises the momentum of each matrix before applying it (Jordan et al., 2024).

The orthogonalisation needs the whole matrix. If weights are sharded, the ranks share the work: each rank gathers some
of the matrices, orthogonalises them, and sends the other ranks their rows. The result is the same as with whole
weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from unisono.optim.base import ShardAwareOptimizer
from unisono.parallel.row_shards import RowShards

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # coefficients of the quintic iteration, chosen to maximise its slope at 0
_ITERATIONS = 5
_RMS_OF_ADAMW = 0.2  # the typical root mean square of AdamW's updates


class Muon(ShardAwareOptimizer):
    """Muon for matrices. Its updates are scaled to the size of AdamW's, so that both can use the same learning rate."""

    def __init__(
        self,
        parameters: Iterable[Any],
        *,
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        shards: RowShards | None = None,
    ) -> None:
        super().__init__(
            parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}, shards or RowShards()
        )

    def _new_state(self, weight: nn.Parameter, group: dict[str, Any]) -> dict[str, Any]:
        return {"momentum_buffer": torch.zeros_like(weight, memory_format=torch.contiguous_format)}

    def _step_group(self, group: dict[str, Any], weights: list[nn.Parameter]) -> None:
        rate, momentum, decay = group["lr"], group["momentum"], group["weight_decay"]
        directions = []
        for weight in weights:
            gradient, buffer = self._gradient(weight), self.state[weight]["momentum_buffer"]
            averaged = torch.lerp(buffer, gradient, 1 - momentum)
            self._store(buffer, averaged)
            directions.append(torch.lerp(gradient, averaged, momentum))  # Nesterov momentum
        for weight, update in zip(weights, self._orthogonalised(weights, directions), strict=True):
            scale = _RMS_OF_ADAMW * max(self.shards.whole_shape(weight)) ** 0.5
            self._store(weight, weight * (1 - rate * decay) - rate * scale * update)

    def _orthogonalised(self, weights: list[nn.Parameter], directions: list[Tensor]) -> list[Tensor]:
        sharded = [number for number, weight in enumerate(weights) if self.shards.is_sharded(weight)]
        computed = self.shards.map_whole(
            [weights[number] for number in sharded], [directions[number] for number in sharded], orthogonalise
        )
        results = dict(zip(sharded, computed, strict=True))
        return [
            results[number] if number in results else orthogonalise(direction)
            for number, direction in enumerate(directions)
        ]


def orthogonalise(matrix: Tensor) -> Tensor:
    """Returns the nearest matrix whose singular values are about 1, found by a Newton-Schulz iteration.

    The iteration computes in bfloat16, or in float64 for a float64 matrix.
    """
    a, b, c = _COEFFICIENTS
    result: Tensor = matrix if matrix.dtype == torch.float64 else matrix.bfloat16()
    if tall := matrix.shape[0] > matrix.shape[1]:
        result = result.T
    result = result / result.norm().clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = result @ result.T
        result = a * result + (b * gram + c * gram @ gram) @ result
    return (result.T if tall else result).to(matrix.dtype).contiguous()
