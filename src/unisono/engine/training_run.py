"""The state that one rank has built and restored before the first step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from unisono.engine.batch import BatchPlan
from unisono.engine.build.datasets import Datasets
from unisono.engine.fit.at_start import Advice
from unisono.engine.length import Length
from unisono.engine.rank_context import RankContext
from unisono.engine.recipe import Work
from unisono.engine.resume import ChosenCheckpoint
from unisono.engine.run_folder.enter import EnteredRun
from unisono.engine.step.components import Components
from unisono.observe.folder import RunFolder
from unisono.settings import Settings


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A run that is ready to train."""

    rank: RankContext
    entered: EnteredRun
    run_id: str
    batch: BatchPlan
    datasets: Datasets
    components: Components
    checkpoint: ChosenCheckpoint  # the checkpoint that was restored, if any
    start_step: int
    length: Length
    save_group: dist.ProcessGroup | None  # process group for the collectives of saves, which run in a separate thread
    work: Work  # this rank's share of prepare() and refresh()
    advice: Advice  # what to do if the run does not fit into memory
    remarks: list[str]  # notes for the user, from all phases of start-up

    @property
    def settings(self) -> Settings:
        """The engine's settings."""
        return self.entered.settings

    @property
    def folder(self) -> RunFolder:
        """The run folder."""
        return self.entered.folder

    @property
    def identity(self) -> dict[str, Any]:
        """The description of the run that every checkpoint stores."""
        return {
            "recipe": self.entered.recipe_name,
            "seed": self.settings.run.seed,
            "global_batch": self.batch.global_batch,
            "run": self.run_id,
        }
