"""How good scores of pages are: the field's measures, beside what two scorers without skill reach.

One knows only how frequent labels are, the other only how long a text is: a model that is no better than they are has
learned nothing about pages.
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

_LENGTHS = 10  # ranges of length that the length baseline tells apart
_PAGES_EACH = 20  # in each of them
_AFTER = ("ECE_calibrated", "log_loss_calibrated", "RMSE_calibrated")
_SAYS_NOTHING = ("AUC_majority", "ECE_majority", "ECE_length")  # always 0.5; frequencies are as frequent as they say


def accuracy(predicted: NDArray[np.int64], labels: NDArray[np.int64]) -> float:
    """The share that is right."""
    return float((predicted == labels).mean())


def macro_f1(predicted: NDArray[np.int64], labels: NDArray[np.int64]) -> float:
    """The mean over classes of F1, the harmonic mean of precision and recall; over those that occur in either."""
    each = []
    for label in np.union1d(predicted, labels):
        said, true = predicted == label, labels == label
        each.append(2 * float((said & true).sum()) / float(said.sum() + true.sum()))
    return float(np.mean(each))


def auc(scores: Numbers, positive: NDArray[np.bool_]) -> float:
    """How often a positive page is scored above another one, ties half; NaN where there are only of one kind."""
    num_positive = int(positive.sum())
    num_pairs = num_positive * (len(positive) - num_positive)
    if not num_pairs:
        return float("nan")
    return float((ranks(scores)[positive].sum() - num_positive * (num_positive + 1) / 2) / num_pairs)


def mean_auc(probabilities: Numbers, labels: NDArray[np.int64]) -> float:
    """Of two classes the AUC of the second; of more the mean of each against the rest, of those that occur."""
    if probabilities.shape[1] == 2:
        return auc(probabilities[:, 1], labels == 1)
    each = [auc(probabilities[:, label], labels == label) for label in np.unique(labels)]
    return float(np.mean(each))


def spearman(scores: Numbers, labels: Numbers) -> float:
    """The correlation of ranks; 0 where one side is the same throughout."""
    first, second = ranks(scores), ranks(labels)
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


def ranks(values: Numbers) -> Numbers:
    """From 1; equal values share the mean of theirs."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    shared: Numbers = (np.cumsum(counts) - (counts - 1) / 2)[group]
    return shared


def marks_of_classes(probabilities: Numbers, labels: NDArray[np.int64]) -> dict[str, float]:
    """AUC, F1, accuracy, log loss and the error of calibration, given probabilities [N, classes]."""
    predicted = probabilities.argmax(axis=1)
    found = {
        "AUC": mean_auc(probabilities, labels),
        "F1": macro_f1(predicted, labels),
        "accuracy": accuracy(predicted, labels),
        "log_loss": log_loss(probabilities, labels),
        "ECE": expected_calibration_error(probabilities, labels),
    }
    return {name: value for name, value in found.items() if not np.isnan(value)}


def marks_of_numbers(values: Numbers, labels: Numbers) -> dict[str, float]:
    """Spearman's correlation and the root of the mean squared error."""
    return {"Spearman": spearman(values, labels), "RMSE": rmse(values, labels)}


