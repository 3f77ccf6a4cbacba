"""Counts the tokens of a batch that has the usual form for language models."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def tokens_in(batch: Any) -> int | None:
    """Returns the number of tokens of a batch without padding; None if it has no `input_ids` or `attention_mask`."""
    total: int | None = None

    def count(mapping: Any) -> None:
        nonlocal total
        if isinstance(mapping, dict):
            mask, ids = mapping.get("attention_mask"), mapping.get("input_ids")
            if isinstance(mask, Tensor) and (ids is None or mask.shape == ids.shape):
                total = (total or 0) + int((mask != 0).sum())
            elif isinstance(ids, Tensor):
                total = (total or 0) + ids.numel()
            else:
                for each in mapping.values():
                    count(each)
        elif isinstance(mapping, list | tuple):
            for each in mapping:
                count(each)

    count(batch)
    return total
