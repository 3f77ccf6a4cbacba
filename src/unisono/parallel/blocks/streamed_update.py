"""Updates weights in host memory on the device: a few of them at a time, with gradients and optimizer state.

An optimizer step on the CPU is limited by the host's memory bandwidth and cores. Copying to the device and back over
PCIe is faster, and several parts are under way at once: one is copied in, one is updated, one is copied out. A part is
a few weights of a block, so that the buffers need little memory; they are allocated for each update, when the
activations are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from unisono.parallel.blocks.host_memory import Extract, HostTensors, aligned
from unisono.parallel.blocks.staging import HostWeights, Slot
from unisono.parallel.blocks.swap import BlockSwap

_PART_BYTES = 64 * 2**20
"""Maximum size of a part's weights, in bytes; a larger weight forms its own part."""
_NUM_BUFFERS = 3  # one is copied in, one is updated, one is copied out

States = Any  # the optimizer's state: a mapping from weights to mappings from names to tensors


@dataclass
class _Range:
    """Consecutive tensors of a host buffer."""

    flat: Tensor
    extracts: Sequence[Extract]  # relative to `flat`
    is_written: bool  # copied back to the host

    @classmethod
    def of(cls, memory: HostTensors, first: int, last: int, *, is_written: bool = True) -> _Range:
        start, end = memory.extracts[first].offset, memory.extracts[last - 1].end
        extracts = [replace(each, offset=each.offset - start) for each in memory.extracts[first:last]]
        return cls(memory.flat[start:end], extracts, is_written)

    def views(self, buffer: Tensor, offset: int) -> list[Tensor]:
        return [extract.of(buffer[offset:]) for extract in self.extracts]


@dataclass
class _Part:
    """A few trained weights of a block."""

    weights: list[nn.Parameter]
    at_rest: list[Tensor]  # the weights in host memory
    values: _Range
    gradients: _Range
    average: _Range | None = None
    state: _Range | None = None
    slots: list[tuple[nn.Parameter, str]] = field(default_factory=list)  # of the tensors in `state`
    slots_at_rest: list[Tensor] = field(default_factory=list)


