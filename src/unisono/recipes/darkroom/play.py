"""Playing: the transformer acts, episode after episode, and learns from its context alone.

Hundreds of tasks are played at once and all are at the same step, so one cache of keys and values serves them all.
When the context is full, the oldest episode is dropped and the rest is read again from its beginning: exactly what
the transformer was trained on, whichever episode it is in.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from unisono.recipes.darkroom.model import NOTHING_YET, HistoryReader, Tokens
from unisono.recipes.darkroom.rooms import NUM_ACTIONS, Room


class Past:
    """What has happened so far in each row, and which of it the context holds."""

    def __init__(self, batch: int, num_steps: int, device: torch.device) -> None:
        empty = torch.zeros(batch, num_steps, dtype=torch.int64, device=device)
        self.cells, self.actions, self.rewards = empty, empty.clone(), empty.clone()  # the last two of the step before

    def stretch(self, begin: int, end: int) -> Tokens:
        """The steps from `begin` to `end`, as if nothing had been before them."""
        cells, actions, rewards = (values[:, begin:end].clone() for values in (self.cells, self.actions, self.rewards))
        actions[:, :1], rewards[:, :1] = NOTHING_YET, 0
        return Tokens(cells, actions, rewards)


class Sliding:
    """A context of the last episodes that fit."""

    def __init__(self, context: int, horizon: int) -> None:
        self._context, self._horizon = context, horizon
        self._begin = 0

    def at(self, step: int, past: Past) -> Tokens | None:
        """What the context is to hold before this step, where that is to be read anew."""
        if step == 0 or step % self._horizon or step - self._begin + self._horizon <= self._context:
            return None
        self._begin += self._horizon
        return past.stretch(self._begin, step)


class Regions:
    """A context of the region before and the current one."""

    def __init__(self, interval: int) -> None:
        self._interval = interval

    def at(self, step: int, past: Past) -> Tokens | None:
        """See Sliding."""
        if step % self._interval:
            return None
        older = past.stretch(max(0, step - self._interval), step)
        batch, device = len(older.cells), older.cells.device

        def between(value: int, middle: Tensor, begin: int | None = None, end: int | None = None) -> Tensor:
            ends = [torch.full((batch, 1), value if at is None else at, device=device) for at in (begin, end)]
            return torch.cat([ends[0], middle, ends[1]], dim=1)

        return Tokens(
            between(0, older.cells),
            between(NOTHING_YET, older.actions),
            between(0, older.rewards),
            between(0, torch.zeros_like(older.cells), 1, 2),
        )


@torch.no_grad()
def play(
    model: HistoryReader,
    room: Room,
    tasks: Tensor,
    chances: Tensor,
    context: Sliding | Regions,
    *,
    greedy: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """[batch, episodes] returns of playing `tasks` ([batch]) with frozen weights.

    `chances` [batch, steps], uniform in [0, 1), are what actions are drawn with; their number says how long to play.
    """
    batch, num_steps = chances.shape
    past = Past(batch, num_steps, tasks.device)
    cache = model.new_cache(batch, dtype)
    episode = room.begin(tasks)
    action, reward = torch.full_like(tasks, NOTHING_YET), torch.zeros_like(tasks)
    rewards = []
    step_once = _single_step(model, cache)
    for step in range(num_steps):
        if step % room.horizon == 0:
            episode = room.begin(tasks)
        anew = context.at(step, past)
        if anew is not None:
            cache.clear()
            model(anew, cache)
        past.cells[:, step], past.actions[:, step], past.rewards[:, step] = room.cell(episode), action, reward
        logits = step_once(past.cells[:, step], action, reward)
        action = logits.argmax(-1) if greedy else draw(logits, chances[:, step])
        episode, reward = room.step(episode, action)
        rewards.append(reward)
    return torch.stack(rewards, dim=1).view(batch, -1, room.horizon).sum(-1)


def draw(logits: Tensor, chance: Tensor) -> Tensor:
    """[batch] actions drawn from [batch, actions] logits, each by one uniform number."""
    below = logits.float().softmax(-1).cumsum(-1) <= chance[:, None]
    return below.sum(-1).clamp(max=NUM_ACTIONS - 1)


def _single_step(model: HistoryReader, cache: object) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def step(cells: Tensor, actions: Tensor, rewards: Tensor) -> Tensor:
        marks = torch.zeros_like(cells)[:, None] if model.shape.marks else None
        logits: Tensor = model(Tokens(cells[:, None], actions[:, None], rewards[:, None], marks), cache)
        return logits[:, -1]

    return step
