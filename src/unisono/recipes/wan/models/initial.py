"""The weights that training begins with, as the engine asks for them: row by row, by the model's own names."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from unisono.recipes.wan.models.native import base_name
from unisono.recipes.wan.models.weights import Weights


class FromFile:
    """The weights of one transformer in a file."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """The rows of a weight; only these are read."""
        theirs = base_name(name)
        if theirs is None:
            raise ValueError(f"{name} belongs to a LoRA, and is in no file")
        return self._weights.slice(theirs, start, stop)


class FromFiles:
    """The weights of one transformer, or of two experts, in files."""

    def __init__(self, files: Mapping[str, Weights]) -> None:
        self._files = files

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """The rows of a weight; only these are read."""
        transformer, _, inside = name.partition(".")
        return FromFile(self._files[transformer]).rows(inside, start, stop)
