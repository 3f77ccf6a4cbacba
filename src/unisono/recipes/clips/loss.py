"""The losses of a window of clips: a loss of each clip's score, and a pairwise ranking loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_NEAR = 0.05  # the ranking loss ignores pairs of clips whose labelled scores differ by less


def score_loss(logits: Tensor, scores: Tensor, kind: str) -> Tensor:
    """Returns the mean loss [windows] over each window's labelled clips: cross-entropy (bce) or squared error (mse)."""
    labelled = ~scores.isnan()
    target = scores.nan_to_num()
    if kind == "bce":
        errors = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    else:
        errors = (torch.sigmoid(logits) - target).square()
    return (errors * labelled).sum(1) / labelled.sum(1).clamp(min=1)


def ranking_loss(logits: Tensor, scores: Tensor) -> Tensor:
    """Returns the mean [windows] of log(1 + e^(worse − better)) over all pairs of clips with different labelled scores.

    Only the order of the scores decides which moments are cut. Most clips have similar scores, so the score loss alone
    can be small even if the few highlights do not score highest.
    """
    better = scores[:, :, None] - scores[:, None, :] > _NEAR  # False if either score is NaN
    pairs = F.softplus(logits[:, None, :] - logits[:, :, None])
    return (pairs * better).sum((1, 2)) / better.sum((1, 2)).clamp(min=1)
