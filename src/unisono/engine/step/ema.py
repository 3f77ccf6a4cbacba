"""The exponential moving average of the weights.

It is elementwise, so each rank averages its own shards without communication, and checkpoints store and reshard it like
the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from unisono.settings import EmaSettings


class Ema:
    """A moving average of the weights."""

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], settings: EmaSettings) -> None:
        self._names = [name for name, _ in parameters]
        self._weights = [parameter.detach() for _, parameter in parameters]
        self._averages = [weight.clone() for weight in self._weights]
        self._settings = settings

    def decay(self, updates: int) -> float:
        """The decay of the update that follows `updates` earlier ones."""
        if not self._settings.ema_warmup:
            return self._settings.ema_decay
        return min(self._settings.ema_decay, (1 + updates) / (10 + updates))

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Moves the average towards the weights, in one kernel for all of them."""
        torch._foreach_lerp_(self._averages, self._weights, 1 - self.decay(updates))

    @torch.no_grad()
    def restart(self) -> None:
        """Starts again from the current weights."""
        torch._foreach_copy_(self._averages, self._weights)

    def tensors(self) -> dict[str, Tensor]:
        """The averages by the weights' names."""
        return dict(zip(self._names, self._averages, strict=True))

    @contextmanager
    def in_place_of_weights(self, changed: Callable[[], None]) -> Iterator[None]:
        """A context in which the model computes with the average; calls `changed` after each swap."""
        self._exchange()
        changed()
        try:
            yield
        finally:
            self._exchange()
            changed()

    @torch.no_grad()
    def _exchange(self) -> None:
        for weight, average in zip(self._weights, self._averages, strict=True):  # one temporary weight at a time
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)
