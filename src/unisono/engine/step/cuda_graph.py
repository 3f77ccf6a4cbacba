"""Records a part of the step once as a CUDA graph and replays it: one launch instead of hundreds.

For small models Python and kernel launches take longer than the kernels. A graph does the same every time: it reads
inputs of one shape from fixed addresses and contains no host sync. The first calls run normally (they compile and
choose kernels). Inputs of another shape, or with a different number or string among them, always run normally.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from unisono.data.nested import leaves, mapped
from unisono.data.prefetch_stream import PrefetchStream, is_worth_prefetching
from unisono.data.resident import Rows
from unisono.engine.step.guard import shape_of
from unisono.engine.step.out_of_memory import in_one_line, is_out_of_memory
from unisono.errors import TrainingFailed, UnisonoError

_WARM_UP = 3
_CALLS_BEFORE_RERECORDING = 50  # calls in a row with another kind of input before that kind is recorded instead
_MOST_KINDS = 1000  # number of kinds of input to count
_PLAIN = (int, float, complex, str, bytes, NoneType)


class GraphedFunction:
    """Calls a function of nested tensors; after a few calls with inputs of one kind, records a graph and replays it."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function = function
        self._num_calls: Counter[Hashable] = Counter()  # calls since the last replay, by kind of input
        self._kind: Hashable = None  # the kind of the graph's inputs
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Any, ...] = ()
        self._output: Tensor | None = None

    def __call__(self, *inputs: Any) -> Tensor:
        """Returns function(*inputs). The next call overwrites the result, so copy it if you need it longer."""
        kind = _kind_of(inputs)
        if self._graph is None or kind != self._kind:  # another kind of input, such as the last batch of a run
            if len(self._num_calls) >= _MOST_KINDS:
                self._num_calls.clear()
            self._num_calls[kind] += 1
            if self._num_calls[kind] <= (_WARM_UP if self._graph is None else _CALLS_BEFORE_RERECORDING):
                return self._function(*inputs)
            self._record(kind, inputs)
        self._num_calls.clear()
        prefetch: PrefetchStream | None = None
        for recorded, new in zip(leaves(self._inputs), leaves(inputs), strict=True):
            if isinstance(recorded, Rows):
                recorded.indices.copy_(new.indices, non_blocking=True)
            elif isinstance(recorded, Tensor):
                if is_worth_prefetching(new, recorded.device):
                    prefetch = prefetch or PrefetchStream.on(recorded.device)
                    new = prefetch.copied(new, new.dtype)
                recorded.copy_(new, non_blocking=True)
        assert self._graph is not None and self._output is not None
        self._graph.replay()
        return self._output

    def forget(self) -> None:
        """Frees the graph and its memory; the next calls run normally and then record a new one."""
        self._graph = self._output = self._kind = None
        self._inputs = ()
        self._num_calls.clear()

    def _record(self, kind: Hashable, inputs: tuple[Any, ...]) -> None:
        self.forget()
        self._inputs = mapped(inputs, _fixed)
        graph = torch.cuda.CUDAGraph()
        try:
            self._output = self._call_into(graph)
        except Exception as error:
            self.forget()
            if is_out_of_memory(error) or isinstance(error, UnisonoError):
                raise
            raise TrainingFailed(
                f"cuda_graph: this recipe's step cannot be recorded ({in_one_line(error)}); remove host-device "
                "syncs (.item(), .tolist(), `if` on a tensor) from loss(), or remove --cuda_graph"
            ) from error
        self._graph, self._kind = graph, kind

    def _call_into(self, graph: torch.cuda.CUDAGraph) -> Tensor:
        failure: Exception | None = None
        try:
            # Capture on the run's own stream, because autograd accumulates a gradient on the stream of its first use.
            # Other threads (which pin batches, or memory for checkpoints) may continue during the capture.
            stream = torch.cuda.current_stream()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                try:
                    return self._function(*self._inputs)
                except Exception as error:
                    failure = error
                    raise
        except Exception as error:
            raise failure or error from None  # ending a failed capture also fails, with a less useful error


def _kind_of(inputs: tuple[Any, ...]) -> Hashable:
    """Returns what a graph depends on: the shapes and dtypes of tensors, and the values of numbers and strings."""
    return shape_of(inputs), tuple((type(leaf), leaf) for leaf in leaves(inputs) if isinstance(leaf, _PLAIN))


def _fixed(leaf: Any) -> Any:
    if isinstance(leaf, Rows):
        return leaf.with_indices(leaf.indices.clone())
    if isinstance(leaf, Tensor):
        return leaf.to(torch.cuda.current_device(), copy=True)
    if isinstance(leaf, _PLAIN):
        return leaf
    raise TrainingFailed(
        f"cuda_graph: the batch holds a {type(leaf).__name__}, and a recorded step would always use the first one; "
        "let collate() return tensors (in dicts, lists, tuples or dataclasses), or remove --cuda_graph"
    )
