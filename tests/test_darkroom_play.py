"""A rollout with a cache equals recomputing the context at every step, and contexts are like those in training."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unisono.recipes.darkroom.data.windows import TwoRegions, Windows
from unisono.recipes.darkroom.models.rollout import RegionContext, SlidingContext, play, sample
from unisono.recipes.darkroom.models.transformer import NO_ACTION, HistoryTransformer, Shape, Tokens
from unisono.recipes.darkroom.rooms import NUM_ACTIONS, ROOMS, Darkroom, Room
from unisono.recipes.darkroom.sources.source import Histories

HORIZON, EPISODES = 4, 7
STEPS = HORIZON * EPISODES
ROOM = Darkroom(3, HORIZON)
TASKS = torch.tensor([0, 4, 5, 8])
# Rollouts with contexts of 2, 3 or all episodes, and with regions of 1, 1.5 and 3 episodes.
CONTEXTS: dict[str, Any] = {
    "two episodes": ("sliding", 8),
    "three episodes and a half": ("sliding", 14),
    "everything": ("sliding", STEPS),
    "regions of one episode": ("regions", 4),
    "regions of one and a half": ("regions", 6),
    "regions of three": ("regions", 12),
}


def chances_of(rows: int, steps: int = STEPS, seed: int = 0) -> Tensor:
    return torch.rand(rows, steps, generator=torch.Generator().manual_seed(seed))


def context_of(name: str, horizon: int = HORIZON) -> SlidingContext | RegionContext:
    kind, size = CONTEXTS[name]
    return SlidingContext(size, horizon) if kind == "sliding" else RegionContext(size)


def held(name: str, step: int, horizon: int = HORIZON) -> tuple[range, range | None]:
    """The steps in the context at `step`: the previous region (if there are regions) and the rest."""
    kind, size = CONTEXTS[name]
    if kind == "regions":
        begin = step // size * size
        return range(begin, step + 1), range(max(0, begin - size), begin)
    # As many whole episodes as fit, the current one included.
    episodes = min(step // horizon + 1, size // horizon)
    return range((step // horizon + 1 - episodes) * horizon, step + 1), None


def tokens_at(name: str, step: int, cells: Tensor, actions: Tensor, rewards: Tensor, horizon: int = HORIZON) -> Tokens:
    """The whole context at `step`, from the cells, actions and rewards so far ([rows, steps])."""
    rows = len(cells)
    current, older = held(name, step, horizon)
    first = current[0] if not older else older[0]

    def token(at: int) -> list[list[int]]:
        before = [[NO_ACTION, 0]] * rows
        if at > first:
            before = torch.stack([actions[:, at - 1], rewards[:, at - 1]], dim=1).tolist()
        return [[int(cells[row, at]), *before[row], 0] for row in range(rows)]

    def mark(which: int) -> list[list[int]]:
        return [[0, NO_ACTION, 0, which]] * rows

    slots = [token(at) for at in current]
    if older is not None:
        slots = [mark(1), *map(token, older), mark(2), *slots]
    columns = torch.tensor(slots).permute(2, 1, 0)  # [4, rows, length]
    return Tokens(columns[0], columns[1], columns[2], columns[3] if older is not None else None)


class Watching(nn.Module):
    """A model without weights whose action is a hash of its context; it records the context."""

    def __init__(self, separators: bool) -> None:
        super().__init__()
        self.shape = Shape(3, STEPS + 2, separators=separators)
        self.contexts: list[Tokens] = []

    def new_cache(self, batch: int, dtype: torch.dtype) -> Any:
        return Memory()

    def forward(self, tokens: Tokens, cache: Any) -> Tensor:
        cache.add(tokens)
        if tokens.cells.shape[1] == 1 and not cache.anew:
            self.contexts.append(cache.whole())
        cache.anew = False
        seen = torch.stack([column for column in cache.whole() if column is not None]).sum((0, 2))
        target = (seen * 7 + cache.whole().cells.shape[1]) % NUM_ACTIONS
        return 50.0 * nn.functional.one_hot(target, NUM_ACTIONS)[:, None].float()


class Memory:
    """A cache that stores tokens."""

    def __init__(self) -> None:
        self.anew = False
        self.columns: list[list[Tensor]] = [[], [], [], []]

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]
        self.anew = True  # the following tokens fill the cache and are not a step

    def add(self, tokens: Tokens) -> None:
        for column, new in zip(self.columns, tokens, strict=True):
            if new is not None:
                column.append(new.clone())

    def whole(self) -> Tokens:
        return Tokens(*(torch.cat(column, dim=1) if column else None for column in self.columns))  # type: ignore[arg-type]


def played_again(room: Room, tasks: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """The cells and rewards [rows, steps] that these actions lead to."""
    cells, rewards = [], []
    for step in range(actions.shape[1]):
        if step % room.horizon == 0:
            episode = room.begin(tasks)
        cells.append(episode.cells)
        episode, reward = room.step(episode, actions[:, step])
        rewards.append(reward)
    return torch.stack(cells, dim=1), torch.stack(rewards, dim=1)


@pytest.mark.parametrize("name", CONTEXTS)
def test_the_context_is_right_at_every_step_of_a_rollout(name: str) -> None:
    model = Watching(separators="regions" in name)
    returns = play(model, ROOM, TASKS, chances_of(len(TASKS)), context_of(name))  # type: ignore[arg-type]
    assert len(model.contexts) == STEPS
    # The action of a step is in the context of the next step; the cell of a step is its own last token.
    done = [context.actions[:, -1] for context in model.contexts[1:]]
    actions = torch.stack([*done, done[-1]], dim=1)
    cells, rewards = played_again(ROOM, TASKS, actions)
    for step, context in enumerate(model.contexts):
        expected = tokens_at(name, step, cells, actions, rewards)
        for column, result, target in zip(Tokens._fields, context, expected, strict=True):
            assert (result is None) == (target is None)
            assert target is None or torch.equal(result, target), (step, column)
    assert torch.equal(returns[:, :-1], rewards.view(len(TASKS), EPISODES, HORIZON).sum(-1)[:, :-1])
    assert returns.shape == (len(TASKS), EPISODES) and returns.sum() > 0


@pytest.mark.parametrize("name", CONTEXTS)
def test_contexts_of_rollouts_equal_those_of_training(name: str) -> None:
    """Other implementations train on the state after a reset but play with the true state; here both are the same."""
    kind, size = CONTEXTS[name]
    model = Watching(separators=kind == "regions")
    play(model, ROOM, TASKS, chances_of(len(TASKS)), context_of(name))  # type: ignore[arg-type]
    done = [context.actions[:, -1] for context in model.contexts[1:]]
    actions = torch.stack([*done, done[-1]], dim=1)
    cells, rewards = played_again(ROOM, TASKS, actions)
    histories = Histories(TASKS, *(column[:, None].to(torch.uint8) for column in (cells, actions, rewards)))
    data: Windows
    if kind == "regions":
        data = TwoRegions.cut(histories, HORIZON, size)
        ends = range(size - 1, data.per_history * size, size)  # the last step of each region
    else:
        length = size // HORIZON * HORIZON
        data = Windows.of(histories, HORIZON, length)
        ends = range(length - 1, STEPS, HORIZON)  # the last step of each window
    assert len(ends) == data.per_history
    for number, end in enumerate(ends):
        trained = data.gather(torch.arange(len(TASKS)) * data.per_history + number).tokens
        length = model.contexts[end].cells.shape[1]
        for result, target in zip(model.contexts[end], trained, strict=True):
            assert (result is None) == (target is None)
            assert result is None or torch.equal(result, target[:, :length]), (number, end)


def random_reader(room: Room, separators: bool, context: int, seed: int = 0) -> HistoryTransformer:
    """Weights so large that every token of the context moves the logits, but no action is certain."""
    torch.manual_seed(seed)
    model = HistoryTransformer(Shape(room.size, context, 16, 2, 2, 16, separators=separators)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    return model


def heard(model: nn.Module) -> list[Tensor]:
    """Collects the logits [rows, actions] of every step that is played."""
    logits: list[Tensor] = []

    def note(_: nn.Module, inputs: tuple[Tokens, ...], output: Tensor) -> None:
        if inputs[0].cells.shape[1] == 1:
            logits.append(output[:, 0].clone())

    model.register_forward_hook(note)
    return logits


@torch.no_grad()
def slowly(
    model: HistoryTransformer, room: Room, tasks: Tensor, chances: Tensor, name: str, greedy: bool
) -> tuple[Tensor, list[Tensor]]:
    """Returns [rows, episodes] and logits from recomputing the whole context at every step, without a cache."""
    cells, actions, rewards = (torch.zeros(chances.shape, dtype=torch.int64) for _ in range(3))
    all_logits = []
    for step in range(chances.shape[1]):
        if step % room.horizon == 0:
            episode = room.begin(tasks)
        cells[:, step] = episode.cells
        logits = model(tokens_at(name, step, cells, actions, rewards, room.horizon))[:, -1]
        all_logits.append(logits)
        chosen = logits.argmax(-1) if greedy else sample(logits, chances[:, step])
        actions[:, step] = chosen
        episode, rewards[:, step] = room.step(episode, chosen)
    assert greedy or all(row.unique().numel() > 1 for row in actions), "it does different things"
    return rewards.view(len(tasks), -1, room.horizon).sum(-1), all_logits


@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize(("room_name", "greedy"), [*((name, False) for name in ROOMS), ("darkroom", True)])
def test_a_rollout_with_a_cache_equals_recomputing_the_context(room_name: str, greedy: bool, name: str) -> None:
    room = ROOMS[room_name](3, HORIZON)
    tasks = torch.arange(9) * (room.num_tasks // 9)
    model = random_reader(room, "regions" in name, 2 * CONTEXTS[name][1] + 2)
    chances = chances_of(len(tasks))
    returns, logits = slowly(model, room, tasks, chances, name, greedy)
    result = heard(model)
    played = play(model, room, tasks, chances, context_of(name), greedy=greedy, dtype=torch.float64)
    torch.testing.assert_close(torch.stack(result), torch.stack(logits), rtol=0, atol=1e-10)
    assert torch.equal(played, returns)


@pytest.mark.parametrize("name", ["two episodes", "regions of one and a half"])
def test_rollouts_of_a_batch_equal_single_rollouts(name: str) -> None:
    """A cache that mixes up its rows would show only here (amago#79)."""
    tasks, chances = torch.arange(9), chances_of(9)
    model = random_reader(ROOM, "regions" in name, 2 * CONTEXTS[name][1] + 2)
    together = play(model, ROOM, tasks, chances, context_of(name), dtype=torch.float64)
    alone = [
        play(model, ROOM, tasks[row : row + 1], chances[row : row + 1], context_of(name), dtype=torch.float64)
        for row in range(9)
    ]
    assert torch.equal(together, torch.cat(alone))
    assert len({tuple(row) for row in together.tolist()}) > 3


def test_actions_are_sampled_with_the_probabilities_of_the_logits() -> None:
    probabilities = torch.tensor([0.1, 0.0, 0.45, 0.05, 0.4])
    number = 100_000
    chances = (torch.arange(number) + 0.5) / number  # evenly spaced numbers in [0, 1)
    drawn = sample(probabilities.log().expand(number, -1), chances)
    result = torch.bincount(drawn, minlength=NUM_ACTIONS) / number
    torch.testing.assert_close(result, probabilities, rtol=0, atol=3 / number)
    assert all(a <= b for a, b in pairwise(drawn.tolist())), "one number decides, action by action"
    largest = torch.full((2,), 1 - 2**-24)
    assert sample(torch.tensor([[0.0] * 5, [9.0, -9.0, -9.0, -9.0, -9.0]]), largest).max() <= NUM_ACTIONS - 1


def test_greedy_rollouts_take_the_most_likely_action() -> None:
    model = random_reader(ROOM, False, 8)
    one, other = (
        play(model, ROOM, TASKS, chances_of(4, seed=seed), SlidingContext(8, HORIZON), greedy=True) for seed in (1, 2)
    )
    assert torch.equal(one, other), "chance has no say"
