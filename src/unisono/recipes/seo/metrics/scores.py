"""Metrics of the task `score`, with two baselines that do not read the text.

One baseline uses only the label frequencies, the other only the length of a text. A model that is no better than these
has learned nothing from the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unisono.recipes.seo.metrics.calibration import (
    Calibration,
    Numbers,
    expected_calibration_error,
    fit,
    log_loss,
    rmse,
)

_NUM_RANGES = 10  # maximum number of length ranges
_PAGES_PER_RANGE = 20
_CALIBRATED = ("ECE_calibrated", "log_loss_calibrated", "RMSE_calibrated")
_TRIVIAL = (
    "AUC_majority",
    "ECE_majority",
    "ECE_length",
)  # omitted, because AUC is always 0.5, and label frequencies are calibrated by definition


def class_metrics(probabilities: Numbers, labels: NDArray[np.int64]) -> dict[str, float]:
    """Returns AUC, macro F1, accuracy, log loss and expected calibration error of probabilities [N, classes].

    With more than two classes, the AUC is the mean of each class against the rest, over the classes that occur.
    """
    from sklearn.metrics import f1_score, roc_auc_score

    predicted, present = probabilities.argmax(axis=1), np.unique(labels)
    metrics: dict[str, float] = {}
    if len(present) > 1:
        positive = [1] if probabilities.shape[1] == 2 else present.tolist()
        metrics["AUC"] = float(np.mean([roc_auc_score(labels == each, probabilities[:, each]) for each in positive]))
    return metrics | {
        "F1": float(f1_score(labels, predicted, average="macro")),
        "accuracy": float((predicted == labels).mean()),
        "log_loss": log_loss(probabilities, labels),
        "ECE": expected_calibration_error(probabilities, labels),
    }


def number_metrics(values: Numbers, labels: Numbers) -> dict[str, float]:
    """Returns Spearman's rank correlation (0 if either input is constant) and the root mean squared error."""
    from scipy.stats import spearmanr

    constant = np.ptp(values) == 0 or np.ptp(labels) == 0
    spearman = 0.0 if constant else float(spearmanr(values, labels).statistic)
    return {"Spearman": spearman, "RMSE": rmse(values, labels)}


@dataclass(frozen=True)
class Baselines:
    """Predictions from the training labels and the lengths of texts, without reading the texts."""

    overall: Numbers
    """The label frequencies [classes], or the mean label [1]."""
    edges: Numbers
    """Boundaries between the length ranges."""
    by_length: Numbers
    """The label frequencies or the mean label in each length range, [ranges, classes or 1]."""

    @classmethod
    def fit(cls, lengths: NDArray[Any], labels: NDArray[Any], num_classes: int = 0) -> Self:
        """Fits the baselines on the lengths and labels [N] of the training texts; num_classes 0: labels are numbers."""
        rows = np.eye(num_classes)[labels] if num_classes else np.asarray(labels, np.float64)[:, None]
        overall = rows.mean(axis=0)
        num_ranges = max(1, min(_NUM_RANGES, len(lengths) // _PAGES_PER_RANGE))
        edges = np.unique(np.quantile(lengths, np.arange(1, num_ranges) / num_ranges))
        range_of = np.searchsorted(edges, lengths, side="right")
        counts = np.bincount(range_of, minlength=len(edges) + 1)[:, None]
        sums = np.stack([np.bincount(range_of, column, minlength=len(edges) + 1) for column in rows.T], axis=1)
        return cls(overall, edges, (sums + overall) / (counts + 1))  # smoothed: adds one average page to each range

    def constant(self, num_pages: int) -> Numbers:
        """Returns the same prediction for every page, [N, classes or 1]."""
        return np.repeat(self.overall[None], num_pages, axis=0)

    def from_length(self, lengths: NDArray[Any]) -> Numbers:
        """Returns predictions from the length alone, [N, classes or 1]."""
        predictions: Numbers = self.by_length[np.searchsorted(self.edges, lengths, side="right")]
        return predictions


class ScoreMetrics:
    """Collects a model's outputs on held-out pages and computes metrics; the engine merges the objects of all ranks."""

    update_called = False
    sync_on_compute = False  # the engine calls merge_state

    def __init__(self, uncalibrated: Calibration, baselines: Baselines) -> None:
        self._uncalibrated, self._baselines = uncalibrated, baselines
        self._parts: list[tuple[Tensor, ...]] = []

    def update(self, indices: Tensor, outputs: Tensor, labels: Tensor, lengths: Tensor) -> None:
        """Adds pages: logits [B, classes] (or regression outputs [B]), with their labels and lengths."""
        self.update_called = True
        self._parts.append((indices.detach(), outputs.detach().float(), labels.detach(), lengths.detach()))

    def merge_state(self, other: Self) -> None:
        """Adds the pages of another rank."""
        self.update_called |= other.update_called
        self._parts += other._parts

    def reset(self) -> None:
        """Removes all pages."""
        self._parts, self.update_called = [], False

    def to(self, device: torch.device | str) -> Self:
        """Moves the collected outputs to a device."""
        self._parts = [tuple(column.to(device) for column in part) for part in self._parts]
        return self

    def cpu(self) -> Self:
        """Moves the collected outputs to the CPU."""
        return self.to("cpu")

    def compute(self) -> dict[str, float]:
        """Returns the metrics of the model, of the calibrated model, and of both baselines."""
        indices, *columns = (torch.cat(column).cpu().numpy() for column in zip(*self._parts, strict=True))
        # Count each page once, in a fixed order, so that sums are bitwise equal on any number of ranks.
        _, first = np.unique(indices, return_index=True)
        outputs, labels, lengths = (column[first] for column in columns)
        outputs = outputs.astype(np.float64)
        constant, by_length = self._baselines.constant(len(labels)), self._baselines.from_length(lengths)
        if self._uncalibrated.names:
            metrics = class_metrics(self._uncalibrated.probabilities(outputs), labels)
            others = {"majority": class_metrics(constant, labels), "length": class_metrics(by_length, labels)}
        else:
            metrics = number_metrics(self._uncalibrated.values(outputs), labels)
            others = {
                "mean": {"RMSE": rmse(constant[:, 0], labels)},
                "length": number_metrics(by_length[:, 0], labels),
            }
        measured = fit(outputs, labels, self._uncalibrated).measured
        metrics |= {name: value for name, value in measured.items() if name in _CALIBRATED}
        baselines = {f"{name}_{kind}": value for kind, values in others.items() for name, value in values.items()}
        return metrics | {name: value for name, value in baselines.items() if name not in _TRIVIAL}
