"""Converts the frozen linear layers of a run's models to the storage format in the setting base_precision."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from unisono.engine.checks import nothing_frozen
from unisono.engine.recipe import Recipe
from unisono.formatting import format_bytes
from unisono.parallel.integer_weights import can_shard_integers
from unisono.parallel.materialize import Weights
from unisono.parallel.strategy import Placement
from unisono.quantize.layers import Quantized, check_names, frozen_linears, quantize
from unisono.quantize.products import has_fp8_products
from unisono.quantize.weights import QuantizedWeights


class BasePrecision:
    """Quantises the frozen linear layers of one module after the other, and reports the memory saved."""

    def __init__(self, recipe: Recipe, base_precision: str, placement: Placement) -> None:
        self._recipe, self._format, self._placement = recipe, base_precision, placement
        self._converted = Quantized()

    def convert(
        self, part: str, module: nn.Module, blocks: Sequence[nn.Module], exact: Collection[str] = ()
    ) -> Sequence[str]:
        """Converts the frozen linear layers of a module in place; returns their names."""
        if self._format == "auto":
            return ()
        chosen = self._recipe.frozen_linears(part, module)
        if chosen is None:
            names = frozen_linears(module, blocks, exact)
        else:
            names = check_names(module, chosen, "frozen_linears()")
        if self._format == "bf16":  # mixed precision may have cast the weights already
            done = {name for name in names if module.get_submodule(name).weight.dtype == torch.bfloat16}
            self._converted += Quantized(sorted(done))
            names = [name for name in names if name not in done]
        converted = quantize(module, names, self._format, fp8_products=has_fp8_products(self._placement.device))
        self._converted += converted
        return converted.layers

    def source(self, weights: Weights, layers: Sequence[str]) -> Weights:
        """Returns a source of weights that quantises the weights of the converted `layers` as it reads them."""
        return QuantizedWeights(weights, layers, self._format) if layers else weights

    def remarks(self, *, sharded: bool) -> list[str]:
        """Returns notes for the user; raises ConfigError if nothing was converted. `sharded`: fsdp shards weights."""
        if self._format == "auto":
            return []
        converted = self._converted
        if not converted.layers:
            if self._recipe.has_frozen_weights:  # the recipe has converted its layers itself
                return []
            raise nothing_frozen(self._format)
        remarks = []
        if converted.bytes_after:
            sizes = f"{format_bytes(converted.bytes_after)} instead of {format_bytes(converted.bytes_before)}"
            remarks.append(f"base_precision {self._format}: {len(converted.layers)} frozen linear layers take {sizes}")
        if sharded and converted.bytes_after and self._format != "bf16" and not can_shard_integers():
            remarks.append(
                f"base_precision {self._format}: fsdp of torch {torch.__version__} cannot shard integers, so every "
                "rank holds all quantised weights; torch 2.13 can shard them"
            )
        device = self._placement.device
        if self._format == "fp8" and not has_fp8_products(device):
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
            reason = "weights are dequantised before each product"
            remarks.append(f"base_precision fp8: {name} cannot multiply fp8 matrices; {reason}")
        return remarks
