"""The environments. Thousands of episodes run as one batch, in which a step takes only a few tensor operations.

A room is a grid with walls around it. An agent observes only its own cell. It must infer the task (where the goal is,
what the actions do, where the key and the door are) from rewards. Episodes have a fixed length and all rows of a batch
are at the same step, so batches need neither masks nor resets of single rows.

Cells and goals are numbered x * size + y.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import permutations
from typing import ClassVar

import torch
from torch import Tensor

from unisono.errors import ConfigError

NUM_ACTIONS = 5
MOVES = ((1, 0), (-1, 0), (0, 1), (0, -1), (0, 0))  # dx and dy of each action
STAY = NUM_ACTIONS - 1
MAX_SIZE = 16  # because a history stores a cell in one byte


@dataclass(frozen=True)
class Episode:
    """The state of a batch of episodes."""

    tasks: Tensor  # [batch], int64
    cells: Tensor  # [batch], int64
    stage: Tensor  # [batch], int64; in DarkKeyToDoor 1 after taking the key and 2 after opening the door; otherwise 0


class Table:
    """A constant tensor with a copy on every device that uses it."""

    def __init__(self, values: Tensor) -> None:
        self._copies = {values.device: values}

    def on(self, device: torch.device) -> Tensor:
        """Returns the copy on this device."""
        if device not in self._copies:
            self._copies[device] = next(iter(self._copies.values())).to(device)
        return self._copies[device]


class Room(ABC):
    """Base class of the environments."""

    name: ClassVar[str]
    usual_horizon: ClassVar[int] = 20
    num_stages: ClassVar[int] = 1
    num_tasks: int
    start: tuple[int, int]

    def __init__(self, size: int = 9, horizon: int = 0) -> None:
        """Creates a grid of size x size cells with episodes of `horizon` steps (0: the environment's usual length)."""
        if not 2 <= size <= MAX_SIZE:
            raise ConfigError(f"grid_size: expected 2 to {MAX_SIZE}, got {size}")
        if horizon < 0:
            raise ConfigError(f"horizon: expected at least 1, or 0 for the usual {self.usual_horizon}, got {horizon}")
        self.size, self.horizon = size, horizon or self.usual_horizon
        self._neighbours = Table(_neighbours(size))
        self._straight_moves = Table(_straight_moves(size))

    @property
    def num_cells(self) -> int:
        """Number of cells, which are the possible observations."""
        return self.size * self.size

    def begin(self, tasks: Tensor) -> Episode:
        """Starts an episode of each task."""
        start = self.start[0] * self.size + self.start[1]
        return Episode(tasks, torch.full_like(tasks, start), torch.zeros_like(tasks))

    def neighbours(self, cells: Tensor) -> Tensor:
        """Returns the cells that the five moves lead to, [batch, moves]."""
        return self._neighbours.on(cells.device).view(-1, NUM_ACTIONS)[cells]

    def move(self, tasks: Tensor, cells: Tensor, actions: Tensor) -> Tensor:
        """Returns the cells that the actions lead to. A move into a wall leads to the same cell."""
        return self._neighbours.on(cells.device)[cells * NUM_ACTIONS + actions]

    def step(self, episode: Episode, actions: Tensor) -> tuple[Episode, Tensor]:
        """Takes one action per episode ([batch], 0 to 4); returns the new state and the rewards ([batch], int64)."""
        cells = self.move(episode.tasks, episode.cells, actions)
        rewards = (cells == self.target(episode.tasks, episode.stage)).long()
        stage = episode.stage + rewards if self.num_stages > 1 else episode.stage
        return Episode(episode.tasks, cells, stage), rewards

    def straight(self, cells: Tensor, targets: Tensor, uniform: Tensor) -> Tensor:
        """Returns the moves [batch] that lead straight from cells to targets; at a target, the move that stays there.

        If a move along x and a move along y are equally good, `uniform` [batch], in [0, 1), decides.
        """
        along_y = (uniform >= 0.5).long()
        return self._straight_moves.on(cells.device)[(along_y * self.num_cells + cells) * self.num_cells + targets]

    def best_actions(self, episode: Episode, uniform: Tensor) -> Tensor:
        """Returns optimal actions [batch]; `uniform` decides between equally good actions."""
        targets = self.target(episode.tasks, episode.stage)
        return self.straight(episode.cells, torch.where(targets < 0, episode.cells, targets), uniform)

    @abstractmethod
    def target(self, tasks: Tensor, stage: Tensor) -> Tensor:
        """Returns the cells [batch] of the next reward; -1 if the episode has no further reward."""

    @abstractmethod
    def optimum(self, tasks: Tensor) -> Tensor:
        """Returns the largest possible return of an episode of each task, [batch]."""

    def describe(self, task: int) -> str:
        """Describes a task in a few words, for labels in figures."""
        return f"goal {self._coordinates(task)}"

    def _coordinates(self, cell: int) -> str:
        return f"({cell // self.size}, {cell % self.size})"

    def _distance(self, cells: Tensor, targets: Tensor) -> Tensor:
        across = (cells // self.size - targets // self.size).abs()
        return across + (cells % self.size - targets % self.size).abs()


class Darkroom(Room):
    """The agent must find the goal cell; every step that ends there gives a reward of 1. A task is a goal cell."""

    name = "darkroom"

    def __init__(self, size: int = 9, horizon: int = 0) -> None:
        super().__init__(size, horizon)
        self.num_tasks = size * size
        self.start = (size // 2, size // 2)

    def target(self, tasks: Tensor, stage: Tensor) -> Tensor:
        return tasks

    def optimum(self, tasks: Tensor) -> Tensor:
        distance = self._distance(self.begin(tasks).cells, tasks)
        # The step that reaches the goal is rewarded; if the goal is the start cell, every step is rewarded.
        return (self.horizon + 1 - distance).clamp(0, self.horizon)


class DarkroomPermuted(Room):
    """The agent must find out what its actions do: a task is one of 120 permutations. The goal is the far corner."""

    name = "darkroom_permuted"
    num_tasks = 120
    start = (0, 0)

    def __init__(self, size: int = 9, horizon: int = 0) -> None:
        super().__init__(size, horizon)
        self.moves = Table(torch.tensor(list(permutations(range(NUM_ACTIONS)))))  # [task, action] -> move
        self._actions = Table(self.moves.on(torch.device("cpu")).argsort(dim=1))  # [task, move] -> action

    def describe(self, task: int) -> str:
        return "actions " + " ".join(str(move) for move in self.moves.on(torch.device("cpu"))[task].tolist())

    def move(self, tasks: Tensor, cells: Tensor, actions: Tensor) -> Tensor:
        return super().move(tasks, cells, self.moves.on(cells.device)[tasks, actions])

    def target(self, tasks: Tensor, stage: Tensor) -> Tensor:
        return torch.full_like(tasks, self.num_cells - 1)

    def best_actions(self, episode: Episode, uniform: Tensor) -> Tensor:
        moves = super().best_actions(episode, uniform)
        return self._actions.on(moves.device)[episode.tasks, moves]

    def optimum(self, tasks: Tensor) -> Tensor:
        return torch.full_like(tasks, max(0, self.horizon + 1 - 2 * (self.size - 1)))


class DarkKeyToDoor(Room):
    """The agent must find the key, then the door; each gives a reward of 1. A task is key cell * cells + door cell.

    One step takes the key or opens the door, never both. If both are in the same cell, the step that arrives there
    takes the key, and a later step that ends there (such as staying) opens the door. Taking the key needs a step even
    if it is in the start cell.
    """

    name = "dark_key_to_door"
    usual_horizon = 50
    num_stages = 3

    def __init__(self, size: int = 9, horizon: int = 0) -> None:
        super().__init__(size, horizon)
        self.num_tasks = (size * size) ** 2
        self.start = (size // 2, size // 2)

    def describe(self, task: int) -> str:
        key, door = divmod(task, self.num_cells)
        return f"key {self._coordinates(key)}, door {self._coordinates(door)}"

    def target(self, tasks: Tensor, stage: Tensor) -> Tensor:
        key, door = tasks // self.num_cells, tasks % self.num_cells
        return torch.where(stage == 0, key, torch.where(stage == 1, door, -1))

    def optimum(self, tasks: Tensor) -> Tensor:
        key, door = tasks // self.num_cells, tasks % self.num_cells
        # An agent that is already in the right cell still needs one step.
        to_key = self._distance(self.begin(tasks).cells, key).clamp(min=1)
        to_door = to_key + self._distance(key, door).clamp(min=1)
        return (to_key <= self.horizon).long() + (to_door <= self.horizon).long()


ROOMS: dict[str, type[Room]] = {room.name: room for room in (Darkroom, DarkroomPermuted, DarkKeyToDoor)}


@dataclass(frozen=True)
class Split:
    """The tasks for training, for choosing the best checkpoint, and for evaluation only."""

    train: list[int]
    validation: list[int]
    unseen: list[int]

    @property
    def all(self) -> list[int]:
        """Returns the tasks of all three groups."""
        return [*self.train, *self.validation, *self.unseen]


def split_tasks(num_tasks: int, seed: int, train_ratio: float, num_validation: int) -> Split:
    """Shuffles and splits the tasks: the fraction `train_ratio` is for training and validation, the rest is unseen."""
    tasks = list(range(num_tasks))
    random.Random(seed).shuffle(tasks)
    num_train = round(num_tasks * train_ratio)
    seen, unseen = tasks[:num_train], tasks[num_train:]
    if not 0 <= num_validation < len(seen):
        raise ConfigError(
            f"num_validation {num_validation} leaves no tasks to train on, because train_env_ratio {train_ratio} of "
            f"{num_tasks} tasks is {len(seen)}; use a smaller num_validation or a larger train_env_ratio"
        )
    return Split(seen[: len(seen) - num_validation], seen[len(seen) - num_validation :], unseen)


def _neighbours(size: int) -> Tensor:
    """Returns a flat table of the cell that each move leads to; the index is cell * actions + action."""
    cells = torch.arange(size * size)[:, None]
    moves = torch.tensor(MOVES)
    x, y = (cells // size + moves[:, 0]).clamp(0, size - 1), (cells % size + moves[:, 1]).clamp(0, size - 1)
    return (x * size + y).flatten()


def _straight_moves(size: int) -> Tensor:
    """Returns a flat table of the move from each cell towards each target.

    The index is (along_y * cells + cell) * cells + target; `along_y` is 1 for paths that move along y first.
    """
    cells = torch.arange(size * size)
    dx, dy = (cells[None] // size - cells[:, None] // size), (cells[None] % size - cells[:, None] % size)
    along_x, along_y = (dx < 0).long(), 2 + (dy < 0).long()
    x_first = torch.where(dx != 0, along_x, torch.where(dy != 0, along_y, STAY))
    y_first = torch.where(dy != 0, along_y, torch.where(dx != 0, along_x, STAY))
    return torch.stack([x_first, y_first]).flatten()
