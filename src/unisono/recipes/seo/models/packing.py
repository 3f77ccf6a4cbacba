"""Texts one after the other, without padding, through models of BERT's and RoBERTa's families.

All texts of a batch are one long row of tokens, and attention is told where each begins: nothing is computed for
padding, and the model is called once. On a GPU a small model waits for the host, which needs as long for few tokens as
for many; so one call for queries and pages of all lengths is what makes it fast. Where there are flash attention's
kernels they attend to rows of any lengths; elsewhere attention pads, which is slower than `groups.py` and tells the
same.
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

_ATTENTION = "unisono"  # its name among those of transformers
_FAMILIES = ("bert", "roberta", "xlm-roberta", "camembert")
_WIDEST, _MULTIPLE = 192, 8  # of a head, for flash attention on every GPU that has it


class Packed(NamedTuple):
    """Texts one after the other."""

    ids: Tensor  # [1, tokens]
    places: Tensor  # [1, tokens], of each in its text, from 0; -1: not counted
    starts: Tensor  # [texts + 1], int32: where each text begins, and where the last one ends
    longest: int

    def on(self, device: torch.device) -> Packed:
        """The same on a device."""
        return to_device(self, device)  # type: ignore[no-any-return]

    def through(self, model: Callable[..., Tensor]) -> Tensor:
        """What the model gives for each text."""
        return model(self)


def pack(texts: Sequence[NDArray[np.integer[Any]]], pad_id: int, uncounted: int | None = None) -> Packed:
    """Texts one after the other; of one without tokens its padding is looked at.

    `uncounted`: a token that has no place of its own in a text, as RoBERTa's padding has none.
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
    """Makes a model ready for packed texts (it reads others as before); or what keeps it from reading them."""
    import transformers

    told = backbone.config
    if int(transformers.__version__.split(".")[0]) < 5:
        return f"transformers {transformers.__version__} is too old for it, 5 is needed"
    if told.model_type not in _FAMILIES or getattr(told, "position_embedding_type", "absolute") != "absolute":
        return f"{told.model_type} is not of BERT's or RoBERTa's family, which can be read so"
    if getattr(told, "is_decoder", False):
        return "it reads from left to right only"
    if getattr(told, "chunk_size_feed_forward", 0):
        return "it computes in chunks (chunk_size_feed_forward)"
    head = told.hidden_size // told.num_attention_heads
    if head % _MULTIPLE or head > _WIDEST:
        return f"its heads are {head} wide, not a multiple of {_MULTIPLE} up to {_WIDEST}"
    transformers.AttentionInterface.register(_ATTENTION, attend)
    transformers.AttentionMaskInterface.register(_ATTENTION, transformers.masking_utils.sdpa_mask)
    backbone.set_attn_implementation(_ATTENTION)
    if told._attn_implementation != _ATTENTION:  # which transformers only warns of
        return "transformers cannot change how it attends"
    return None


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    packed: Packed | None = None,
    **told: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: [texts, heads, tokens, width] in, [texts, tokens, heads, width] out."""
    if packed is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, mask, **told)
    dropout, scale = told.get("dropout", 0.0), told.get("scaling")
    parts = [part[0].transpose(0, 1) for part in (query, key, value)]
    if query.dtype in (torch.float16, torch.bfloat16) and has_flash_attention(query.device):
        starts, longest = packed.starts, packed.longest
        around = (starts, starts, longest, longest, dropout, False, False)
        return torch.ops.aten._flash_attention_forward(*parts, *around, scale=scale)[0][None], None
    there = torch.arange(packed.longest, device=query.device) < packed.starts.diff()[:, None]
    q, k, v = (_padded(part, there).transpose(1, 2) for part in parts)
    found = scaled_dot_product_attention(q, k, v, there[:, None, None], dropout, scale=scale)
    return found.transpose(1, 2)[there][None], None


def _padded(rows: Tensor, there: Tensor) -> Tensor:
    """[texts, longest, heads, width] of [tokens, heads, width]."""
    return rows.new_zeros(*there.shape, *rows.shape[1:]).masked_scatter(there[..., None, None], rows)


def pool_packed(vectors: Tensor, starts: Tensor, pooling: str) -> Tensor:
    """[texts, width] of [tokens, width]: the mean of each text's tokens, its first or its last."""
    if pooling == "cls":
        return vectors[starts[:-1]]
    if pooling == "last":
        return vectors[starts[1:] - 1]
    return torch.segment_reduce(vectors, "mean", offsets=starts.long(), axis=0)
