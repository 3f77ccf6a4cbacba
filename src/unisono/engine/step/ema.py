"""Averages of the weights for evaluation, previews and export: an exponential moving average, or the optimizer's own.

They are elementwise, so each rank averages its own shards without communication, and checkpoints store and reshard them
like the weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from unisono.optim.schedule_free import ScheduleFreeAdamW
from unisono.parallel.blocks.streamed_update import StreamedUpdate
from unisono.settings import EmaSettings


class Average(ABC):
    """An average of the weights that can take their place in the model."""

    @abstractmethod
    def update(self, updates: int) -> None:
        """Updates the average with the weights of a step; `updates` is the number of earlier updates."""

    @abstractmethod
    def restart(self) -> None:
        """Starts again from the current weights."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Returns the averages by the weights' names."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """The memory that the average takes between evaluations."""

    @abstractmethod
    def in_place_of_weights(self, changed: Callable[[], None]) -> AbstractContextManager[None]:
        """A context in which the model computes with the average; calls `changed` after each swap."""


class Ema(Average):
    """An exponential moving average of the weights."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        settings: EmaSettings,
        on_host: StreamedUpdate | None = None,
    ) -> None:
        """`on_host`: the parameters that are stored in host memory, where their averages are stored too."""
        self._names = [name for name, _ in parameters]
        self._weights = [parameter.detach() for _, parameter in parameters]
        waiting = {} if on_host is None else on_host.create_averages()
        self._averages = [
            waiting[parameter] if parameter in waiting else parameter.detach().clone() for _, parameter in parameters
        ]
        resident = [place for place, (_, parameter) in enumerate(parameters) if parameter not in waiting]
        self._resident_weights = [self._weights[place] for place in resident]
        self._resident_averages = [self._averages[place] for place in resident]
        self._settings, self._on_host = settings, on_host

    def decay(self, updates: int) -> float:
        """Returns the decay of the next update, after `updates` earlier updates."""
        if not self._settings.ema_warmup:
            return self._settings.ema_decay
        return min(self._settings.ema_decay, (1 + updates) / (10 + updates))

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Moves the average towards the weights, in one kernel for all of them on the device."""
        amount = 1 - self.decay(updates)
        if self._resident_averages:
            torch._foreach_lerp_(self._resident_averages, self._resident_weights, amount)
        if self._on_host is not None:
            self._on_host.move_averages(amount)

    @torch.no_grad()
    def restart(self) -> None:
        """Starts again from the current weights."""
        self._complete()
        torch._foreach_copy_(self._averages, self._weights)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the averages by the weights' names."""
        self._complete()
        return dict(zip(self._names, self._averages, strict=True))

    @property
    def num_bytes(self) -> int:
        """The memory of the averages."""
        return sum(average.nbytes for average in self._averages)

    def _complete(self) -> None:
        if self._on_host is not None:
            self._on_host.flush()

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
        self._complete()
        for weight, average in zip(self._weights, self._averages, strict=True):  # one temporary weight at a time
            copy = weight.clone()
            weight.copy_(average)
            average.copy_(copy)


class ScheduleFreeAverage(Average):
    """The average that a schedule-free optimizer computes: derived from its state when it is needed."""

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], optimizer: ScheduleFreeAdamW) -> None:
        self._parameters, self._optimizer = parameters, optimizer

    def update(self, updates: int) -> None:
        """Does nothing, because the optimizer has updated the average."""

    def restart(self) -> None:
        """Does nothing, because the optimizer's state was restored."""

    def tensors(self) -> dict[str, Tensor]:
        """Returns the averages, computed from the optimizer's current state."""
        return {name: self._optimizer.average(parameter) for name, parameter in self._parameters}

    @property
    def num_bytes(self) -> int:
        """0, because the average is not stored."""
        return 0

    @contextmanager
    def in_place_of_weights(self, changed: Callable[[], None]) -> Iterator[None]:
        """A context in which the model computes with the average; calls `changed` after each swap."""
        trained = [parameter.detach().clone() for _, parameter in self._parameters]
        self._set(self._optimizer.average(parameter) for _, parameter in self._parameters)  # one at a time
        changed()
        try:
            yield
        finally:
            self._set(trained)
            changed()

    @torch.no_grad()
    def _set(self, weights: Iterable[Tensor]) -> None:
        for (_, parameter), weight in zip(self._parameters, weights, strict=True):
            parameter.copy_(weight)
