"""A learner that only seems to learn: it knows the task, and acts at random ever more rarely.

This is the noise curriculum of AD-epsilon (Zisman et al. 2024): histories that get better from episode to episode,
without any learning. It shows no exploration, so the transformer cannot learn to explore from it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.recipes.darkroom.rooms import NUM_ACTIONS, Episode
from unisono.recipes.darkroom.sources.source import Source


class NoiseCurriculum(Source):
    """Acts at random with a probability that falls evenly from 1 to 0 over its history, and perfectly otherwise."""

    def act(self, cells: Tensor, step: int) -> Tensor:
        """See Source."""
        noise = 1 - step / max(1, self.num_steps - 1)
        chance = self.draws.uniform(3)
        best = self.room.best_actions(Episode(self.tasks, cells, self.stage), chance[:, 0])
        return torch.where(chance[:, 1] < noise, (chance[:, 2] * NUM_ACTIONS).long(), best)

    def learn(self, cells: Tensor, actions: Tensor, rewards: Tensor, next_cells: Tensor, step: int) -> None:
        """Nothing: it knows everything already."""