class StreamedUpdate:
    """The trained weights of swapped blocks, in parts."""

    def __init__(self, swap: BlockSwap) -> None:
        assert swap.gradients is not None
        self._swap = swap
        self._transfers = swap.transfers
        self._averages: dict[nn.Parameter, Tensor] = {}
        self._due: float | None = None  # weight of the pending update of the averages, if there is one
        self._parts: list[_Part] = []
        self._by_block: list[tuple[HostWeights, list[_Part]]] = []
        for host, gradients in zip(swap.hosts, swap.gradients.memory, strict=True):
            parts = [
                _Part(
                    host.trained[first:last],
                    host.memory.views[first:last],
                    _Range.of(host.memory, first, last),
                    _Range.of(gradients, first, last, is_written=False),
                )
                for first, last in _divided(host.trained)
            ]
            self._parts += parts
            self._by_block.append((host, parts))

    @property
    def device(self) -> torch.device:
        """The device that updates the weights."""
        return self._swap.device

    @property
    def weights(self) -> list[nn.Parameter]:
        """All weights in host memory."""
        return [weight for part in self._parts for weight in part.weights]

    def create_state(self, states: States, create: Callable[[list[nn.Parameter]], None]) -> None:
        """Calls `create` for a few weights at a time, on the device; moves the state that it creates to the host."""
        for part in self._parts:
            with torch.no_grad():
                for weight, host in zip(part.weights, part.at_rest, strict=True):
                    weight.data = host.to(self.device)
            create(part.weights)
            for weight, host in zip(part.weights, part.at_rest, strict=True):
                weight.data = host
            part.slots = [
                (weight, slot)
                for weight in part.weights
                for slot, value in states[weight].items()
                if isinstance(value, Tensor)
            ]
            if part.slots:
                created = [states[weight][slot] for weight, slot in part.slots]
                memory = HostTensors(created, pin=self._transfers.pin)
                for (weight, slot), value, view in zip(part.slots, created, memory.views, strict=True):
                    states[weight][slot] = view.copy_(value)
                part.state = _Range.of(memory, 0, len(created))
                part.slots_at_rest = memory.views

    def step(self, states: States) -> Iterator[list[nn.Parameter]]:
        """Yields a few weights at a time, with gradients and state on the device; the caller updates them there."""
        for part, views in self._streamed(self._due is not None, with_state=True):
            self._update_average(views)
            with _attached(part, views, states):
                yield part.weights
        self._due = None
        self._swap.weights_updated()

    def create_averages(self) -> dict[nn.Parameter, Tensor]:
        """Creates averages of the weights in host memory, equal to the current weights."""
        for host, parts in self._by_block:
            memory, first = HostTensors(host.trained, pin=self._transfers.pin), 0
            for part in parts:
                last = first + len(part.weights)
                part.average = _Range.of(memory, first, last)
                first = last
            for weight, value, view in zip(host.trained, host.memory.views, memory.views, strict=False):
                self._averages[weight] = view.copy_(value)
        return self._averages

    def move_averages(self, amount: float) -> None:
        """Schedules a move of the averages towards the weights, which the next step or `flush` then makes."""
        self.flush()
        self._due = amount

    def flush(self) -> None:
        """Computes the pending update of the averages; afterwards the host may read and change them."""
        if self._due is None:
            return
        for _, views in self._streamed(with_average=True, with_state=False):
            self._update_average(views)
        self._due = None
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _update_average(self, views: dict[str, list[Tensor]]) -> None:
        if self._due is not None:
            torch._foreach_lerp_(views["average"], views["values"], self._due)

    @torch.no_grad()
    def _streamed(self, with_average: bool, *, with_state: bool) -> Iterator[tuple[_Part, dict[str, list[Tensor]]]]:
        """Yields each part with its tensors on the device; copies them back when the caller continues."""
        jobs = [(part, self._ranges(part, with_average, with_state)) for part in self._parts]
        size = max(_end_of(ranges) for _, ranges in jobs)
        buffers = [Slot(size, self.device) for _ in range(min(_NUM_BUFFERS, len(jobs)))]
        self._transfers.finish()  # the gradients must be in host memory

        def start(number: int) -> None:
            if number < len(jobs):
                for _, range_, offset in _placed(jobs[number][1]):
                    self._transfers.start(range_.flat, buffers[number % len(buffers)], offset)

        try:
            for number in range(len(buffers) - 1):
                start(number)
            for number, (part, ranges) in enumerate(jobs):
                start(number + len(buffers) - 1)
                buffer = buffers[number % len(buffers)]
                self._transfers.wait(buffer)
                yield part, {name: range_.views(buffer.flat, offset) for name, range_, offset in _placed(ranges)}
                for name, range_, offset in _placed(ranges):
                    if name == "average" or (with_state and range_.is_written):
                        self._transfers.write(buffer, range_.flat, offset)
        finally:
            self._transfers.finish()  # before the memory of the buffers is used for anything else

    def _ranges(self, part: _Part, with_average: bool, with_state: bool) -> dict[str, _Range]:
        ranges: dict[str, _Range | None] = {"values": part.values}
        if with_state:
            ranges |= {"gradients": part.gradients, "state": part.state}
        if with_average:
            ranges["average"] = part.average
        return {name: each for name, each in ranges.items() if each is not None}


@contextmanager
def _attached(part: _Part, views: dict[str, list[Tensor]], states: States) -> Iterator[None]:
    """A context in which weights, gradients and state of a part are the tensors on the device."""
    gradients = [weight.grad for weight in part.weights]
    slots = list(zip(part.slots, views.get("state", ()), part.slots_at_rest, strict=True))
    for weight, value, gradient in zip(part.weights, views["values"], views["gradients"], strict=True):
        has_gradient, weight.grad = weight.grad is not None, None  # torch rejects a gradient on another device
        weight.data = value
        weight.grad = gradient if has_gradient else None
    for (weight, slot), value, _ in slots:
        if slot in states[weight]:
            states[weight][slot] = value
    try:
        yield
    finally:
        for (weight, slot), value, at_rest in slots:
            if slot in states[weight]:
                if states[weight][slot] is not value:  # the optimizer has replaced the tensor
                    value.copy_(states[weight][slot])
                states[weight][slot] = at_rest
        for weight, host, gradient_at_rest in zip(part.weights, part.at_rest, gradients, strict=True):
            weight.grad = None
            weight.data = host
            weight.grad = gradient_at_rest


def _divided(weights: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Returns the ranges (first, last + 1) of consecutive weights of limited size."""
    borders, size = [0], 0
    for number, weight in enumerate(weights):
        if size and size + weight.nbytes > _PART_BYTES:
            borders.append(number)
            size = 0
        size += weight.nbytes
    return list(pairwise([*borders, len(weights)])) if weights else []


def _placed(ranges: dict[str, _Range]) -> Iterator[tuple[str, _Range, int]]:
    """Yields each range with its offset in a buffer on the device."""
    offset = 0
    for name, each in ranges.items():
        yield name, each, offset
        offset += aligned(len(each.flat))


def _end_of(ranges: dict[str, _Range]) -> int:
    return sum(aligned(len(each.flat)) for each in ranges.values())
