"""Making scores mean what they say: probabilities as often right as they claim, numbers without a lean.

Classes get one temperature (Guo et al. 2017), which changes no decision; numbers get a rising step curve (isotonic
regression by pooling adjacent violators), which changes no order. Both are fitted on one half of the held-out pages and
measured on the other.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from unisono.data.order import Order
from unisono.errors import ConfigError
from unisono.recipes.common.whole_files import write_whole

FILE = "calibration.json"
BINS = 10
FEWEST = 20
"""Pages that a fit needs."""
_COLDEST, _HOTTEST = 0.01, 100.0
_STEPS = 60  # of halving the interval: below the rounding of a float64
_MOST_BYTES = 64 * 2**20

Numbers = NDArray[np.float64]


@dataclass
class Calibration:
    """How a model's outputs become probabilities (`temperature`) or numbers (`mean`, `std`, then the curve)."""

    temperature: float = 1.0
    """Logits are divided by it."""
    mean: float = 0.0
    std: float = 1.0
    """Of the labels trained on: a number is mean + std × output."""
    numbers: list[float] = field(default_factory=list)
    becomes: list[float] = field(default_factory=list)
    """The curve: numbers, rising, and what each becomes; straight lines between them. Empty: they stay."""
    names: list[str] = field(default_factory=list)
    """Of the classes; empty: a number."""
    measured: dict[str, Any] = field(default_factory=dict)
    """On the half of the held-out pages that it was not fitted on: before and after, and the reliability table."""

    def probabilities(self, logits: Numbers) -> Numbers:
        """[N, classes] from logits [N, classes]."""
        return softmax(np.asarray(logits, np.float64) / self.temperature)

    def values(self, outputs: Numbers) -> Numbers:
        """[N] numbers in the labels' own unit, from a regression's outputs [N]."""
        values = self.mean + self.std * np.asarray(outputs, np.float64)
        return np.interp(values, self.numbers, self.becomes) if self.numbers else values

    def write(self, folder: Path) -> None:
        """Keeps it beside the model."""
        write_whole(folder / FILE, (json.dumps(vars(self), indent=2) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """What lies beside a model; None where nothing does."""
        file = folder / FILE
        try:
            if not file.is_file():
                return None
            if file.stat().st_size > _MOST_BYTES:
                raise ValueError("too long")
            found = json.loads(file.read_bytes())
            if not isinstance(found, dict):
                raise ValueError("it is no JSON object")
            calibration = cls(**{name: found[name] for name in vars(cls()) if name in found})
            calibration._check()
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(f"{file} cannot be used ({error}); export the run again, or remove the file") from None
        return calibration

    def _check(self) -> None:
        lists = (self.numbers, self.becomes, self.names)
        if not all(isinstance(value, list) for value in lists) or not isinstance(self.measured, dict):
            raise ValueError("numbers, becomes and names must be lists")
        plain = [self.temperature, self.mean, self.std, *self.numbers, *self.becomes]
        if not all(type(value) in (int, float) and math.isfinite(value) for value in plain):
            raise ValueError("it holds something other than finite numbers")
        if self.temperature <= 0 or self.std <= 0:
            raise ValueError("temperature and std must be above 0")
        if len(self.numbers) != len(self.becomes) or sorted(self.numbers) != self.numbers:
            raise ValueError("numbers must rise, and becomes be as long")
        if not all(isinstance(name, str) for name in self.names):
            raise ValueError("names must be words")


def fit(outputs: Numbers, labels: NDArray[Any], plain: Calibration) -> Calibration:
    """`plain` with what half of the pages say of it, and what the other half says of that.

    `outputs` are logits [N, classes] where `plain` has names of classes, otherwise numbers [N]. As it is, where the
    pages are too few.
    """
    number = len(labels)
    if number // 2 < FEWEST or not np.isfinite(outputs).all():
        return plain
    # Drawn, not every other page: a file may have its labels in turn.
    drawn = Order(number, seed=0).indices(np.arange(number))
    fitted_on, left = np.sort(drawn[: number // 2]), np.sort(drawn[number // 2 :])
    truth = labels[left]
    if plain.names:
        if len(np.unique(labels[fitted_on])) < 2:
            return plain
        found = replace(plain, temperature=fit_temperature(outputs[fitted_on], labels[fitted_on]))
        before, after = plain.probabilities(outputs[left]), found.probabilities(outputs[left])
        found.measured = {
            "log_loss": log_loss(before, truth),
            "log_loss_calibrated": log_loss(after, truth),
            "ECE": expected_calibration_error(before, truth),
            "ECE_calibrated": expected_calibration_error(after, truth),
            "reliability": reliability(before, truth),
            "reliability_calibrated": reliability(after, truth),
        }
    else:
        numbers, becomes = fit_isotonic(plain.values(outputs[fitted_on]), labels[fitted_on])
        found = replace(plain, numbers=numbers, becomes=becomes)
        before, after = plain.values(outputs[left]), found.values(outputs[left])
        found.measured = {"RMSE": rmse(before, truth), "RMSE_calibrated": rmse(after, truth)}
    found.measured["pages"] = len(left)
    return found


def softmax(logits: Numbers) -> Numbers:
    """[N, classes] probabilities."""
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities: Numbers = weights / weights.sum(axis=1, keepdims=True)
    return probabilities


def fit_temperature(logits: Numbers, labels: NDArray[np.int64]) -> float:
    """The temperature with the least log loss, for logits [N, classes] and true classes [N].

    As if one page more were wrong (Platt 1999): a model that is right about all of them would be made certain of
    everything it says.
    """
    logits = np.asarray(logits, np.float64)
    truth, doubt = logits[np.arange(len(labels)), labels], 1 / (len(labels) + 2)
    others = (logits.sum(axis=1) - truth) / max(1, logits.shape[1] - 1)
    wanted = (1 - doubt) * truth + doubt * others

    def slope(temperature: float) -> float:
        # Of the mean log loss by 1 / temperature, in which it is convex: below 0 means colder is better.
        return float(((softmax(logits / temperature) * logits).sum(axis=1) - wanted).mean())

    if not len(labels) or np.ptp(logits, axis=1).max() == 0:
        return 1.0
    low, high = math.log(_COLDEST), math.log(_HOTTEST)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if slope(math.exp(middle)) < 0 else (middle, high)
    return math.exp((low + high) / 2)


def fit_isotonic(numbers: Numbers, labels: Numbers) -> tuple[list[float], list[float]]:
    """The rising curve nearest to the labels: its corners, as numbers and what they become."""
    distinct, group = np.unique(np.asarray(numbers, np.float64), return_inverse=True)
    weights = np.bincount(group).astype(np.float64)
    means = np.bincount(group, np.asarray(labels, np.float64)) / weights
    blocks: list[tuple[float, float, int, int]] = []  # mean, weight, first and last of the distinct numbers
    for place, (mean, weight) in enumerate(zip(means.tolist(), weights.tolist(), strict=True)):
        first = place
        while blocks and blocks[-1][0] >= mean:
            before, heavy, first, _ = blocks.pop()
            mean, weight = (before * heavy + mean * weight) / (heavy + weight), heavy + weight
        blocks.append((mean, weight, first, place))
    corners = [(float(distinct[end]), mean) for mean, _, *ends in blocks for end in dict.fromkeys(ends)]
    return [number for number, _ in corners], [mean for _, mean in corners]


def reliability(probabilities: Numbers, labels: NDArray[np.int64], bins: int = BINS) -> list[dict[str, float]]:
    """How often a model is right that is so sure: a row for each range of its highest probability."""
    sure, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    which = np.minimum((sure * bins).astype(np.int64), bins - 1)
    rows = []
    for number in range(bins):
        mine = which == number
        if mine.any():
            means = {"confidence": float(sure[mine].mean()), "accuracy": float(right[mine].mean())}
            rows.append({"from": number / bins, "to": (number + 1) / bins, "pages": int(mine.sum()), **means})
    return rows


def expected_calibration_error(probabilities: Numbers, labels: NDArray[np.int64], bins: int = BINS) -> float:
    """How far confidence and accuracy are apart, on average over pages."""
    rows = reliability(probabilities, labels, bins)
    return math.fsum(row["pages"] * abs(row["confidence"] - row["accuracy"]) for row in rows) / max(1, len(labels))


def log_loss(probabilities: Numbers, labels: NDArray[np.int64]) -> float:
    """The mean of -ln of what the true class was given."""
    given = probabilities[np.arange(len(labels)), labels]
    return float(np.log(1 / np.maximum(given, 1e-15)).mean())


def rmse(values: Numbers, labels: Numbers) -> float:
    """The root of the mean squared error."""
    return float(np.sqrt(np.mean((values - labels) ** 2)))
