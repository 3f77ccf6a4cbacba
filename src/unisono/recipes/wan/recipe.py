"""The base class of the Wan recipes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from unisono.engine.recipe import Recipe

if TYPE_CHECKING:  # keeps `unisono train RECIPE --help` from importing torch
    import torch
    from torch import Tensor, nn

    from unisono.recipes.wan.models.kernels.attention import Kernel
    from unisono.settings import Settings


class WanRecipe(Recipe):
    """A recipe whose model is an `Experts` and whose settings have `attention`."""

    verify_precision: ClassVar[str] = "float32"  # diffusers' norms always compute in float32
    supports_context_parallel: ClassVar[bool] = True
    export_formats: ClassVar[Sequence[str]] = ("diffusers", "native", "comfyui")
    context_size: int = 1
    """Value of the setting context_parallel: the number of ranks that share each sample."""

    def check_settings(self, settings: Settings) -> None:
        """Stores the setting context_parallel, which the checks of the dataset need."""
        self.context_size = settings.parallel.context_parallel

    @cached_property
    def kernel(self) -> Kernel:
        """The attention kernel that the run uses."""
        from unisono.recipes.wan.models.kernels.attention import Kernel

        return Kernel(self.config.attention)

    def optimised(self, transformer: Any) -> Any:
        """Gives the transformer the run's attention kernel, fast blocks and a float32 time embedding; returns it.

        With context_parallel, the transformer then computes each sample together with other ranks.
        """
        from unisono.recipes.wan.models.float32_weights import keep_time_embedding_in_float32
        from unisono.recipes.wan.models.kernels.attention import use
        from unisono.recipes.wan.models.kernels.block import use_fast_blocks

        keep_time_embedding_in_float32(transformer)
        use("auto" if self.is_estimate else self.kernel.name_for(self.context.size), transformer)
        use_fast_blocks(transformer, is_estimate=self.is_estimate)
        return self.divided(transformer)

    def divided(self, transformer: Any) -> Any:
        """With context_parallel, makes the transformer compute each sample together with other ranks; returns it."""
        from unisono.recipes.wan.models.context import divide_tokens

        if self.context.size > 1:
            divide_tokens(transformer, self.context)
            heads = transformer.config.num_attention_heads
            if not self.context.exchanges_heads(heads):
                self.remarks = [
                    *self.remarks,
                    f"context_parallel {self.context.size} does not divide the {heads} attention heads: ranks gather "
                    "keys and values instead of exchanging heads, which is slower",
                ]
        return transformer

    def compute_dtype(self, model: nn.Module, latents: Tensor) -> torch.dtype:
        """Returns the dtype that the model computes in; checks that the attention kernel supports it."""
        from unisono.recipes.wan.models.float32_weights import compute_dtype

        dtype = compute_dtype(latents)
        if not self.is_estimate:
            self.kernel.check_support(model, latents.device.type, dtype)
        return dtype

    def full_precision(self, model: nn.Module) -> Sequence[str]:
        """Names of the weights that stay in float32: norms, modulation and the time embedding."""
        from unisono.recipes.wan.models.float32_weights import float32_weights

        return float32_weights(model)

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The transformer blocks."""
        return [block for transformer in model.children() for block in transformer.blocks]  # type: ignore[union-attr]
