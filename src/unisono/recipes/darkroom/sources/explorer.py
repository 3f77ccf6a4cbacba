"""A learner that explores efficiently until it knows how to get the reward, then exploits.

It behaves like R-max (Brafman and Tennenholtz 2002) with knowledge of the environment's structure. Its histories are
short and informative, and the transformer trained on them explores well too: in our measurements, no other source
learner was distilled as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.recipes.darkroom.rooms import NUM_ACTIONS, DarkroomPermuted, Room
from unisono.recipes.darkroom.sources.source import Draws, Source


class Explorer(Source):
    """Walks to the nearest unvisited cell until it has found the reward, then goes straight there.

    In an environment with a key and a door, it searches for the key first and then for the door, which may be in any
    cell, including those that it has visited before.
    """

    def __init__(self, room: Room, tasks: Tensor, draws: Draws, num_steps: int, noise: float = 0.02) -> None:
        super().__init__(room, tasks, draws, num_steps)
        self._noise = noise
        self._num_goals = max(1, room.num_stages - 1)
        self._goals = torch.full((len(tasks), self._num_goals), -1, device=tasks.device)  # -1: not found yet
        cells = torch.arange(room.num_cells, device=tasks.device)
        x, y = cells // room.size, cells % room.size
        self._distance = ((x[:, None] - x).abs() + (y[:, None] - y).abs()).float()  # [cell, cell]
        self._tie_break = draws.uniform(room.num_cells)  # random cost of each cell, which differs between learners
        self._cost = self._tie_break.clone()  # the random cost for unvisited cells, infinity for visited cells

    def act(self, cells: Tensor, step: int) -> Tensor:
        stage = self.stage.clamp(max=self._num_goals - 1)
        target = self._goals.gather(1, stage[:, None])[:, 0]
        target = torch.where(self.stage < self._num_goals, target, cells) if self._num_goals > 1 else target
        if len(searching := (target < 0).nonzero()[:, 0]):
            nearest = (self._distance[cells[searching]] + self._cost[searching]).argmin(dim=1)
            target = target.index_copy(0, searching, nearest)
        uniform = self.draws.uniform(3)
        return _with_noise(self.room.straight(cells, target, uniform[:, 0]), self._noise, uniform)

    def learn(self, cells: Tensor, actions: Tensor, rewards: Tensor, next_cells: Tensor, step: int) -> None:
        if self._num_goals == 1:
            # Continues after the goal has been found, which is harmless, because the costs are no longer used then.
            self._cost.scatter_(1, next_cells[:, None], torch.inf)
            self._goals[:, 0] = torch.where(rewards > 0, next_cells, self._goals[:, 0])
            return
        stage = self.stage.clamp(max=self._num_goals - 1)[:, None]
        goal = self._goals.gather(1, stage)[:, 0]
        searching = (goal < 0) & (self.stage < self._num_goals)
        rows = searching.nonzero()[:, 0]
        self._cost[rows, next_cells[rows]] = torch.inf
        reached = searching & (rewards > 0)
        self._goals.scatter_(1, stage, torch.where(reached, next_cells, goal)[:, None])
        rows = reached.nonzero()[:, 0]
        self._cost[rows] = self._tie_break[rows]  # resets the costs, because the next goal may be in any cell


class ActionExplorer(Source):
    """Knows where the goal is but not what its actions do.

    It takes the action that most probably leads towards the goal, given everything it has observed. It therefore tries
    an unknown action only if no known action leads towards the goal.
    """

    def __init__(
        self, room: DarkroomPermuted, tasks: Tensor, draws: Draws, num_steps: int, noise: float = 0.02
    ) -> None:
        super().__init__(room, tasks, draws, num_steps)
        self._noise, device = noise, tasks.device
        moves = room.moves.on(device)  # [task, action] -> move
        self._moves = moves.t().contiguous()
        self._one_hot_moves = (
            torch.nn.functional.one_hot(moves, NUM_ACTIONS).float().flatten(1)
        )  # [task, action * move]
        # The tasks that the observations have not ruled out yet.
        self._possible = torch.ones(len(tasks), room.num_tasks, dtype=torch.bool, device=device)
        cells = torch.arange(room.num_cells, device=device)
        self._outcomes = room.neighbours(cells)  # [cell, move] -> cell
        goal = room.num_cells - 1
        distance = 2 * (room.size - 1) - cells // room.size - cells % room.size
        closer = distance[self._outcomes] < distance[:, None]
        # [cell, move]: whether the move gets closer to the goal, or stays there.
        self._forward = (closer | (self._outcomes == goal)).float()

    def act(self, cells: Tensor, step: int) -> Tensor:
        ways = (self._possible.float() @ self._one_hot_moves).view(-1, NUM_ACTIONS, NUM_ACTIONS)
        # The score of an action is the number of possible tasks in which it leads towards the goal. Adds random numbers
        # below 1 only to break ties.
        score = (ways * self._forward[cells][:, None]).sum(dim=2)
        uniform = self.draws.uniform(NUM_ACTIONS + 3)
        return _with_noise((score + uniform[:, 3:] / 2).argmax(dim=1), self._noise, uniform)

    def learn(self, cells: Tensor, actions: Tensor, rewards: Tensor, next_cells: Tensor, step: int) -> None:
        is_consistent = self._outcomes[cells] == next_cells[:, None]  # [batch, move]
        self._possible &= is_consistent.gather(1, self._moves[actions])


def explorer(room: Room, tasks: Tensor, draws: Draws, num_steps: int, noise: float = 0.02) -> Source:
    """Returns the explorer for this environment; `noise` is the probability of a random action."""
    if isinstance(room, DarkroomPermuted):
        return ActionExplorer(room, tasks, draws, num_steps, noise)
    return Explorer(room, tasks, draws, num_steps, noise)


def _with_noise(actions: Tensor, noise: float, uniform: Tensor) -> Tensor:
    return torch.where(uniform[:, 1] < noise, (uniform[:, 2] * NUM_ACTIONS).long(), actions)