@dataclass(frozen=True)
class Unskilled:
    """Scorers that have not read the text; made from the training labels and how long the texts are."""

    overall: Numbers
    """[classes] how frequent each is, or [1] the mean."""
    edges: Numbers
    """Lengths at which the ranges of lengths end."""
    by_length: Numbers
    """[ranges, classes or 1] the same within each."""

    @classmethod
    def of(cls, lengths: NDArray[Any], labels: NDArray[Any], num_classes: int = 0) -> Self:
        """From texts to learn from: their lengths and labels [N]; num_classes 0: labels are numbers."""
        rows = np.eye(num_classes)[labels] if num_classes else np.asarray(labels, np.float64)[:, None]
        overall = rows.mean(axis=0)
        num_ranges = max(1, min(_LENGTHS, len(lengths) // _PAGES_EACH))
        edges = np.unique(np.quantile(lengths, np.arange(1, num_ranges) / num_ranges))
        which = np.searchsorted(edges, lengths, side="right")
        counts = np.bincount(which, minlength=len(edges) + 1)[:, None]
        sums = np.stack([np.bincount(which, column, minlength=len(edges) + 1) for column in rows.T], axis=1)
        return cls(overall, edges, (sums + overall) / (counts + 1))  # each range as if it had one mean page more

    def most_frequent(self, num_pages: int) -> Numbers:
        """[N, classes or 1] the same for every page."""
        return np.repeat(self.overall[None], num_pages, axis=0)

    def from_length(self, lengths: NDArray[Any]) -> Numbers:
        """[N, classes or 1] what pages of that length were like."""
        found: Numbers = self.by_length[np.searchsorted(self.edges, lengths, side="right")]
        return found


class Marks:
    """A model's outputs on held-out pages, and what they are worth; ranks' objects are merged exactly."""

    update_called = False
    sync_on_compute = False  # the engine merges

    def __init__(self, plain: Calibration, unskilled: Unskilled) -> None:
        self._plain, self._unskilled = plain, unskilled
        self._parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def update(self, indices: Tensor, outputs: Tensor, labels: Tensor, lengths: Tensor) -> None:
        """Takes logits [B, classes] (or [B] outputs of a regression) of pages, with their labels and lengths."""
        self.update_called = True
        self._parts.append((indices.detach(), outputs.detach().float(), labels.detach(), lengths.detach()))

    def merge_state(self, other: Self) -> None:
        """Adds what another rank has found."""
        self.update_called |= other.update_called
        self._parts += other._parts

    def reset(self) -> None:
        """Forgets all pages."""
        self._parts, self.update_called = [], False

    def to(self, device: torch.device | str) -> Self:
        """Keeps them on a device."""
        self._parts = [
            (indices.to(device), outputs.to(device), labels.to(device), lengths.to(device))
            for indices, outputs, labels, lengths in self._parts
        ]
        return self

    def cpu(self) -> Self:
        """Keeps them in main memory."""
        return self.to("cpu")

    def outputs(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Outputs, labels and lengths in the order of the pages, each page once."""
        joined = [torch.cat(column).cpu().numpy() for column in zip(*self._parts, strict=True)]
        # Sorted: sums come out the same to the last bit, whoever computed which page.
        _, first = np.unique(joined[0], return_index=True)
        outputs, labels, lengths = (column[first] for column in joined[1:])
        return outputs.astype(np.float64), labels, lengths

    def calibration(self) -> Calibration:
        """What one half of the pages says, measured on the other."""
        outputs, labels, _ = self.outputs()
        return fit(outputs, labels, self._plain)

    def compute(self) -> dict[str, float]:
        """Each measure: the model's, after calibration, of the majority (or the mean), and of the length alone."""
        outputs, labels, lengths = self.outputs()
        frequent, by_length = self._unskilled.most_frequent(len(labels)), self._unskilled.from_length(lengths)
        if self._plain.names:
            found = marks_of_classes(self._plain.probabilities(outputs), labels)
            others = {"majority": marks_of_classes(frequent, labels), "length": marks_of_classes(by_length, labels)}
        else:
            found = marks_of_numbers(self._plain.values(outputs), labels)
            others = {
                "mean": {"RMSE": rmse(frequent[:, 0], labels)},
                "length": marks_of_numbers(by_length[:, 0], labels),
            }
        measured = fit(outputs, labels, self._plain).measured
        after = {name: value for name, value in measured.items() if name in _AFTER}
        beside = {f"{name}_{whose}": value for whose, marks in others.items() for name, value in marks.items()}
        return found | after | {name: value for name, value in beside.items() if name not in _SAYS_NOTHING}
