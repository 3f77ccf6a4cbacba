"""The recipe's datasets, checked against the batch and against the other ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import Dataset

from unisono.engine.batch import BatchPlan, check_against_data
from unisono.engine.build.dataset import build_dataset
from unisono.engine.checks import check_held_out
from unisono.engine.rank_context import RankContext
from unisono.engine.recipe import Recipe
from unisono.engine.run_folder.enter import EnteredRun
from unisono.errors import RecipeError


@dataclass(frozen=True)
class Datasets:
    """What a run trains and evaluates on."""

    train: Dataset[Any]
    evaluation: Dataset[Any] | None
    num_samples: int  # of `train`
    remarks: list[str] = field(default_factory=list)


def build_datasets(recipe: Recipe, run: EnteredRun, batch: BatchPlan, rank: RankContext) -> Datasets:
    """Asks the recipe for its datasets; every rank calls it."""
    seed = run.settings.run.seed
    train, evaluation = build_dataset(recipe, "train", seed), build_dataset(recipe, "eval", seed)
    assert train is not None
    check_held_out(evaluation, run.settings, run.resolved)
    num_samples = len(train)  # type: ignore[arg-type]
    if len(set(rank.agreement.all_gather(num_samples))) > 1:
        raise RecipeError(
            f'dataset("train") has {num_samples} samples on this rank and a different number on other ranks; '
            "make it the same on all ranks"
        )
    if recipe.whole_epochs:
        return Datasets(train, evaluation, num_samples)
    check_against_data(batch, num_samples)
    remarks = []
    if num_samples < batch.global_batch:
        remarks.append(
            f"the dataset has {num_samples} samples, fewer than the effective batch of {batch.global_batch}: "
            "a step reads on into the next epoch"
        )
    return Datasets(train, evaluation, num_samples, remarks)
