"""Packs all texts of a batch into one row without padding, for BERT and RoBERTa models.

Attention receives the start of each text. Nothing is computed for padding, and the model is called only once per batch,
which matters because a small model on a GPU is limited by kernel launches. Flash attention supports sequences of
different lengths. Without it, attention pads the texts, which gives the same result but is slower than `groups.py`.
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
_WIDEST, _MULTIPLE = 192, 8  # flash attention on all supported GPUs: maximum head width, and a divisor of the width


class Packed(NamedTuple):
    """Texts packed into one row."""

    ids: Tensor  # [1, tokens]
    places: Tensor  # [1, tokens], position of each token in its text, from 0; -1 for tokens without a position
    starts: Tensor  # [texts + 1], int32: start of each text, and end of the last one
    longest: int

    def on(self, device: torch.device) -> Packed:
        """Returns a copy on a device."""
        return to_device(self, device)  # type: ignore[no-any-return]

    def through(self, model: Callable[..., Tensor]) -> Tensor:
        """Applies a model that reads packed texts."""
        return model(self)


def pack(texts: Sequence[NDArray[np.integer[Any]]], pad_id: int, uncounted: int | None = None) -> Packed:
    """Packs texts into one row; an empty text becomes one padding token.

    `uncounted` is the id of a token that gets no position, such as RoBERTa's padding.
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
    """Enables a model to read packed texts; returns None, or the reason why that is not possible."""
    import transformers

    model_config = backbone.config
    if int(transformers.__version__.split(".")[0]) < 5:
        return f"packing needs transformers 5, but {transformers.__version__} is installed"
    if (
        model_config.model_type not in _FAMILIES
        or getattr(model_config, "position_embedding_type", _ABSOLUTE) != _ABSOLUTE
    ):
        return f"{model_config.model_type} is not a BERT or RoBERTa model"
    if getattr(model_config, "is_decoder", False):
        return "the model is a decoder"
    if getattr(model_config, "chunk_size_feed_forward", 0):
        return "the model's config sets chunk_size_feed_forward"
    head = model_config.hidden_size // model_config.num_attention_heads
    if head % _MULTIPLE or head > _WIDEST:
        return f"the model's head width is {head}, not a multiple of {_MULTIPLE} up to {_WIDEST}"
    transformers.AttentionInterface.register(_ATTENTION, attend)
    transformers.AttentionMaskInterface.register(_ATTENTION, transformers.masking_utils.sdpa_mask)
    backbone.set_attn_implementation(_ATTENTION)
    if model_config._attn_implementation != _ATTENTION:  # transformers only warns about this
        return "transformers cannot change the model's attention"
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
    """Implements transformers' attention interface: takes [texts, heads, tokens, width] tensors.

    Returns [texts, tokens, heads, width].
    """
    if packed is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, mask, **options)
    dropout, scale = options.get("dropout", 0.0), options.get("scaling")
    parts = [part[0].transpose(0, 1) for part in (query, key, value)]
    if query.dtype in (torch.float16, torch.bfloat16) and has_flash_attention(query.device):
        starts, longest = packed.starts, packed.longest
        around = (starts, starts, longest, longest, dropout, False, False)
        return torch.ops.aten._flash_attention_forward(*parts, *around, scale=scale)[0][None], None
    is_token = torch.arange(packed.longest, device=query.device) < packed.starts.diff()[:, None]
    q, k, v = (_padded(part, is_token).transpose(1, 2) for part in parts)
    attended = scaled_dot_product_attention(q, k, v, is_token[:, None, None], dropout, scale=scale)
    return attended.transpose(1, 2)[is_token][None], None


def _padded(rows: Tensor, is_token: Tensor) -> Tensor:
    """Unpacks [tokens, heads, width] to [texts, longest, heads, width], padded with zeros."""
    return rows.new_zeros(*is_token.shape, *rows.shape[1:]).masked_scatter(is_token[..., None, None], rows)


def pool_packed(vectors: Tensor, starts: Tensor, pooling: str) -> Tensor:
    """Pools [tokens, width] to [texts, width]: the mean of each text's tokens, the first token, or the last."""
    if pooling == "cls":
        return vectors[starts[:-1]]
    if pooling == "last":
        return vectors[starts[1:] - 1]
    return torch.segment_reduce(vectors, "mean", offsets=starts.long(), axis=0)
