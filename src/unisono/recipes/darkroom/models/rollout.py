"""Rollouts: the transformer plays episode after episode with frozen weights and learns only from its context.

All tasks of a batch are at the same step, so they share one cache of keys and values. When the context is full, the
oldest episode is dropped and the rest is computed again, starting with its first token. A context therefore always
looks like the contexts in training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch
import torch.nn.functional as F
from torch import Tensor

from unisono.recipes.darkroom.models.transformer import NO_ACTION, HistoryTransformer, Tokens
from unisono.recipes.darkroom.rooms import NUM_ACTIONS, Episode, Room

_WARM_UP_CALLS = 4


class Past:
    """The cells, actions and rewards of all steps so far, for each row of the batch."""

    def __init__(self, batch: int, num_steps: int, device: torch.device) -> None:
        self.cells = torch.zeros(batch, num_steps, dtype=torch.int64, device=device)
        self.actions, self.rewards = self.cells.clone(), self.cells.clone()  # actions and rewards of the previous step

    def tokens(self, begin: int, end: int) -> Tokens:
        """Returns the steps from `begin` to before `end` as a context whose first token is step `begin`."""
        cells, actions, rewards = (values[:, begin:end].clone() for values in (self.cells, self.actions, self.rewards))
        actions[:, :1], rewards[:, :1] = NO_ACTION, 0
        return Tokens(cells, actions, rewards)


class SlidingContext:
    """A context of the most recent episodes, as many as fit."""

    def __init__(self, context: int, horizon: int) -> None:
        self._context, self._horizon = context, horizon
        self._begin = 0

    def rebuilt(self, step: int, past: Past) -> Tokens | None:
        """Returns the tokens with which to refill the cache before this step; None if the cache can be continued."""
        if step == 0 or step % self._horizon or step - self._begin + self._horizon <= self._context:
            return None
        self._begin += self._horizon
        return past.tokens(self._begin, step)


class RegionContext:
    """A context of the previous region, between two separators, and of the current region."""

    def __init__(self, interval: int) -> None:
        self._interval = interval

    def rebuilt(self, step: int, past: Past) -> Tokens | None:
        if step % self._interval:
            return None
        previous = past.tokens(max(0, step - self._interval), step)

        def enclosed(values: Tensor, start: int, end: int) -> Tensor:
            return F.pad(F.pad(values, (1, 0), value=start), (0, 1), value=end)

        return Tokens(
            enclosed(previous.cells, 0, 0),
            enclosed(previous.actions, NO_ACTION, NO_ACTION),
            enclosed(previous.rewards, 0, 0),
            enclosed(torch.zeros_like(previous.cells), 1, 2),
        )


@torch.no_grad()
def play(
    model: HistoryTransformer,
    room: Room,
    tasks: Tensor,
    uniform: Tensor,
    context: SlidingContext | RegionContext,
    *,
    greedy: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Plays `tasks` [batch]; returns the return of each episode, [batch, episodes].

    `uniform` [batch, steps] holds random numbers in [0, 1) to sample actions with; its second dimension is the number
    of steps to play.
    """
    game = _Game(model, room, tasks, uniform, greedy, dtype)
    one_step = _as_cuda_graph(game.step) if tasks.is_cuda else game.step
    for step in range(uniform.shape[1]):
        if step % room.horizon == 0:
            game.begin_episode()
        tokens = context.rebuilt(step, game.past)
        if tokens is not None:
            game.read(tokens)
        one_step()
    return game.rewards.view(len(tasks), -1, room.horizon).sum(-1)


class _Game:
    """The state of all rows of a batch, updated in place so that a CUDA graph can replay a step."""

    def __init__(
        self, model: HistoryTransformer, room: Room, tasks: Tensor, uniform: Tensor, greedy: bool, dtype: torch.dtype
    ) -> None:
        self._model, self._room, self._tasks, self._uniform, self._greedy = model, room, tasks, uniform, greedy
        self.past = Past(len(tasks), uniform.shape[1], tasks.device)
        self.rewards = torch.zeros_like(self.past.rewards)
        self._cache = model.new_cache(len(tasks), dtype)
        self._now = torch.zeros(1, dtype=torch.int64, device=tasks.device)
        self._episode = room.begin(tasks)
        self._action, self._reward = torch.full_like(tasks, NO_ACTION), torch.zeros_like(tasks)

    def begin_episode(self) -> None:
        """Moves all agents to the start."""
        self._set_episode(self._room.begin(self._tasks))

    def read(self, tokens: Tokens) -> None:
        """Replaces the cached context."""
        self._cache.clear()
        self._model(tokens, self._cache)

    def step(self) -> None:
        """Takes one action in each row."""
        cells = self._episode.cells
        past = self.past
        for column, values in ((past.cells, cells), (past.actions, self._action), (past.rewards, self._reward)):
            column.index_copy_(1, self._now, values[:, None])
        separators = torch.zeros_like(cells)[:, None] if self._model.shape.separators else None
        tokens = Tokens(cells[:, None], self._action[:, None], self._reward[:, None], separators)
        logits = self._model(tokens, self._cache)[:, -1]
        uniform = self._uniform.index_select(1, self._now)[:, 0]
        action = logits.argmax(-1) if self._greedy else sample(logits, uniform)
        episode, reward = self._room.step(self._episode, action)
        self.rewards.index_copy_(1, self._now, reward[:, None])
        self._set_episode(episode)
        self._action.copy_(action)
        self._reward.copy_(reward)
        self._now += 1

    def _set_episode(self, episode: Episode) -> None:
        for field in fields(episode):
            getattr(self._episode, field.name).copy_(getattr(episode, field.name))


def sample(logits: Tensor, uniform: Tensor) -> Tensor:
    """Samples actions [batch] from logits [batch, actions], each with one uniform random number."""
    below = logits.float().softmax(-1).cumsum(-1) <= uniform[:, None]
    return below.sum(-1).clamp(max=NUM_ACTIONS - 1)


def _as_cuda_graph(step: Callable[[], None]) -> Callable[[], None]:
    """Wraps a step so that, after a few calls, it is recorded as a CUDA graph: one launch instead of a hundred."""
    graph = torch.cuda.CUDAGraph()
    calls = 0

    def run() -> None:
        nonlocal calls
        calls += 1
        if calls < _WARM_UP_CALLS:
            step()
            return
        if calls == _WARM_UP_CALLS:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):  # records the step without running it
                step()
        graph.replay()

    return run
