"""Contexts equal those of a plain Python reference that cuts them sample by sample."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from unisono.data.noise import Noise
from unisono.errors import ConfigError
from unisono.recipes.darkroom.data.windows import Contexts, TwoRegions, Windows
from unisono.recipes.darkroom.models.transformer import NO_ACTION
from unisono.recipes.darkroom.recipe import Darkroom as Recipe
from unisono.recipes.darkroom.rooms import Darkroom
from unisono.recipes.darkroom.sources import SOURCES
from unisono.recipes.darkroom.sources.source import Histories, run_learners

HORIZON, EPISODES = 4, 6
STEPS = HORIZON * EPISODES
ROOM = Darkroom(3, HORIZON)
TASKS, STREAMS = [0, 4, 7], 2


class Slot(NamedTuple):
    """One token and its target."""

    cell: int
    action_before: int
    reward_before: int
    mark: int
    action: int | None  # None: this position does not count in the loss


def lived(num_steps: int = STEPS) -> Histories:
    return run_learners(SOURCES["noise"], ROOM, torch.tensor(TASKS), STREAMS, num_steps, seed=3)


def steps_of(histories: Histories, history: int) -> list[tuple[int, int, int]]:
    """(cell, action, reward) of every step of a history, in order."""
    columns = (
        values.reshape(-1, values.shape[-1])[history].tolist()
        for values in vars(histories).values()
        if values.dim() > 1
    )
    return list(zip(*columns, strict=True))


def slots_of(contexts: Contexts, row: int) -> list[Slot]:
    tokens = contexts.tokens
    length = tokens.cells.shape[1]
    separators = torch.zeros(length) if tokens.separators is None else tokens.separators[row]
    learned = torch.ones(length) if contexts.learned is None else contexts.learned[row]
    return [
        Slot(
            int(tokens.cells[row, slot]),
            int(tokens.actions[row, slot]),
            int(tokens.rewards[row, slot]),
            int(separators[slot]),
            int(contexts.actions[row, slot]) if learned[slot] else None,
        )
        for slot in range(length)
    ]


def a_window(steps: list[tuple[int, int, int]], begin: int, length: int) -> list[Slot]:
    slots, before = [], (NO_ACTION, 0)
    for cell, action, reward in steps[begin : begin + length]:
        slots.append(Slot(cell, *before, 0, action))
        before = action, reward
    return slots


def two_regions(steps: list[tuple[int, int, int]], region: int, interval: int) -> list[Slot]:
    """<mark> previous region </mark> current region; the first region has no previous one."""
    begin = region * interval
    older = steps[max(0, begin - interval) : begin]
    slots, before = [Slot(0, NO_ACTION, 0, 1, None)], (NO_ACTION, 0)
    for cell, action, reward in older:
        slots.append(Slot(cell, *before, 0, None))
        before = action, reward
    slots.append(Slot(0, NO_ACTION, 0, 2, None))
    for cell, action, reward in steps[begin : begin + interval]:
        slots.append(Slot(cell, *before, 0, action))
        before = action, reward
    return slots


@pytest.mark.parametrize("length", [8, 10, STEPS])
def test_a_window_starts_with_an_episode(length: int) -> None:
    histories = lived()
    windows = Windows.of(histories, HORIZON, length)
    starts = range(0, STEPS - length + 1, HORIZON)
    assert len(windows) == len(TASKS) * STREAMS * len(starts) > 0
    contexts = windows.gather(torch.arange(len(windows)))
    result = [slots_of(contexts, row) for row in range(len(windows))]
    expected = [a_window(steps_of(histories, h), s, length) for h in range(len(TASKS) * STREAMS) for s in starts]
    assert result == expected, "every window once, in order"
    assert all(slots[0].cell == 4 and slots[0].action_before == NO_ACTION for slots in result), "as when it plays"


def test_windows_can_be_gathered_in_any_order() -> None:
    windows = Windows.of(lived(), HORIZON, 8)
    whole = windows.gather(torch.arange(len(windows)))
    picked = windows.gather(torch.tensor([5, 0, 5, 17]))
    assert [slots_of(picked, row) for row in range(4)] == [slots_of(whole, row) for row in (5, 0, 5, 17)]
    assert slots_of(windows[17], 0) == slots_of(whole, 17)


def test_the_end_of_an_episode_has_its_true_action_and_reward() -> None:
    """Other implementations store the reset state there and lose the result of the last action."""
    histories = lived()
    windows = Windows.of(histories, HORIZON, STEPS)
    tokens, actions, _ = windows.gather(torch.arange(len(windows)))
    cells = histories.cells.reshape(-1, STEPS).long()
    starts = torch.arange(HORIZON, STEPS, HORIZON)
    assert (tokens.cells[:, starts] == 4).all(), "each episode begins at the start cell"
    tasks = torch.tensor(TASKS).repeat_interleave(STREAMS)[:, None].expand(-1, len(starts))
    after = ROOM.move(tasks, cells[:, starts - 1], actions[:, starts - 1])
    assert (tokens.actions[:, starts] == actions[:, starts - 1]).all()
    assert ((after == tasks) == (tokens.rewards[:, starts] == 1)).all() and tokens.rewards[:, starts].any()


@pytest.mark.parametrize("skip", [2, 3])
def test_skipping_uses_every_nth_episode_and_they_follow_each_other(skip: int) -> None:
    histories = lived()
    windows = Windows.of(histories, HORIZON, 8, skip)
    kept = [step for episode in range(0, EPISODES, skip) for step in range(episode * HORIZON, (episode + 1) * HORIZON)]
    thinned = [[steps_of(histories, h)[step] for step in kept] for h in range(len(TASKS) * STREAMS)]
    starts = range(0, len(kept) - 8 + 1, HORIZON)
    contexts = windows.gather(torch.arange(len(windows)))
    expected = [a_window(steps, start, 8) for steps in thinned for start in starts]
    assert [slots_of(contexts, row) for row in range(len(windows))] == expected


def test_an_incomplete_last_episode_is_ignored() -> None:
    assert len(Windows.of(lived(STEPS + HORIZON - 1), HORIZON, STEPS)) == len(TASKS) * STREAMS


@pytest.mark.parametrize("interval", [HORIZON, 6, 8, STEPS // 2, STEPS])
@pytest.mark.parametrize("skip", [1, 2])
def test_two_regions_equal_a_plain_python_reference(interval: int, skip: int) -> None:
    histories = lived()
    kept = [step for e in range(0, EPISODES, skip) for step in range(e * HORIZON, (e + 1) * HORIZON)]
    if interval > len(kept):
        pytest.skip("no region is that long")
    windows = TwoRegions.cut(histories, HORIZON, interval, skip)
    regions = len(kept) // interval
    assert len(windows) == len(TASKS) * STREAMS * regions
    contexts = windows.gather(torch.arange(len(windows)))
    for index in range(len(windows)):
        history, region = divmod(index, regions)
        steps = steps_of(histories, history)
        expected = two_regions([steps[at] for at in kept], region, interval)
        result = slots_of(contexts, index)
        assert result[: len(expected)] == expected
        assert len(result) == 2 * interval + 2 and (len(expected) == len(result)) == (region > 0)
        assert all(slot.action is None for slot in result[len(expected) :]), "what is left over is never learned"
    assert contexts.learned is not None and (contexts.learned.sum(1) == interval).all(), "the last step too"


def test_the_usual_compressed_settings_give_contexts() -> None:
    """240 transitions with regions of 80; other implementations look for a region of 240 and find none."""
    for interval in (80, 240):
        histories = run_learners(SOURCES["noise"], Darkroom(), torch.tensor([3]), 2, 1000, seed=0)
        assert len(TwoRegions.cut(histories, 20, interval)) == 2 * (1000 // interval)
    assert len(Windows.of(histories, 20, 240)) == 2 * ((1000 - 240) // 20 + 1)


def test_too_short_histories_are_rejected_with_the_name_of_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"^n_transit 25: the histories have 24 steps"):
        Windows.of(lived(), HORIZON, 25)
    with pytest.raises(ConfigError, match=r"^n_transit 16: .* 12 steps \(train_source_timesteps 24, history_skip 2\)"):
        Windows.of(lived(), HORIZON, 16, skip=2)
    with pytest.raises(ConfigError, match=r"^compress_interval 25: the histories have 24 steps"):
        TwoRegions.cut(lived(), HORIZON, 25)


class Scripted(torch.nn.Module):
    """Returns the same logits for any input."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(logits)

    def forward(self, tokens: object) -> torch.Tensor:
        return self.logits


