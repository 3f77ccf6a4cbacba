"""PPO learners learn, independently or with a shared policy; gradients are right; batches do not change histories."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from unisono.recipes.darkroom.rooms import Darkroom
from unisono.recipes.darkroom.sources.ppo import INDEPENDENT, PPO, SHARED, Settings, _advantages, _Learners
from unisono.recipes.darkroom.sources.source import Draws, Histories, run_learners

ROOM = Darkroom(size=5)
CORNER, NEAR, FAR = 0, 7, 19


def histories(tasks: list[int], num_streams: int, num_steps: int, seed: int = 0, **settings: Any) -> Histories:
    def make(room: Any, rows: Tensor, draws: Draws, num_steps: int) -> PPO:
        return PPO(room, rows, draws, num_steps, **settings)

    return run_learners(make, ROOM, torch.tensor(tasks), num_streams, num_steps, seed)


def returns(lived: Histories) -> Tensor:
    """[tasks, streams, episodes]"""
    return lived.rewards.float().unflatten(-1, (-1, ROOM.horizon)).sum(-1)


@pytest.mark.parametrize(("shared", "settings"), [(False, {}), (True, {"minibatch": 160, "n_epochs": 10, "lr": 2e-3})])
def test_learners_improve_and_beat_a_random_policy(shared: bool, settings: dict[str, Any]) -> None:
    gained = returns(histories([CORNER, NEAR, FAR], num_streams=16, num_steps=600, shared=shared, **settings))
    first, last = gained[..., :3].mean(dim=(1, 2)), gained[..., -5:].mean(dim=(1, 2))
    chance = ROOM.horizon / ROOM.num_cells
    assert first.mean() < 4 * chance
    assert (last > first + 4).all(), (first, last)
    assert (last / ROOM.optimum(torch.tensor([CORNER, NEAR, FAR]))).mean() > 0.6, last


def test_independent_learners_differ_from_the_start() -> None:
    rows = torch.tensor([NEAR, NEAR])
    [learners] = PPO(ROOM, rows, Draws(0, rows, torch.arange(2)), 40)._groups
    assert not torch.equal(*learners.weights[0].chunk(2))
    lived = histories([NEAR], num_streams=2, num_steps=40)
    assert not torch.equal(lived.actions[0, 0], lived.actions[0, 1])


@pytest.mark.parametrize("shared", [False, True])
def test_tasks_collected_together_or_apart_give_the_same_histories(shared: bool) -> None:
    settings = {"shared": shared, "n_steps": 10, "minibatch": 8, "n_epochs": 3, "lr": 5e-3}
    together = histories([CORNER, NEAR, FAR], 3, 120, **settings)
    for number, task in enumerate([CORNER, NEAR, FAR]):
        apart = histories([task], 3, 120, **settings)
        assert torch.equal(apart.actions[0], together.actions[number])
    assert not torch.equal(histories([CORNER], 3, 120, seed=1, **settings).actions[0], together.actions[0])


def test_more_learners_than_are_updated_at_once_give_the_same_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = histories([NEAR, FAR], 5, 100)
    monkeypatch.setattr("unisono.recipes.darkroom.sources.ppo._GROUP_ON_CPU", 3)
    assert torch.equal(histories([NEAR, FAR], 5, 100).actions, whole.actions)


def test_streams_that_share_a_policy_depend_on_each_other_and_independent_ones_do_not() -> None:
    settings = {"n_steps": 20, "n_epochs": 4, "lr": 5e-3}
    for shared in (False, True):
        few, many = (histories([12], streams, 200, shared=shared, **settings).actions[0] for streams in (2, 6))
        assert torch.equal(few[:, :20], many[:2, :20])  # before the first update
        assert torch.equal(few, many[:2]) is not shared


@pytest.mark.parametrize("entropy", [0.0, 0.3])
def test_hand_written_gradients_equal_those_of_autograd(entropy: float) -> None:
    torch.manual_seed(0)
    num, count = 3, 11
    settings = Settings(entropy=entropy, width=8, value_coefficient=0.7)
    learners = _Learners(torch.arange(num), torch.randn(25, 6), settings)
    learners.weights = [torch.randn_like(weight) for weight in learners.weights]
    cells, actions = torch.randint(25, (num, count)), torch.randint(5, (num, count))
    advantages, targets = torch.randn(num, count), torch.randn(num, count)
    now = learners.table()[0][torch.arange(num)[:, None], cells, actions]
    before = now + 0.4 * torch.randn(num, count)  # large enough steps for clipping on both sides

    weights = [weight.clone().requires_grad_() for weight in learners.weights]
    loss = torch.tensor(0.0)
    for i in range(num):
        w1, b1, w2, b2 = (weight.unflatten(0, (num, 2))[i] for weight in weights[:4])
        hidden = ((learners._inputs[cells[i]] @ w1 + b1).tanh() @ w2 + b2).tanh()
        policy = torch.distributions.Categorical(logits=hidden[0] @ weights[4][i] + weights[5][i])
        ratio = (policy.log_prob(actions[i]) - before[i]).exp()
        clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
        loss = loss - torch.min(ratio * advantages[i], clipped * advantages[i]).mean()
        value = (hidden[1] @ weights[6][i] + weights[7][i])[:, 0]
        loss = loss + 0.7 * (value - targets[i]).square().mean() - entropy * policy.entropy().mean()
    expected = torch.autograd.grad(loss, weights)
    result = learners.gradients(cells, actions, advantages, targets, before)
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_advantages_stop_at_the_end_of_an_episode_but_not_of_a_rollout() -> None:
    rewards, values = torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[0.5, 1.0, 4.0]])
    result = _advantages(rewards, values, torch.tensor([10.0]), [False, True, False], gamma=0.5, gae_lambda=0.5)
    # step 2: 2 + 0.5 * 10 - 4; step 1 ends an episode: 0 - 1; step 0: 1 + 0.5 * 1 - 0.5 + 0.25 * (-1)
    torch.testing.assert_close(result, torch.tensor([[0.75, -1.0, 3.0]]))


def test_initial_weights_are_orthogonal_and_policies_nearly_uniform() -> None:
    learners = _Learners(torch.arange(4), torch.eye(25), SHARED)
    second = learners.weights[2]
    torch.testing.assert_close(second @ second.mT, 2 * torch.eye(64).expand(8, -1, -1), rtol=0, atol=1e-4)
    first = learners.weights[0]  # [8, 25, 64]
    torch.testing.assert_close(first @ first.mT, 2 * torch.eye(25).expand(8, -1, -1), rtol=0, atol=1e-4)
    assert (learners.table()[0].exp() - 0.2).abs().max() < 0.01


def test_missing_settings_have_the_defaults_of_shared_or_independent_learners() -> None:
    tasks = torch.tensor([NEAR])
    for shared, expected in ((False, INDEPENDENT), (True, SHARED)):
        source = PPO(ROOM, tasks, Draws(0, tasks, tasks), 100, shared=shared, lr=None)
        assert source.settings == expected
