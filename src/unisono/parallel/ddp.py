"""Replicates the model on every rank and averages gradients during backward (`DistributedDataParallel`).

In a guarded step, gradients are not reduced during backward but afterwards, once all ranks know that none of them ran
out of memory. So no rank is left waiting in a collective. The reduction uses the same buckets, so guarded and fast
steps are bitwise identical.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono.parallel.gradient_buckets import GradientBuckets
from unisono.parallel.strategy import ForwardWrapper, Strategy, unused_weights

_BROADCAST_BYTES = 250 * 2**20


class DDP(Strategy):
    """Replicates the model on every rank."""

    name = "ddp"
    collective = True

    def _set_up(self, wrapper: ForwardWrapper, blocks: Sequence[nn.Module]) -> nn.Module:
        wrapper = wrapper.to(self.placement.device)
        self.guardable = self._is_guardable(wrapper)
        self._buckets_of_groups = self._make_buckets(wrapper)
        self._buckets = self._buckets_of_groups[0]
        return wrapper

    def _make_buckets(self, wrapper: ForwardWrapper) -> list[GradientBuckets]:
        """Creates the buckets of all weights, or of each group: DDP reduces what requires gradients at its creation."""

        def buckets(*, is_synchronized: bool = False) -> GradientBuckets:
            return GradientBuckets(
                wrapper, self.placement, self.settings, guardable=self.guardable, is_synchronized=is_synchronized
            )

        if not self._groups:
            return [buckets()]
        weights = dict(wrapper.model.named_parameters())
        everything = {name for names in self._groups for name in names}
        made: list[GradientBuckets] = []
        for names in map(set, self._groups):
            for name in everything:
                weights[name].requires_grad_(name in names)
            made.append(buckets(is_synchronized=bool(made)))
        for name in everything:
            weights[name].requires_grad_(True)
        return made

    @property
    def gradient_divisor(self) -> float:
        """The number of ranks, because DDP averages gradients across ranks."""
        return float(self.placement.world)

    def _is_guardable(self, wrapper: ForwardWrapper) -> bool:
        """Whether steps can be guarded: DDP need not see every backward graph, and no forward pass has a collective."""
        syncs_in_forward = self._gathers or any(isinstance(module, nn.SyncBatchNorm) for module in wrapper.modules())
        return not (self.settings.static_graph or self.settings.find_unused_parameters or syncs_in_forward)

    def train_only(self, group: int) -> None:
        """Makes the next passes train one of the groups, in its own buckets."""
        super().train_only(group)
        self._buckets = self._buckets_of_groups[group]

    def train(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Returns call(model, *arguments); the backward pass averages the gradients across ranks."""
        return self._buckets.train(call, *arguments)

    def fix_gradient_addresses(self) -> bool:
        """Keeps gradients in the buckets, if their layout can be fixed before the first reduction."""
        return self.guardable and self.settings.gradient_as_bucket_view

    @property
    def has_fixed_gradients(self) -> bool:
        """True once the buckets are final: guarded steps then compute and average gradients inside the buckets."""
        return self._buckets.views is not None

    def begin_step(self, *, guarded: bool) -> None:
        """Broadcasts rank 0's buffers; in a guarded step, also places the gradients in the buckets."""
        buffers = self.buffers.tensors() if self.settings.broadcast_buffers and self.placement.world > 1 else []
        if buffers:
            with torch.no_grad():
                assert dist.group.WORLD is not None
                dist._broadcast_coalesced(  # type: ignore[attr-defined]
                    dist.group.WORLD, buffers, _BROADCAST_BYTES, 0
                )
        if guarded:
            self._buckets.begin_guarded_step()

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """A context for a forward pass whose gradients stay local, unless it is the last pass of an unguarded step."""
        return self._buckets.accumulating(last=last)

    def reduce_in_backward(self) -> None:
        """Makes the next backward pass reduce gradients across ranks."""
        if self.guardable:
            self._buckets.reduce_in_backward()

    def reduce(self) -> None:
        """Averages the gradients of a guarded step across ranks, in the same buckets as fast steps."""
        if unused := self.without_gradient():
            raise unused_weights(unused)
        self.check_dense()
        self._buckets.reduce()

    def gradients(self) -> list[Tensor]:
        """Returns the averaged gradients; averages those in host memory now, because DDP does not know them."""
        if self._on_host is not None and self.placement.world > 1:
            self._on_host.average(self.placement.world)
        return super().gradients()

    def without_gradient(self) -> list[str]:
        """Returns the names of trained weights that the step did not use."""
        unused, used = self._buckets.unused, self._buckets.used
        return [
            name
            for name, parameter in self._trained_now().items()
            if parameter in unused or (parameter.grad is None and parameter not in used)
        ]
