"""The environments match the literature, and both implementations agree step by step."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys

import gymnasium
import pytest
import torch
from gymnasium.utils.env_checker import check_env

from unisono.errors import ConfigError
from unisono.recipes.darkroom.gym import ENVIRONMENTS, register
from unisono.recipes.darkroom.rooms import (
    NUM_ACTIONS,
    ROOMS,
    DarkKeyToDoor,
    Darkroom,
    DarkroomPermuted,
    Room,
    split_tasks,
)

NAMES = dict(zip(ROOMS, ENVIRONMENTS, strict=True))  # both in the order plain, permuted, key to door


def returns_of(room: Room, tasks: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """The returns [batch] of action sequences [batch, steps]."""
    episode, total = room.begin(tasks), torch.zeros_like(tasks)
    for actions in sequences.T:
        episode, rewards = room.step(episode, actions)
        total += rewards
    return total


def following_best(room: Room, tasks: torch.Tensor, seed: int) -> torch.Tensor:
    chance, episode, total = torch.Generator().manual_seed(seed), room.begin(tasks), torch.zeros_like(tasks)
    for _ in range(room.horizon):
        actions = room.best_actions(episode, torch.rand(len(tasks), generator=chance))
        episode, rewards = room.step(episode, actions)
        total += rewards
    return total


@pytest.mark.parametrize("size", [9, 4])
@pytest.mark.parametrize("name", ROOMS)
def test_rooms_and_gymnasium_agree_step_by_step(name: str, size: int) -> None:
    dice, chance = random.Random(size), torch.Generator().manual_seed(size)
    room = ROOMS[name](size)
    batch = 60
    tasks = [dice.randrange(room.num_tasks) for _ in range(batch)]
    if name == "dark_key_to_door":  # most pairs are far apart; these are close or share a cell
        near = [room.num_cells // 2 + offset for offset in (-size, -1, 0, 1, size)]
        tasks[:25] = [key * room.num_cells + door for key, door in itertools.product(near, near)]
    environments = [gymnasium.make(NAMES[name], task=task, size=size) for task in tasks]
    earned = 0.0
    for skill in (0.0, 0.6, 0.95):  # a random walk alone would find few rewards
        episode = room.begin(torch.tensor(tasks))
        seen = [environment.reset()[0].tolist() for environment in environments]
        for step in itertools.count(1):
            assert [x * size + y for x, y in seen] == episode.cells.tolist()
            best = room.best_actions(episode, torch.rand(batch, generator=chance)).tolist()
            actions = [action if dice.random() < skill else dice.randrange(5) for action in best]
            episode, rewards = room.step(episode, torch.tensor(actions))
            results = [environment.step(action) for environment, action in zip(environments, actions, strict=True)]
            seen = [result[0].tolist() for result in results]
            assert [result[1] for result in results] == rewards.tolist()
            earned += float(rewards.sum())
            assert not any(result[2] for result in results)
            assert {result[3] for result in results} == {step == room.horizon}
            if step == room.horizon:
                break
        assert [x * size + y for x, y in seen] == episode.cells.tolist()
    assert earned > batch  # rewards were really compared


@pytest.mark.parametrize("name", ENVIRONMENTS)
@pytest.mark.filterwarnings("error")
def test_gymnasiums_environment_checker_passes(name: str) -> None:
    check_env(gymnasium.make(name, render_mode="ansi").unwrapped)
    check_env(gymnasium.make(name, task=7, size=5, horizon=6).unwrapped)


def test_registering_twice_does_no_harm() -> None:
    register()
    register()
    assert set(ENVIRONMENTS) <= set(gymnasium.registry)


def test_importing_the_rooms_does_not_import_gymnasium() -> None:
    code = (
        "import sys, unisono.recipes.darkroom.rooms, unisono.recipes.darkroom.data.collect; print(sorted(sys.modules))"
    )
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "'gymnasium'" not in modules and "'h5py'" not in modules and "'torch'" in modules


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_environment_without_a_task_draws_one_from_its_seed(name: str) -> None:
    environment = gymnasium.make(name)
    first = environment.reset(seed=3)[1]["task"]
    others = {environment.reset()[1]["task"] for _ in range(20)}
    assert len(others) > 5
    assert environment.reset(seed=3)[1]["task"] == first


def test_invalid_arguments_of_an_environment_are_rejected() -> None:
    environment = gymnasium.make("unisono/Darkroom-v0", task=0, horizon=1).unwrapped
    with pytest.raises(gymnasium.error.ResetNeeded):
        environment.step(0)
    environment.reset()
    with pytest.raises(gymnasium.error.InvalidAction):
        environment.step(5)
    environment.step(4)
    with pytest.raises(gymnasium.error.ResetNeeded):
        environment.step(4)
    with pytest.raises(ValueError, match="expected 0 to 119"):
        gymnasium.make("unisono/DarkroomPermuted-v0", task=120)


def test_render_shows_agent_and_goal() -> None:
    environment = gymnasium.make("unisono/Darkroom-v0", task=2, size=3, render_mode="ansi")  # x 0, y 2
    environment.reset()
    assert environment.render() == "*..\n.@.\n...\n"
    environment.step(0)
    assert environment.render() == "*..\n..@\n...\n"


@pytest.mark.parametrize("action, expected", [(0, (5, 4)), (1, (3, 4)), (2, (4, 5)), (3, (4, 3)), (4, (4, 4))])
def test_actions_move_as_in_other_implementations(action: int, expected: tuple[int, int]) -> None:
    room = Darkroom()
    episode, _ = room.step(room.begin(torch.tensor([0])), torch.tensor([action]))
    assert divmod(int(episode.cells), 9) == expected


def test_the_optimum_has_the_published_values() -> None:
    room = Darkroom()
    assert room.optimum(torch.arange(81)).float().mean() == pytest.approx(16.54, abs=0.005)
    unseen = split_tasks(81, seed=0, train_ratio=0.9, num_validation=8).unseen
    assert [divmod(task, 9) for task in unseen] == [(4, 2), (5, 6), (6, 8), (7, 2), (3, 6), (0, 5), (5, 8), (5, 4)]
    assert room.optimum(torch.tensor(unseen)).tolist() == [19, 18, 15, 16, 18, 16, 16, 20]
    assert DarkroomPermuted().optimum(torch.arange(120)).unique().tolist() == [5]
    assert DarkKeyToDoor().optimum(torch.arange(81**2)).unique().tolist() == [2]


@pytest.mark.parametrize("name", ROOMS)
@pytest.mark.parametrize("horizon", [1, 2, 3, 4, 5])
def test_no_sequence_of_actions_beats_the_optimum_and_the_best_actions_reach_it(name: str, horizon: int) -> None:
    room = ROOMS[name](3, horizon)
    sequences = torch.tensor(list(itertools.product(range(NUM_ACTIONS), repeat=horizon)))
    tasks = torch.arange(room.num_tasks)[:: 2 if horizon == 5 else 1]
    largest = returns_of(room, tasks.repeat_interleave(len(sequences)), sequences.repeat(len(tasks), 1))
    assert torch.equal(largest.view(len(tasks), -1).amax(dim=1), room.optimum(tasks))
    assert torch.equal(following_best(room, tasks, seed=1), room.optimum(tasks))


@pytest.mark.parametrize("name", ROOMS)
def test_the_best_actions_reach_the_optimum_on_nine_by_nine(name: str) -> None:
    room = ROOMS[name]()
    tasks = torch.arange(room.num_tasks)
    for seed in range(3):
        assert torch.equal(following_best(room, tasks, seed), room.optimum(tasks))


def test_key_and_door_on_one_cell_take_two_steps() -> None:
    room = DarkKeyToDoor(3)
    middle = torch.tensor([4 * 9 + 4])
    episode, rewards = room.begin(middle), []
    for _ in range(4):
        episode, reward = room.step(episode, torch.tensor([4]))
        rewards.append(int(reward))
    assert rewards == [1, 1, 0, 0]


def test_validation_tasks_are_taken_from_the_training_tasks() -> None:
    split = split_tasks(81, seed=3, train_ratio=0.9, num_validation=8)
    assert (len(split.train), len(split.validation), len(split.unseen)) == (65, 8, 8)
    assert sorted(split.train + split.validation + split.unseen) == list(range(81))
    assert split_tasks(81, 3, 0.9, 0).unseen == split.unseen
    with pytest.raises(ConfigError, match="num_validation 73 leaves no tasks"):
        split_tasks(81, 0, 0.9, 73)


def test_impossible_sizes_and_horizons_are_rejected() -> None:
    for size, horizon, words in [(1, 20, "2 to 16, got 1"), (17, 20, "got 17"), (9, -1, "got -1")]:
        with pytest.raises(ConfigError, match=words):
            Darkroom(size, horizon)
    assert [room().horizon for room in ROOMS.values()] == [20, 20, 50]
