"""Histories without learning: an expert that takes random actions less and less often.

This is the noise curriculum of AD-epsilon (Zisman et al. 2024). Returns improve from episode to episode, but the
histories contain no exploration, so the transformer cannot learn to explore from them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.recipes.darkroom.rooms import NUM_ACTIONS, Episode
from unisono.recipes.darkroom.sources.source import Source


class NoiseCurriculum(Source):
    """Takes a random action with a probability that falls linearly from 1 to 0, and an optimal one otherwise."""

    def act(self, cells: Tensor, step: int) -> Tensor:
        noise = 1 - step / max(1, self.num_steps - 1)
        uniform = self.draws.uniform(3)
        best = self.room.best_actions(Episode(self.tasks, cells, self.stage), uniform[:, 0])
        return torch.where(uniform[:, 1] < noise, (uniform[:, 2] * NUM_ACTIONS).long(), best)

    def learn(self, cells: Tensor, actions: Tensor, rewards: Tensor, next_cells: Tensor, step: int) -> None:
        """Does nothing, because the expert knows the task."""
