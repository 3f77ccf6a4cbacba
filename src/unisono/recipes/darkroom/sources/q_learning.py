"""Tabular Q-learning (Watkins 1989), with what it takes to learn within fifty episodes.

A thousand steps are few for a table of four hundred values. Three things make them do: the table starts out optimistic,
so what was not tried looks better than what led nowhere; rooms are deterministic, so a value may be replaced at once
(learning rate 1); and every finished episode is gone through once more, backwards (Lin 1992), which carries a reward to
the start of the episode instead of one step towards it. Without the last two fewer goals are found again in time.
In the permuted room, whose goal is 16 steps away from the start of episodes of 20, a thousand steps are not enough.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.recipes.darkroom.rooms import NUM_ACTIONS, Room
from unisono.recipes.darkroom.sources.source import Draws, Source


class QLearning(Source):
    """Each learner has a table of its own, and acts by it but for an exploration that fades out.

    `exploration` is the probability of a random action at the start; it falls evenly to 0 over the first half of the
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
        # The little on top breaks ties; each learner has its own.
        start = optimism + draws.uniform(num_states, NUM_ACTIONS) / 1000
        self._values = start.view(-1, NUM_ACTIONS)  # [batch * states, actions]
        self._first_state = torch.arange(len(tasks), device=tasks.device) * num_states
        self._episode: list[tuple[Tensor, Tensor, Tensor]] = []

    def act(self, cells: Tensor, step: int) -> Tensor:
        """See Source."""
        exploration = self._exploration * max(0.0, 1 - 2 * step / self.num_steps)
        chance = self.draws.uniform(2)
        best = self._values[self._state(self.stage, cells)].argmax(dim=1)
        return torch.where(chance[:, 0] < exploration, (chance[:, 1] * NUM_ACTIONS).long(), best)

    def learn(self, cells: Tensor, actions: Tensor, rewards: Tensor, next_cells: Tensor, step: int) -> None:
        """See Source."""
        tried = self._state(self.stage, cells) * NUM_ACTIONS + actions
        after = self._state(self.next_stage, next_cells)
        self._update(tried, rewards, after)
        if not self._replay:
            return
        self._episode.append((tried, rewards, after))
        if (step + 1) % self.room.horizon == 0:
            for transition in reversed(self._episode):
                self._update(*transition)
            self._episode.clear()

    def _state(self, stage: Tensor, cells: Tensor) -> Tensor:
        return self._first_state + stage * self.room.num_cells + cells

    def _update(self, tried: Tensor, rewards: Tensor, after: Tensor) -> None:
        # An episode ends because its time is over, not because nothing comes after: the value after it counts, too.
        worth = rewards + self._discount * self._values[after].amax(dim=1)
        values = self._values.view(-1)
        values[tried] = torch.lerp(values[tried], worth, self._lr)
