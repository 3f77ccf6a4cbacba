"""The buckets in which `DistributedDataParallel` reduces the gradients of weights that a step trains together.

DDP rebuilds its buckets after the first backward pass, in the order in which gradients arrived. The first step of a
resumed run would therefore use different buckets, and with 3 or more ranks the order of summation, and so the rounding,
depends on the bucket. So the buckets are fixed before the first reduction. If a recipe trains several groups of weights
in turn, each group has its own buckets, over the same module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from unisono.parallel.strategy import ForwardWrapper, Placement
from unisono.settings import ParallelSettings


class GradientBuckets:
    """Reduces the gradients of the weights of a module that require gradients when this object is created."""

    def __init__(
        self,
        wrapper: ForwardWrapper,
        placement: Placement,
        settings: ParallelSettings,
        *,
        guardable: bool,
        is_synchronized: bool = False,
    ) -> None:
        """`guardable`: whether a pass can be repeated. `is_synchronized`: whether all ranks have rank 0's weights."""
        accepted = inspect.signature(DistributedDataParallel).parameters
        # begin_step broadcasts buffers. DDP would do so in its forward pass, which a rank that ran out of memory may
        # never reach. torch 2.13 renamed the option.
        broadcasts = "forward_sync_buffers" if "forward_sync_buffers" in accepted else "broadcast_buffers"
        options: dict[str, Any] = {broadcasts: False}
        if is_synchronized and "init_sync" in accepted:
            options["init_sync"] = False
        self._wrapped = DistributedDataParallel(
            wrapper,
            device_ids=[placement.device.index] if placement.device.type == "cuda" else None,
            **options,
            bucket_cap_mb=settings.bucket_cap_mb,
            find_unused_parameters=settings.find_unused_parameters,
            gradient_as_bucket_view=settings.gradient_as_bucket_view,
            static_graph=settings.static_graph,
        )
        self._settings, self._guardable = settings, guardable
        self._first_forward = True
        self.trained = [parameter for parameter in wrapper.model.parameters() if parameter.requires_grad]
        """The weights whose gradients these buckets hold."""
        self.views: list[Tensor] | None = None
        """The gradients as views of the buckets, once these are final."""
        self._has_final_buckets = False
        self._arrivals: list[nn.Parameter] = []  # parameters in the order in which their gradients became ready
        self._hooks: list[Any] = []  # hooks that fill _arrivals
        self._has_observed = False
        if guardable and placement.deterministic:
            self._fix(self.trained[::-1])

    def train(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Returns call(model, *arguments); the backward pass averages the gradients across ranks."""
        return self._wrapped(call, *arguments)

    def begin_guarded_step(self) -> None:
        """Places the gradients in the buckets, if these are final."""
        if not self._has_observed:
            self._observe_order()
        if self.views is not None:
            torch._foreach_zero_(self.views)  # new gradients would need memory besides the buckets
            for parameter, view in zip(self.trained, self.views, strict=True):
                parameter.grad = view

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """A context for a forward pass whose gradients stay local, unless it is the last pass of an unguarded step."""
        # static_graph records the graph in its first backward pass and asserts that it is not under no_sync. Reducing
        # once more is harmless: the average of equal gradients is the gradient.
        must_sync = not self._guardable and (last or (self._settings.static_graph and self._first_forward))
        self._first_forward = False
        return nullcontext() if must_sync else self._wrapped.no_sync()

    def reduce_in_backward(self) -> None:
        """Makes the next backward pass reduce gradients across ranks."""
        self._wrapped(_nothing)  # DDP prepares for backward in its forward pass, even if that computes nothing

    def reduce(self) -> None:
        """Averages the gradients of a guarded step across ranks, in the same buckets as fast steps."""
        had_final_buckets = self._has_final_buckets
        if not had_final_buckets:  # this happens in the same step on all ranks
            self._fix_keeping_gradients()
        self._stop_observing()
        if had_final_buckets and self.views is not None:
            # DDP divides gradients that are in its buckets, but multiplies gradients that it copies there by 1 / world,
            # which rounds differently. Fast steps copy, so this step copies too. The activations are freed by now, so
            # the copies fit into memory.
            for parameter in self.trained:
                parameter.grad = parameter.grad.clone()  # type: ignore[union-attr]
        self._wrapped(self._touch).backward()

    @property
    def unused(self) -> set[nn.Parameter]:
        """Weights that the first backward pass has not used; empty after that pass.

        `parameter.grad` does not show this, because the buckets may contain zeros for unused weights.
        """
        return set(self.trained).difference(self._arrivals) if self._hooks else set()

    @property
    def used(self) -> set[nn.Parameter]:
        """Weights that the first backward pass has used; empty after that pass."""
        return set(self._arrivals)

    def _touch(self, model: nn.Module) -> Tensor:
        return _Touch.apply(*self.trained)  # type: ignore[no-any-return, no-untyped-call]

    def _observe_order(self) -> None:
        """Records the order in which gradients become ready in the first backward pass, the best order for buckets."""
        self._has_observed = True
        for parameter in self.trained:
            hook = parameter.register_post_accumulate_grad_hook(self._arrivals.append)  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    def _stop_observing(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._arrivals, self._hooks = [], []

    def _fix_keeping_gradients(self) -> None:
        arrived = self._arrivals
        self._stop_observing()
        # Ranks may have recorded different orders; DDP uses the order of rank 0.
        order = list(dict.fromkeys([*arrived, *self.trained[::-1]]))
        gradients = [parameter.grad for parameter in self.trained]
        for parameter in self.trained:
            parameter.grad = None
        self._fix(order)
        for parameter, gradient in zip(self.trained, gradients, strict=True):
            parameter.grad = gradient

    def _fix(self, order: Sequence[nn.Parameter]) -> None:
        """Makes DDP build its final buckets now, as if gradients became ready in this order.

        A backward pass through a chain of all parameters makes DDP rebuild its buckets before the first real reduction.
        """

        def chain(model: nn.Module) -> Tensor:
            total = torch.zeros((), device=order[0].device)
            for parameter in reversed(order):  # the last one's gradient arrives first
                total = total + (parameter * 0).sum()
            return total

        self._has_final_buckets = True
        for _ in range(2):  # DDP rebuilds its buckets in the second forward pass
            self._wrapped(chain).backward()
        if self._settings.gradient_as_bucket_view:
            self.views = [parameter.grad for parameter in self.trained]  # type: ignore[misc]
        for parameter in self.trained:
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
    """Does nothing; a forward pass with this function only prepares DDP for backward."""
