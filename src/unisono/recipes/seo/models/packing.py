"""Packs all texts of a batch into one row without padding, for BERT and RoBERTa models.

Attention receives the start of each text. Nothing is computed for padding, and the model is called once, which matters
because small models on a GPU wait for the host. Flash attention supports rows of different lengths; without it,
attention pads, which is slower than `groups.py` with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from unisono.data.loader import to_device
from unisono.engine.build.device import has_flash_attention

_ATTENTION = "unisono"  # name of our attention in transformers
_ABSOLUTE = "absolute"
_FAMILIES = ("bert", "roberta", "xlm-roberta", "camembert")
_WIDEST, _MULTIPLE = 192, 8  # width of a head that flash attention supports on every GPU


class Packed(NamedTuple):
    """Texts in one row."""

    ids: Tensor  # [1, tokens]
    places: Tensor  # [1, tokens], position in its text, from 0; -1: none
    starts: Tensor  # [texts + 1], int32: start of each text, and end of the last one
    longest: int

    def on(self, device: torch.device) -> Packed:
        """A copy on a device."""
        return to_device(self, device)  # type: ignore[no-any-return]

    def through(self, model: Callable[..., Tensor]) -> Tensor:
        """Applies a model."""
        return model(self)


def pack(texts: Sequence[NDArray[np.integer[Any]]], pad_id: int, uncounted: int | None = None) -> Packed:
    """Packs texts into one row; an empty text becomes one padding token.

    `uncounted`: a token without a position, such as RoBERTa's padding.
    """
    rows = [text if len(text) else np.array([pad_id]) for text in texts]
    ids = np.concatenate(rows).astype(np.int64)
    starts = np.cumsum([0, *(len(row) for row in rows)])
    lengths = np.diff(starts)
    counts = ids != uncounted if uncounted is not None else np.ones(len(ids), dtype=bool)
    counted = np.concatenate(([0], np.cumsum(counts)))
    places = np.where(counts, counted[1:] - 1 - np.repeat(counted[starts[:-1]], lengths), -1)
    return Packed(
        torch.from_numpy(ids)[None],
        torch.from_numpy(places)[None],
        torch.from_numpy(starts.astype(np.int32)),
        int(lengths.max()),
    )


def read_packed(backbone: Any) -> str | None:
    """Enables a model to read packed texts; returns the reason if it cannot."""
    import transformers

    model_config = backbone.config
    if int(transformers.__version__.split(".")[0]) < 5:
        return f"transformers {transformers.__version__} is too old, packing needs 5"
    if (
        model_config.model_type not in _FAMILIES
        or getattr(model_config, "position_embedding_type", _ABSOLUTE) != _ABSOLUTE
    ):
        return f"{model_config.model_type} is not a BERT or RoBERTa model"
    if getattr(model_config, "is_decoder", False):
        return "it is a decoder"
    if getattr(model_config, "chunk_size_feed_forward", 0):
        return "it computes in chunks (chunk_size_feed_forward)"
    head = model_config.hidden_size // model_config.num_attention_heads
    if head % _MULTIPLE or head > _WIDEST:
        return f"its heads are {head} wide, not a multiple of {_MULTIPLE} up to {_WIDEST}"
    transformers.AttentionInterface.register(_ATTENTION, attend)
    transformers.AttentionMaskInterface.register(_ATTENTION, transformers.masking_utils.sdpa_mask)
    backbone.set_attn_implementation(_ATTENTION)
    if model_config._attn_implementation != _ATTENTION:  # transformers only warns
        return "transformers cannot change its attention"
    return None


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    packed: Packed | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: [texts, heads, tokens, width] in, [texts, tokens, heads, width] out."""
    if packed is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, mask, **options)
    dropout, scale = options.get("dropout", 0.0), options.get("scaling")
    parts = [part[0].transpose(0, 1) for part in (query, key, value)]
    if query.dtype in (torch.float16, torch.bfloat16) and has_flash_attention(query.device):
        starts, longest = packed.starts, packed.longest
        around = (starts, starts, longest, longest, dropout, False, False)
        return torch.ops.aten._flash_attention_forward(*parts, *around, scale=scale)[0][None], None
    there = torch.arange(packed.longest, device=query.device) < packed.starts.diff()[:, None]
    q, k, v = (_padded(part, there).transpose(1, 2) for part in parts)
    attended = scaled_dot_product_attention(q, k, v, there[:, None, None], dropout, scale=scale)
    return attended.transpose(1, 2)[there][None], None


def _padded(rows: Tensor, there: Tensor) -> Tensor:
    """[texts, longest, heads, width] of [tokens, heads, width]."""
    return rows.new_zeros(*there.shape, *rows.shape[1:]).masked_scatter(there[..., None, None], rows)


def pool_packed(vectors: Tensor, starts: Tensor, pooling: str) -> Tensor:
    """[texts, width] from [tokens, width]: the mean of each text's tokens, the first, or the last."""
    if pooling == "cls":
        return vectors[starts[:-1]]
    if pooling == "last":
        return vectors[starts[1:] - 1]
    return torch.segment_reduce(vectors, "mean", offsets=starts.long(), axis=0)
