"""What every recipe that trains a Wan transformer has in common."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from unisono.engine.recipe import Recipe

if TYPE_CHECKING:  # `unisono train RECIPE --help` need not wait for torch
    from torch import nn

    from unisono.recipes.wan.models.attention import Kernel


class WanRecipe(Recipe):
    """A recipe whose model is an `Experts`, and whose settings have `attention`."""

    verify_precision: ClassVar[str] = "float32"  # diffusers' norms compute in it, whatever the rest does

    @cached_property
    def kernel(self) -> Kernel:
        """What computes attention."""
        from unisono.recipes.wan.models.attention import Kernel

        return Kernel(self.config.attention)

    def full_precision(self, model: nn.Module) -> Sequence[str]:
        """Norms, modulation and the time embedding."""
        from unisono.recipes.wan.models.islands import full_precision_weights

        return full_precision_weights(model)

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The transformer blocks."""
        return [block for transformer in model.children() for block in transformer.blocks]  # type: ignore[union-attr]
