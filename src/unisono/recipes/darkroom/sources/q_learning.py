"""Tabular Q-learning (Watkins 1989), tuned to learn within fifty episodes.

A thousand steps are few for a table of four hundred values. Three measures make them sufficient. The initial values are
optimistic, so untried actions look better than actions that led nowhere. The environments are deterministic, so a value
can be replaced at once (learning rate 1). Each finished episode is replayed once in reverse (Lin 1992), which
propagates a reward to the start of the episode instead of by one step. Without the last two measures, learners find
their way back to fewer goals within their history. In the permuted environment, whose goal is 16 steps away from the
start, a thousand steps are too few.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.recipes.darkroom.rooms import NUM_ACTIONS, Room
from unisono.recipes.darkroom.sources.source import Draws, Source


class QLearning(Source):
    """Q-learning with one table per learner and epsilon-greedy actions.

    `exploration` is the initial probability of a random action; it falls linearly to 0 over the first half of the
    history.
    """

    def __init__(
        self,
        room: Room,
        tasks: Tensor,
        draws: Draws,
        num_steps: int,
        lr: float = 1.0,
        discount: float = 0.9,
        optimism: float = 1.0,
        exploration: float = 0.3,
        replay: bool = True,
    ) -> None:
        super().__init__(room, tasks, draws, num_steps)
        self._lr, self._discount, self._exploration, self._replay = lr, discount, exploration, replay
        num_states = room.num_stages * room.num_cells
        start = optimism + draws.uniform(num_states, NUM_ACTIONS) / 1000  # random numbers break ties
        self._values = start.view(-1, NUM_ACTIONS)  # [batch * states, actions]
        self._first_state = torch.arange(len(tasks), device=tasks.device) * num_states
        self._episode: list[tuple[Tensor, Tensor, Tensor]] = []

    def act(self, cells: Tensor, step: int) -> Tensor:
        exploration = self._exploration * max(0.0, 1 - 2 * step / self.num_steps)
        uniform = self.draws.uniform(2)
        best = self._values[self._state(self.stage, cells)].argmax(dim=1)
        return torch.where(uniform[:, 0] < exploration, (uniform[:, 1] * NUM_ACTIONS).long(), best)

    def learn(self, cells: Tensor, actions: Tensor, rewards: Tensor, next_cells: Tensor, step: int) -> None:
        entry = self._state(self.stage, cells) * NUM_ACTIONS + actions
        next_state = self._state(self.next_stage, next_cells)
        self._update(entry, rewards, next_state)
        if not self._replay:
            return
        self._episode.append((entry, rewards, next_state))
        if (step + 1) % self.room.horizon == 0:
            for transition in reversed(self._episode):
                self._update(*transition)
            self._episode.clear()

    def _state(self, stage: Tensor, cells: Tensor) -> Tensor:
        return self._first_state + stage * self.room.num_cells + cells

    def _update(self, entry: Tensor, rewards: Tensor, next_state: Tensor) -> None:
        # Episodes are truncated, not terminated, so the value of the next state counts even at the last step.
        target = rewards + self._discount * self._values[next_state].amax(dim=1)
        values = self._values.view(-1)
        values[entry] = torch.lerp(values[entry], target, self._lr)
