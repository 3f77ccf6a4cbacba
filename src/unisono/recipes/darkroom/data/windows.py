"""The training data: contexts cut out of learning histories.

All histories are stored on the device as bytes (22 MB with the default settings), and batches of contexts are gathered
from them by index. Every context starts at the first step of an episode, as in a rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.errors import ConfigError
from unisono.recipes.darkroom.models.transformer import NO_ACTION, Tokens
from unisono.recipes.darkroom.sources.source import Histories


class Contexts(NamedTuple):
    """A batch of contexts; each tensor is [batch, length]."""

    tokens: Tokens
    actions: Tensor  # the targets
    learned: Tensor | None  # positions that count in the loss; None: all positions


def joined(batches: Sequence[Contexts]) -> Contexts:
    """Joins several batches into one."""
    tokens = Tokens(*(_cat(column) for column in zip(*(batch.tokens for batch in batches), strict=True)))
    actions = torch.cat([batch.actions for batch in batches])
    return Contexts(tokens, actions, _cat([batch.learned for batch in batches]))


def _cat(tensors: Sequence[Tensor | None]) -> Any:
    return None if tensors[0] is None else torch.cat([tensor for tensor in tensors if tensor is not None])


@dataclass(frozen=True)
class Windows:
    """A dataset of all windows of `length` steps that start at the first step of an episode."""

    cells: Tensor  # [histories, steps], uint8
    actions: Tensor
    rewards: Tensor
    horizon: int
    length: int

    @classmethod
    def of(cls, histories: Histories, horizon: int, length: int, skip: int = 1, setting: str = "n_transit") -> Windows:
        """Returns windows over every `skip`-th episode; `setting` names the setting for `length` in error messages."""
        steps = histories.cells.shape[-1] // horizon * horizon
        columns = [
            values[..., :steps].reshape(-1, steps // horizon, horizon)[:, ::skip].flatten(1).contiguous()
            for values in (histories.cells, histories.actions, histories.rewards)
        ]
        if columns[0].shape[1] < length:
            raise ConfigError(
                f"{setting} {length}: the histories have {columns[0].shape[1]} steps (train_source_timesteps "
                f"{histories.cells.shape[-1]}, history_skip {skip}); use a shorter context or longer histories"
            )
        return cls(columns[0], columns[1], columns[2], horizon, length)

    @property
    def per_history(self) -> int:
        """Number of contexts per history."""
        return (self.cells.shape[1] - self.length) // self.horizon + 1

    def __len__(self) -> int:
        return len(self.cells) * self.per_history

    def __getitem__(self, index: int) -> Contexts:
        return self.gather(torch.tensor([index], device=self.cells.device))

    def to(self, device: torch.device) -> Windows:
        """Copies the histories to a device."""
        return replace(
            self, cells=self.cells.to(device), actions=self.actions.to(device), rewards=self.rewards.to(device)
        )

    def gather(self, indices: Tensor) -> Contexts:
        """Returns the contexts at `indices`."""
        history, number = indices // self.per_history, indices % self.per_history
        steps = (number * self.horizon)[:, None] + torch.arange(self.length, device=indices.device)
        return self._at(history, steps, first=torch.zeros_like(number))

    def _at(self, history: Tensor, steps: Tensor, first: Tensor) -> Contexts:
        """Returns the contexts of these steps, [batch, length]; slot `first` of each row has no previous step."""
        flat = history[:, None] * self.cells.shape[1] + steps
        cells, actions = self.cells.view(-1)[flat].long(), self.actions.view(-1)[flat].long()
        before = (flat - 1).clamp(min=0)
        is_first = torch.arange(steps.shape[1], device=steps.device) == first[:, None]
        previous_actions = self.actions.view(-1)[before].long().masked_fill(is_first, NO_ACTION)
        previous_rewards = self.rewards.view(-1)[before].long().masked_fill(is_first, 0)
        return Contexts(Tokens(cells, previous_actions, previous_rewards), actions, None)


@dataclass(frozen=True)
class TwoRegions(Windows):
    """A dataset of two-region contexts: the previous `interval` steps between separators, then the current steps.

    Only actions in the current region count in the loss. The first region of a history has no previous region. In its
    contexts, nothing is between the separators, and the unused slots at the end do not count in the loss.
    """

    interval: int = 80

    @classmethod
    def cut(cls, histories: Histories, horizon: int, interval: int, skip: int = 1) -> TwoRegions:
        """Returns two-region contexts over every `skip`-th episode."""
        plain = Windows.of(histories, horizon, interval, skip, setting="compress_interval")
        return cls(plain.cells, plain.actions, plain.rewards, horizon, 2 * interval + 2, interval)

    @property
    def per_history(self) -> int:
        """Number of regions per history."""
        return self.cells.shape[1] // self.interval

    def gather(self, indices: Tensor) -> Contexts:
        """Returns the contexts at `indices`."""
        history, region = indices // self.per_history, indices % self.per_history
        num_previous = torch.where(region > 0, self.interval, 0)[:, None]  # steps between the separators
        slot = torch.arange(self.length, device=indices.device)[None]
        separators = torch.where(slot == 0, 1, torch.where(slot == num_previous + 1, 2, 0))
        is_current = slot > num_previous + 1
        # The step in each slot, relative to the first step of the current region.
        relative = torch.where(is_current, slot - num_previous - 2, slot - 1 - num_previous)
        learned = is_current & (relative < self.interval)
        steps = (region[:, None] * self.interval + relative).clamp(0, self.cells.shape[1] - 1)
        tokens, actions, _ = self._at(history, steps, first=torch.where(region > 0, 1, 2))
        is_separator = separators > 0
        tokens = Tokens(
            tokens.cells.masked_fill(is_separator, 0),
            tokens.actions.masked_fill(is_separator, NO_ACTION),
            tokens.rewards.masked_fill(is_separator, 0),
            separators,
        )
        return Contexts(tokens, actions, learned)
