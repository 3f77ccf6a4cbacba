"""Replicates the model on every rank and averages gradients during backward (`DistributedDataParallel`).

In a guarded step, gradients are not reduced during backward but afterwards, once all ranks know that none of them ran
out of memory. So no rank is left waiting in a collective. The reduction uses the same buckets, so guarded and fast
steps are bitwise identical.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from unisono.parallel.strategy import ForwardWrapper, Strategy, unused_weights

_BROADCAST_BYTES = 250 * 2**20


class DDP(Strategy):
    """Replicates the model on every rank."""

    name = "ddp"
    collective = True

    def _set_up(self, wrapper: ForwardWrapper, blocks: Sequence[nn.Module]) -> nn.Module:
        placement, settings = self.placement, self.settings
        wrapper = wrapper.to(placement.device)
        self._wrapped = DistributedDataParallel(
            wrapper,
            device_ids=[placement.device.index] if placement.device.type == "cuda" else None,
            # begin_step broadcasts buffers. DDP would do so in its forward pass, which a rank that ran out of memory
            # may never reach.
            **_buffer_option(False),
            bucket_cap_mb=settings.bucket_cap_mb,
            find_unused_parameters=settings.find_unused_parameters,
            gradient_as_bucket_view=settings.gradient_as_bucket_view,
            static_graph=settings.static_graph,
        )
        self._first_forward = True
        self.guardable = self._is_guardable(wrapper)
        self._trained = [parameter for parameter in wrapper.model.parameters() if parameter.requires_grad]
        self._views: list[Tensor] | None = None  # the gradients as views of the buckets
        self._has_final_buckets = False
        self._arrivals: list[nn.Parameter] = []  # parameters in the order in which their gradients became ready
        self._hooks: list[Any] = []  # hooks that fill _arrivals
        self._has_observed = False
        if self.guardable and placement.deterministic:
            self._fix_buckets(self._trained[::-1])
        return wrapper

    @property
    def gradient_divisor(self) -> float:
        """The number of ranks, because DDP averages gradients across ranks."""
        return float(self.placement.world)

    def _is_guardable(self, wrapper: ForwardWrapper) -> bool:
        """False if DDP must see the graph of every backward pass, or if forward passes contain collectives."""
        syncs_in_forward = self._gathers or any(isinstance(module, nn.SyncBatchNorm) for module in wrapper.modules())
        return not (self.settings.static_graph or self.settings.find_unused_parameters or syncs_in_forward)

    def train(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Returns call(model, *arguments); the backward pass averages the gradients across ranks."""
        return self._wrapped(call, *arguments)

    def fix_gradient_addresses(self) -> bool:
        """Keeps gradients in the buckets, if their layout can be fixed before the first reduction."""
        return self.guardable and self.settings.gradient_as_bucket_view

    @property
    def has_fixed_gradients(self) -> bool:
        """True once the buckets are final: guarded steps then compute and average gradients inside the buckets."""
        return self._views is not None

    def begin_step(self, *, guarded: bool) -> None:
        """Broadcasts rank 0's buffers; in a guarded step, also places the gradients in the buckets."""
        buffers = self.buffers.tensors() if self.settings.broadcast_buffers and self.placement.world > 1 else []
        if buffers:
            with torch.no_grad():
                assert dist.group.WORLD is not None
                dist._broadcast_coalesced(  # type: ignore[attr-defined]
                    dist.group.WORLD, buffers, _BROADCAST_BYTES, 0
                )
        if guarded and not self._has_observed:
            self._observe_order()
        if guarded and self._views is not None:
            torch._foreach_zero_(self._views)  # new gradients would need memory besides the buckets
            for parameter, view in zip(self._trained, self._views, strict=True):
                parameter.grad = view

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """A context for a forward pass: its gradients stay local, unless it is the last of a step without a guard."""
        # static_graph records the graph in its first backward pass and asserts that it is not under no_sync. Reducing
        # once more is harmless: the average of equal gradients is the gradient.
        must_sync = not self.guardable and (last or (self.settings.static_graph and self._first_forward))
        self._first_forward = False
        return nullcontext() if must_sync else self._wrapped.no_sync()

    def reduce_in_backward(self) -> None:
        """Makes the next backward pass reduce gradients across ranks."""
        if self.guardable:
            self._wrapped(_nothing)  # DDP prepares for backward in its forward pass, even if that computes nothing

    def reduce(self) -> None:
        """Averages the gradients of a guarded step across ranks, in the same buckets as fast steps."""
        if unused := self.without_gradient():
            raise unused_weights(unused)
        self.check_dense()
        had_final_buckets = self._has_final_buckets
        if not had_final_buckets:  # this happens in the same step on all ranks
            self._fix_buckets_keeping_gradients()
        self._stop_observing()
        if had_final_buckets and self._views is not None:
            # DDP divides gradients that are in its buckets, but multiplies gradients that it copies there by 1 / world,
            # which rounds differently. Fast steps copy, so this step copies too. The activations are freed by now, so
            # the copies fit into memory.
            for parameter in self._trained:
                parameter.grad = parameter.grad.clone()  # type: ignore[union-attr]
        self._wrapped(self._touch).backward()

    def gradients(self) -> list[Tensor]:
        """The averaged gradients; averages those in host memory now, because DDP does not know them."""
        if self._on_host is not None and self.placement.world > 1:
            self._on_host.average(self.placement.world)
        return super().gradients()

    def _touch(self, model: nn.Module) -> Tensor:
        return _Touch.apply(*self._trained)  # type: ignore[no-any-return, no-untyped-call]

    def _observe_order(self) -> None:
        """Records the order in which gradients become ready in the first backward pass, the best order for buckets."""
        self._has_observed = True
        for parameter in self._trained:
            hook = parameter.register_post_accumulate_grad_hook(self._arrivals.append)  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    def _stop_observing(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._arrivals, self._hooks = [], []

    def without_gradient(self) -> list[str]:
        """Names of trained weights that the step did not use."""
        if not self._hooks:
            return super().without_gradient()
        # Before the first backward pass all weights may have a gradient of zeros, in the buckets.
        without = set(self._trained).difference(self._arrivals)
        return [
            name
            for name, parameter in self.parameters
            if parameter in without or (parameter.grad is None and parameter not in self._arrivals)
        ]

    def _fix_buckets_keeping_gradients(self) -> None:
        arrived = self._arrivals
        self._stop_observing()
        # Ranks may have recorded different orders; DDP uses that of rank 0.
        order = list(dict.fromkeys([*arrived, *self._trained[::-1]]))
        gradients = [parameter.grad for parameter in self._trained]
        for parameter in self._trained:
            parameter.grad = None
        self._fix_buckets(order)
        for parameter, gradient in zip(self._trained, gradients, strict=True):
            parameter.grad = gradient

    def _fix_buckets(self, order: Sequence[nn.Parameter]) -> None:
        """Makes DDP build its final buckets now, as if gradients became ready in this order.

        DDP rebuilds its buckets after the first backward pass, in the order in which gradients arrived. The first step
        of a resumed run would therefore use different buckets, and with 3 or more ranks the order of summation, and so
        the rounding, depends on the bucket. A backward pass through a chain of all parameters makes DDP rebuild its
        buckets before the first real reduction.
        """

        def chain(model: nn.Module) -> Tensor:
            total = torch.zeros((), device=order[0].device)
            for parameter in reversed(order):  # the last one's gradient arrives first
                total = total + (parameter * 0).sum()
            return total

        self._has_final_buckets = True
        for _ in range(2):  # DDP rebuilds its buckets in the second forward pass
            self._wrapped(chain).backward()
        if self.settings.gradient_as_bucket_view:
            self._views = [parameter.grad for parameter in self._trained]  # type: ignore[misc]
        for parameter in self._trained:
            parameter.grad = None


class _Touch(torch.autograd.Function):
    """Uses all parameters and adds nothing to their gradients, so that DDP reduces the existing gradients."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.num = len(parameters)
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None,) * ctx.num


def _nothing(model: nn.Module) -> None:
    """A forward pass that computes nothing."""


def _buffer_option(broadcast: bool) -> dict[str, Any]:
    """The option to broadcast buffers, by its name in this version of torch (2.13 renamed it)."""
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if renamed else "broadcast_buffers": broadcast}
