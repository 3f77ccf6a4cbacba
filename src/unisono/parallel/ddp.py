"""A replica per rank, gradients averaged bucket by bucket while backward runs (`DistributedDataParallel`).

A guarded step does not let gradients travel while backward runs: they wait on their rank until all ranks know that
everybody has them, and then go through the very same buckets. So a rank that ran out of memory leaves no collective
half done, and guarded steps give the same bits as fast ones.
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
    """The same weights on every rank."""

    name = "ddp"
    collective = True

    def _set_up(self, wrapper: ForwardWrapper, blocks: Sequence[nn.Module]) -> nn.Module:
        placement, settings = self.placement, self.settings
        wrapper = wrapper.to(placement.device)
        self._wrapped = DistributedDataParallel(
            wrapper,
            device_ids=[placement.device.index] if placement.device.type == "cuda" else None,
            # DDP would copy buffers inside its forward pass, where a rank that ran out of memory may never come:
            # begin_step does it.
            **_buffer_option(False),
            bucket_cap_mb=settings.bucket_cap_mb,
            find_unused_parameters=settings.find_unused_parameters,
            gradient_as_bucket_view=settings.gradient_as_bucket_view,
            static_graph=settings.static_graph,
        )
        self._first_forward = True
        self.guardable = self._is_guardable(wrapper)
        self._trained = [parameter for parameter in wrapper.model.parameters() if parameter.requires_grad]
        self._views: list[Tensor] | None = None  # of the gradients, inside the buckets
        self._settled = False  # whether the buckets have their final layout
        self._arrivals: list[nn.Parameter] = []  # in which order gradients became ready
        self._hooks: list[Any] = []  # that note it
        self._listened = False
        if self.guardable and placement.deterministic:
            self._settle_buckets(self._trained[::-1])
        return wrapper

    @property
    def gradient_divisor(self) -> float:
        """DDP averages over the ranks."""
        return float(self.placement.world)

    def _is_guardable(self, wrapper: ForwardWrapper) -> bool:
        """Not where DDP must see the graph of every backward pass, nor where forward passes need all ranks."""
        in_forward = any(isinstance(module, nn.SyncBatchNorm) for module in wrapper.modules())
        in_forward = in_forward or self._gathers
        return not (self.settings.static_graph or self.settings.find_unused_parameters or in_forward)

    def train(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """call(model, *arguments) with gradients that are averaged over the ranks in backward."""
        return self._wrapped(call, *arguments)

    def keep_gradients(self) -> bool:
        """They stay in the buckets, where these are settled before gradients travel."""
        return self.guardable and self.settings.gradient_as_bucket_view

    @property
    def gradients_stay(self) -> bool:
        """Of guarded steps, once the buckets are settled; what the ranks have summed lies there too."""
        return self._views is not None

    def begin_step(self, *, guarded: bool) -> None:
        """The first rank's buffers for all; for a guarded step, gradients that lie in the buckets from the start."""
        buffers = self.buffers.tensors() if self.settings.broadcast_buffers and self.placement.world > 1 else []
        if buffers:
            with torch.no_grad():
                assert dist.group.WORLD is not None
                dist._broadcast_coalesced(  # type: ignore[attr-defined]
                    dist.group.WORLD, buffers, _BROADCAST_BYTES, 0
                )
        if guarded and not self._listened:
            self._listen()
        if guarded and self._views is not None:
            torch._foreach_zero_(self._views)  # otherwise they would need memory beside the buckets
            for parameter, view in zip(self._trained, self._views, strict=True):
                parameter.grad = view

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Around a forward pass whose gradients stay on this rank (until `arm`, where a step can be guarded)."""
        # static_graph records the graph in its first backward pass and asserts that it is not under no_sync; summing
        # once more is harmless, because the average of equal gradients is the gradient.
        must_sync = not self.guardable and (last or (self.settings.static_graph and self._first_forward))
        self._first_forward = False
        return nullcontext() if must_sync else self._wrapped.no_sync()

    def arm(self) -> None:
        """The next backward pass sums gradients over the ranks while it runs."""
        if self.guardable:
            self._wrapped(_nothing)  # DDP prepares for a backward pass in its forward pass, whatever that computes

    def reduce(self) -> None:
        """Averages the gradients of a guarded step over the ranks, in the buckets that fast steps use."""
        if unused := self.without_gradient():
            raise unused_weights(unused)
        settled = self._settled
        if not settled:  # on all ranks at the same time, whether they were listening or not
            self._settle_with_gradients()
        self._stop_listening()
        if settled and self._views is not None:
            # DDP divides what lies in its buckets and multiplies what it copies there by 1 / world: other bits. Fast
            # steps copy. The activations are gone by now, so there is room for a copy.
            for parameter in self._trained:
                parameter.grad = parameter.grad.clone()  # type: ignore[union-attr]
        self._wrapped(_touch).backward()

    def _listen(self) -> None:
        """Notes the order in which the first backward pass makes gradients ready: the best order for the buckets."""
        self._listened = True
        for parameter in self._trained:
            hook = parameter.register_post_accumulate_grad_hook(self._arrivals.append)  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    def _stop_listening(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._arrivals, self._hooks = [], []

    def without_gradient(self) -> list[str]:
        """Names of trained weights that took no part in the step."""
        if not self._hooks:
            return super().without_gradient()
        # All weights may have had a gradient, zeros in the buckets, before the first backward pass.
        arrived = {id(parameter) for parameter in self._arrivals}
        return [name for name, parameter in self.parameters if id(parameter) not in arrived]

    def _settle_with_gradients(self) -> None:
        arrived = self._arrivals
        self._stop_listening()
        # Ranks may have noted different orders; DDP takes the first rank's.
        order = list(dict.fromkeys([*arrived, *self._trained[::-1]]))
        gradients = [parameter.grad for parameter in self._trained]
        for parameter in self._trained:
            parameter.grad = None
        self._settle_buckets(order)
        for parameter, gradient in zip(self._trained, gradients, strict=True):
            parameter.grad = gradient

    def _settle_buckets(self, order: Sequence[nn.Parameter]) -> None:
        """Makes DDP settle its buckets now, as if gradients became ready in this order.

        DDP rebuilds its buckets after the first backward pass, in the order in which gradients arrived. A resumed run
        would therefore do its first step with other buckets than the run it continues, and from 3 ranks on the order
        of summation, and with it the last bit, depends on the bucket. A backward pass through a chain of all
        parameters makes it settle on an order before the first gradient travels.
        """

        def chain(model: nn.Module) -> Tensor:
            total = torch.zeros((), device=order[0].device)
            for parameter in reversed(order):  # the last one's gradient arrives first
                total = total + (parameter * 0).sum()
            return total

        self._settled = True
        for _ in range(2):  # the rebuild itself happens in the second forward pass
            self._wrapped(chain).backward()
        if self.settings.gradient_as_bucket_view:
            self._views = [parameter.grad for parameter in self._trained]  # type: ignore[misc]
        for parameter in self._trained:
            parameter.grad = None


class _Touch(torch.autograd.Function):
    """Uses all parameters and adds nothing to their gradients: DDP then takes those that are there already."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.num = len(parameters)
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None,) * ctx.num


def _nothing(model: nn.Module) -> None:
    """A forward pass of nothing."""


def _touch(model: nn.Module) -> Tensor:
    used = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return _Touch.apply(*used)  # type: ignore[no-any-return, no-untyped-call]


def _buffer_option(broadcast: bool) -> dict[str, Any]:
    """The option under the name this torch knows it by (renamed in torch 2.13)."""
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if renamed else "broadcast_buffers": broadcast}
