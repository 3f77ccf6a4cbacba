"""A loss as sums and counts, which micro-batches and ranks add up before the division."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.engine.recipe import Loss
from unisono.errors import RecipeError

_RESERVED = {"step", "epoch", "samples", "loss", "lr", "grad_norm", "count", "world", "skipped"}
_SUM, _COUNT = "metric/", "count of "
_FIRST_STEPS = 3


def flatten_loss(loss: Any) -> dict[str, Tensor]:
    """Checks the result of a recipe's loss() and flattens it to scalar tensors: total, count, metrics.

    A metric with its own count becomes two tensors.
    """
    if not isinstance(loss, Loss):
        raise RecipeError(
            f"loss() returned {type(loss).__name__}; return unisono.Loss(total, count): a sum and its number of items"
        )
    total = loss.total
    if not isinstance(total, Tensor) or total.dim() != 0:
        description = f"shape {tuple(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        raise RecipeError(f"loss(): total must be a scalar tensor, a sum over items; got {description}")
    if torch.is_grad_enabled() and not total.requires_grad:
        raise RecipeError(
            "loss(): total does not depend on any trainable weight (detached, or computed without the model?)"
        )

    def tensor(name: str, value: Any) -> Tensor:
        if isinstance(value, Tensor) and value.numel() == 1:
            return value.detach().reshape(()).to(total.device)
        if isinstance(value, Tensor | bool | str) or not hasattr(value, "__float__"):
            description = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise RecipeError(f"loss(): {name} must be one number, a sum over items; got {description}")
        # torch.full launches a kernel; torch.tensor would copy from the host.
        return torch.full((), float(value), device=total.device, dtype=torch.float64)

    reserved = sorted(_RESERVED & set(loss.metrics))
    if reserved:
        raise RecipeError(f"loss(): a metric cannot be called {reserved[0]}, a name that every run uses; rename it")
    sums = {"total": total, "count": tensor("count", loss.count)}
    for name, value in sorted(loss.metrics.items()):
        if isinstance(value, tuple):
            if len(value) != 2:
                raise RecipeError(f"loss(): {name} has {len(value)} parts; return a sum, or (sum, count)")
            sums[f"{_COUNT}{name}"] = tensor(f"the count of {name}", value[1])
            value = value[0]
        sums[f"{_SUM}{name}"] = tensor(name, value)
    return sums


def per_item(sums: Mapping[str, float], count: float) -> dict[str, float]:
    """Returns the metrics of a step from the sums across all ranks; a metric whose own count is 0 is omitted."""
    means = {}
    for key, value in sums.items():
        name = key.removeprefix(_SUM)
        if name == key:
            continue
        own = sums.get(f"{_COUNT}{name}")
        if own is None:
            means[name] = value / count if count else 0.0
        elif own:
            means[name] = value / own
    return means


def row_of(results: Mapping[str, Tensor]) -> Tensor:
    """Returns the sums in one tensor, for the all-reduce."""
    return torch.stack([value.detach().double() for value in results.values()])


def power_of_two_near(value: float) -> float:
    """Returns the power of two nearest to `value`: dividing by it is exact."""
    return 2.0 ** round(math.log2(value)) if value > 0 else 1.0


def metrics_in(names: Sequence[str]) -> list[str]:
    """Returns those names of sums that are metrics."""
    return [name.removeprefix(_SUM) for name in names if name.startswith(_SUM)]


def describe_metrics(names: list[str]) -> str:
    """Lists the metrics among the names of sums, for an error message."""
    metrics = metrics_in(names)
    own = {name.removeprefix(_COUNT) for name in names if name.startswith(_COUNT)}
    return ", ".join(f"{name} (with a count)" if name in own else name for name in metrics) or "none"


class CountCheck:
    """Detects a loss() that returns a mean: one that counts 1 item in every micro-batch of the first steps."""

    def __init__(self) -> None:
        self._steps: set[int] = set()
        self._samples = 0  # number of samples in the largest micro-batch
        self._ones = True
        self._has_warned = False

    def add(self, step: int, count: Tensor, samples: int) -> None:
        """Records the count of a micro-batch. Synchronises with the device, in the first steps only."""
        if len(self._steps | {step}) > _FIRST_STEPS or not self._ones:
            return
        self._steps.add(step)
        self._samples = max(self._samples, samples)
        self._ones = bool(count.item() == 1)

    def remark(self, *, ended: bool) -> str | None:
        """Returns the warning once, after the first steps or at the end of the run; None if there is no problem."""
        enough = len(self._steps) >= (1 if ended else _FIRST_STEPS)
        if self._has_warned or not enough or not self._ones or self._samples < 2:
            return None
        self._has_warned = True
        return (
            f"loss() counted 1 in every micro-batch of up to {self._samples} samples: is its total a mean? Return the "
            "sum over n items and their number, Loss(mean * n, n): otherwise the result depends on the micro-batch size"
        )
