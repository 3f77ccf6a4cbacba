"""Source learners: those whose histories are distilled. Thousands of independent ones at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from unisono.recipes.darkroom.rooms import Room
from unisono.recipes.darkroom.sources.explorer import explorer
from unisono.recipes.darkroom.sources.noise import NoiseCurriculum
from unisono.recipes.darkroom.sources.q_learning import QLearning
from unisono.recipes.darkroom.sources.source import Draws, Source


def _ppo(room: Room, tasks: Tensor, draws: Draws, num_steps: int, **settings: Any) -> Source:
    from unisono.recipes.darkroom.sources.ppo import PPO

    return PPO(room, tasks, draws, num_steps, **settings)


SOURCES: dict[str, Callable[..., Source]] = {
    "explorer": explorer,
    "q_learning": QLearning,
    "noise": NoiseCurriculum,
    "ppo": _ppo,
}
"""By name; called with (room, tasks, draws, num_steps) and the settings of that source."""
