"""Evaluates the model and the baselines on held-out videos."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from unisono.recipes.clips.calibration import HIGHLIGHTS, OTHERS
from unisono.recipes.clips.data.statistics import STATS
from unisono.recipes.clips.metrics.baselines import kinds_for, scores
from unisono.recipes.clips.metrics.highlights import of_video

if TYPE_CHECKING:
    from torch import Tensor


def evaluate_videos(
    logits: Tensor, batch: Mapping[str, Tensor], names: Sequence[str], config: Any
) -> dict[str, tuple[Tensor, int]]:
    """Returns (sum, count) of every metric over the videos of a batch.

    `logits` [videos, clips] are the model's output, `names` [videos] the names of the videos. The metrics of a baseline
    have its name as a suffix: `mAP_random`. A video for which a metric is undefined does not count in it.
    """
    values: dict[str, list[float]] = {}
    for row, predicted in enumerate(torch.sigmoid(logits).cpu().numpy()):
        truth = batch["scores"][row].cpu().numpy()
        has_stats = "stats" in batch
        stats = batch["stats"][row].cpu().numpy() if has_stats else truth[:, None]
        scorers = {"": predicted} | {
            f"_{kind}": scores(kind, stats, STATS, video=names[row]) for kind in kinds_for(STATS if has_stats else ())
        }
        values.setdefault(HIGHLIGHTS, []).extend(predicted[truth >= config.positive_from].tolist())
        values.setdefault(OTHERS, []).extend(predicted[truth < config.positive_from].tolist())
        for suffix, predictions in scorers.items():
            metrics = of_video(truth, predictions, config.clip_seconds, positive_from=config.positive_from)
            for metric, value in metrics.items():
                values.setdefault(f"{metric}{suffix}", []).extend([] if math.isnan(value) else [value])
    return {name: (torch.tensor(sum(each), dtype=torch.float64), len(each)) for name, each in values.items()}
