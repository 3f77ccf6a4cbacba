"""The encoder, which embeds texts with a transformer, pooling and normalisation; also pads batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from unisono.recipes.seo.models.folders import Kind, Pooling
from unisono.recipes.seo.models.packing import Packed, pool_packed

Row = NDArray[np.integer[Any]]


class Encoder(nn.Module):
    """A transformer with pooling and normalisation."""

    def __init__(
        self, backbone: nn.Module, pooling: Pooling, prompts: Mapping[Kind, str] | None = None, *, decoder: bool = False
    ) -> None:
        super().__init__()
        self.backbone, self.pooling = backbone, pooling
        self.prompts: dict[Kind, str] = {"query": "", "page": "", **(prompts or {})}
        """Prefix for queries and for pages."""
        self._further = {"use_cache": False} if decoder else {}
        # Freeze the unused pooler: it gets no gradient, and ddp would wait for one.
        if isinstance(pooler := getattr(backbone, "pooler", None), nn.Module):
            pooler.requires_grad_(False)

    def forward(self, texts: Tensor | Packed, mask: Tensor | None = None) -> Tensor:
        """Returns [texts, width] unit vectors, at least float32, from [texts, tokens] right-padded ids and their mask.

        For packed texts there is no mask, and `read_packed` must have been called on the backbone.
        """
        if isinstance(texts, Packed):
            places = texts.places + (0 if self.uncounted is None else self.uncounted + 1)
            inside = {"input_ids": texts.ids, "position_ids": places, "packed": texts}
        else:
            inside = {"input_ids": texts, "attention_mask": mask}
        hidden = self.backbone(**inside, **self._further).last_hidden_state
        hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))  # sums of 16-bit numbers are inexact
        if isinstance(texts, Packed):
            return functional.normalize(pool_packed(hidden[0], texts.starts, self.pooling), dim=-1)
        assert mask is not None
        return functional.normalize(pool(hidden, mask, self.pooling), dim=-1)

    @cached_property
    def uncounted(self) -> int | None:
        """Id of the token that gets no position, which is RoBERTa's padding token; None if every token gets one."""
        table = position_table(self.backbone)
        return None if table is None else table.padding_idx


def position_table(model: nn.Module) -> nn.Embedding | None:
    """Returns the position embedding of a model; None if the model has none."""
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and ("position" in last or last == "wpe"):
            return module
    return None


def pool(vectors: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Pools [texts, tokens, width] to [texts, width]: the mean, first or last token, ignoring padding."""
    if pooling == "cls":
        return vectors[:, 0]
    if pooling == "last":
        last = mask.sum(1).long() - 1
        return vectors[torch.arange(len(vectors), device=vectors.device), last]
    weight = mask.to(vectors.dtype)[..., None]
    return (vectors * weight).sum(1) / weight.sum(1).clamp_min(1e-9)


def pad(rows: Sequence[Row], pad_id: int, multiple: int = 8) -> tuple[Tensor, Tensor]:
    """Pads texts to a common length, a multiple of `multiple`; returns ids and mask, [texts, tokens] each."""
    # Count an empty text as one token, because a fully masked row would give NaN.
    lengths = np.array([max(1, len(row)) for row in rows])
    width = max(multiple, -(-int(lengths.max(initial=1)) // multiple) * multiple)
    ids = np.full((len(rows), width), pad_id, dtype=np.int64)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
    mask = np.arange(width)[None] < lengths[:, None]
    return torch.from_numpy(ids), torch.from_numpy(mask.astype(np.int64))
