"""How right predictions are: of classes, of numbers, of an order. Every figure has its baseline beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from unisono.errors import ConfigError
from unisono.recipes.seo.metrics.scores import spearman

CUTS = (5, 10, 20)


def of_classes(truth: Sequence[Any], found: Sequence[Any]) -> dict[str, Any]:
    """Accuracy, precision, recall and F1 (weighted by class, and the plain mean), and Cohen's kappa.

    `baseline_accuracy` is what always saying the most frequent class gets. Of two classes, `seo_precision`,
    `seo_recall` and `seo_f1` are those of the second one.
    """
    _check(truth, found)
    classes = sorted({*truth, *found}, key=lambda each: (isinstance(each, str), each))
    number = {each: place for place, each in enumerate(classes)}
    table = np.zeros((len(classes), len(classes)))  # [true, found]
    np.add.at(table, ([number[each] for each in truth], [number[each] for each in found]), 1)
    true, said, hits, num = table.sum(1), table.sum(0), table.diagonal(), len(truth)
    precision, recall = _ratio(hits, said), _ratio(hits, true)
    f1 = _ratio(2 * hits, said + true)
    accuracy, chance = float(hits.sum() / num), float((true @ said) / num**2)
    measures = {
        "accuracy": accuracy,
        "baseline_accuracy": float(true.max() / num),
        "precision_weighted": float(precision @ true / num),
        "recall_weighted": float(recall @ true / num),
        "f1_weighted": float(f1 @ true / num),
        "f1_macro": float(f1.mean()),
        "cohen_kappa": (accuracy - chance) / (1 - chance) if chance < 1 else 0.0,
        "num": num,
    }
    if len(classes) == 2:
        measures |= {"seo_precision": precision[1], "seo_recall": recall[1], "seo_f1": f1[1]}
    return {name: float(value) if name != "num" else value for name, value in measures.items()}


def of_numbers(truth: Sequence[float], found: Sequence[float]) -> dict[str, Any]:
    """Errors, R², and how far the order is right (Spearman); `baseline_rmse` is what always saying the mean gets."""
    _check(truth, found)
    wanted, said = np.array(truth, dtype=np.float64), np.array(found, dtype=np.float64)
    errors, spread = said - wanted, wanted.std()
    known = wanted != 0
    return {
        "mse": float((errors**2).mean()),
        "rmse": float(np.sqrt((errors**2).mean())),
        "baseline_rmse": float(spread),
        "mae": float(abs(errors).mean()),
        "mape": float(abs(errors[known] / wanted[known]).mean()) if known.any() else None,
        "max_error": float(abs(errors).max()),
        "r2": float(1 - (errors**2).mean() / spread**2) if spread else None,
        "spearman": spearman(said, wanted),
        "num": len(wanted),
    }


def of_order(truth: Sequence[float], found: Sequence[float]) -> dict[str, Any]:
    """NDCG of one list: `truth` says how good each page is, `found` orders them; ties count as their mean.

    `baseline_ndcg_10` is what any order gets on average.
    """
    _check(truth, found)
    gains, scores = np.array(truth, dtype=np.float64), np.array(found, dtype=np.float64)
    if (gains < 0).any():
        raise ConfigError("y_true: how good a page is cannot be negative in a ranking")
    measures: dict[str, Any] = {}
    for cut in CUTS:
        ideal = _gain(np.sort(gains)[::-1], cut)
        measures[f"ndcg_{cut}"] = _gain(_with_ties(gains, scores), cut) / ideal if ideal else None
    ideal = _gain(np.sort(gains)[::-1], 10)
    measures["baseline_ndcg_10"] = _gain(np.full(len(gains), gains.mean()), 10) / ideal if ideal else None
    measures["num"] = len(gains)
    return measures


def _with_ties(gains: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """The gains from the best score to the worst; those of one score share theirs."""
    order = np.argsort(-scores, kind="stable")
    _, group = np.unique(-scores[order], return_inverse=True)
    means = np.bincount(group, gains[order]) / np.bincount(group)
    return np.asarray(means[group])


def _gain(gains: np.ndarray, cut: int) -> float:
    top = gains[:cut]
    return float((top / np.log2(np.arange(len(top)) + 2)).sum())


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.asarray(np.divide(part, whole, out=np.zeros(len(part)), where=whole > 0))


def _check(truth: Sequence[Any], found: Sequence[Any]) -> None:
    if len(truth) != len(found) or not len(truth):
        raise ConfigError(f"y_true and y_pred: expected equally many, and one at least; got {len(truth)}, {len(found)}")
