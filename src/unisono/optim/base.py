"""The base class of the optimizers in this package."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.parallel.row_shards import RowShards


class ShardAwareOptimizer(Optimizer):
    """An optimizer whose result does not depend on how weights are sharded across ranks.

    Like torch's fused optimizers, it divides gradients by `grad_scale` itself, and changes nothing in a step for which
    `found_inf` is 1. Such a step is skipped on the device, without synchronizing with the host. Subclasses compute new
    values and pass them to `_store`. `shards` describes how the weights are sharded.
    """

    _step_supports_amp_scaling: ClassVar[bool] = True
    row_slots: ClassVar[frozenset[str]] = frozenset()
    """Names of state tensors with one row per row of the weight, which are sharded like the weight."""
    whole_slots: ClassVar[frozenset[str]] = frozenset()
    """Names of state tensors that every rank stores in full, whatever their shape."""

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    def __init__(self, parameters: Iterable[Any], defaults: dict[str, Any], shards: RowShards) -> None:
        super().__init__(parameters, defaults)
        self.shards = shards

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates all weights that have a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and not self.state[weight]:
                    self.state[weight] = self._new_state(weight, group)
            self._step_group(group, [weight for weight in group["params"] if weight.grad is not None])

    def _new_state(self, weight: nn.Parameter, group: dict[str, Any]) -> dict[str, Any]:
        """Returns the state of a weight before its first step."""
        raise NotImplementedError

    def _step_group(self, group: dict[str, Any], weights: list[nn.Parameter]) -> None:
        """Updates the weights of one group."""
        raise NotImplementedError

    def _gradient(self, weight: nn.Parameter) -> Tensor:
        assert weight.grad is not None
        return weight.grad if self.grad_scale is None else weight.grad / self.grad_scale.to(weight.grad.dtype)

    def _store(self, target: Tensor, value: Tensor) -> None:
        """Writes a new value into a weight or its state, unless this step is skipped."""
        if self.found_inf is not None:
            value = torch.where(self.found_inf.bool(), target, value.to(target.dtype))
        target.copy_(value)

    def _count_step(self, state: dict[str, Any]) -> Tensor:
        """Increments a weight's step counter and returns it."""
        self._store(state["step"], state["step"] + 1)
        # If the first step is skipped, the counter is 0 and bias corrections would divide by 0.
        return torch.clamp(state["step"], min=1)


def step_counter(weight: Tensor) -> Tensor:
    """Creates a step counter on the weight's device."""
    return torch.zeros((), dtype=torch.float32, device=weight.device)
