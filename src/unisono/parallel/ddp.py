"""A replica per rank, gradients averaged bucket by bucket while backward runs (`DistributedDataParallel`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from unisono.parallel.strategy import Stage, Strategy


class DDP(Strategy):
    """The same weights on every rank."""

    name = "ddp"

    def _set_up(self, stage: Stage, blocks: Sequence[nn.Module]) -> nn.Module:
        place, settings = self.place, self.settings
        stage = stage.to(place.device)
        self._wrapped = DistributedDataParallel(
            stage,
            device_ids=[place.device.index] if place.device.type == "cuda" else None,
            **_buffer_option(settings.broadcast_buffers),
            bucket_cap_mb=settings.bucket_cap_mb,
            find_unused_parameters=settings.find_unused_parameters,
            gradient_as_bucket_view=settings.gradient_as_bucket_view,
            static_graph=settings.static_graph,
        )
        self._first_backward = True
        if place.deterministic and not settings.static_graph and not settings.find_unused_parameters:
            self._fix_bucket_layout()
        return stage

    @property
    def gradient_divisor(self) -> float:
        """DDP averages over the ranks."""
        return float(self.place.world)

    def train(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """call(model, *arguments) with gradients that are averaged over the ranks in backward."""
        return self._wrapped(call, *arguments)

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """No communication before the last micro-batch."""
        # static_graph records the graph in its first backward pass and asserts that it is not under no_sync; summing
        # once more is harmless, because the average of equal gradients is the gradient.
        must_sync = last or (self.settings.static_graph and self._first_backward)
        self._first_backward = False
        if must_sync:
            return nullcontext()
        return self._wrapped.no_sync()

    def _fix_bucket_layout(self) -> None:
        """Makes DDP settle its buckets before the first step.

        DDP rebuilds its buckets after the first backward pass, in the order in which gradients arrived. A resumed run
        would therefore do its first step with other buckets than the run it continues, and from 3 ranks on the order
        of summation, and with it the last bit, depends on the bucket. A backward pass through a chain of all
        parameters, in which the last one's gradient arrives first, makes it settle on that order on every start.
        """
        for _ in range(2):  # the rebuild itself happens in the second forward pass
            self._wrapped(_chain).backward()
        for parameter in self.model.parameters():
            parameter.grad = None


def _buffer_option(broadcast: bool) -> dict[str, Any]:
    """The option under the name this torch knows it by (renamed in torch 2.13)."""
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if renamed else "broadcast_buffers": broadcast}


def _chain(model: nn.Module) -> Tensor:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    total = torch.zeros((), device=parameters[0].device, dtype=parameters[0].dtype)
    for parameter in parameters:
        total = total + (parameter * 0).sum()
    return total
