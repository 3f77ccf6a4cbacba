"""Proximal policy optimisation, thousands of learners at once (Schulman et al. 2017).

Each learner has a policy network and a value network of its own; all learners together are batched matrix products. A
room has few cells, so after every update both networks are evaluated once for all cells, and acting is a look into
that table. The gradients are written out: with autograd they take a fifth longer.

There are two ways to live. Independent learners see one episode per update; with the values known for PPO they learn
next to nothing in 50 episodes, so they have values of their own. Shared is what the known code does: the streams of a
task are copies of one policy, which learns from all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from unisono.data.bits import keys_for, random_bits, to_unit
from unisono.errors import ConfigError
from unisono.recipes.darkroom.rooms import NUM_ACTIONS, Room
from unisono.recipes.darkroom.sources.source import Draws, Source


@dataclass(frozen=True)
class Settings:
    """What PPO can be told. These are the values of the known code, which shares a policy among streams."""

    lr: float = 3e-4
    """Learning rate of Adam."""
    n_steps: int = 20
    """Steps of a rollout: after so many the policy is updated."""
    minibatch: int = 50
    """Transitions of one gradient step. A policy whose rollout has no more than these takes the rollout as a whole."""
    n_epochs: int = 20
    """Passes over a rollout."""
    gamma: float = 0.99
    """Discount."""
    gae_lambda: float = 0.95
    """Between one-step (0) and whole-episode (1) estimates of the advantage."""
    clip: float = 0.2
    """How far an update may change the probability of an action."""
    entropy: float = 0.0
    """Weight of the entropy of the policy: what keeps it trying."""
    value_coefficient: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Largest norm of a learner's gradient."""
    adam_eps: float = 1e-5
    """Of Adam."""
    width: int = 64
    """Of the two hidden layers of each network."""
    inputs: Literal["coordinates", "cells"] = "coordinates"
    """What the networks see: x and y as numbers, or one input for each cell."""
    normalise_advantages: bool = True
    """To mean 0 and variance 1 in each minibatch. A rollout without any reward then teaches noise at full strength."""

    def __post_init__(self) -> None:
        for name in ("n_steps", "minibatch", "n_epochs", "width"):
            if getattr(self, name) < 1:
                raise ConfigError(f"ppo: {name} is {getattr(self, name)}; use 1 or more")
        for name in ("lr", "clip", "max_grad_norm", "adam_eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"ppo: {name} is {getattr(self, name)}; use a number above 0")
        for name in ("entropy", "value_coefficient"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"ppo: {name} is {getattr(self, name)}; use 0 or more")
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"ppo: {name} is {getattr(self, name)}; use a number from 0 to 1")
        if self.inputs not in ("coordinates", "cells"):
            raise ConfigError(f"ppo: inputs is {self.inputs!r}; use 'coordinates' or 'cells'")


SHARED = Settings()
# Of what was tried on the 9 x 9 room these reach most in 50 episodes. An input for each cell matters most, then few
# epochs (20 passes over one episode end in a policy that tries nothing any more) and advantages as they are.
INDEPENDENT = Settings(lr=5e-3, n_epochs=4, gamma=0.9, entropy=0.02, inputs="cells", normalise_advantages=False)

_GROUP_ON_CPU = 64  # learners updated together; more are no faster and need more memory
_GROUP_ON_GPU = 8192


