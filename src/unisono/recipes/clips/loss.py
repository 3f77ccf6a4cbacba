"""How wrong the scores of a window are: by themselves, and in their order."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_NEAR = 0.05  # scores that differ by less are not put in order


def score_loss(logits: Tensor, scores: Tensor, kind: str) -> Tensor:
    """[windows] mean over the labelled clips of a window of cross-entropy with the score (bce), or its square (mse)."""
    known = ~scores.isnan()
    target = scores.nan_to_num()
    if kind == "bce":
        each = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    else:
        each = (torch.sigmoid(logits) - target).square()
    return (each * known).sum(1) / known.sum(1).clamp(min=1)


def ranking_loss(logits: Tensor, scores: Tensor) -> Tensor:
    """[windows] mean over all pairs of clips with different scores: log(1 + e^(worse − better)).

    What matters in the end is the order, and most clips of a video are alike: few good ones must come first.
    """
    better = scores[:, :, None] - scores[:, None, :] > _NEAR  # not-a-number is never better
    each = F.softplus(logits[:, None, :] - logits[:, :, None])
    return (each * better).sum((1, 2)) / better.sum((1, 2)).clamp(min=1)
