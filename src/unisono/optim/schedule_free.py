"""AdamW without a learning-rate schedule (Defazio et al., The Road Less Scheduled, 2024).

The optimizer applies steps to weights z, averages z over the steps to get x, and computes gradients at a point y
between x and z. The model's weights are y during training. Evaluation, previews and exports use x, which at any step is
about as good as the result of a full schedule. x is not stored, because it follows from y = beta1 x + (1 - beta1) z.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from unisono.optim.base import ShardAwareOptimizer, step_counter
from unisono.parallel.row_shards import RowShards


class ScheduleFreeAdamW(ShardAwareOptimizer):
    """Schedule-free AdamW. `average` returns the weights to evaluate and export."""

    def __init__(
        self,
        parameters: Iterable[Any],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        shards: RowShards | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, defaults, shards or RowShards())

    def _new_state(self, weight: nn.Parameter, group: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = {"step": step_counter(weight), "z": weight.detach().clone()}
        state["exp_avg_sq"] = torch.zeros_like(weight)
        scalar = torch.zeros((), dtype=weight.dtype, device=weight.device)
        return state | {"largest_rate": scalar, "sum_of_shares": scalar.clone()}

    def _step_group(self, group: dict[str, Any], weights: list[nn.Parameter]) -> None:
        (beta1, beta2), rate = group["betas"], group["lr"]
        for weight in weights:
            state, gradient = self.state[weight], self._gradient(weight)
            step = self._count_step(state).to(gradient.dtype)
            # Weight each point in the average by its squared learning rate, so that warm-up points count less.
            largest = torch.clamp(state["largest_rate"], min=rate)
            total = state["sum_of_shares"] + largest.square()
            share = torch.where(total > 0, largest.square() / total, 0)
            second = torch.lerp(state["exp_avg_sq"], gradient.square(), 1 - beta2)
            direction = gradient / ((second / (1 - beta2**step)).sqrt_().add_(group["eps"]))
            direction = direction + group["weight_decay"] * weight
            y = torch.lerp(weight, state["z"], share) + direction * (rate * (beta1 * (1 - share) - 1))
            for target, value in (
                (state["largest_rate"], largest),
                (state["sum_of_shares"], total),
                (state["exp_avg_sq"], second),
                (state["z"], state["z"] - rate * direction),
                (weight, y),
            ):
                self._store(target, value)

    def average(self, weight: nn.Parameter) -> Tensor:
        """Computes x, the weight to evaluate and export."""
        for group in self.param_groups:
            if any(weight is each for each in group["params"]) and self.state[weight]:
                return torch.lerp(weight.detach(), self.state[weight]["z"], 1 - 1 / group["betas"][0])
        return weight.detach().clone()
