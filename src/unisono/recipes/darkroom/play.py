"""Playing: the transformer acts, episode after episode, and learns from its context alone.

Hundreds of tasks are played at once and all are at the same step, so one cache of keys and values serves them all.
When the context is full, the oldest episode is dropped and the rest is read again from its beginning: exactly what
the transformer was trained on, whichever episode it is in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor

from unisono.recipes.darkroom.model import NOTHING_YET, HistoryReader, Tokens
from unisono.recipes.darkroom.rooms import NUM_ACTIONS, Episode, Room

_WARM_UP = 4


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
    game = _Game(model, room, tasks, chances, greedy, dtype)
    one_step = _recorded(game.step) if tasks.is_cuda else game.step
    for step in range(chances.shape[1]):
        if step % room.horizon == 0:
            game.begin_episode()
        anew = context.at(step, game.past)
        if anew is not None:
            game.read(anew)
        one_step()
    return game.rewards.view(len(tasks), -1, room.horizon).sum(-1)


class _Game:
    """All rows of a batch, at the same step. Everything that changes is a tensor that stays where it is."""

    def __init__(
        self, model: HistoryReader, room: Room, tasks: Tensor, chances: Tensor, greedy: bool, dtype: torch.dtype
    ) -> None:
        self._model, self._room, self._tasks, self._chances, self._greedy = model, room, tasks, chances, greedy
        self.past = Past(len(tasks), chances.shape[1], tasks.device)
        self.rewards = torch.zeros_like(self.past.rewards)
        self._cache = model.new_cache(len(tasks), dtype)
        self._now = torch.zeros(1, dtype=torch.int64, device=tasks.device)
        self._episode = room.begin(tasks)
        self._action, self._reward = torch.full_like(tasks, NOTHING_YET), torch.zeros_like(tasks)

    def begin_episode(self) -> None:
        """Everybody back to the start."""
        self._take(self._room.begin(self._tasks))

    def read(self, tokens: Tokens) -> None:
        """The context from its beginning."""
        self._cache.clear()
        self._model(tokens, self._cache)

    def step(self) -> None:
        """Each row acts once."""
        cells = self._room.cell(self._episode)
        seen = ((self.past.cells, cells), (self.past.actions, self._action), (self.past.rewards, self._reward))
        for column, values in seen:
            column.index_copy_(1, self._now, values[:, None])
        marks = torch.zeros_like(cells)[:, None] if self._model.shape.marks else None
        tokens = Tokens(cells[:, None], self._action[:, None], self._reward[:, None], marks)
        logits = self._model(tokens, self._cache)[:, -1]
        chance = self._chances.index_select(1, self._now)[:, 0]
        action = logits.argmax(-1) if self._greedy else draw(logits, chance)
        episode, reward = self._room.step(self._episode, action)
        self.rewards.index_copy_(1, self._now, reward[:, None])
        self._take(episode)
        self._action.copy_(action)
        self._reward.copy_(reward)
        self._now += 1

    def _take(self, episode: Episode) -> None:
        for f in fields(episode):
            getattr(self._episode, f.name).copy_(getattr(episode, f.name))


def draw(logits: Tensor, chance: Tensor) -> Tensor:
    """[batch] actions drawn from [batch, actions] logits, each by one uniform number."""
    below = logits.float().softmax(-1).cumsum(-1) <= chance[:, None]
    return below.sum(-1).clamp(max=NUM_ACTIONS - 1)


def _recorded(step: Callable[[], None]) -> Callable[[], None]:
    """The same step as a CUDA graph, after the first few: a hundred small kernels in one launch."""
    graph = torch.cuda.CUDAGraph()
    calls = 0

    def run() -> None:
        nonlocal calls
        calls += 1
        if calls < _WARM_UP:
            step()
            return
        if calls == _WARM_UP:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):  # records, and does not run
                step()
        graph.replay()

    return run
