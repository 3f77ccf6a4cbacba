"""The parts of Wan that stay in 32 bit when all else is computed in 16.

diffusers lists them for loading (`_keep_in_fp32_modules`); in training, mixed precision would undo it: autocast
computes the time embedding's layers in 16 bit, and a sharded model's weights are gathered in 16 bit. Norms and
modulation ask for 32 bit in their own code; only their weights must come as they are.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

_NAMES = ("rope", "time_embedder", "scale_shift_table", "norm1", "norm2", "norm3", "norm_q", "norm_k")


def full_precision_weights(model: nn.Module) -> list[str]:
    """The names of the weights that must be used in 32 bit."""
    return [name for name, _ in model.named_parameters() if any(part in _NAMES for part in name.split("."))]


def keep_time_embedding_exact(transformer: nn.Module) -> None:
    """Lets the time embedding compute in its weights' own type, also under autocast."""
    embedder = transformer.condition_embedder.time_embedder  # type: ignore[union-attr]
    embedder.__class__ = _exact(type(embedder))  # type: ignore[arg-type]


@cache
def _exact(plain: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, sample: Tensor, *arguments: Any, **keywords: Any) -> Any:
        with torch.autocast(sample.device.type, enabled=False):
            return plain.forward(self, sample.to(next(self.parameters()).dtype), *arguments, **keywords)

    return type(plain.__name__, (plain,), {"forward": forward, "__module__": plain.__module__})


def compute_type(latent: Tensor) -> torch.dtype:
    """The type that the transformer computes in, for inputs like these."""
    kind = latent.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else latent.dtype
