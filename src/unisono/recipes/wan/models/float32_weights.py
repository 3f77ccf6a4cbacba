"""The parts of Wan that stay in float32 under mixed precision.

diffusers lists these parts and loads them in float32 (`_keep_in_fp32_modules`). In training, mixed precision would undo
that: autocast computes the time embedding's layers in 16 bits, and FSDP gathers weights in 16 bits. Norms and
modulation cast to float32 in their own code, so only their weights must be protected from rounding.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from unisono.recipes.wan.models.weight_names import MAGNITUDE

_NAMES: tuple[str, ...] = ("rope", "time_embedder", "scale_shift_table", "norm1", "norm2", "norm3", "norm_q", "norm_k")
_NAMES += ("norm_added_k", MAGNITUDE)


def float32_weights(model: nn.Module) -> list[str]:
    """Returns the names of the weights that must stay in float32."""
    return [name for name, _ in model.named_parameters() if any(part in _NAMES for part in name.split("."))]


def keep_time_embedding_in_float32(transformer: nn.Module) -> None:
    """Makes the time embedding compute in its weights' dtype, even under autocast."""
    embedder = transformer.condition_embedder.time_embedder  # type: ignore[union-attr]
    embedder.__class__ = _exact(type(embedder))  # type: ignore[arg-type]


@cache
def _exact(plain: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, sample: Tensor, *arguments: Any, **keywords: Any) -> Any:
        with torch.autocast(sample.device.type, enabled=False):
            return plain.forward(self, sample.to(next(self.parameters()).dtype), *arguments, **keywords)

    return type(plain.__name__, (plain,), {"forward": forward, "__module__": plain.__module__})


def compute_dtype(latent: Tensor) -> torch.dtype:
    """Returns the dtype that the transformer computes in: autocast's dtype if enabled, otherwise the latent's dtype."""
    kind = latent.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else latent.dtype
