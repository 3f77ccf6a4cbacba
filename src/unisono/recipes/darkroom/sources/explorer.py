"""A learner that explores well: it goes where it can learn something new, until it knows how to get the reward.

It is what R-max does when it knows what it may know (Brafman and Tennenholtz 2002). Its histories are short and
informative, and the transformer that reads them explores well too: of all sources this one distils best.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.recipes.darkroom.rooms import NUM_ACTIONS, DarkroomPermuted, Room
from unisono.recipes.darkroom.sources.source import Draws, Source


class Explorer(Source):
    """Looks for cells: the nearest one where it has not looked yet, until it knows where the reward is; then straight.

    With a key and a door it looks for one after the other, and a cell where no key was may still be the door.
    """

    def __init__(self, room: Room, tasks: Tensor, draws: Draws, num_steps: int, noise: float = 0.02) -> None:
        super().__init__(room, tasks, draws, num_steps)
        self._noise = noise
        self._num_goals = max(1, room.num_stages - 1)
        self._goals = torch.full((len(tasks), self._num_goals), -1, device=tasks.device)  # where known
        cells = torch.arange(room.num_cells, device=tasks.device)
        x, y = cells // room.size, cells % room.size
        self._distance = ((x[:, None] - x).abs() + (y[:, None] - y).abs()).float()  # [cell, cell]
        self._taste = draws.uniform(room.num_cells)  # breaks ties; each learner has its own
        self._price = self._taste.clone()  # the same, and infinite where there is nothing left to look for

    def act(self, cells: Tensor, step: int) -> Tensor:
        """See Source."""
        stage = self.stage.clamp(max=self._num_goals - 1)
        target = self._goals.gather(1, stage[:, None])[:, 0]
        target = torch.where(self.stage < self._num_goals, target, cells) if self._num_goals > 1 else target
        if len(searching := (target < 0).nonzero()[:, 0]):
            nearest = (self._distance[cells[searching]] + self._price[searching]).argmin(dim=1)
            target = target.index_copy(0, searching, nearest)
        chance = self.draws.uniform(3)
        return _or_anything(self.room.straight(cells, target, chance[:, 0]), self._noise, chance)

    def learn(self, cells: Tensor, actions: Tensor, rewards: Tensor, next_cells: Tensor, step: int) -> None:
        """See Source."""
        if self._num_goals == 1:
            # Nobody looks at the prices of a learner who knows its goal.
            self._price.scatter_(1, next_cells[:, None], torch.inf)
            self._goals[:, 0] = torch.where(rewards > 0, next_cells, self._goals[:, 0])
            return
        stage = self.stage.clamp(max=self._num_goals - 1)[:, None]
        known = self._goals.gather(1, stage)[:, 0]
        looking = (known < 0) & (self.stage < self._num_goals)
        rows = looking.nonzero()[:, 0]
        self._price[rows, next_cells[rows]] = torch.inf
        found = looking & (rewards > 0)
        self._goals.scatter_(1, stage, torch.where(found, next_cells, known)[:, None])
        rows = found.nonzero()[:, 0]
        self._price[rows] = self._taste[rows]  # the next thing may be anywhere


class ActionExplorer(Source):
    """Looks for actions: knows its way and where the reward is, but not what its actions do.

    It does what most probably brings it forward, by all that it has seen; so it tries an unknown action only as long as
    none is known to do that.
    """

    def __init__(
        self, room: DarkroomPermuted, tasks: Tensor, draws: Draws, num_steps: int, noise: float = 0.02
    ) -> None:
        super().__init__(room, tasks, draws, num_steps)
        self._noise, device = noise, tasks.device
        meanings = room.meanings.on(device)  # [task, action] -> move
        self._meanings = meanings.t().contiguous()
        self._means = torch.nn.functional.one_hot(meanings, NUM_ACTIONS).float().flatten(1)  # [task, action * move]
        self._possible = torch.ones(len(tasks), room.num_tasks, dtype=torch.bool, device=device)  # by what was seen
        cells = torch.arange(room.num_cells, device=device)
        self._outcomes = room.neighbours(cells)  # [cell, move] -> cell
        goal = room.num_cells - 1
        size = room.size
        steps_to_go = 2 * (size - 1) - cells // size - cells % size
        forward = steps_to_go[self._outcomes] < steps_to_go[:, None]
        self._forward = (forward | (self._outcomes == goal)).float()  # [cell, move]: closer to the goal, or kept there

    def act(self, cells: Tensor, step: int) -> Tensor:
        """See Source."""
        # In how many of the possible tasks an action brings it forward: whole numbers; chance decides between equals.
        ways = (self._possible.float() @ self._means).view(-1, NUM_ACTIONS, NUM_ACTIONS)
        hope = (ways * self._forward[cells][:, None]).sum(dim=2)
        chance = self.draws.uniform(NUM_ACTIONS + 3)
        return _or_anything((hope + chance[:, 3:] / 2).argmax(dim=1), self._noise, chance)

    def learn(self, cells: Tensor, actions: Tensor, rewards: Tensor, next_cells: Tensor, step: int) -> None:
        """See Source."""
        explains = self._outcomes[cells] == next_cells[:, None]  # [batch, move]
        self._possible &= explains.gather(1, self._meanings[actions])


def explorer(room: Room, tasks: Tensor, draws: Draws, num_steps: int, noise: float = 0.02) -> Source:
    """The explorer that looks for what this room hides; `noise` is how often it does anything instead."""
    if isinstance(room, DarkroomPermuted):
        return ActionExplorer(room, tasks, draws, num_steps, noise)
    return Explorer(room, tasks, draws, num_steps, noise)


def _or_anything(actions: Tensor, noise: float, chance: Tensor) -> Tensor:
    anything = (chance[:, 2] * NUM_ACTIONS).long()
    return torch.where(chance[:, 1] < noise, anything, actions)
