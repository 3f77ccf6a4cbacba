"""Compares losses, metrics and weights of two runs of the same steps, each with its own tolerance.

Losses and metrics are compared relative to max(1, |value|), with a fixed tolerance per precision (`TOLERANCES`).

Weights need another tolerance. Adam divides a gradient by its own size. A weight whose true gradient is zero, such as
the key biases of attention, therefore follows the sign of the gradient's rounding error: in each run it moves by up to
the learning rate per step, in either direction. The losses do not change, because they do not depend on such a weight.
The tolerance of each element of a weight w is therefore

    floor * max(1, |w|)  +  2 * learning rate * steps * min(1, noise / (sqrt(v) + epsilon)),
    noise = NOISE_FACTOR * machine epsilon * largest gradient norm,

where v is Adam's bias-corrected second moment of that element: the gradients of the two runs differ by about `noise`,
which Adam turns into the fraction noise / (sqrt(v) + epsilon) of a full step. For an element with a real gradient, the
tolerance is about the floor; an element whose gradient is only rounding error may drift by 2 * learning rate * steps.
With other optimizers that normalise their steps, every weight may drift that far; with SGD, none may. In 16-bit
precision, weights are not compared: a few steps change them by no more than rounding.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from unisono.checkpoint.contents import describe
from unisono.checkpoint.find import list_steps
from unisono.checkpoint.load import load_whole
from unisono.settings import OptimSettings


@dataclass(frozen=True)
class Tolerance:
    """The largest differences that count as the same, in one precision."""

    loss: float
    metric: float
    weight_floor: float
    epsilon: float  # machine epsilon of the computation


TOLERANCES = {
    "float64": Tolerance(1e-10, 1e-10, 1e-10, 2.0**-52),
    "float32": Tolerance(1e-5, 1e-4, 1e-4, 2.0**-23),
    "bf16": Tolerance(2e-3, math.inf, math.inf, 2.0**-8),
    "fp16": Tolerance(1e-3, math.inf, math.inf, 2.0**-10),
}
"""The tolerances of each precision. Below float64, metrics have a larger tolerance than losses, because many metrics
count samples: one sample that crosses a threshold changes an accuracy by more than rounding does. In 16-bit precision,
many samples cross it."""

NOISE_FACTOR = 100.0
"""The rounding error of a gradient, in units of machine epsilon x norm; the errors of a sum's terms add up."""

_LOSS = "loss"
# Entries of metrics.jsonl that describe how or how fast a run was executed, and are not compared.
_NOT_COMPARED = {"step", "epoch", "samples", _LOSS, "lr", "world", "skipped", "mem_gib", "slowest_rank", "bad_samples"}
_NOT_COMPARED |= {"slowest_compute_rank", "mfu", "gpu_util", "gpu_power_w"}
_MEASURED = re.compile(r".*(_ms|_per_s|_by_rank|_seconds|_gib)")


@dataclass(frozen=True)
class RunRecord:
    """The metrics.jsonl and the last checkpoint of a finished run."""

    folder: Path
    optim: OptimSettings

    @cached_property
    def lines(self) -> list[dict[str, object]]:
        """The records of all steps, and of the evaluation."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @cached_property
    def losses(self) -> list[float]:
        """The loss of each step."""
        return [_number(line[_LOSS]) for line in self.lines if _LOSS in line]

    @cached_property
    def metrics(self) -> dict[str, list[float]]:
        """The values of each metric that depends only on data and weights, including the metrics of the evaluation."""
        metrics: dict[str, list[float]] = {}
        for line in self.lines:
            for name, value in line.items():
                if name not in _NOT_COMPARED and not _MEASURED.fullmatch(name):
                    metrics.setdefault(name, []).extend(_numbers(value))
        return metrics

    @cached_property
    def checkpoint(self) -> Path:
        """The last checkpoint."""
        return list_steps(self.folder / "checkpoints")[-1][1]

    @cached_property
    def slots(self) -> dict[str, set[str]]:
        """The names of the optimizer's tensors, by weight."""
        slots: dict[str, set[str]] = {}
        for name in describe(self.checkpoint):
            if name.startswith("optimizer."):
                weight, _, slot = name.removeprefix("optimizer.").rpartition(".")
                slots.setdefault(weight, set()).add(slot)
        return slots

    def largest_drift(self, machine_epsilon: float) -> float:
        """Returns the largest tolerated difference of a weight whose gradient is only rounding error."""
        if any(self._is_normalised(name) for name in self.slots):
            return self._drift
        if any("exp_avg_sq" in slots for slots in self.slots.values()):
            return self._drift * float(self._fraction(torch.zeros(()), machine_epsilon))
        return 0.0

    def drift_of(self, name: str, machine_epsilon: float) -> Tensor | float:
        """Returns the tolerated drift of each element of a weight: the second term of the formula above."""
        if "exp_avg_sq" in self.slots.get(name, ()):
            [second_moment] = load_whole(self.checkpoint, f"optimizer.{name}.exp_avg_sq").values()
            return self._drift * self._fraction(second_moment.double(), machine_epsilon)
        return self._drift if self._is_normalised(name) else 0.0

    @property
    def _drift(self) -> float:
        rates = [_number(line["lr"]) for line in self.lines if "lr" in line]
        return 2 * max(rates, default=0.0) * len(rates)

    def _is_normalised(self, name: str) -> bool:
        """Whether an optimizer other than SGD, without second moments per element, updates this weight."""
        slots = self.slots.get(name, set())
        is_sgd = self.optim.optimizer.lower() == "sgd" and slots <= {"momentum_buffer"}
        return bool(slots) and "exp_avg_sq" not in slots and not is_sgd

    def _fraction(self, second_moment: Tensor, machine_epsilon: float) -> Tensor:
        """Returns the fraction of a full step that depends on rounding."""
        norms = [norm for norm in self.metrics.get("grad_norm", []) if math.isfinite(norm)]
        noise = NOISE_FACTOR * machine_epsilon * max(norms, default=1.0)
        corrected = second_moment / (1 - self.optim.beta2 ** len(self.losses))
        return (noise / (corrected.sqrt() + self.optim.epsilon)).clamp(max=1.0)


