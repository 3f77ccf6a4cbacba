"""The rooms, thousands at once: environments in which an episode is a few tensor operations.

A room is a grid with walls around it. An agent sees its own cell and nothing else; what it has to find out (the task:
where the goal is, what the actions do, where key and door are) it can only learn from rewards. Episodes have a fixed
length and all rows of a batch are at the same step of theirs, so there is no mask and no reset inside a batch.

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
MOVES = ((1, 0), (-1, 0), (0, 1), (0, -1), (0, 0))  # of x and y, by action; the last one stays
STAY = NUM_ACTIONS - 1
MAX_SIZE = 16  # histories keep a cell in a byte


@dataclass(frozen=True)
class Episode:
    """A batch of episodes at some step: where each agent is, which task it has, and how far it has come."""

    tasks: Tensor  # [batch], int64
    cells: Tensor  # [batch], int64
    stage: Tensor  # [batch], int64; 0, and with a key and a door: 1 with the key, 2 when the door is open


class Table:
    """Numbers to look up, on whichever device they are looked up from."""

    def __init__(self, values: Tensor) -> None:
        self._copies = {values.device: values}

    def on(self, device: torch.device) -> Tensor:
        """The numbers on this device, copied there once."""
        if device not in self._copies:
            self._copies[device] = next(iter(self._copies.values())).to(device)
        return self._copies[device]


class Room(ABC):
    """What is common to all rooms."""

    name: ClassVar[str]
    own_horizon: ClassVar[int] = 20
    num_stages: ClassVar[int] = 1
    num_tasks: int
    start: tuple[int, int]

    def __init__(self, size: int = 9, horizon: int = 0) -> None:
        """A room of size x size cells and episodes of `horizon` steps; 0 is what is usual for this room."""
        if not 2 <= size <= MAX_SIZE:
            raise ConfigError(f"a room of {size} x {size} cells: its sides may have 2 to {MAX_SIZE} cells")
        if horizon < 0:
            raise ConfigError(
                f"episodes of {horizon} steps: expected at least 1 (or 0 for {self.own_horizon}, the usual)"
            )
        self.size, self.horizon = size, horizon or self.own_horizon
        self._neighbours = Table(_neighbours(size))
        self._ways = Table(_ways(size))

    @property
    def num_cells(self) -> int:
        """How many different observations there are."""
        return self.size * self.size

    def begin(self, tasks: Tensor) -> Episode:
        """A new episode of each task."""
        start = self.start[0] * self.size + self.start[1]
        return Episode(tasks, torch.full_like(tasks, start), torch.zeros_like(tasks))

    def cell(self, episode: Episode) -> Tensor:
        """[batch] what the agents see: the number of their cell."""
        return episode.cells

    def neighbours(self, cells: Tensor) -> Tensor:
        """[batch, moves] the cells to which the five moves lead."""
        return self._neighbours.on(cells.device).view(-1, NUM_ACTIONS)[cells]

    def move(self, tasks: Tensor, cells: Tensor, actions: Tensor) -> Tensor:
        """The cells to which the actions lead; who walks into a wall stays."""
        return self._neighbours.on(cells.device)[cells * NUM_ACTIONS + actions]

    def step(self, episode: Episode, actions: Tensor) -> tuple[Episode, Tensor]:
        """The episodes after one action each ([batch], 0 to 4), and the rewards ([batch], int64)."""
        cells = self.move(episode.tasks, episode.cells, actions)
        rewards = (cells == self.target(episode.tasks, episode.stage)).long()
        stage = episode.stage + rewards if self.num_stages > 1 else episode.stage
        return Episode(episode.tasks, cells, stage), rewards

    def straight(self, cells: Tensor, targets: Tensor, chance: Tensor) -> Tensor:
        """[batch] the move that leads straight from cell to target; at the target, to stay.

        Where it may go along x or along y, `chance` ([batch], uniform in [0, 1)) decides.
        """
        along_y = (chance >= 0.5).long()
        return self._ways.on(cells.device)[(along_y * self.num_cells + cells) * self.num_cells + targets]

    def best_actions(self, episode: Episode, chance: Tensor) -> Tensor:
        """[batch] what an agent who knows the task would do; `chance` decides where two actions are as good."""
        targets = self.target(episode.tasks, episode.stage)
        return self.straight(episode.cells, torch.where(targets < 0, episode.cells, targets), chance)

    @abstractmethod
    def target(self, tasks: Tensor, stage: Tensor) -> Tensor:
        """[batch] the cell whose arrival is rewarded; -1 when nothing is left to be had."""

    @abstractmethod
    def optimum(self, tasks: Tensor) -> Tensor:
        """[batch] the largest return that an agent who knows the task can get in one episode."""

    def describe(self, task: int) -> str:
        """A task in words."""
        return f"goal {self._cell_in_words(task)}"

    def _cell_in_words(self, cell: int) -> str:
        return f"({cell // self.size}, {cell % self.size})"

    def _distance(self, cells: Tensor, targets: Tensor) -> Tensor:
        across = (cells // self.size - targets // self.size).abs()
        return across + (cells % self.size - targets % self.size).abs()


class Darkroom(Room):
    """Find the goal cell: reward 1 on every step that ends there. 81 tasks on 9 x 9, one for each cell."""

    name = "darkroom"

    def __init__(self, size: int = 9, horizon: int = 0) -> None:
        super().__init__(size, horizon)
        self.num_tasks = size * size
        self.start = (size // 2, size // 2)

    def target(self, tasks: Tensor, stage: Tensor) -> Tensor:
        """See Room."""
        return tasks

    def optimum(self, tasks: Tensor) -> Tensor:
        """See Room."""
        distance = self._distance(self.begin(tasks).cells, tasks)
        # The step that arrives is rewarded already; at the start cell itself every one of them is.
        return (self.horizon + 1 - distance).clamp(0, self.horizon)


class DarkroomPermuted(Room):
    """Find out what the actions do: a task is one of their 120 permutations; the goal is the far corner."""

    name = "darkroom_permuted"
    num_tasks = 120
    start = (0, 0)

    def __init__(self, size: int = 9, horizon: int = 0) -> None:
        super().__init__(size, horizon)
        self.meanings = Table(torch.tensor(list(permutations(range(NUM_ACTIONS)))))  # [task, action] -> move
        self._actions = Table(self.meanings.on(torch.device("cpu")).argsort(dim=1))  # [task, move] -> action

    def describe(self, task: int) -> str:
        """See Room."""
        return "actions " + " ".join(str(move) for move in self.meanings.on(torch.device("cpu"))[task].tolist())

    def move(self, tasks: Tensor, cells: Tensor, actions: Tensor) -> Tensor:
        """See Room."""
        return super().move(tasks, cells, self.meanings.on(cells.device)[tasks, actions])

    def target(self, tasks: Tensor, stage: Tensor) -> Tensor:
        """See Room."""
        return torch.full_like(tasks, self.num_cells - 1)

    def best_actions(self, episode: Episode, chance: Tensor) -> Tensor:
        """See Room."""
        moves = super().best_actions(episode, chance)
        return self._actions.on(moves.device)[episode.tasks, moves]

    def optimum(self, tasks: Tensor) -> Tensor:
        """See Room."""
        return torch.full_like(tasks, max(0, self.horizon + 1 - 2 * (self.size - 1)))


class DarkKeyToDoor(Room):
    """Find the key, then the door: reward 1 for each, once per episode. A task is a pair of cells: key * 81 + door.

    One step takes the key or opens the door, never both: where key and door share a cell, the arrival takes the key and
    a later step that ends on the cell (staying is one) opens the door. The same holds for a key on the start cell.
    """

    name = "dark_key_to_door"
    own_horizon = 50
    num_stages = 3

    def __init__(self, size: int = 9, horizon: int = 0) -> None:
        super().__init__(size, horizon)
        self.num_tasks = (size * size) ** 2
        self.start = (size // 2, size // 2)

    def describe(self, task: int) -> str:
        """See Room."""
        key, door = divmod(task, self.num_cells)
        return f"key {self._cell_in_words(key)}, door {self._cell_in_words(door)}"

    def target(self, tasks: Tensor, stage: Tensor) -> Tensor:
        """See Room."""
        key, door = tasks // self.num_cells, tasks % self.num_cells
        return torch.where(stage == 0, key, torch.where(stage == 1, door, -1))

    def optimum(self, tasks: Tensor) -> Tensor:
        """See Room."""
        key, door = tasks // self.num_cells, tasks % self.num_cells
        # Who is there already has to spend a step on it all the same.
        to_key = self._distance(self.begin(tasks).cells, key).clamp(min=1)
        to_door = to_key + self._distance(key, door).clamp(min=1)
        return (to_key <= self.horizon).long() + (to_door <= self.horizon).long()


ROOMS: dict[str, type[Room]] = {room.name: room for room in (Darkroom, DarkroomPermuted, DarkKeyToDoor)}


@dataclass(frozen=True)
class Split:
    """Which tasks are trained on, which choose the model, and which nobody has seen."""

    train: list[int]
    validation: list[int]
    unseen: list[int]


def split_tasks(num_tasks: int, seed: int, train_ratio: float, num_validation: int) -> Split:
    """The tasks in the order of a seeded shuffle: the first are for training, the last of those for validation."""
    tasks = list(range(num_tasks))
    random.Random(seed).shuffle(tasks)
    num_train = round(num_tasks * train_ratio)
    seen, unseen = tasks[:num_train], tasks[num_train:]
    if not 0 <= num_validation < len(seen):
        raise ConfigError(
            f"{num_validation} tasks for validation, taken out of {len(seen)} seen ones (of {num_tasks} in all), leave "
            "none to train on; take fewer, or a larger train_env_ratio"
        )
    return Split(seen[: len(seen) - num_validation], seen[len(seen) - num_validation :], unseen)


def _neighbours(size: int) -> Tensor:
    """[cell * actions + action] the cell to which a move leads."""
    cells = torch.arange(size * size)[:, None]
    moves = torch.tensor(MOVES)
    x, y = (cells // size + moves[:, 0]).clamp(0, size - 1), (cells % size + moves[:, 1]).clamp(0, size - 1)
    return (x * size + y).flatten()


def _ways(size: int) -> Tensor:
    """[(along_y * cells + cell) * cells + target] the move towards the target, along x or along y first."""
    cells = torch.arange(size * size)
    dx, dy = (cells[None] // size - cells[:, None] // size), (cells[None] % size - cells[:, None] % size)
    along_x, along_y = (dx < 0).long(), 2 + (dy < 0).long()
    x_first = torch.where(dx != 0, along_x, torch.where(dy != 0, along_y, STAY))
    y_first = torch.where(dy != 0, along_y, torch.where(dx != 0, along_x, STAY))
    return torch.stack([x_first, y_first]).flatten()
