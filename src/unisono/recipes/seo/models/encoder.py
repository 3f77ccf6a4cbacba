"""Texts to vectors: a transformer whose token vectors become one of length 1; and batches for it."""

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
    """A transformer and how its token vectors become one."""

    def __init__(
        self, backbone: nn.Module, pooling: Pooling, prompts: Mapping[Kind, str] | None = None, *, decoder: bool = False
    ) -> None:
        super().__init__()
        self.backbone, self.pooling = backbone, pooling
        self.prompts: dict[Kind, str] = {"query": "", "page": "", **(prompts or {})}
        """What the model wants to read before a text of each kind."""
        self._further = {"use_cache": False} if decoder else {}
        # Where it is there it is computed and not used: under ddp its missing gradient would be waited for.
        if isinstance(pooler := getattr(backbone, "pooler", None), nn.Module):
            pooler.requires_grad_(False)

    def forward(self, texts: Tensor | Packed, mask: Tensor | None = None) -> Tensor:
        """[texts, width] vectors of length 1, at least float32, of [texts, tokens] right-padded ids and their mask.

        Of packed texts there is no mask; the model has been made ready for them.
        """
        if isinstance(texts, Packed):
            places = texts.places + (0 if self.uncounted is None else self.uncounted + 1)
            inside = {"input_ids": texts.ids, "position_ids": places, "packed": texts}
        else:
            inside = {"input_ids": texts, "attention_mask": mask}
        found = self.backbone(**inside, **self._further).last_hidden_state
        found = found.to(torch.promote_types(found.dtype, torch.float32))  # sums of 16-bit numbers are rough
        if isinstance(texts, Packed):
            return functional.normalize(pool_packed(found[0], texts.starts, self.pooling), dim=-1)
        assert mask is not None
        return functional.normalize(pool(found, mask, self.pooling), dim=-1)

    @cached_property
    def uncounted(self) -> int | None:
        """The token that has no position of its own: RoBERTa's padding, whose first position comes after it."""
        table = position_table(self.backbone)
        return None if table is None else table.padding_idx


def position_table(model: nn.Module) -> nn.Embedding | None:
    """What a model looks up positions in; None where it counts them without a table."""
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and ("position" in last or last == "wpe"):
            return module
    return None


def pool(vectors: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """[texts, width] of [texts, tokens, width]: of the tokens that are not padding the mean, the first or the last."""
    if pooling == "cls":
        return vectors[:, 0]
    if pooling == "last":
        last = mask.sum(1).long() - 1
        return vectors[torch.arange(len(vectors), device=vectors.device), last]
    weight = mask.to(vectors.dtype)[..., None]
    return (vectors * weight).sum(1) / weight.sum(1).clamp_min(1e-9)


def pad(rows: Sequence[Row], pad_id: int, multiple: int = 8) -> tuple[Tensor, Tensor]:
    """Ids and mask, [texts, tokens] each, of texts of several lengths; a multiple, because kernels like few widths."""
    # Of a text without tokens one is looked at: attention to nothing would be a division by zero.
    lengths = np.array([max(1, len(row)) for row in rows])
    width = max(multiple, -(-int(lengths.max(initial=1)) // multiple) * multiple)
    ids = np.full((len(rows), width), pad_id, dtype=np.int64)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
    mask = np.arange(width)[None] < lengths[:, None]
    return torch.from_numpy(ids), torch.from_numpy(mask.astype(np.int64))
