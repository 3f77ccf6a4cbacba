"""The rooms as gymnasium environments, one episode at a time; importing this module registers them.

    import gymnasium
    import unisono.recipes.darkroom.gym

    room = gymnasium.make("unisono/Darkroom-v0", task=5)

They are written apart from `rooms`, in plain Python, so that each can be held against the other.
"""

from __future__ import annotations

import itertools
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

Cell = tuple[int, int]
Observation = NDArray[np.int32]


class RoomEnv(gymnasium.Env[Observation, np.int64]):
    """A dark room: the agent sees its own cell (x, y), and what it has to find only by the reward.

    `task` names what is hidden; without it every episode has a new one, drawn by the environment's own generator and
    told in `info["task"]`. Episodes last `horizon` steps and then are *truncated*: nothing in the room has come to an
    end, only the time is over. (Other versions set `terminated` as well, which tells a learner that the last state is
    worth nothing.)
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012  # declared so by gymnasium

    def __init__(
        self, task: int | None = None, size: int = 9, horizon: int = 20, render_mode: str | None = None
    ) -> None:
        if size < 2 or horizon < 1:
            raise ValueError(f"size {size}, horizon {horizon}: expected at least 2 and 1")
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(f'render_mode {render_mode!r}: this room can be drawn as "ansi" only')
        self.size, self.horizon, self.render_mode = size, horizon, render_mode
        if task is not None and not 0 <= task < self.num_tasks:
            raise ValueError(f"task {task}: this room has tasks 0 to {self.num_tasks - 1}")
        self.observation_space = gymnasium.spaces.Box(0, size - 1, shape=(2,), dtype=np.int32)
        self.action_space = gymnasium.spaces.Discrete(5)
        self._given_task = task
        self._task = task or 0
        self._at: Cell = self._start
        self._steps: int | None = None  # none before the first reset

    @property
    def num_tasks(self) -> int:
        """How many tasks there are."""
        return self.size**2

    @property
    def _start(self) -> Cell:
        return self.size // 2, self.size // 2

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begins an episode, on a new task if none was given."""
        super().reset(seed=seed)
        self._task = int(self.np_random.integers(self.num_tasks)) if self._given_task is None else self._given_task
        self._at, self._steps = self._start, 0
        return self._observation(), {"task": self._task}

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Goes one step: 0 x+1, 1 x-1, 2 y+1, 3 y-1, 4 stays; who walks into a wall stays as well."""
        if self._steps is None or self._steps >= self.horizon:
            raise gymnasium.error.ResetNeeded("the episode has ended or not begun; call reset() first")
        if not self.action_space.contains(action):
            raise gymnasium.error.InvalidAction(f"action {action!r}: expected a whole number, 0 to 4")
        x, y = self._at
        move = self._meaning(int(action))
        if move == 0:
            x = min(x + 1, self.size - 1)
        elif move == 1:
            x = max(x - 1, 0)
        elif move == 2:
            y = min(y + 1, self.size - 1)
        elif move == 3:
            y = max(y - 1, 0)
        self._at = (x, y)
        self._steps += 1
        return self._observation(), self._arrive(), False, self._steps == self.horizon, {"task": self._task}

    def render(self) -> str | None:
        """The room as text, x to the right and y upwards: @ the agent, and what it cannot see."""
        if self.render_mode is None:
            return None
        signs = {**{cell: sign for sign, cell in self._things().items()}, self._at: "@"}
        rows = [[signs.get((x, y), ".") for x in range(self.size)] for y in reversed(range(self.size))]
        return "\n".join("".join(row) for row in rows) + "\n"

    def _observation(self) -> Observation:
        return np.array(self._at, dtype=np.int32)

    def _cell(self, number: int) -> Cell:
        return number // self.size, number % self.size

    def _meaning(self, action: int) -> int:
        return action

    def _arrive(self) -> float:
        """The reward for being where the agent is now."""
        return float(self._at in self._things().values())

    def _things(self) -> dict[str, Cell]:
        """What is hidden in the room, by the sign it is drawn with."""
        return {"*": self._cell(self._task)}


class DarkroomEnv(RoomEnv):
    """Reward 1 on every step that ends on the goal. A task is a goal: x * size + y."""


class DarkroomPermutedEnv(RoomEnv):
    """The goal is the far corner, but a task (0 to 119) mixes up the actions."""

    @property
    def num_tasks(self) -> int:
        """How many tasks there are."""
        return 120

    @property
    def _start(self) -> Cell:
        return 0, 0

    def _meaning(self, action: int) -> int:
        return next(itertools.islice(itertools.permutations(range(5)), self._task, None))[action]

    def _things(self) -> dict[str, Cell]:
        return {"*": (self.size - 1, self.size - 1)}


class DarkKeyToDoorEnv(RoomEnv):
    """Reward 1 for the key and then 1 for the door, once each. A task is a pair: key * size² + door.

    A step takes the key or opens the door, never both, also where they share a cell.
    """

    def __init__(
        self, task: int | None = None, size: int = 9, horizon: int = 50, render_mode: str | None = None
    ) -> None:
        super().__init__(task, size, horizon, render_mode)
        self._has_key = self._is_open = False

    @property
    def num_tasks(self) -> int:
        """How many tasks there are."""
        return self.size**4

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begins an episode, on a new task if none was given."""
        self._has_key = self._is_open = False
        return super().reset(seed=seed, options=options)

    def _arrive(self) -> float:
        key, door = (self._cell(number) for number in divmod(self._task, self.size**2))
        if not self._has_key:
            self._has_key = self._at == key
            return float(self._has_key)
        if not self._is_open:
            self._is_open = self._at == door
            return float(self._is_open)
        return 0.0

    def _things(self) -> dict[str, Cell]:
        key, door = (self._cell(number) for number in divmod(self._task, self.size**2))
        return {**({} if self._is_open else {"D": door}), **({} if self._has_key else {"k": key})}


ENVIRONMENTS: dict[str, type[RoomEnv]] = {
    "unisono/Darkroom-v0": DarkroomEnv,
    "unisono/DarkroomPermuted-v0": DarkroomPermutedEnv,
    "unisono/DarkKeyToDoor-v0": DarkKeyToDoorEnv,
}


def register() -> None:
    """Makes the rooms known to gymnasium.make; more than once does no harm."""
    for name, environment in ENVIRONMENTS.items():
        if name not in gymnasium.registry:
            gymnasium.register(name, entry_point=f"{__name__}:{environment.__name__}")


register()
