"""Calibrates predictions, so that probabilities match observed frequencies and numbers are unbiased.

Class logits are divided by a temperature (Guo et al. 2017), which never changes the predicted class. Numbers are mapped
by isotonic regression, which never changes their order. Both are fitted on one half of the held-out pages and evaluated
on the other half.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from unisono.data.order import Order
from unisono.errors import ConfigError
from unisono.recipes.common.cache_files import write_cache_file

FILE = "calibration.json"
BINS = 10
MIN_PAGES = 20
"""Minimum number of pages for fitting a calibration, and for evaluating it."""
_TEMPERATURES = 0.01, 100.0
_MAX_BYTES = 64 * 2**20

Numbers = NDArray[np.float64]


@dataclass
class Calibration:
    """Converts a model's outputs to probabilities (`temperature`) or to numbers (`mean`, `std`, then the curve)."""

    temperature: float = 1.0
    """Divisor of the logits."""
    mean: float = 0.0
    std: float = 1.0
    """Mean and standard deviation of the training labels: a prediction is mean + std × output."""
    numbers: list[float] = field(default_factory=list)
    becomes: list[float] = field(default_factory=list)
    """The calibration curve: increasing numbers and their calibrated values, interpolated linearly. Empty: identity."""
    names: list[str] = field(default_factory=list)
    """Names of the classes; empty for numbers."""
    measured: dict[str, Any] = field(default_factory=dict)
    """Metrics before and after calibration, and reliability tables."""

    def probabilities(self, logits: Numbers) -> Numbers:
        """Returns probabilities [N, classes] from logits [N, classes]."""
        return softmax(np.asarray(logits, np.float64) / self.temperature)

    def values(self, outputs: Numbers) -> Numbers:
        """Returns numbers [N] in the unit of the labels, from the outputs [N] of a regression model."""
        values = self.mean + self.std * np.asarray(outputs, np.float64)
        return np.interp(values, self.numbers, self.becomes) if self.numbers else values

    def write(self, folder: Path) -> None:
        """Writes calibration.json."""
        write_cache_file(folder / FILE, (json.dumps(vars(self), indent=2) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Reads calibration.json; returns None if the file does not exist."""
        file = folder / FILE
        try:
            if not file.is_file():
                return None
            if file.stat().st_size > _MAX_BYTES:
                raise ValueError("the file is too large")
            return cls.from_json(json.loads(file.read_bytes()))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise ConfigError(f"{file} cannot be used ({error}); export the run again, or remove the file") from None

    @classmethod
    def from_json(cls, content: Any) -> Self:
        """Creates a calibration from the content of a file; raises ValueError or TypeError if it is invalid."""
        if not isinstance(content, Mapping):
            raise ValueError("expected a JSON object")
        new = cls(**{name: content[name] for name in vars(cls()) if name in content})
        if not all(isinstance(value, list) for value in (new.numbers, new.becomes, new.names)):
            raise ValueError("'numbers', 'becomes' and 'names' must be lists")
        values = [new.temperature, new.mean, new.std, *new.numbers, *new.becomes]
        if not all(type(value) in (int, float) and math.isfinite(value) for value in values):
            raise ValueError("all numbers must be finite")
        if new.temperature <= 0 or new.std <= 0:
            raise ValueError("'temperature' and 'std' must be above 0")
        if len(new.numbers) != len(new.becomes) or sorted(new.numbers) != new.numbers:
            raise ValueError("'numbers' must increase, and 'becomes' must have the same length")
        if not all(isinstance(name, str) for name in new.names) or not isinstance(new.measured, dict):
            raise ValueError("'names' must be strings, and 'measured' an object")
        return new


def fit(outputs: Numbers, labels: NDArray[Any], uncalibrated: Calibration) -> Calibration:
    """Fits a calibration on half of the pages and evaluates it on the rest; does not fit it if there are too few pages.

    `outputs` are logits [N, classes] if `uncalibrated` names classes, otherwise numbers [N].
    """
    number = len(labels)
    if number // 2 < MIN_PAGES or not np.isfinite(outputs).all():
        return uncalibrated
    # The halves are random, because labels may follow a pattern in the file.
    drawn = Order(number, seed=0).indices(np.arange(number))
    first, second = np.sort(drawn[: number // 2]), np.sort(drawn[number // 2 :])
    targets = labels[second]
    if uncalibrated.names:
        if len(np.unique(labels[first])) < 2:
            return uncalibrated
        calibrated = replace(uncalibrated, temperature=fit_temperature(outputs[first], labels[first]))
        before, after = uncalibrated.probabilities(outputs[second]), calibrated.probabilities(outputs[second])
        calibrated.measured = {
            "log_loss": log_loss(before, targets),
            "log_loss_calibrated": log_loss(after, targets),
            "ECE": expected_calibration_error(before, targets),
            "ECE_calibrated": expected_calibration_error(after, targets),
            "reliability": reliability(before, targets),
            "reliability_calibrated": reliability(after, targets),
        }
    else:
        from sklearn.isotonic import IsotonicRegression

        curve = IsotonicRegression().fit(uncalibrated.values(outputs[first]), labels[first].astype(np.float64))
        numbers, becomes = curve.X_thresholds_.tolist(), curve.y_thresholds_.tolist()
        calibrated = replace(uncalibrated, numbers=numbers, becomes=becomes)
        before, after = uncalibrated.values(outputs[second]), calibrated.values(outputs[second])
        calibrated.measured = {"RMSE": rmse(before, targets), "RMSE_calibrated": rmse(after, targets)}
    calibrated.measured["pages"] = len(second)
    return calibrated


def softmax(logits: Numbers) -> Numbers:
    """Returns probabilities [N, classes] from logits [N, classes]."""
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities: Numbers = weights / weights.sum(axis=1, keepdims=True)
    return probabilities


def fit_temperature(logits: Numbers, labels: NDArray[np.int64]) -> float:
    """Returns the temperature with the lowest log loss, for logits [N, classes] and true classes [N].

    Targets are smoothed (Platt 1999). Otherwise the temperature of a model without errors would go to 0, and its
    probabilities to 0 and 1.
    """
    from scipy.optimize import minimize_scalar
    from scipy.special import log_softmax

    number, num_classes = logits.shape
    if not number or np.ptp(logits, axis=1).max() == 0:
        return 1.0
    doubt = 1 / (number + 2)
    targets = np.full(logits.shape, doubt / max(1, num_classes - 1))
    targets[np.arange(number), labels] = 1 - doubt

    def loss(log_temperature: float) -> float:
        scaled = np.asarray(logits, np.float64) / math.exp(log_temperature)
        return float(-(targets * log_softmax(scaled, axis=1)).sum(axis=1).mean())

    low, high = map(math.log, _TEMPERATURES)
    return math.exp(minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-7}).x)


def reliability(probabilities: Numbers, labels: NDArray[np.int64], bins: int = BINS) -> list[dict[str, float]]:
    """Returns a reliability table: mean confidence and accuracy in each range of confidence."""
    confidence, correct = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    bin_of = np.minimum((confidence * bins).astype(np.int64), bins - 1)
    rows = []
    for number in np.unique(bin_of).tolist():
        inside = bin_of == number
        means = {"confidence": float(confidence[inside].mean()), "accuracy": float(correct[inside].mean())}
        rows.append({"from": number / bins, "to": (number + 1) / bins, "pages": int(inside.sum()), **means})
    return rows


def expected_calibration_error(probabilities: Numbers, labels: NDArray[np.int64], bins: int = BINS) -> float:
    """Returns the expected calibration error: the mean absolute difference between confidence and accuracy."""
    rows = reliability(probabilities, labels, bins)
    return math.fsum(row["pages"] * abs(row["confidence"] - row["accuracy"]) for row in rows) / max(1, len(labels))


def log_loss(probabilities: Numbers, labels: NDArray[np.int64]) -> float:
    """Returns the mean negative log probability of the true class."""
    chosen = probabilities[np.arange(len(labels)), labels]
    return float(-np.log(np.maximum(chosen, 1e-15)).mean())


def rmse(values: Numbers, labels: Numbers) -> float:
    """Returns the root mean squared error."""
    return float(np.sqrt(np.mean((values - labels) ** 2)))
