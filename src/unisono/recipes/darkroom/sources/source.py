"""The interface of a source learner, and the loop that runs thousands of them.

A learner acts, observes the outcome and improves from episode to episode. The transformer is trained on its history.
All random numbers of a history depend only on (seed, task, stream, step), where the stream is the number of the learner
within its task. A history therefore does not depend on the rank or on other histories that are collected with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.data.bits import key_of, keys_for, random_bits, to_unit
from unisono.recipes.darkroom.rooms import Room

_MAX_DRAWS = 16  # maximum number of calls of Draws.uniform per step


@dataclass(frozen=True)
class Histories:
    """Learning histories as bytes, [tasks, streams, steps]; each episode directly follows the previous one."""

    tasks: Tensor  # [tasks], int64
    cells: Tensor  # the cell before the action
    actions: Tensor
    rewards: Tensor


class Draws:
    """Random numbers for a batch of histories; every step has new numbers."""

    def __init__(self, seed: int, tasks: Tensor, streams: Tensor) -> None:
        self._keys = keys_for(key_of(seed), keys_for(0, tasks) + streams)  # [batch]
        self._step, self._draw = -1, 0

    def next_step(self) -> None:
        """Switches to the random numbers of the next step."""
        self._step, self._draw = self._step + 1, 0

    def uniform(self, *shape: int) -> Tensor:
        """Returns [batch, *shape] numbers in [0, 1)."""
        size = int(torch.Size(shape).numel())
        counter = torch.arange(size, device=self._keys.device) * _MAX_DRAWS + self._draw + (self._step << 32)
        self._draw += 1
        return to_unit(random_bits(self._keys[:, None], counter[None]), torch.float32).view(-1, *shape)


class Source(ABC):
    """A batch of learners, one per row."""

    def __init__(self, room: Room, tasks: Tensor, draws: Draws, num_steps: int) -> None:
        """`num_steps` is the length of the histories. Only experts may use `tasks` to choose actions."""
        self.room, self.tasks, self.draws, self.num_steps = room, tasks, draws, num_steps
        # `Episode.stage` of each learner before and after the action. Learners may read it, because it is only the
        # number of one-time rewards that they have received in this episode.
        self.stage = self.next_stage = torch.zeros_like(tasks)

    @abstractmethod
    def act(self, cells: Tensor, step: int) -> Tensor:
        """Returns the actions of all learners, [batch], at this step of their histories."""

    @abstractmethod
    def learn(self, cells: Tensor, actions: Tensor, rewards: Tensor, next_cells: Tensor, step: int) -> None:
        """Learns from the outcome; `next_cells` are the true next cells, even at the end of an episode."""


def run_learners(
    make: Callable[[Room, Tensor, Draws, int], Source],
    room: Room,
    tasks: Tensor,
    num_streams: int,
    num_steps: int,
    seed: int,
) -> Histories:
    """Runs `num_streams` learners per task on the device of `tasks` and returns their histories."""
    rows = tasks.repeat_interleave(num_streams)
    streams = torch.arange(num_streams, device=tasks.device).repeat(len(tasks))
    draws = Draws(seed, rows, streams)
    source = make(room, rows, draws, num_steps)
    columns = torch.empty(3, num_steps, len(rows), dtype=torch.uint8, device=tasks.device)
    episode = room.begin(rows)
    for step in range(num_steps):
        if step % room.horizon == 0:
            episode = room.begin(rows)
        draws.next_step()
        cells, source.stage = episode.cells, episode.stage
        actions = source.act(cells, step)
        episode, rewards = room.step(episode, actions)
        source.next_stage = episode.stage
        source.learn(cells, actions, rewards, episode.cells, step)
        for column, values in zip(columns[:, step], (cells, actions, rewards), strict=True):
            column.copy_(values)
    cells, actions, rewards = columns.transpose(1, 2).reshape(3, len(tasks), num_streams, num_steps)
    return Histories(tasks, cells, actions, rewards)
