"""Wraps the torch optimizer: normalises gradients, sets learning rates, skips steps, names its state by weight."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.checkpoint.manifest import CheckpointError
from unisono.engine.step.make_optimizer import (
    NamedParameters,
    check_optimizer,
    check_updates_in_parts,
    from_settings,
)
from unisono.errors import RecipeError
from unisono.optim.base import ShardAwareOptimizer
from unisono.optim.combined import CombinedOptimizer
from unisono.parallel.blocks.streamed_update import StreamedUpdate
from unisono.parallel.row_shards import RowShards, one_device
from unisono.settings import OptimSettings


class OptimizerWrapper:
    """A torch optimizer that steps with unnormalised gradients and the factor that normalises them."""

    def __init__(
        self,
        parameters: NamedParameters,
        settings: OptimSettings,
        own: Callable[[NamedParameters], Optimizer | None],
        lr_scale: float,
        *,
        sharded: bool = False,
        shards: RowShards | None = None,
        not_for_muon: Collection[str] = (),
        on_host: StreamedUpdate | None = None,
    ) -> None:
        """`own` creates the recipe's optimizer, or returns None to use the optimizer in the settings.

        `on_host`: the parameters that are stored in host memory with their state.
        """
        optimizer = own(list(parameters))
        is_own = optimizer is not None
        if optimizer is None:
            optimizer = from_settings(parameters, settings, shards=shards, not_for_muon=not_for_muon)
        self.remarks = check_optimizer(optimizer, parameters, sharded=sharded)
        if on_host is not None:
            check_updates_in_parts(optimizer)
        if is_own and settings.optimizer.lower() != OptimSettings.optimizer:
            self.remarks.append(
                f"optimizer {settings.optimizer} has no effect: the recipe's optimizer() returned "
                f"{type(optimizer).__name__}"
            )
        self.optimizer = optimizer
        self._names = {id(parameter): name for name, parameter in parameters}
        # Recorded kernels read the rate as float32. All runs round it, so that recorded runs are bitwise identical.
        self._rounded = np.float32 if parameters[0][1].dtype == torch.float32 else float
        self._device = one_device([parameter for _, parameter in parameters]) if on_host is None else on_host.device
        self._peaks = [group["lr"] * lr_scale for group in optimizer.param_groups]
        # SGD applies no dampening in the first step, which it recognises by a missing momentum buffer.
        dampened = any(group.get("dampening") for group in optimizer.param_groups)
        self._fused = bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and not dampened
        self._on_host = on_host
        waiting = set() if on_host is None else set(on_host.weights)
        self._resident = [parameter for _, parameter in parameters if parameter not in waiting]
        if self._fused:
            with self._stepping(self._resident):
                self._allocate_state(self._resident)
        if on_host is not None:
            on_host.create_state(optimizer.state, self._create_state)

    def _create_state(self, weights: list[nn.Parameter]) -> None:
        with self._stepping(weights):
            self._allocate_state(weights)

    def _allocate_state(self, parameters: Sequence[nn.Parameter]) -> None:
        """Allocates the optimizer's state before step 1: out of memory in a step would leave half-updated weights."""
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        skip = torch.ones((), device=self._device, dtype=torch.float32)
        self.optimizer.found_inf, self.optimizer.grad_scale = skip, None  # type: ignore[attr-defined]
        self.optimizer.step()  # a skipped step creates the state and changes nothing else
        for parameter in parameters:
            slots = self.optimizer.state[parameter]
            if slots.get("momentum_buffer") is not None:  # SGD allocates it empty and fills it in its first step
                slots["momentum_buffer"].zero_()
            parameter.grad = None

    @property
    def class_name(self) -> str:
        """The name of the optimizer's class, which a checkpoint stores."""
        return type(self.optimizer).__name__

    @property
    def has_all_state(self) -> bool:
        """Whether all optimizer state exists before its first step; no checkpoint can then contain further state."""
        return self._fused and isinstance(self.optimizer, CombinedOptimizer | ShardAwareOptimizer)

    def set_learning_rate(self, factor: float) -> float:
        """Sets each group's rate to `factor` times its peak; returns the first group's rate."""
        return self._set_rates([peak * factor for peak in self._peaks])

    def set_own_learning_rate(self, rate: Any) -> float:
        """Sets the rate that a recipe's learning_rate() returned; returns the first group's rate.

        One number is the first group's rate, and the other groups keep their ratio to it. A sequence has one per group.
        """
        several = isinstance(rate, Sequence) and not isinstance(rate, str)
        rates = list(rate) if several else [rate]
        if not all(isinstance(each, int | float | np.floating) and 0 <= each < math.inf for each in rates):
            raise RecipeError(f"learning_rate() returned {rate!r}; expected a number of at least 0, or one per group")
        if several and len(rates) != (groups := len(self._peaks)):
            raise RecipeError(f"learning_rate() returned {len(rates)} rates; the optimizer has {groups} groups")
        if not several:
            base = self._peaks[0]
            rates = [rates[0] * (peak / base) if base else rates[0] for peak in self._peaks]  # a factor of 1 is exact
        return self._set_rates([float(each) for each in rates], own=True)

    def _set_rates(self, rates: Sequence[float], *, own: bool = False) -> float:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            elif not own or group["lr"] != rate:  # a scheduler that has set it continues from its exact number
                group["lr"] = float(self._rounded(rate))
        return float(rates[0])

    def groups(self) -> dict[str, list[nn.Parameter]]:
        """Returns the optimizer's parameter groups by name: a group's `name`, or its number."""
        groups: dict[str, list[nn.Parameter]] = {}
        for number, group in enumerate(self.optimizer.param_groups):
            name = str(group.get("name", number))
            groups[f"{name} {number}" if name in groups else name] = group["params"]
        return groups

    def make_capturable(self) -> bool:
        """Moves values that change between steps to the device, so that steps can be recorded; False if impossible."""
        groups = self.optimizer.param_groups
        if not self._fused or not all("capturable" in group for group in groups):
            return False
        for group in groups:
            group["capturable"] = True
            # float32 also in a run whose default dtype is float64: fused kernels reject a float64 rate.
            rate = torch.full((), float(group["lr"]), dtype=torch.float32, device=group["params"][0].device)
            group["lr"] = rate
        return True

    def step(self, gradients: list[Tensor], factor: Tensor, found_inf: Tensor) -> None:
        """Steps with `gradients` x `factor`; does nothing if `found_inf` is 1."""
        device = self._device
        if self._fused:
            # On the CPU reading the flag is free, and cheaper than letting the optimizer skip.
            skip = found_inf.to(device, torch.float32) if device.type != "cpu" else None
            self.optimizer.found_inf = skip  # type: ignore[attr-defined]
        if (not self._fused or device.type == "cpu") and bool(found_inf):
            return  # an optimizer that cannot skip on the device needs a host-device sync
        in_kernel = self._fused and bool(gradients) and gradients[0].dtype == torch.float32
        if in_kernel:  # the kernel divides by grad_scale itself, which saves a pass over the gradients
            self.optimizer.grad_scale = (1 / factor).to(device, torch.float32)  # type: ignore[attr-defined]
        if self._on_host is None:
            self._step_with(gradients, None if in_kernel else factor)
            return
        for weights in itertools.chain([self._resident], self._on_host.step(self.optimizer.state)):
            with self._stepping(weights):
                here = [weight.grad for weight in weights if weight.grad is not None]
                self._step_with(here, None if in_kernel else factor)

    def _step_with(self, gradients: list[Tensor], factor: Tensor | None) -> None:
        # Also used for float64, because the kernel reads grad_scale as float32, which is not exact enough.
        if gradients and factor is not None:
            torch._foreach_mul_(gradients, factor.to(self._device, gradients[0].dtype))
        self.optimizer.step()

    @contextmanager
    def _stepping(self, weights: Sequence[nn.Parameter]) -> Iterator[None]:
        """A context in which the optimizer holds only these weights."""
        if self._on_host is None:
            yield
            return
        of_group = [group["params"] for group in self.optimizer.param_groups]
        chosen = set(weights)
        for group in self.optimizer.param_groups:
            group["params"] = [weight for weight in group["params"] if weight in chosen]
        try:
            yield
        finally:
            for group, whole in zip(self.optimizer.param_groups, of_group, strict=True):
                group["params"] = whole

    def is_of(self, parameter: nn.Parameter) -> bool:
        """Whether the optimizer was created for this parameter."""
        return id(parameter) in self._names

    def tensors(self) -> dict[tuple[str, str], Tensor]:
        """Returns the tensors of the optimizer state, by (weight name, slot)."""
        return {
            (self._names[id(parameter)], slot): value
            for parameter, slots in self.optimizer.state.items()
            for slot, value in slots.items()
            if isinstance(value, Tensor)
        }

    def is_by_rows(self, slot: str) -> bool | None:
        """Whether state tensors of this name have a row for each row of the weight; None: compare their shapes."""
        parts = self.optimizer.parts if isinstance(self.optimizer, CombinedOptimizer) else [self.optimizer]
        if any(slot in getattr(part, "row_slots", ()) for part in parts):
            return True
        return False if any(slot in getattr(part, "whole_slots", ()) for part in parts) else None

    def to_json(self) -> dict[str, Any]:
        """Returns the optimizer state that is not in tensors."""
        return {
            self._names[id(parameter)]: plain
            for parameter, slots in self.optimizer.state.items()
            if (plain := {slot: value for slot, value in slots.items() if not isinstance(value, Tensor)})
        }

    @contextmanager
    def without_state_missing_in(self, saved: Collection[str]) -> Iterator[None]:
        """Drops state that the checkpoint does not contain, because it was saved before that state existed.

        Restores that state if the checkpoint turns out not to fit.
        """
        dropped: list[tuple[dict[str, Any], str, Tensor]] = []
        for parameter, slots in self.optimizer.state.items():
            for slot in [slot for slot, value in slots.items() if isinstance(value, Tensor)]:
                if f"optimizer.{self._names[id(parameter)]}.{slot}" not in saved:
                    dropped.append((slots, slot, slots.pop(slot)))
        try:
            yield
        except CheckpointError:
            for slots, slot, value in dropped:
                slots[slot] = value
            raise

    def restore(self, tensors: dict[tuple[str, str], Tensor], plain: dict[str, Any]) -> None:
        """Restores a saved state; ignores the state of weights that other optimizers update."""
        parameters = {
            self._names[id(parameter)]: parameter
            for group in self.optimizer.param_groups
            for parameter in group["params"]
        }
        for (name, slot), value in tensors.items():
            if name not in parameters:
                continue
            current = self.optimizer.state[parameters[name]].get(slot)
            if isinstance(current, Tensor):
                current.copy_(value)
            else:
                # State that the optimizer creates in its first step moves to the weight's device, except step counters.
                home = value.device if value.dim() == 0 else parameters[name].device
                self.optimizer.state[parameters[name]][slot] = value.to(home)
        for name, slots in plain.items():
            if name in parameters:
                self.optimizer.state[parameters[name]].update(slots)
