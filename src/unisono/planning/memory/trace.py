"""Measures the memory and the work of a forward and backward pass without computing it.

The passes run on fake tensors, which have a shape and a dtype but no memory. A dispatch mode sees every tensor that an
operation creates, and is notified when autograd and Python have dropped the last reference to it. This includes tensors
that custom autograd functions save and tensors that activation checkpointing recomputes. Code that torch.compile would
fuse runs eagerly here, so temporary tensors inside a compiled block are counted although they would not exist.

Fake tensors are on the CPU, because a torch build without CUDA has no autograd for tensors on a fake GPU. Where torch
behaves differently on a GPU, the GPU's behaviour is substituted: fused attention, and the operations that autocast
computes in float32.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from unisono.formatting import describe_exception
from unisono.planning.speed.work import Work

_BLOCK = 512  # the allocator rounds sizes up to a multiple of this many bytes
_FLOAT32_ON_GPU = ("layer_norm", "group_norm", "softmax", "log_softmax", "cross_entropy", "nll_loss", "mse_loss")
"""Functions that autocast computes in float32 on a GPU but not on the CPU."""


class CannotTrace(Exception):
    """Raised if a model cannot run on fake tensors, for instance because control flow depends on a tensor's value."""


@dataclass(frozen=True)
class Moment:
    """Memory use at one moment of a forward and backward pass, in bytes, without weights."""

    activations: int  # everything but gradients: the batch, stored and temporary results
    gradients: int  # gradients of weights that exist at that moment


@dataclass(frozen=True)
class Trace:
    """The moments of a forward and backward pass at which memory use may reach its peak."""

    moments: Sequence[Moment]
    gradients: int  # gradients of all weights at the end
    work: Work = field(default_factory=Work)

    def fullest(self, *, existing: float = 0, share: float = 1) -> Moment:
        """Returns the moment that needs the most memory.

        `existing`: bytes of gradients that exist before the pass begins. `share`: fraction of the new gradients that
        stays on the device.
        """
        moments = (Moment(each.activations, int(existing + share * each.gradients)) for each in self.moments)
        return max(moments, key=lambda moment: moment.activations + moment.gradients)


def extended(short: Trace, longer: Trace, periods: float) -> Trace:
    """Extrapolates the trace of a deeper model: adds the difference between `longer` and `short` `periods` more times.

    Each further block adds the results that it stores until the backward pass reaches it, and its gradients after that.
    No moment in between needs more memory than the fuller one of both ends.
    """
    stored = _most_activations(longer) - _most_activations(short)
    gradients = longer.gradients - short.gradients
    early = [Moment(each.activations + int(periods * stored), each.gradients) for each in longer.moments]
    late = [Moment(each.activations, each.gradients + int(periods * gradients)) for each in longer.moments]
    work = longer.work + longer.work.minus(short.work) * periods
    return Trace([*early, *late], longer.gradients + int(periods * gradients), work)


def _most_activations(trace: Trace) -> int:
    return max(moment.activations for moment in trace.moments)


class _Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks the memory of all tensors that operations create, except views of the weights."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes = {weight.untyped_storage()._cdata: 0 for weight in weights}
        self._activations = self.gradients = 0
        self._gradients: set[int] = set()
        self._fullest: dict[int, int] = {}  # bytes of gradients -> maximum bytes of activations at the same time
        self.work = Work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.work.add(func, args, kwargs, result)
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        size = -(-storage.nbytes() // _BLOCK) * _BLOCK
        self._sizes[key] = size
        self._activations += size
        weakref.finalize(storage, self._drop, key)
        self._note()

    def _drop(self, key: int) -> None:
        size = self._sizes.pop(key)
        if key in self._gradients:
            self._gradients.remove(key)
            self.gradients -= size
        else:
            self._activations -= size

    def note_gradient(self, weight: Tensor) -> None:
        """Counts the gradient of a weight as a gradient instead of an activation."""
        assert weight.grad is not None
        key = weight.grad.untyped_storage()._cdata
        if key in self._sizes and key not in self._gradients:
            self._gradients.add(key)
            self._activations -= self._sizes[key]
            self.gradients += self._sizes[key]
            self._note()

    def _note(self) -> None:
        self._fullest[self.gradients] = max(self._activations, self._fullest.get(self.gradients, 0))

    def moments(self) -> list[Moment]:
        """Returns the moments that no other moment exceeds in both activations and gradients."""
        moments: list[Moment] = []
        for gradients, activations in sorted(self._fullest.items(), reverse=True):
            if not moments or activations > moments[-1].activations:
                moments.append(Moment(activations, gradients))
        return moments


def trace_step(
    model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batch: Any, compute_type: torch.dtype | None
) -> Trace:
    """Traces loss(model, batch) and its backward pass; `compute_type` is the dtype of mixed precision.

    Makes the model's tensors fake, so the model cannot be used afterwards. Raises CannotTrace if any operation fails.
    """
    try:
        with _pretending(), FakeTensorMode(allow_non_fake_inputs=True):
            weights = _fake_weights(model)
            ledger = _Ledger(weights)
            with ledger:
                fake_batch = tree_map_only(Tensor, _fake, batch)
                for weight in weights:
                    if weight.requires_grad:
                        weight.register_post_accumulate_grad_hook(ledger.note_gradient)  # type: ignore[no-untyped-call]
                with torch.autocast("cpu", compute_type, enabled=compute_type is not None):
                    total = loss(model, fake_batch)
                total.backward()  # type: ignore[no-untyped-call]
            return Trace(ledger.moments(), ledger.gradients, ledger.work)
    except Exception as error:  # any operation of any model may fail, and a prediction must never end a run
        raise CannotTrace(describe_exception(error)) from error


def _fake(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _fake_weights(model: nn.Module) -> list[Tensor]:
    """Replaces all weights and buffers with fake tensors; a shared weight stays shared."""
    replaced: dict[Tensor, Tensor] = {}
    for module in model.modules():
        tensors: Any
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if tensor not in replaced:
                    fake = _fake(tensor)
                    is_weight = isinstance(tensor, nn.Parameter)
                    replaced[tensor] = nn.Parameter(fake, tensor.requires_grad) if is_weight else fake
                tensors[name] = replaced[tensor]
    return list(replaced.values())


@contextmanager
def _pretending() -> Iterator[None]:
    """Makes functions that differ between CPU and GPU behave as on a GPU inside the `with` block."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        own = F.scaled_dot_product_attention
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", _attention(own)))
        for name in _FLOAT32_ON_GPU:
            stack.enter_context(mock.patch.object(F, name, _in_float32(getattr(F, name))))
        yield


def _attention(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns a version of `own` that uses fused attention, which stores one number per query instead of all scores."""

    def attend(query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        if query.ndim != 4 or query.dtype == torch.float64 or query.shape[1] != key.shape[1]:
            return own(query, key, value, *arguments, **keywords)
        if torch.is_autocast_enabled("cpu"):
            query, key, value = (part.to(torch.get_autocast_dtype("cpu")) for part in (query, key, value))
        if query.dtype.itemsize == 2:
            return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, False, False)[0]  # type: ignore[no-any-return]
        return torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, None, True)[0]  # type: ignore[no-any-return]

    return attend


def _in_float32(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def compute(x: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        if torch.is_autocast_enabled("cpu") and x.dtype.itemsize == 2:
            x, *arguments = tree_map_only(Tensor, _widened, [x, *arguments])
        return function(x, *arguments, **keywords)

    return compute


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor
