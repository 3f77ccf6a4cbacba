"""Contexts cut out of histories: what the transformer trains on.

All histories lie on the device as bytes (22 MB for the whole data set), and a batch of contexts is gathered from them
by index. A context begins where an episode begins, as it does when the transformer plays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.errors import ConfigError
from unisono.recipes.darkroom.model import NOTHING_YET, Tokens
from unisono.recipes.darkroom.sources.source import Histories


class Contexts(NamedTuple):
    """A batch of contexts, each [batch, length]."""

    tokens: Tokens
    actions: Tensor  # what was done next
    learned: Tensor | None  # where that is to be learned; None: everywhere


@dataclass(frozen=True)
class Windows:
    """Every stretch of `length` steps that begins with an episode."""

    cells: Tensor  # [histories, steps], uint8
    actions: Tensor
    rewards: Tensor
    horizon: int
    length: int

    @classmethod
    def of(cls, histories: Histories, horizon: int, length: int, skip: int = 1, setting: str = "n_transit") -> Windows:
        """Contexts of histories of which every `skip`-th episode is used; `setting` is what says how long they are."""
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
        """Contexts that begin in one history."""
        return (self.cells.shape[1] - self.length) // self.horizon + 1

    def __len__(self) -> int:
        return len(self.cells) * self.per_history

    def __getitem__(self, index: int) -> Contexts:
        return self.gather(torch.tensor([index], device=self.cells.device))

    def to(self, device: torch.device) -> Windows:
        """The histories on a device."""
        return replace(
            self, cells=self.cells.to(device), actions=self.actions.to(device), rewards=self.rewards.to(device)
        )

    def gather(self, indices: Tensor) -> Contexts:
        """The contexts at `indices`."""
        history, number = indices // self.per_history, indices % self.per_history
        steps = (number * self.horizon)[:, None] + torch.arange(self.length, device=indices.device)
        return self._at(history, steps, first=torch.zeros_like(number))

    def _at(self, history: Tensor, steps: Tensor, first: Tensor) -> Contexts:
        """Tokens of these steps ([batch, length]); in each row, nothing is known before slot `first`."""
        flat = history[:, None] * self.cells.shape[1] + steps
        cells, actions = self.cells.view(-1)[flat].long(), self.actions.view(-1)[flat].long()
        before = (flat - 1).clamp(min=0)
        new = torch.arange(steps.shape[1], device=steps.device) == first[:, None]
        known_actions = self.actions.view(-1)[before].long().masked_fill(new, NOTHING_YET)
        known_rewards = self.rewards.view(-1)[before].long().masked_fill(new, 0)
        return Contexts(Tokens(cells, known_actions, known_rewards), actions, None)


@dataclass(frozen=True)
class TwoRegions(Windows):
    """Compressed contexts: the region of `interval` steps before, between two marks, and then the current region.

    Learned in the current region only. The first region of a history has none before it: its marks enclose nothing,
    and the slots that are left over at the end are not learned.
    """

    interval: int = 80

    @classmethod
    def cut(cls, histories: Histories, horizon: int, interval: int, skip: int = 1) -> TwoRegions:
        """The same for a compressed context."""
        plain = Windows.of(histories, horizon, interval, skip, setting="compress_interval")
        return cls(plain.cells, plain.actions, plain.rewards, horizon, 2 * interval + 2, interval)

    @property
    def per_history(self) -> int:
        """Regions of one history."""
        return self.cells.shape[1] // self.interval

    def gather(self, indices: Tensor) -> Contexts:
        """The contexts at `indices`."""
        history, region = indices // self.per_history, indices % self.per_history
        older = torch.where(region > 0, self.interval, 0)[:, None]  # steps between the marks
        slot = torch.arange(self.length, device=indices.device)[None]
        ends = slot == older + 1
        marks = torch.where(slot == 0, 1, torch.where(ends, 2, 0)).expand(len(indices), -1)
        current = slot > older + 1
        within = torch.where(
            current, slot - older - 2, slot - 1 - older
        )  # counted from the current region's first step
        learned = current & (within < self.interval)
        steps = (region[:, None] * self.interval + within).clamp(0, self.cells.shape[1] - 1)
        first = torch.where(region > 0, 1, 2)
        tokens, actions, _ = self._at(history, steps, first)
        mark = marks > 0
        tokens = Tokens(
            tokens.cells.masked_fill(mark, 0),
            tokens.actions.masked_fill(mark, NOTHING_YET),
            tokens.rewards.masked_fill(mark, 0),
            marks,
        )
        return Contexts(tokens, actions, learned)
