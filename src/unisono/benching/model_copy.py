"""Copies a model before its first step, so that another loop can start from the same weights."""

from __future__ import annotations

import copy

import torch
from torch import nn


def copy_of(model: nn.Module) -> nn.Module:
    """Copies a model to host memory; shares frozen weights with the original, because no loop changes them."""
    frozen = {id(weight): weight for weight in model.parameters() if not weight.requires_grad}
    copied = copy.deepcopy(model, dict(frozen))
    for tensor in _own(copied):
        tensor.data = tensor.data.cpu()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return copied


def bytes_on_host(copied: nn.Module) -> int:
    """Returns the host memory that a copy takes, in bytes."""
    return sum(tensor.nbytes for tensor in _own(copied))


def _own(copied: nn.Module) -> list[torch.Tensor]:
    return [weight for weight in copied.parameters() if weight.requires_grad] + list(copied.buffers())
