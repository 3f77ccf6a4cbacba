"""Proximal policy optimisation (Schulman et al. 2017) for thousands of learners at once.

Each learner has its own policy and value network; batched matrix products compute all learners together. The
environments have few cells, so after every update both networks are evaluated once for all cells, and acting is a
look-up in the resulting table. The gradients are written by hand, because autograd took a fifth longer.

Learners are either independent or share a policy. An independent learner sees one episode per update and learns next to
nothing in 50 episodes with the usual hyperparameters, so independent learners have their own hyperparameters. In other
implementations, learners share a policy: the streams of a task are copies of one policy that learns from all streams.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from unisono.data.bits import keys_for, random_bits, to_unit
from unisono.recipes.darkroom.rooms import NUM_ACTIONS, Room
from unisono.recipes.darkroom.sources.source import Draws, Source


@dataclass(frozen=True)
class Settings:
    """Hyperparameters; the defaults are those of other implementations, which share a policy among streams."""

    lr: float = 3e-4
    """Learning rate of Adam."""
    n_steps: int = 20
    """Number of steps per rollout, after which the policy is updated."""
    minibatch: int = 50
    """Number of transitions per gradient step; a shorter rollout is one minibatch."""
    n_epochs: int = 20
    """Number of passes over a rollout."""
    gamma: float = 0.99
    """Discount factor."""
    gae_lambda: float = 0.95
    """Lambda of the generalised advantage estimates: 0 looks one step ahead, 1 looks to the end of the episode."""
    clip: float = 0.2
    """Largest relative change of an action's probability per update."""
    entropy: float = 0.0
    """Weight of the policy's entropy; a larger weight sustains exploration."""
    value_coefficient: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Largest norm of a learner's gradient."""
    adam_eps: float = 1e-5
    """Epsilon of Adam."""
    width: int = 64
    """Width of the two hidden layers of each network."""
    inputs: Literal["coordinates", "cells"] = "coordinates"
    """Inputs of the networks: x and y as numbers, or a one-hot vector of the cell."""
    normalise_advantages: bool = True
    """Whether to normalise advantages in each minibatch, which amplifies the noise of rollouts without any reward."""


SHARED = Settings()
# The best hyperparameters among those that were tried on the 9 x 9 grid for 50 episodes. One-hot inputs matter most.
# Next come few epochs (after 20 passes over one episode, the policy no longer explores) and advantages that are not
# normalised.
INDEPENDENT = Settings(lr=5e-3, n_epochs=4, gamma=0.9, entropy=0.02, inputs="cells", normalise_advantages=False)

_GROUP_ON_CPU = 64  # number of learners to update together; more would need more memory without being faster
_GROUP_ON_GPU = 8192


class PPO(Source):
    """PPO learners: one per row of the batch, or, with `shared`, one per task.

    `settings` are fields of `Settings`; a field that is missing or None has its value in SHARED or INDEPENDENT. On a
    9 x 9 grid, an independent learner takes 0.25 MB, and 7,300 learners take 1.8 GB. A history does not depend on the
    other histories that are collected with it, except that another batch size may change the rounding and thereby an
    action, which was not observed on the CPU. Histories from CPU and GPU diverge sooner or later.
    """

    def __init__(
        self, room: Room, tasks: Tensor, draws: Draws, num_steps: int, *, shared: bool = False, **settings: Any
    ) -> None:
        super().__init__(room, tasks, draws, num_steps)
        overrides = {name: value for name, value in settings.items() if value is not None}
        self.settings = replace(SHARED if shared else INDEPENDENT, **overrides)
        self._streams = _streams_of(tasks) if shared else 1  # streams per learner
        self._learner = torch.arange(len(tasks), device=tasks.device) // self._streams  # index of each row's learner
        # The weights of a shared policy depend on the random numbers of its first stream.
        halves = (draws.uniform(2)[:: self._streams] * 2**24).long()
        keys = keys_for(0, (halves[:, 0] << 24) + halves[:, 1])
        inputs = _inputs_of(room, self.settings.inputs).to(tasks.device)
        size = _GROUP_ON_GPU if tasks.is_cuda else _GROUP_ON_CPU
        self._groups = [_Learners(part, inputs, self.settings) for part in torch.split(keys, size)]
        self._rollout: list[tuple[Tensor, Tensor, Tensor]] = []
        self._ends: list[bool] = []  # whether an episode ended at each step of the rollout
        self._tabulate()

    def act(self, cells: Tensor, step: int) -> Tensor:
        return (self.draws.uniform(1) >= self._cumulative[self._learner, cells]).sum(dim=1)

    def learn(self, cells: Tensor, actions: Tensor, rewards: Tensor, next_cells: Tensor, step: int) -> None:
        self._rollout.append((cells, actions, rewards))
        self._ends.append((step + 1) % self.room.horizon == 0)
        if len(self._rollout) == self.settings.n_steps and step + 1 < self.num_steps:
            self._update(next_cells)
            self._rollout.clear()
            self._ends.clear()

    def _update(self, next_cells: Tensor) -> None:
        cells, actions, rewards = (torch.stack(column, dim=1) for column in zip(*self._rollout, strict=True))
        values = self._values[self._learner[:, None], cells]
        last = self._values[self._learner, next_cells]
        advantages = _advantages(rewards, values, last, self._ends, self.settings.gamma, self.settings.gae_lambda)
        # Each tensor is [rows, n_steps]; a learner learns from the rows of all its streams.
        columns = (cells, actions, advantages, advantages + values)
        rollout = [column.reshape(-1, self._streams * self.settings.n_steps) for column in columns]
        for group, *part in zip(
            self._groups, *(torch.split(column, self._groups[0].num) for column in rollout), strict=True
        ):
            group.improve(*part)
        self._tabulate()

    def _tabulate(self) -> None:
        self._values = torch.cat([group.values for group in self._groups])  # [learners, cells]
        # [learners, cells, actions - 1] cumulative probabilities of the actions
        self._cumulative = torch.cat([group.log_probs for group in self._groups]).exp().cumsum(dim=-1)[..., :-1]