class PPO(Source):
    """Learners by PPO: one per row of the batch, or, if `shared`, one per task.

    `settings` are the fields of `Settings`; one that is missing or None has the value of SHARED or INDEPENDENT. On
    9 x 9 an independent learner needs 0.25 MB, so 7,300 of them 1.8 GB. What is collected together does not matter to
    a history, unless batched products of another size are rounded differently and that tips an action: on the CPU
    this was not seen; CPU and GPU part sooner or later.
    """

    def __init__(
        self, room: Room, tasks: Tensor, draws: Draws, num_steps: int, *, shared: bool = False, **settings: Any
    ) -> None:
        super().__init__(room, tasks, draws, num_steps)
        given = {name: value for name, value in settings.items() if value is not None}
        self.settings = replace(SHARED if shared else INDEPENDENT, **given)
        if self.settings.n_steps > num_steps:
            raise ConfigError(
                f"ppo: a rollout of n_steps {self.settings.n_steps} does not fit into a history of {num_steps} steps; "
                f"use at most {num_steps}"
            )
        self._streams = _streams_of(tasks) if shared else 1  # that learn as one
        self._learner = torch.arange(len(tasks), device=tasks.device) // self._streams  # of each row
        # Where a policy is shared, its first stream draws for it.
        halves = (draws.uniform(2)[:: self._streams] * 2**24).long()
        keys = keys_for(0, (halves[:, 0] << 24) + halves[:, 1])
        seen = _inputs_of(room, self.settings.inputs).to(tasks.device)
        size = _GROUP_ON_GPU if tasks.is_cuda else _GROUP_ON_CPU
        self._groups = [_Learners(part, seen, self.settings) for part in torch.split(keys, size)]
        self._rollout: list[tuple[Tensor, Tensor, Tensor]] = []
        self._ends: list[bool] = []  # whether an episode ended with this step of the rollout
        self._tabulate()

    def act(self, cells: Tensor, step: int) -> Tensor:
        """See Source."""
        return (self.draws.uniform(1) >= self._below[self._learner, cells]).sum(dim=1)

    def learn(self, cells: Tensor, actions: Tensor, rewards: Tensor, next_cells: Tensor, step: int) -> None:
        """See Source."""
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
        # [rows, n_steps] each; a learner takes those of all its streams.
        columns = (cells, actions, advantages, advantages + values)
        rollout = [column.reshape(-1, self._streams * self.settings.n_steps) for column in columns]
        for group, *part in zip(
            self._groups, *(torch.split(column, self._groups[0].num) for column in rollout), strict=True
        ):
            group.improve(*part)
        self._tabulate()

    def _tabulate(self) -> None:
        self._values = torch.cat([group.values for group in self._groups])  # [learners, cells]
        # [learners, cells, actions - 1] the probability of this action or one before it
        self._below = torch.cat([group.log_probs for group in self._groups]).exp().cumsum(dim=-1)[..., :-1]


