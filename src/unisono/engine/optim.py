"""The optimizer: built by name, fed with normalised gradients, its state by the names of the weights."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.errors import ConfigError, RecipeError
from unisono.settings import OptimSettings

NamedParameters = Sequence[tuple[str, nn.Parameter]]

# Their update looks at whole matrices; on a shard of one it would be another algorithm.
NOT_ELEMENTWISE = {"muon", "adafactor", "lbfgs"}


def learning_rate_factor(step: int, total_steps: int | None, settings: OptimSettings) -> float:
    """The part of the peak learning rate that optimizer step `step` (from 0) uses."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if settings.lr_schedule == "constant" or total_steps is None:
        return 1.0
    decay = total_steps - settings.warmup_steps
    if settings.lr_schedule == "wsd":
        decay = max(1, round(total_steps * settings.wsd_decay_ratio))
    left = min(1.0, max(0.0, (total_steps - step) / max(1, decay)))  # 1 at the start of the decay, 0 at the end
    if settings.lr_schedule == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * (1 - left)))
    return settings.min_lr_ratio + (1 - settings.min_lr_ratio) * left


def learning_rate_scale(global_batch: int, settings: OptimSettings) -> float:
    """What lr_scaling multiplies the learning rate by."""
    ratio = global_batch / settings.lr_scaling_batch
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[settings.lr_scaling]


def named_optimizer(name: str) -> type[Optimizer]:
    """The class in torch.optim with this name, whatever its capitals."""
    classes = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, Optimizer) and value is not Optimizer
    }
    if name.lower() not in classes:
        raise ConfigError(f"optimizer: torch.optim has no {name!r}; it has {', '.join(sorted(classes))}")
    return classes[name.lower()]


def from_settings(parameters: NamedParameters, settings: OptimSettings) -> Optimizer:
    """The optimizer that the settings name."""
    kind = named_optimizer(settings.optimizer)
    accepted = inspect.signature(kind).parameters
    options: dict[str, Any] = {
        "lr": settings.learning_rate,
        "weight_decay": settings.weight_decay,
        "betas": (settings.beta1, settings.beta2),
        "momentum": settings.beta1,
        "eps": settings.epsilon,
        # One kernel for all weights; it also skips a non-finite step on the device, without asking the host.
        "fused": True,
    }
    if "fused" not in accepted:
        options["foreach"] = True
    return kind(list(parameters), **{name: value for name, value in options.items() if name in accepted})


class Updater:
    """An optimizer that takes unnormalised gradients and the factor that normalises them."""

    def __init__(
        self,
        parameters: NamedParameters,
        settings: OptimSettings,
        own: Callable[[NamedParameters], Optimizer | None],
        lr_scale: float,
    ) -> None:
        optimizer = own(list(parameters))
        if optimizer is None:
            optimizer = from_settings(parameters, settings)
        if not isinstance(optimizer, Optimizer):
            raise RecipeError(f"optimizer() returned {type(optimizer).__name__}; expected a torch.optim.Optimizer")
        self.optimizer = optimizer
        self._names = {id(parameter): name for name, parameter in parameters}
        # Recorded kernels read the rate as float32: rounded in all runs, so that a recorded one has the same bits.
        self._rounded = np.float32 if parameters[0][1].dtype == torch.float32 else float
        self._peaks = [group["lr"] * lr_scale for group in optimizer.param_groups]
        # sgd's dampening spares the first step, which can no longer be told once its buffer is allocated in advance.
        dampened = any(group.get("dampening") for group in optimizer.param_groups)
        self._fused = bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and not dampened
        if self._fused:
            self._allocate_state(parameters)

    def _allocate_state(self, parameters: NamedParameters) -> None:
        """Creates the optimizer's state before step 1: out of memory later would leave half-stepped weights."""
        for _, parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        skip = torch.ones((), device=parameters[0][1].device, dtype=torch.float32)
        self.optimizer.found_inf, self.optimizer.grad_scale = skip, None  # type: ignore[attr-defined]
        self.optimizer.step()  # a skipped step: state is created, nothing else changes
        for slots in self.optimizer.state.values():
            if slots.get("momentum_buffer") is not None:  # sgd's comes from torch.empty, to be filled in a first step
                slots["momentum_buffer"].zero_()
        for _, parameter in parameters:
            parameter.grad = None

    def set_learning_rate(self, factor: float) -> float:
        """Sets each group's rate to `factor` of its peak; returns the first one's."""
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(peak * factor)
            else:
                group["lr"] = float(self._rounded(peak * factor))
        return float(self._peaks[0] * factor)

    def make_capturable(self) -> bool:
        """Keeps on the device what changes from step to step, so that a step can be recorded; False where it cannot."""
        groups = self.optimizer.param_groups
        if not self._fused or not all("capturable" in group for group in groups):
            return False
        for group in groups:
            group["capturable"] = True
            group["lr"] = torch.full((), float(group["lr"]), device=group["params"][0].device)
        return True

    def step(self, gradients: list[Tensor], factor: Tensor, found_inf: Tensor) -> None:
        """Steps with `gradients` x `factor`, or not at all where `found_inf` is 1."""
        device = gradients[0].device if gradients else factor.device
        if self._fused:
            # On the CPU looking is free, and cheaper than letting the optimizer skip.
            skip = found_inf.to(device, torch.float32) if device.type != "cpu" else None
            self.optimizer.found_inf = skip  # type: ignore[attr-defined]
        if (not self._fused or device.type == "cpu") and bool(found_inf):
            return  # an optimizer that cannot skip on the device: the host waits for it here
        in_kernel = self._fused and bool(gradients) and gradients[0].dtype == torch.float32
        if in_kernel:  # the kernel divides by grad_scale itself, which saves a pass over the gradients
            self.optimizer.grad_scale = (1 / factor).to(device, torch.float32)  # type: ignore[attr-defined]
        elif gradients:  # also float64: the kernel reads grad_scale as float32, which is too coarse for it
            torch._foreach_mul_(gradients, factor.to(device, gradients[0].dtype))
        self.optimizer.step()

    def tensors(self) -> dict[tuple[str, str], Tensor]:
        """The state's tensors by (weight, slot)."""
        return {
            (self._names[id(parameter)], slot): value
            for parameter, slots in self.optimizer.state.items()
            for slot, value in slots.items()
            if isinstance(value, Tensor)
        }

    def to_json(self) -> dict[str, Any]:
        """The state that is not in tensors."""
        return {
            self._names[id(parameter)]: plain
            for parameter, slots in self.optimizer.state.items()
            if (plain := {slot: value for slot, value in slots.items() if not isinstance(value, Tensor)})
        }

    def drop_all_but(self, saved: Collection[str]) -> None:
        """Forgets state that a checkpoint of these names does not have: it was saved before the state came to be."""
        for parameter, slots in self.optimizer.state.items():
            for slot in [slot for slot, value in slots.items() if isinstance(value, Tensor)]:
                if f"optimizer.{self._names[id(parameter)]}.{slot}" not in saved:
                    del slots[slot]

    def restore(self, tensors: dict[tuple[str, str], Tensor], plain: dict[str, Any]) -> None:
        """Takes up a saved state."""
        parameters = {
            self._names[id(parameter)]: parameter
            for group in self.optimizer.param_groups
            for parameter in group["params"]
        }
        for (name, slot), value in tensors.items():
            current = self.optimizer.state[parameters[name]].get(slot)
            if isinstance(current, Tensor):
                current.copy_(value)
            else:
                self.optimizer.state[parameters[name]][slot] = value
        for name, slots in plain.items():
            self.optimizer.state[parameters[name]].update(slots)