class _Learners:
    """The networks of a group of learners; hidden layers alternate between policy and value networks."""

    def __init__(self, keys: Tensor, inputs: Tensor, settings: Settings) -> None:
        """`keys` [learners] are the random seeds; `inputs` [cells, inputs] are the network inputs for each cell."""
        self.num, self._keys, self._inputs, self._settings = len(keys), keys, inputs, settings
        self._num_random = 0
        width, root = settings.width, math.sqrt(2)
        self.weights = [
            *self._layer(2, inputs.shape[1], width, gain=root),
            *self._layer(2, width, width, gain=root),
            *self._layer(1, width, NUM_ACTIONS, gain=0.01),  # makes the initial policy nearly uniform
            *self._layer(1, width, 1, gain=1.0),
        ]
        self._adam = torch.optim.Adam(self.weights, lr=settings.lr, eps=settings.adam_eps, fused=True)
        self.log_probs, self.values = self.table()

    def table(self) -> tuple[Tensor, Tensor]:
        """Returns the log probabilities, [learners, cells, actions], and the values, [learners, cells]."""
        *_, logits, values = self._forward(self._inputs.expand(2 * self.num, -1, -1))
        return logits.log_softmax(dim=-1), values[..., 0]

    def improve(self, cells: Tensor, actions: Tensor, advantages: Tensor, returns: Tensor) -> None:
        """Learns from a rollout, [learners, transitions] each."""
        learner = torch.arange(self.num, device=cells.device)[:, None]
        rollout = (cells, actions, advantages, returns, self.log_probs[learner, cells, actions])
        size = self._settings.minibatch
        for _ in range(self._settings.n_epochs):
            if size >= cells.shape[1]:
                self._descend(*rollout)
                continue
            order = self._uniform(cells.shape[1]).argsort(dim=1)
            for minibatch in torch.split(order, size, dim=1):
                self._descend(*(column.gather(1, minibatch) for column in rollout))
        self.log_probs, self.values = self.table()

    def _descend(
        self, cells: Tensor, actions: Tensor, advantages: Tensor, returns: Tensor, old_log_probs: Tensor
    ) -> None:
        """Takes one step of Adam on one minibatch."""
        if self._settings.normalise_advantages and cells.shape[1] > 1:
            spread = advantages.std(dim=1, keepdim=True) + 1e-8
            advantages = (advantages - advantages.mean(dim=1, keepdim=True)) / spread
        gradients = self.gradients(cells, actions, advantages, returns, old_log_probs)
        norms = torch.stack([torch.linalg.vector_norm(gradient.view(self.num, -1), dim=1) for gradient in gradients])
        scale = (self._settings.max_grad_norm / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
        for weight, gradient in zip(self.weights, gradients, strict=True):
            gradient.view(self.num, -1).mul_(scale[:, None])
            weight.grad = gradient
        self._adam.step()
        self._adam.zero_grad()  # frees memory: the gradients of all groups would need as much as the weights

    def gradients(
        self, cells: Tensor, actions: Tensor, advantages: Tensor, returns: Tensor, old_log_probs: Tensor
    ) -> list[Tensor]:
        """Computes the gradients of each learner's loss; `old_log_probs` belong to the time when actions were taken."""
        settings, count = self._settings, cells.shape[1]
        inputs = self._inputs[cells].repeat_interleave(2, dim=0)
        first, second, logits, values = self._forward(inputs)
        log_probs = logits.log_softmax(dim=-1)
        probs, taken = log_probs.exp(), actions[..., None]
        ratio = (log_probs.gather(2, taken)[..., 0] - old_log_probs).exp()
        # Where the clipped term is smaller, the loss does not depend on the policy.
        clipped = torch.where(advantages > 0, ratio > 1 + settings.clip, ratio < 1 - settings.clip)
        push = (ratio * advantages / count).masked_fill(clipped, 0.0)[..., None]
        by_logits = (probs * push).scatter_add(2, taken, -push)
        if settings.entropy:
            entropy = -(probs * log_probs).sum(dim=-1, keepdim=True)
            by_logits += settings.entropy / count * probs * (log_probs + entropy)
        by_values = (values - returns[..., None]) * (2 * settings.value_coefficient / count)
        _, _, w2, _, w_policy, _, w_value, _ = self.weights
        by_second = torch.stack([by_logits @ w_policy.mT, by_values @ w_value.mT], dim=1).view_as(second)
        by_second *= 1 - second * second
        by_first = by_second @ w2.mT * (1 - first * first)
        layers = (
            (inputs, by_first),
            (first, by_second),
            (second[0::2], by_logits),
            (second[1::2], by_values),
        )
        return [part for into, by in layers for part in (into.mT @ by, by.sum(dim=1, keepdim=True))]

    def _forward(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        w1, b1, w2, b2, w_policy, b_policy, w_value, b_value = self.weights
        first = torch.baddbmm(b1, inputs, w1).tanh_()
        second = torch.baddbmm(b2, first, w2).tanh_()
        logits = torch.baddbmm(b_policy, second[0::2], w_policy)
        return first, second, logits, torch.baddbmm(b_value, second[1::2], w_value)

    def _layer(self, networks: int, num_in: int, num_out: int, gain: float) -> tuple[Tensor, Tensor]:
        """Returns orthogonal weights and zero biases."""
        tall = (networks, max(num_in, num_out), min(num_in, num_out))
        radius = (-2 * (1 - self._uniform(*tall)).log()).sqrt()
        normal = radius * (2 * math.pi * self._uniform(*tall)).cos()
        q, r = torch.linalg.qr(normal.flatten(0, 1))
        q = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]  # makes q uniformly distributed over orthogonal matrices
        weight = gain * (q if num_in >= num_out else q.mT)
        return weight.contiguous(), weight.new_zeros(len(weight), 1, num_out)

    def _uniform(self, *shape: int) -> Tensor:
        """Returns [learners, *shape] random numbers in [0, 1); every call returns new numbers."""
        size = int(torch.Size(shape).numel())
        counter = torch.arange(size, device=self._keys.device) + (self._num_random << 32)
        self._num_random += 1
        return to_unit(random_bits(self._keys[:, None], counter[None]), torch.float32).view(-1, *shape)


def _advantages(
    rewards: Tensor, values: Tensor, last: Tensor, ends: list[bool], gamma: float, gae_lambda: float
) -> Tensor:
    """Returns a rollout's generalised advantage estimates [rows, steps]; `last` [rows] is the value of the next state.

    The end of an episode counts as terminal, as in other implementations.
    """
    advantage, advantages = torch.zeros_like(last), []
    for step in reversed(range(len(ends))):
        discount = 0.0 if ends[step] else gamma
        td_error = rewards[:, step] + discount * last - values[:, step]
        advantage = td_error + discount * gae_lambda * advantage
        last = values[:, step]
        advantages.append(advantage)
    return torch.stack(advantages[::-1], dim=1)


def _inputs_of(room: Room, inputs: str) -> Tensor:
    """Returns the network inputs for each cell, [cells, inputs]."""
    if inputs == "cells":
        return torch.eye(room.num_cells)
    cells = torch.arange(room.num_cells)
    return torch.stack([cells // room.size, cells % room.size], dim=1).float()


def _streams_of(tasks: Tensor) -> int:
    """Returns the number of consecutive rows of each task."""
    _, counts = torch.unique_consecutive(tasks, return_counts=True)
    if bool((counts != counts[0]).any()):
        raise ValueError("with a shared policy, every task must occur once and have the same number of streams")
    return int(counts[0])
