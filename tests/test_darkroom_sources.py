"""Source learners learn, and a history does not depend on the other histories in its batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from unisono.recipes.darkroom.rooms import ROOMS, DarkKeyToDoor, Darkroom, DarkroomPermuted, Room
from unisono.recipes.darkroom.sources import SOURCES
from unisono.recipes.darkroom.sources.explorer import Explorer, explorer
from unisono.recipes.darkroom.sources.noise import NoiseCurriculum
from unisono.recipes.darkroom.sources.q_learning import QLearning
from unisono.recipes.darkroom.sources.source import Draws, Histories, Source, run_learners

QUICK = ["explorer", "q_learning", "noise"]


def some_tasks(room: Room, count: int, seed: int = 0) -> Tensor:
    return torch.randperm(room.num_tasks, generator=torch.Generator().manual_seed(seed))[:count]


def returns(histories: Histories, room: Room) -> Tensor:
    """[tasks, streams, episodes]"""
    return histories.rewards.long().unflatten(2, (-1, room.horizon)).sum(dim=3)


def of_optimum(make: Callable[..., Source], room: Room, tasks: Tensor, num_steps: int = 1000) -> list[float]:
    """Mean return of each episode as a fraction of the optimum, over 8 learners per task."""
    histories = run_learners(make, room, tasks, 8, num_steps, seed=5)
    earned = returns(histories, room).float().mean(dim=(0, 1))
    return (earned / room.optimum(tasks).float().mean()).tolist()


def test_the_four_sources_exist() -> None:
    assert set(SOURCES) == {"explorer", "q_learning", "noise", "ppo"}


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("room_name", ROOMS)
def test_a_history_does_not_depend_on_the_batch(room_name: str, name: str) -> None:
    room = ROOMS[room_name](5, 12)
    tasks = some_tasks(room, 4)
    together = run_learners(SOURCES[name], room, tasks, num_streams=6, num_steps=96, seed=3)
    for index in range(4):
        alone = run_learners(SOURCES[name], room, tasks[index : index + 1], num_streams=3, num_steps=96, seed=3)
        for column in ("cells", "actions", "rewards"):
            assert torch.equal(getattr(alone, column)[0], getattr(together, column)[index, :3]), column


@pytest.mark.parametrize("name", QUICK)
def test_streams_tasks_and_seeds_make_different_histories(name: str) -> None:
    room, tasks = Darkroom(), torch.tensor([3, 60])
    first, other = (run_learners(SOURCES[name], room, tasks, 4, 100, seed).actions for seed in (0, 1))
    everything = torch.cat([first, other]).view(-1, 100)
    assert len(everything.unique(dim=0)) == len(everything) == 16


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("room_name", ROOMS)
def test_histories_record_what_happened(room_name: str, name: str) -> None:
    room = ROOMS[room_name](4, 10)
    tasks = some_tasks(room, 5)
    histories = run_learners(SOURCES[name], room, tasks, 3, 35, seed=0)
    assert histories.cells.shape == histories.actions.shape == histories.rewards.shape == (5, 3, 35)
    assert {histories.cells.dtype, histories.actions.dtype, histories.rewards.dtype} == {torch.uint8}
    episode = room.begin(tasks.repeat_interleave(3))
    for step in range(35):
        if step % 10 == 0:
            episode = room.begin(episode.tasks)
        assert torch.equal(histories.cells[:, :, step].flatten().long(), episode.cells)
        episode, rewards = room.step(episode, histories.actions[:, :, step].flatten().long())
        assert torch.equal(histories.rewards[:, :, step].flatten().long(), rewards)


@pytest.mark.parametrize(
    "room, soon",
    [(Darkroom(), 8), (DarkroomPermuted(), 3), (DarkKeyToDoor(), 5)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_explorer_soon_acts_nearly_optimally(room: Room, soon: int) -> None:
    curve = of_optimum(explorer, room, some_tasks(room, 40))
    assert curve[0] < 0.55
    assert min(curve[soon:]) > 0.9
    without_noise = of_optimum(lambda *a: explorer(*a, noise=0.0), room, some_tasks(room, 40), room.horizon * 12)
    assert without_noise[-1] == 1


def test_the_explorer_finds_every_goal_including_the_start_cell() -> None:
    room = Darkroom(5, 12)
    result = returns(run_learners(Explorer, room, torch.arange(25), 4, 12 * 12, seed=1), room)[:, :, -3:]
    assert (result.float().mean(dim=(1, 2)) >= 0.8 * room.optimum(torch.arange(25))).all()


def test_most_steps_of_a_search_visit_a_new_cell() -> None:
    room = Darkroom(9, 81)  # a whole search in one episode
    histories = run_learners(lambda *a: Explorer(*a, noise=0.0), room, torch.arange(81), 2, 81, seed=2)
    for cells, rewards in zip(histories.cells.flatten(0, 1), histories.rewards.flatten(0, 1), strict=True):
        arrived = int(rewards.nonzero()[0]) if rewards.any() else 80
        looked_at = cells[1 : arrived + 1].tolist()
        # Corners may remain unvisited, and the way back to them leads over visited cells.
        assert len(set(looked_at)) >= 0.6 * len(looked_at)


def test_a_cell_without_the_key_may_still_be_the_door() -> None:
    room = DarkKeyToDoor(4, 30)
    tasks = torch.arange(room.num_tasks)
    last = returns(run_learners(lambda *a: Explorer(*a, noise=0.0), room, tasks, 1, 180, seed=4), room)[:, 0, -1]
    assert torch.equal(last, room.optimum(tasks))  # the agent passed doors near the start many times without the key


def test_the_explorer_learns_what_every_action_does() -> None:
    room = DarkroomPermuted()
    earned = returns(run_learners(lambda *a: explorer(*a, noise=0.0), room, torch.arange(120), 2, 60, seed=4), room)
    assert (earned[:, :, 2] == 5).all()
    assert (earned[:, :, 0] < 5).float().mean() > 0.5  # the learner did not know it before


@pytest.mark.parametrize("room_name", ROOMS)
def test_the_noise_curriculum_goes_from_random_to_perfect(room_name: str) -> None:
    room = ROOMS[room_name]()
    curve = of_optimum(NoiseCurriculum, room, some_tasks(room, 40))
    quarter = len(curve) // 4
    assert curve[0] < 0.35 and sum(curve[:quarter]) / quarter < 0.55
    assert curve[-1] > 0.9


def test_q_learning_gets_clearly_better_within_a_thousand_steps() -> None:
    for room, first, last in [(Darkroom(), 0.15, 0.8), (DarkKeyToDoor(), 0.4, 0.8)]:
        curve = of_optimum(QLearning, room, some_tasks(room, 40))
        assert curve[0] < first and curve[-1] > last, (room.name, curve)


def test_replay_makes_q_learning_faster() -> None:
    room = Darkroom()
    fast, slow = (
        of_optimum(lambda *a, r=r: QLearning(*a, replay=r), room, some_tasks(room, 40)) for r in (True, False)
    )
    assert sum(fast) > 1.2 * sum(slow)


def test_draws_are_uniform_and_new_at_every_step() -> None:
    draws = Draws(7, torch.arange(50), torch.zeros(50, dtype=torch.long))
    steps = []
    for _ in range(40):
        draws.next_step()
        steps.append(draws.uniform(5))
        steps.append(draws.uniform(5))
    numbers = torch.stack(steps).flatten()
    assert len(numbers.unique()) > 0.99 * len(numbers)
    assert abs(numbers.mean() - 0.5) < 0.01 and numbers.min() >= 0 and numbers.max() < 1
