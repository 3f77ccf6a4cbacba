"""Prodigy (Mishchenko and Defazio, 2023), a variant of AdamW that estimates its own step size.

The estimate `d` compares the distance that all weights of the model have moved with the gradients along the way. It
grows from a tiny value to about the best constant learning rate within a few hundred steps, and is multiplied by
`learning_rate`, which is 1 in most runs. If weights are sharded, it needs one all-reduce of two numbers per step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from unisono.optim.base import ShardAwareOptimizer
from unisono.parallel.row_shards import RowShards, one_device


class Prodigy(ShardAwareOptimizer):
    """Prodigy with decoupled weight decay."""

    def __init__(
        self,
        parameters: Iterable[Any],
        *,
        lr: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        initial_d: float = 1e-6,
        shards: RowShards | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "initial_d": initial_d}
        super().__init__(parameters, defaults, shards or RowShards())
        if len(self.param_groups) > 1:
            raise ValueError("prodigy estimates one step size for all weights and supports only one parameter group")

    def _new_state(self, weight: nn.Parameter, group: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq", "travelled")}
        state["initial"] = weight.detach().clone()
        if weight is group["params"][0]:  # the state of the first weight also stores the estimate for the whole model
            home = one_device(group["params"])
            d = torch.full((), group["initial_d"], dtype=weight.dtype, device=home)
            state |= {"d": d, "largest_d": d.clone(), "numerator": torch.zeros_like(d)}
        return state

    def _step_group(self, group: dict[str, Any], weights: list[nn.Parameter]) -> None:
        (beta1, beta2), beta3 = group["betas"], math.sqrt(group["betas"][1])
        estimate = self.state[group["params"][0]]
        d, initial_d = estimate["d"].clone(), group["initial_d"]
        rate = d * group["lr"]
        whole: list[Tensor] = []
        sharded: list[Tensor] = []
        for weight in weights:
            state, gradient = self.state[weight], self._gradient(weight)
            along = (gradient * (state["initial"] - weight)).sum()
            travelled = state["travelled"] * beta3 + gradient * (rate * d / initial_d)
            self._store(state["exp_avg"], state["exp_avg"] * beta1 + gradient * (d * (1 - beta1)))
            self._store(state["exp_avg_sq"], state["exp_avg_sq"] * beta2 + gradient.square() * (d * d * (1 - beta2)))
            self._store(state["travelled"], travelled)
            (sharded if self.shards.is_sharded(weight) else whole).append(torch.stack([along, travelled.abs().sum()]))
        sums = self.shards.sum([torch.stack(sharded).sum(dim=0)]) if self.shards.world > 1 and sharded else sharded
        along, distance = torch.stack([each.to(d.device) for each in (*sums, *whole)]).sum(dim=0)
        self._store(estimate["numerator"], estimate["numerator"] * beta3 + along * (rate * d / initial_d))
        self._update_estimate(estimate, distance)
        for weight in weights:
            state = self.state[weight]
            denominator = state["exp_avg_sq"].sqrt() + estimate["d"] * group["eps"]
            decayed = weight * (1 - rate * group["weight_decay"])
            self._store(weight, torch.where(distance > 0, decayed - rate * state["exp_avg"] / denominator, weight))

    def _update_estimate(self, estimate: dict[str, Tensor], distance: Tensor) -> None:
        """Updates `d`, the largest estimate so far, which never decreases."""
        current = estimate["d"]
        new = torch.where(distance > 0, estimate["numerator"] / distance.clamp(min=1e-38), current)
        largest = torch.maximum(estimate["largest_d"], new)
        self._store(estimate["largest_d"], largest)
        self._store(estimate["d"], torch.maximum(largest, current))
