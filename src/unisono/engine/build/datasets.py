"""Builds the recipe's datasets, and rejects those that cannot be read by index or do not fit the batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from torch.utils.data import Dataset

from unisono.config.resolve import Resolved
from unisono.data.bits import Purpose, key_of
from unisono.data.seeding import seed_everything
from unisono.data.stream import ENDLESS, is_stateful, is_stream, without_state
from unisono.data.windows import Windows, remark_on_windows, windows_of
from unisono.engine.batch import BatchPlan, check_against_data
from unisono.engine.checks import check_held_out
from unisono.engine.rank_context import RankContext
from unisono.engine.recipe import Recipe
from unisono.errors import ConfigError, RecipeError
from unisono.settings import Settings


@dataclass(frozen=True)
class Datasets:
    """The datasets that a run trains and evaluates on."""

    train: Dataset[Any]
    evaluation: Dataset[Any] | None
    num_samples: int  # size of `train`
    windows: Windows | None  # windows in which `train` is shuffled
    remarks: list[str] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        """The checksum of the blocks on which the sample order depends; 0 if it depends on none."""
        return 0 if self.windows is None else self.windows.checksum


def build_datasets(
    recipe: Recipe, settings: Settings, resolved: Resolved, batch: BatchPlan, rank: RankContext
) -> Datasets:
    """Calls Recipe.dataset() and checks the results; every rank calls it."""
    train, evaluation = (_build(recipe, split, settings.run.seed) for split in ("train", "eval"))
    if train is None:
        raise RecipeError('dataset("train") returned None; return a map-style dataset')
    check_held_out(evaluation, settings, resolved)
    if is_stream(train):
        return Datasets(train, evaluation, ENDLESS, None, _check_stream(recipe, train, settings))
    num_samples = len(train)  # type: ignore[arg-type]
    windows = windows_of(train, settings.data.shuffle_window)
    of_ranks = rank.agreement.all_gather((num_samples, 0 if windows is None else windows.checksum))
    if len({size for size, _ in of_ranks}) > 1:
        raise RecipeError(
            f'dataset("train") has {num_samples} samples on this rank and a different number on other ranks; '
            "make it the same on all ranks"
        )
    if len({checksum for _, checksum in of_ranks}) > 1:
        raise RecipeError('dataset("train") has different block_starts on different ranks; make them the same on all')
    remark = remark_on_windows(windows, num_samples)
    remarks = [] if remark is None else [remark]
    if recipe.whole_epochs:
        return Datasets(train, evaluation, num_samples, windows, remarks)
    check_against_data(batch, num_samples)
    if num_samples < batch.global_batch:
        remarks.append(
            f"the dataset has {num_samples} samples, fewer than the effective batch of {batch.global_batch}: "
            "a step continues into the next epoch"
        )
    return Datasets(train, evaluation, num_samples, windows, remarks)


def _check_stream(recipe: Recipe, stream: Any, settings: Settings) -> list[str]:
    """Rejects settings that need the number of samples, which a stream does not have; returns notes for the user."""
    if recipe.whole_epochs:
        raise RecipeError(f"{type(stream).__name__} is a stream without a length; pass a map-style dataset")
    if settings.run.num_epochs is not None or settings.run.max_steps is None:
        raise ConfigError('dataset("train") is a stream, which has no length: set the length of the run with max_steps')
    if settings.data.shuffle_window:
        raise ConfigError('shuffle_window: dataset("train") is a stream, which defines its own order; leave it out')
    remarks = ['dataset("train") is a stream, one for each rank: the run can only resume on as many ranks']
    if settings.data.num_workers > 1:
        remarks.append(f"num_workers {settings.data.num_workers}: a stream is read by one worker on each rank")
    return remarks


def _build(recipe: Recipe, split: str, seed: int) -> Dataset[Any] | None:
    """Returns the dataset of a split; its random numbers are the same on every rank and whenever the run resumes."""
    seed_everything(key_of(Purpose.BUILD, seed, crc32(split.encode())))
    dataset = recipe.dataset(split)
    if dataset is None:
        return None
    if is_stream(dataset) and split == "train":
        if not is_stateful(dataset) and not is_stateful(iter(dataset)):
            raise RecipeError(without_state(dataset))
        return dataset
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise RecipeError(f'dataset("{split}") returned {type(dataset).__name__}, which lacks __len__ or __getitem__')
    try:
        size = len(dataset)
    except (ValueError, TypeError, OverflowError) as error:  # a length that len() rejects, such as a negative number
        raise RecipeError(f'dataset("{split}"): its __len__() is not a number of samples ({error})') from error
    if size == 0:
        raise RecipeError(f'dataset("{split}") is empty; check the data path and filters')
    return dataset
