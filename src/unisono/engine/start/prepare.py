"""Creates the recipe and runs its prepare(): one-off work that all ranks share before training."""

from __future__ import annotations

from collections.abc import Callable

import torch

from unisono.data.bits import Purpose, key_of
from unisono.data.seeding import seed_everything
from unisono.engine.checks import check_with_recipe
from unisono.engine.rank_context import RankContext
from unisono.engine.recipe import Recipe, Work
from unisono.engine.run_folder.enter import EnteredRun
from unisono.engine.run_folder.new_folder import remove_empty
from unisono.errors import UserError
from unisono.observe.status_line import print_line
from unisono.parallel.strategy import Placement


class StoppedBeforeTraining(Exception):
    """A signal stopped the run while the recipe was preparing."""

    def __init__(self, step: int) -> None:
        super().__init__("stopping before the first step; prepared files are kept")
        self.step = step  # step of the checkpoint that the run resumes from; 0 without a checkpoint


def build_recipe(run: EnteredRun, placement: Placement) -> Recipe:
    """Creates the recipe and checks the settings with it; its random numbers are the same on every rank."""
    seed_everything(key_of(Purpose.BUILD, run.settings.run.seed, 2), placement.devices)
    recipe = run.recipe_class(run.resolved.build(run.recipe_class.Config))
    recipe.base_precision = run.settings.precision.base_precision
    check_with_recipe(recipe, run.settings, run.resolved)
    return recipe


def work_of(rank: RankContext, run: EnteredRun, device: torch.device) -> Work:
    """Returns this rank's part of the work in Recipe.prepare() and Recipe.refresh()."""
    world = rank.world
    message: Callable[[str], None] = print_line if world.is_main else lambda text: None
    return Work(
        run.folder.path / "prepared",
        _part=world.rank,
        _parts=world.size,
        _asked_to_stop=lambda: rank.is_asked_to_stop,
        device=str(device),
        _say=message,
        seed=run.settings.run.seed,
        _gather=rank.agreement.all_gather,
        shows_progress=world.is_main,
    )


def prepare(recipe: Recipe, work: Work, rank: RankContext) -> bool:
    """Calls Recipe.prepare() on every rank; returns True if any rank received a stop request."""
    if type(recipe).prepare is Recipe.prepare:
        return False
    folder = work.folder
    is_new = rank.main_decides(lambda: not folder.exists())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be created ({error.strerror}); choose another --output_dir") from None
    rank.heartbeat.at("prepare", 0)
    recipe.prepared = folder
    try:
        recipe.prepare(work)
    except BaseException:
        if is_new:
            remove_empty(folder)  # keeps finished work for the resumed run
        raise
    rank.heartbeat.at("start", 0)
    return work.meet()  # a barrier: no rank reads files that another rank is still writing
