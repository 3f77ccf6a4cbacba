"""Decides which results of a block are stored if the rest is recomputed (selective activation checkpointing).

Elementwise operations and norms take most of a block's memory and little of its time; attention and matrix products are
the opposite. So the results of attention and of every second matrix product are stored, as in torchtitan; everything
else is recomputed. Attention scores that a model computes itself, by batched products, are not stored: they grow with
the square of the number of tokens.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_aten = torch.ops.aten
_PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default, _aten._scaled_mm.default})
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)
_STORED = frozenset(
    {getattr(_aten, name).default for name in _ATTENTION if hasattr(_aten, name)} | {_aten.convolution.default}
)


def store_expensive_results() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Implements the `context_fn` of torch's checkpoint(): returns contexts for forward and for recomputing."""
    num_products: Counter[bool] = Counter()  # by whether they are recomputed

    def policy(context: Any, operation: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
        if operation in _PRODUCTS:
            num_products[context.is_recompute] += 1
            stores = num_products[context.is_recompute] % 2 == 1
        else:
            stores = operation in _STORED
        return CheckpointPolicy.MUST_SAVE if stores else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-any-return,no-untyped-call]


def why_not_selective(block: nn.Module) -> str | None:
    """Returns why a block can only be recomputed as a whole; None if it can store some of its results."""
    if hasattr(type(block), "_unisono_functions"):
        own = own_selective_class(block)
        if isinstance(own, type):
            return None
        return own or "has its own kernels, which torch cannot store results of"
    if any(getattr(module, "inplace", False) is True for module in block.modules()):
        return "has in-place layers, which would change stored results"
    return None


def own_selective_class(block: nn.Module, *, products: bool = False) -> type[nn.Module] | str | None:
    """Returns a class for a block with autograd functions that recomputes what is cheap, or why there is none.

    With `products`, the class also recomputes matrix products with large results. None for blocks without such classes.
    """
    form = getattr(type(block), "_unisono_selective", None)
    return None if form is None else form(block, products=products)
