"""What a source learner is, and the loop in which thousands of them live.

A learner acts, sees what comes of it, and gets better from episode to episode; its history is what the transformer
reads. Each history belongs to a task and a stream (the n-th learner of that task), and everything random in it is a
function of (seed, task, stream, step): it does not matter which tasks are collected together, on which rank or device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.data.bits import key_of, keys_for, random_bits, to_unit
from unisono.recipes.darkroom.rooms import Room

_DRAWS = 16  # at most so many per step


@dataclass(frozen=True)
class Histories:
    """What learners lived through, [tasks, streams, steps] as bytes; episodes follow each other without a gap."""

    tasks: Tensor  # [tasks], int64
    cells: Tensor  # what was seen before the action
    actions: Tensor
    rewards: Tensor


class Draws:
    """Random numbers of a batch of histories, a fresh set at every step."""

    def __init__(self, seed: int, tasks: Tensor, streams: Tensor) -> None:
        self._keys = keys_for(key_of(seed), keys_for(0, tasks) + streams)  # [batch]
        self._step, self._draw = -1, 0

    def next_step(self) -> None:
        """What is drawn from now on belongs to the next step."""
        self._step, self._draw = self._step + 1, 0

    def uniform(self, *shape: int) -> Tensor:
        """[batch, *shape] numbers in [0, 1)."""
        size = int(torch.Size(shape).numel())
        counter = torch.arange(size, device=self._keys.device) * _DRAWS + self._draw + (self._step << 32)
        self._draw += 1
        return to_unit(random_bits(self._keys[:, None], counter[None]), torch.float32).view(-1, *shape)


class Source(ABC):
    """A batch of learners, one per row."""

    def __init__(self, room: Room, tasks: Tensor, draws: Draws, num_steps: int) -> None:
        """`tasks` is for sources that are told the answer; `num_steps` is how long their history will be."""
        self.room, self.tasks, self.draws, self.num_steps = room, tasks, draws, num_steps
        # How far each learner is in its episode (see Episode), before the action and after it. It may know: a stage is
        # the number of rewards it has had, where rewards are to be had once.
        self.stage = self.next_stage = torch.zeros_like(tasks)

    @abstractmethod
    def act(self, cells: Tensor, step: int) -> Tensor:
        """[batch] the actions of all learners at this step of their histories."""

    @abstractmethod
    def learn(self, cells: Tensor, actions: Tensor, rewards: Tensor, next_cells: Tensor, step: int) -> None:
        """What came of it; `next_cells` is where they really were, also at the end of an episode."""


def live(
    make: Callable[[Room, Tensor, Draws, int], Source],
    room: Room,
    tasks: Tensor,
    num_streams: int,
    num_steps: int,
    seed: int,
) -> Histories:
    """The histories of `num_streams` learners for each task, on the device of `tasks`."""
    rows = tasks.repeat_interleave(num_streams)
    streams = torch.arange(num_streams, device=tasks.device).repeat(len(tasks))
    draws = Draws(seed, rows, streams)
    source = make(room, rows, draws, num_steps)
    lived = torch.empty(3, num_steps, len(rows), dtype=torch.uint8, device=tasks.device)
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
        for kept, values in zip(lived[:, step], (cells, actions, rewards), strict=True):
            kept.copy_(values)
    # Learners act side by side, but a history is read along its steps.
    cells, actions, rewards = lived.transpose(1, 2).reshape(3, len(tasks), num_streams, num_steps)
    return Histories(tasks, cells, actions, rewards)
