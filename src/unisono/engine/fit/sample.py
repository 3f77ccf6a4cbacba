"""Chooses the sample for the prediction of memory: the largest sample of the dataset."""

from __future__ import annotations

from typing import Any

from unisono.data.shapes import cost_of, is_shaped
from unisono.data.stream import is_stream
from unisono.engine.recipe import Recipe
from unisono.planning.memory.trace import CannotTrace

_MOST = 20_000  # samples to compare; more would delay the start


def largest_sample(dataset: Any) -> Any:
    """Returns the sample of a dataset that needs the most memory; in a large dataset, the largest of a subset."""
    if is_stream(dataset):
        raise CannotTrace('dataset("train") is a stream, and reading its first sample would move it')
    if not is_shaped(dataset):
        return dataset[0]
    num = len(dataset)  # type: ignore[arg-type]
    indices = range(0, num, -(-num // _MOST))
    return dataset[max(indices, key=lambda index: cost_of(dataset, index, dataset.shape(index)))]  # type: ignore[index]


def example_of(recipe: Recipe) -> Any:
    """Returns a sample of a recipe whose data is not prepared."""
    sample = recipe.example()
    if sample is None:
        sample = largest_sample(recipe.dataset("train"))
    if sample is None:
        raise CannotTrace("the recipe has no training data")
    return sample
