"""The source learners whose histories are distilled; thousands of independent learners run as one batch."""

from __future__ import annotations

from collections.abc import Callable

from unisono.recipes.darkroom.sources.explorer import explorer
from unisono.recipes.darkroom.sources.noise import NoiseCurriculum
from unisono.recipes.darkroom.sources.ppo import PPO
from unisono.recipes.darkroom.sources.q_learning import QLearning
from unisono.recipes.darkroom.sources.source import Source

SOURCES: dict[str, Callable[..., Source]] = {
    "explorer": explorer,
    "q_learning": QLearning,
    "noise": NoiseCurriculum,
    "ppo": PPO,
}
"""Source learners by name; each is called with (room, tasks, draws, num_steps) and its own settings."""
