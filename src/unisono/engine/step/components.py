"""The objects that a training step uses: recipe, distributed model, optimizer, average of the weights, and state."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.engine.recipe import Recipe
from unisono.engine.state import TrainState
from unisono.engine.step.ema import Average
from unisono.engine.step.optimizer_wrapper import OptimizerWrapper
from unisono.engine.step.precision import LossScale
from unisono.parallel.blocks.mixed import MixedBlocks
from unisono.parallel.strategy import Strategy
from unisono.planning.blocks_on_host import BlocksOnHost


@dataclass(frozen=True)
class Components:
    """The components of training, on this rank."""

    recipe: Recipe
    strategy: Strategy
    why_strategy: str
    optimizer: OptimizerWrapper
    ema: Average | None
    scale: LossScale | None
    state: TrainState
    remarks: list[str]  # notes for the user, printed once
    captures: bool  # steps are recorded as CUDA graphs
    recordable: bool  # steps are not recorded, but could be
    blocks_on_host: BlocksOnHost
    mixed_blocks: MixedBlocks | None  # blocks whose levels of recomputation are chosen before the first step