@pytest.mark.parametrize("positions", ["every", "last"])
@pytest.mark.parametrize("compressed", [False, True])
def test_the_loss_ignores_positions_that_do_not_count(compressed: bool, positions: str) -> None:
    windows = TwoRegions.cut(lived(), HORIZON, 8) if compressed else Windows.of(lived(), HORIZON, 8)
    contexts = windows.gather(torch.arange(len(windows)))
    settings = {"use_compressed_context": compressed, "compress_interval": 8, "loss_positions": positions}
    recipe = Recipe(Recipe.Config(grid_size=3, horizon=HORIZON, num_validation=1, n_transit=18, **settings))  # type: ignore[arg-type]
    right = 20.0 * torch.nn.functional.one_hot(contexts.actions, 5)
    learned = torch.ones_like(contexts.actions, dtype=torch.bool) if contexts.learned is None else contexts.learned
    seen = torch.zeros_like(learned)
    for position in range(40):  # different positions each time
        model = Scripted(torch.where(learned[..., None], right, -right))
        noise = Noise(0, torch.arange(len(windows)) + 1000 * position)
        loss = recipe.loss(model, contexts, noise)
        assert loss.total < 1e-4 and float(loss.metrics["accuracy"]) == float(loss.count)
        assert float(loss.count) == (learned.sum() if positions == "every" else len(windows)), "each counts"
        loss.total.backward()
        assert model.logits.grad is not None
        touched = model.logits.grad.abs().sum(-1) > 0
        assert not (touched & ~learned).any()
        seen |= touched
    if positions == "last":
        assert (touched.sum(1) == 1).all(), "one action of each context"
    assert seen[learned].float().mean() > 0.95, "every place has its turn"
