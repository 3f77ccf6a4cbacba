"""Everything that the trainer needs of a run, on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset

from unisono.engine.batch import BatchPlan
from unisono.engine.evaluate import Evaluation
from unisono.engine.rank_context import RankContext
from unisono.engine.recipe import Work
from unisono.engine.recorder import Recorder
from unisono.engine.step.components import Components
from unisono.observe.folder import RunFolder
from unisono.settings import Settings


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A run that is ready to train: a start has built its parts and restored its checkpoint."""

    rank: RankContext
    components: Components
    settings: Settings
    batch: BatchPlan
    dataset: Dataset[Any]
    evaluation: Evaluation | None
    folder: RunFolder
    recorder: Recorder
    save_group: dist.ProcessGroup | None  # for the collectives of saves, which run in a thread of their own
    identity: Mapping[str, Any]  # what every checkpoint says about the run it belongs to
    work: Work  # for Recipe.refresh()
