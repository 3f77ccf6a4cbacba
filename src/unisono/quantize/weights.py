"""Quantises weights as they are read, so the whole model never exists in 16 bits, neither in host nor in GPU memory."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor

from unisono.parallel.materialize import Weights
from unisono.quantize.formats import FORMATS
from unisono.quantize.layers import SCALES


class QuantizedWeights:
    """Provides the weights of a model whose layers `quantize` converted on the meta device."""

    def __init__(self, source: Weights, layers: Iterable[str], format_name: str) -> None:
        """`source` has the original weights; `layers` are the names of the converted layers."""
        self._source, self._layers, self._format = source, set(layers), FORMATS[format_name]
        # Scales of the codes that were requested before, per layer: (start, stop, scales of these rows).
        self._scales: dict[str, list[tuple[int, int, Tensor]]] = {}

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Returns rows of a weight, of a converted layer's codes, or of its scales."""
        layer, _, kind = name.rpartition(".")
        if layer not in self._layers or kind not in ("weight", SCALES):
            return self._source.rows(name, start, stop)
        if kind == SCALES and (scales := self._encoded_scales(layer, start, stop)) is not None:
            return scales
        encoded = self._format.encode(self._source.rows(f"{layer}.weight", start, stop))
        if encoded.scales is None:
            return encoded.codes
        if kind == SCALES:
            return encoded.scales
        self._scales.setdefault(layer, []).append((start, stop, encoded.scales))
        return encoded.codes

    def _encoded_scales(self, layer: str, start: int, stop: int) -> Tensor | None:
        """Returns the scales of rows whose codes were all requested before, in consecutive pieces; otherwise None."""
        pieces = self._scales.get(layer, [])
        bounds = [(first, last) for first, last, _ in pieces]
        if not pieces or bounds != [*pairwise([start, *(last for _, last in bounds)])] or bounds[-1][1] != stop:
            return None
        return torch.cat([scales for _, _, scales in self._scales.pop(layer)])
