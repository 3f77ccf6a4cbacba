"""The environments as gymnasium environments, one episode at a time; importing this module registers them.

    import gymnasium
    import unisono.recipes.darkroom.gym

    room = gymnasium.make("unisono/Darkroom-v0", task=5)

They are written in plain Python, independently of `rooms`, so that tests can compare the two implementations.
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
    """A dark room: the agent observes its own cell (x, y) and must find the goal by its rewards.

    `task` is the number of the task; without it, every episode has a random task (`info["task"]`). An episode is
    *truncated* after `horizon` steps. (Other implementations set `terminated` too, which tells a learner that the value
    of the last state is 0.)
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012  # declared so by gymnasium

    def __init__(
        self, task: int | None = None, size: int = 9, horizon: int = 20, render_mode: str | None = None
    ) -> None:
        if size < 2 or horizon < 1:
            raise ValueError(f"expected a size of at least 2 and a horizon of at least 1, got {size} and {horizon}")
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(f'render_mode: expected "ansi" or None, got {render_mode!r}')
        self.size, self.horizon, self.render_mode = size, horizon, render_mode
        if task is not None and not 0 <= task < self.num_tasks:
            raise ValueError(f"task: expected 0 to {self.num_tasks - 1}, got {task}")
        self.observation_space = gymnasium.spaces.Box(0, size - 1, shape=(2,), dtype=np.int32)
        self.action_space = gymnasium.spaces.Discrete(5)
        self._fixed_task = task
        self._task = task or 0
        self._at: Cell = self._start
        self._steps: int | None = None  # None before the first reset

    @property
    def num_tasks(self) -> int:
        """Number of tasks."""
        return self.size**2

    @property
    def _start(self) -> Cell:
        return self.size // 2, self.size // 2

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Starts an episode, with a random task if none is fixed."""
        super().reset(seed=seed)
        self._task = int(self.np_random.integers(self.num_tasks)) if self._fixed_task is None else self._fixed_task
        self._at, self._steps = self._start, 0
        return self._observation(), {"task": self._task}

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Takes an action: 0 is x+1, 1 is x-1, 2 is y+1, 3 is y-1, 4 stays. A move into a wall stays in place."""
        if self._steps is None or self._steps >= self.horizon:
            raise gymnasium.error.ResetNeeded("the episode has ended or not started; call reset() first")
        if not self.action_space.contains(action):
            raise gymnasium.error.InvalidAction(f"action: expected an integer from 0 to 4, got {action!r}")
        x, y = self._at
        move = self._move(int(action))
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
        return self._observation(), self._reward(), False, self._steps == self.horizon, {"task": self._task}

    def render(self) -> str | None:
        """Draws the room as text, x to the right and y upwards: @ is the agent, * the goal, k the key, D the door."""
        if self.render_mode is None:
            return None
        symbols = {**{cell: symbol for symbol, cell in self._hidden().items()}, self._at: "@"}
        rows = [[symbols.get((x, y), ".") for x in range(self.size)] for y in reversed(range(self.size))]
        return "\n".join("".join(row) for row in rows) + "\n"

    def _observation(self) -> Observation:
        return np.array(self._at, dtype=np.int32)

    def _cell(self, number: int) -> Cell:
        return number // self.size, number % self.size

    def _move(self, action: int) -> int:
        return action

    def _reward(self) -> float:
        """Returns the reward of the current cell."""
        return float(self._at in self._hidden().values())

    def _hidden(self) -> dict[str, Cell]:
        """Returns the cells that the agent must find, by the symbols that render() draws."""
        return {"*": self._cell(self._task)}


class DarkroomEnv(RoomEnv):
    """Every step that ends in the goal cell gives a reward of 1. A task is the number of that cell: x * size + y."""


class DarkroomPermutedEnv(RoomEnv):
    """The goal is the far corner; a task (0 to 119) is a permutation of the actions."""

    @property
    def num_tasks(self) -> int:
        """Number of tasks."""
        return 120

    @property
    def _start(self) -> Cell:
        return 0, 0

    def _move(self, action: int) -> int:
        return next(itertools.islice(itertools.permutations(range(5)), self._task, None))[action]

    def _hidden(self) -> dict[str, Cell]:
        return {"*": (self.size - 1, self.size - 1)}


class DarkKeyToDoorEnv(RoomEnv):
    """The key and then the door give a reward of 1, once each. A task is key cell * size² + door cell.

    A step either takes the key or opens the door, never both, even if they are in the same cell.
    """

    def __init__(
        self, task: int | None = None, size: int = 9, horizon: int = 50, render_mode: str | None = None
    ) -> None:
        super().__init__(task, size, horizon, render_mode)
        self._has_key = self._is_open = False

    @property
    def num_tasks(self) -> int:
        """Number of tasks."""
        return self.size**4

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Starts an episode, with a random task if none is fixed."""
        self._has_key = self._is_open = False
        return super().reset(seed=seed, options=options)

    def _reward(self) -> float:
        key, door = (self._cell(number) for number in divmod(self._task, self.size**2))
        if not self._has_key:
            self._has_key = self._at == key
            return float(self._has_key)
        if not self._is_open:
            self._is_open = self._at == door
            return float(self._is_open)
        return 0.0

    def _hidden(self) -> dict[str, Cell]:
        key, door = (self._cell(number) for number in divmod(self._task, self.size**2))
        return {**({} if self._is_open else {"D": door}), **({} if self._has_key else {"k": key})}


ENVIRONMENTS: dict[str, type[RoomEnv]] = {
    "unisono/Darkroom-v0": DarkroomEnv,
    "unisono/DarkroomPermuted-v0": DarkroomPermutedEnv,
    "unisono/DarkKeyToDoor-v0": DarkKeyToDoorEnv,
}


def register() -> None:
    """Registers the environments with gymnasium; later calls do nothing."""
    for name, environment in ENVIRONMENTS.items():
        if name not in gymnasium.registry:
            gymnasium.register(name, entry_point=f"{__name__}:{environment.__name__}")


register()
