"""The objects that a training step uses: recipe, distributed model, optimizer, average of the weights, and state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from unisono.engine.recipe import Recipe
from unisono.engine.state import GroupState, TrainState
from unisono.engine.step.ema import Average
from unisono.engine.step.optimizer_wrapper import OptimizerWrapper
from unisono.engine.step.precision import LossScale
from unisono.engine.turns.group import Group
from unisono.engine.turns.rhythm import Rhythm
from unisono.parallel.blocks.mixed import MixedBlocks
from unisono.parallel.strategy import Strategy
from unisono.planning.blocks_on_host import BlocksOnHost
from unisono.settings import OptimSettings


@dataclass(frozen=True)
class TrainedGroup:
    """Weights that a step trains together: all of them, or one of the groups that a recipe trains in turn."""

    number: int
    declared: Group | None  # None: the recipe has no groups
    optimizer: OptimizerWrapper
    ema: Average | None
    scale: LossScale | None
    state: TrainState | GroupState  # counters of this group's steps

    @property
    def name(self) -> str:
        """The name of the group; empty if the recipe has no groups."""
        return "" if self.declared is None else self.declared.name

    @property
    def prefix(self) -> str:
        """The beginning of the names of the group's metrics."""
        return "" if self.declared is None else f"{self.declared.name}/"

    def optim(self, settings: OptimSettings) -> OptimSettings:
        """Returns the optimizer settings of the group, in a run with these settings."""
        return settings if self.declared is None else self.declared.optim(settings)


@dataclass(frozen=True)
class Components:
    """The components of training, on this rank."""

    recipe: Recipe
    strategy: Strategy
    why_strategy: str
    groups: Sequence[TrainedGroup]  # a single group, or the groups that are trained in turn
    rhythm: Rhythm
    state: TrainState
    remarks: list[str]  # notes for the user, printed once
    captures: bool  # whether steps are recorded as CUDA graphs
    recordable: bool  # whether steps could be recorded, if they are not
    blocks_on_host: BlocksOnHost
    mixed_blocks: MixedBlocks | None  # blocks whose levels of recomputation are chosen before the first step

    def begin_step(self, step: int) -> TrainedGroup:
        """Makes the next passes train the group of weights whose turn it is at this step (from 0), and returns it."""
        group = self.groups[self.rhythm.group_at(step)]
        self.begin_turn(group)
        return group

    def begin_turn(self, group: TrainedGroup) -> None:
        """Makes the next passes train this group; does nothing if the recipe has no groups."""
        if group.declared is not None:
            self.recipe.group = group.declared.name
            self.strategy.train_only(group.number)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """A context for evaluation: the model computes with the averages of its weights, where there are any."""
        if self.groups[0].declared is not None:  # a recipe without groups may use the name for something else
            self.recipe.group = self.groups[0].name
        with ExitStack() as stack:
            for group in self.groups:
                if group.ema is not None:
                    stack.enter_context(group.ema.in_place_of_weights(self.strategy.weights_changed))
            yield
