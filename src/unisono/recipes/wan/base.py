"""The base class of the Wan recipes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from unisono.engine.recipe import Recipe

if TYPE_CHECKING:  # `unisono train RECIPE --help` need not wait for torch
    from torch import nn

    from unisono.recipes.wan.models.kernels.attention import Kernel


class WanRecipe(Recipe):
    """A recipe whose model is an `Experts` and whose settings have `attention`."""

    verify_precision: ClassVar[str] = "float32"  # diffusers' norms always compute in float32

    @cached_property
    def kernel(self) -> Kernel:
        """The attention kernel."""
        from unisono.recipes.wan.models.kernels.attention import Kernel

        return Kernel(self.config.attention)

    def full_precision(self, model: nn.Module) -> Sequence[str]:
        """Names of the weights that stay in float32: norms, modulation and the time embedding."""
        from unisono.recipes.wan.models.float32_weights import float32_weights

        return float32_weights(model)

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The transformer blocks."""
        return [block for transformer in model.children() for block in transformer.blocks]  # type: ignore[union-attr]