@dataclass(frozen=True)
class Differences:
    """The largest differences between a run and the reference."""

    loss: float
    metric: float
    weight: float
    first_loss: int | None = None
    """The first step whose loss differs."""
    different_metric: str | None = None
    different_weight: str | None = None
    """The first weight, in the model's order, whose difference exceeds its tolerance."""
    different_buffers: tuple[str, ...] = ()
    """Names of tensors that differ although no optimizer updates them, such as buffers."""

    @property
    def same(self) -> bool:
        """Whether the run is the same as the reference."""
        return self.trained_the_same and self.different_metric is None

    @property
    def trained_the_same(self) -> bool:
        """Whether losses and weights are the same; metrics may differ."""
        return self.first_loss is None and self.different_weight is None

    def describe(self) -> str:
        """Returns a description of the first difference."""
        if self.different_weight is not None:
            return f"the first weight that differs is {self.different_weight}"
        if self.first_loss is not None:
            return f"the losses differ from step {self.first_loss} on"
        return f"the metric {self.different_metric} differs"


def compare(
    reference: RunRecord, other: RunRecord, precision: str, ignored: frozenset[str] = frozenset()
) -> Differences:
    """Returns the differences between `other` and `reference`, except in the metrics named in `ignored`."""
    limit = TOLERANCES[precision]
    gaps = [_gap(a, b) for a, b in _pairs(reference.losses, other.losses)]
    first_loss = next((step for step, gap in enumerate(gaps, start=1) if not gap <= limit.loss), None)
    metrics = {name: gap for name, gap in _metric_gaps(reference, other).items() if name not in ignored}
    different_metric = next((name for name, gap in metrics.items() if not gap <= limit.metric), None)
    weight, different = 0.0, []
    for name, gap, is_same in _weights(reference, other, limit):
        weight = max(weight, gap)
        if not is_same:
            different.append(name)
    return Differences(
        max(gaps, default=math.inf),
        max(metrics.values(), default=0.0),
        weight,
        first_loss,
        different_metric,
        different[0] if different else None,
        tuple(name for name in different if reference.slots and name not in reference.slots),
    )


def different_metrics(reference: RunRecord, other: RunRecord, precision: str) -> frozenset[str]:
    """Returns the names of metrics that differ between two runs."""
    limit = TOLERANCES[precision].metric
    return frozenset(name for name, gap in _metric_gaps(reference, other).items() if not gap <= limit)


def _metric_gaps(reference: RunRecord, other: RunRecord) -> dict[str, float]:
    first, second = reference.metrics, other.metrics
    return {
        name: max((_gap(a, b) for a, b in _pairs(first.get(name, []), second.get(name, []))), default=0.0)
        for name in {**first, **second}
    }


def _weights(reference: RunRecord, other: RunRecord, limit: Tolerance) -> Iterator[tuple[str, float, bool]]:
    """Yields the name and the largest difference of each tensor, and whether the difference is within the tolerance."""
    expected, actual = load_whole(reference.checkpoint, "model."), load_whole(other.checkpoint, "model.")
    for name in sorted(expected, key=_natural):
        a, b = expected[name].double(), actual[name].double()
        if not a.numel():
            continue
        gaps, scale = (a - b).abs(), a.abs().clamp(min=1.0)
        same_non_finite = ~a.isfinite() & ((a == b) | (a.isnan() & b.isnan()))
        gaps = torch.where(same_non_finite, 0.0, gaps).nan_to_num(nan=math.inf)
        is_same = bool((gaps <= limit.weight_floor * scale).all())
        if not is_same:  # the optimizer's state is read only if it is needed
            is_same = bool((gaps <= limit.weight_floor * scale + reference.drift_of(name, limit.epsilon)).all())
        yield name, float((gaps / scale).max()), is_same


def _pairs(first: list[float], second: list[float]) -> Iterator[tuple[float, float]]:
    """Yields pairs of values; if one run has fewer values, the missing ones count as different."""
    for i in range(max(len(first), len(second))):
        yield (first[i] if i < len(first) else math.nan), (second[i] if i < len(second) else math.inf)


def _gap(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    gap = abs(a - b) / max(1.0, abs(a))
    return math.inf if math.isnan(gap) else gap


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _numbers(value: object) -> list[float]:
    """Returns all numbers in a JSON value, which is a number, a curve, or a mapping of numbers and curves."""
    if isinstance(value, list):
        return [number for each in value for number in _numbers(each)]
    if isinstance(value, Mapping):
        return [number for each in value.values() for number in _numbers(each)]
    return [_number(value)]


def _natural(name: str) -> list[tuple[int, str]]:
    """Returns a sort key that puts blocks.2 before blocks.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
