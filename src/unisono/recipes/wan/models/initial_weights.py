"""Pretrained weights as the engine reads them: row by row, by the model's own names."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from unisono.recipes.wan.models.weight_names import base_name
from unisono.recipes.wan.models.weights import Weights


class TransformerWeights:
    """The weights of one transformer, in files."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of a weight; reads only these."""
        name_in_file = base_name(name)
        if name_in_file is None:
            raise ValueError(f"{name} belongs to a LoRA, which has no pretrained weights")
        return self._weights.slice(name_in_file, start, stop)


class ExpertWeights:
    """The weights of one transformer, or of two experts, in files."""

    def __init__(self, files: Mapping[str, Weights]) -> None:
        self._files = files

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of a weight; reads only these."""
        transformer, _, inside = name.partition(".")
        return TransformerWeights(self._files[transformer]).rows(inside, start, stop)