class _Learners:
    """The networks of some learners. Policy and value network of a learner follow each other in the hidden layers."""

    def __init__(self, keys: Tensor, seen: Tensor, settings: Settings) -> None:
        """`keys` [learners] name everything random about them; `seen` [cells, inputs] is what they see in each cell."""
        self.num, self._keys, self._seen, self._settings = len(keys), keys, seen, settings
        self._num_random = 0
        width, root = settings.width, math.sqrt(2)
        self.weights = [
            *self._layer(2, seen.shape[1], width, gain=root),
            *self._layer(2, width, width, gain=root),
            *self._layer(1, width, NUM_ACTIONS, gain=0.01),  # so it begins with trying everything
            *self._layer(1, width, 1, gain=1.0),
        ]
        self._adam = torch.optim.Adam(self.weights, lr=settings.lr, eps=settings.adam_eps, fused=True)
        self.log_probs, self.values = self.table()

    def table(self) -> tuple[Tensor, Tensor]:
        """The logarithms of the policies, [learners, cells, actions], and the values, [learners, cells]."""
        *_, logits, values = self._forward(self._seen.expand(2 * self.num, -1, -1))
        return logits.log_softmax(dim=-1), values[..., 0]

    def improve(self, cells: Tensor, actions: Tensor, advantages: Tensor, returns: Tensor) -> None:
        """Learn from a rollout, [learners, transitions] each."""
        learner = torch.arange(self.num, device=cells.device)[:, None]
        rollout = (cells, actions, advantages, returns, self.log_probs[learner, cells, actions])
        size = self._settings.minibatch
        for _ in range(self._settings.n_epochs):
            if size >= cells.shape[1]:
                self._descend(*rollout)
                continue
            order = self._uniform(cells.shape[1]).argsort(dim=1)
            for chosen in torch.split(order, size, dim=1):
                self._descend(*(column.gather(1, chosen) for column in rollout))
        self.log_probs, self.values = self.table()

    def _descend(self, cells: Tensor, actions: Tensor, advantages: Tensor, returns: Tensor, before: Tensor) -> None:
        """One step of Adam on one minibatch."""
        if self._settings.normalise_advantages and cells.shape[1] > 1:
            spread = advantages.std(dim=1, keepdim=True) + 1e-8
            advantages = (advantages - advantages.mean(dim=1, keepdim=True)) / spread
        gradients = self.gradients(cells, actions, advantages, returns, before)
        norms = torch.stack([torch.linalg.vector_norm(gradient.view(self.num, -1), dim=1) for gradient in gradients])
        scale = (self._settings.max_grad_norm / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
        for weight, gradient in zip(self.weights, gradients, strict=True):
            gradient.view(self.num, -1).mul_(scale[:, None])
            weight.grad = gradient
        self._adam.step()
        self._adam.zero_grad()  # the gradients of all groups together would need as much memory as the weights

    def gradients(
        self, cells: Tensor, actions: Tensor, advantages: Tensor, returns: Tensor, before: Tensor
    ) -> list[Tensor]:
        """Of each learner's loss by its weights; `before` are the logarithms of its actions' probabilities then."""
        settings, count = self._settings, cells.shape[1]
        inputs = self._seen[cells].repeat_interleave(2, dim=0)
        first, second, logits, values = self._forward(inputs)
        log_probs = logits.log_softmax(dim=-1)
        probs, taken = log_probs.exp(), actions[..., None]
        ratio = (log_probs.gather(2, taken)[..., 0] - before).exp()
        # Where clipping holds the smaller of the two terms, the loss does not depend on the policy.
        held = torch.where(advantages > 0, ratio > 1 + settings.clip, ratio < 1 - settings.clip)
        push = (ratio * advantages / count).masked_fill(held, 0.0)[..., None]
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
        """Orthogonal weights and no bias."""
        tall = (networks, max(num_in, num_out), min(num_in, num_out))
        radius = (-2 * (1 - self._uniform(*tall)).log()).sqrt()
        normal = radius * (2 * math.pi * self._uniform(*tall)).cos()
        q, r = torch.linalg.qr(normal.flatten(0, 1))
        q = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]  # without it q is not uniform among the orthogonal ones
        weight = gain * (q if num_in >= num_out else q.mT)
        return weight.contiguous(), weight.new_zeros(len(weight), 1, num_out)

    def _uniform(self, *shape: int) -> Tensor:
        """[learners, *shape] numbers in [0, 1), others at every call."""
        size = int(torch.Size(shape).numel())
        counter = torch.arange(size, device=self._keys.device) + (self._num_random << 32)
        self._num_random += 1
        return to_unit(random_bits(self._keys[:, None], counter[None]), torch.float32).view(-1, *shape)


def _advantages(
    rewards: Tensor, values: Tensor, last: Tensor, ends: list[bool], gamma: float, gae_lambda: float
) -> Tensor:
    """Generalised advantage estimates of a rollout, [rows, steps]; `last` [rows] are the values of where it left off.

    The end of an episode counts as the end of all reward, as in the known code.
    """
    advantage, found = torch.zeros_like(last), []
    for step in reversed(range(len(ends))):
        goes_on = 0.0 if ends[step] else gamma
        surprise = rewards[:, step] + goes_on * last - values[:, step]
        advantage = surprise + goes_on * gae_lambda * advantage
        last = values[:, step]
        found.append(advantage)
    return torch.stack(found[::-1], dim=1)


def _inputs_of(room: Room, inputs: str) -> Tensor:
    """[cells, inputs] what the networks see in each cell."""
    if inputs == "cells":
        return torch.eye(room.num_cells)
    cells = torch.arange(room.num_cells)
    return torch.stack([cells // room.size, cells % room.size], dim=1).float()


def _streams_of(tasks: Tensor) -> int:
    """How many rows each task has, one after the other."""
    _, counts = torch.unique_consecutive(tasks, return_counts=True)
    if bool((counts != counts[0]).any()):
        raise ValueError("streams that share a policy must be equally many for each task, and each task named once")
    return int(counts[0])
