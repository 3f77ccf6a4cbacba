"""A part of the step, recorded once as a CUDA graph and then replayed: one launch instead of hundreds.

For small models Python and kernel launches take longer than the kernels. What is recorded must do the same thing every
time: inputs of one shape, read from fixed places in memory, and nothing that makes the host wait. The first calls run
as usual (they compile and choose kernels); inputs of another shape always do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unisono.data.nested import leaves, mapped
from unisono.data.resident import Rows
from unisono.engine.guard import shape_of
from unisono.engine.memory import in_one_line, is_out_of_memory
from unisono.errors import TrainingFailed

_WARM_UP = 3


class Captured:
    """Calls a function of nested tensors; after a few calls with the same shapes, by replaying a recording of it."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function = function
        self._shape: Any = None
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Any, ...] = ()
        self._output: Tensor | None = None

    def __call__(self, *inputs: Any) -> Tensor:
        """function(*inputs); a result that is kept must be copied, the next call overwrites it."""
        shape = shape_of(inputs)
        if self._graph is None:
            if shape != self._shape:
                self._shape, self._calls = shape, 0
            self._calls += 1
            if self._calls <= _WARM_UP:
                return self._function(*inputs)
            self._record(inputs)
        elif shape != self._shape:  # the last batch of a run, for instance
            return self._function(*inputs)
        for static, given in zip(leaves(self._inputs), leaves(inputs), strict=True):
            if isinstance(static, Rows):
                static.indices.copy_(given.indices, non_blocking=True)
            elif isinstance(static, Tensor):
                static.copy_(given, non_blocking=True)
        assert self._graph is not None and self._output is not None
        self._graph.replay()
        return self._output

    def forget(self) -> None:
        """Frees the recording and its memory; the next calls start over."""
        self._graph = self._output = self._shape = None
        self._inputs = ()

    def _record(self, inputs: tuple[Any, ...]) -> None:
        self._inputs = mapped(inputs, _fixed)
        graph = torch.cuda.CUDAGraph()
        try:
            # On the stream that everything runs on: autograd adds up gradients on the stream where it first met them.
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                self._output = self._function(*self._inputs)
        except Exception as error:
            self.forget()
            if is_out_of_memory(error):
                raise
            raise TrainingFailed(
                f"cuda_graph: this recipe's step cannot be recorded ({in_one_line(error)}); nothing in loss() may wait "
                "for the device (.item(), .tolist(), if on a tensor) or depend on the host; or leave --cuda_graph out"
            ) from error
        self._graph = graph


def _fixed(leaf: Any) -> Any:
    if isinstance(leaf, Rows):
        return leaf.with_indices(leaf.indices.clone())
    if isinstance(leaf, Tensor):
        return leaf.to(torch.cuda.current_device(), copy=True)
    return leaf
