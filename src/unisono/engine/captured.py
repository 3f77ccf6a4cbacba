"""A part of the step, recorded once as a CUDA graph and then replayed: one launch instead of hundreds.

For small models Python and kernel launches take longer than the kernels. What is recorded must do the same thing every
time: inputs of one shape, read from fixed places in memory, and nothing that makes the host wait. The first calls run
as usual (they compile and choose kernels); inputs of another shape, or with another number or text among them, always
do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from unisono.data.lane import Lane, is_worth_a_lane
from unisono.data.nested import leaves, mapped
from unisono.data.resident import Rows
from unisono.engine.guard import shape_of
from unisono.engine.memory import in_one_line, is_out_of_memory
from unisono.errors import TrainingFailed, UnisonoError

_WARM_UP = 3
_OUT_OF_USE = 50  # calls with other inputs in a row, after which they are recorded instead
_MOST_KINDS = 1000  # of inputs to count
_PLAIN = (int, float, complex, str, bytes, NoneType)


class Captured:
    """Calls a function of nested tensors; after a few calls with inputs of one kind, by replaying a recording of it."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function = function
        self._met: Counter[Hashable] = Counter()  # kinds of inputs since the last replay
        self._kind: Hashable = None  # of the recording's inputs
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Any, ...] = ()
        self._output: Tensor | None = None
        self.replayed = False
        """Whether the last call was a replay: Python has seen nothing of it."""

    def __call__(self, *inputs: Any) -> Tensor:
        """function(*inputs); a result that is kept must be copied, the next call overwrites it."""
        kind, self.replayed = _kind_of(inputs), False
        if self._graph is None or kind != self._kind:  # the last batch of a run, for instance
            if len(self._met) >= _MOST_KINDS:
                self._met.clear()
            self._met[kind] += 1
            if self._met[kind] <= (_WARM_UP if self._graph is None else _OUT_OF_USE):
                return self._function(*inputs)
            self._record(kind, inputs)
        self._met.clear()
        lane: Lane | None = None
        for static, given in zip(leaves(self._inputs), leaves(inputs), strict=True):
            if isinstance(static, Rows):
                static.indices.copy_(given.indices, non_blocking=True)
            elif isinstance(static, Tensor):
                if is_worth_a_lane(given, static.device):
                    lane = lane or Lane.on(static.device)
                    given = lane.copied(given, given.dtype)
                static.copy_(given, non_blocking=True)
        assert self._graph is not None and self._output is not None
        self._graph.replay()
        self.replayed = True
        return self._output

    def forget(self) -> None:
        """Frees the recording and its memory; the next calls start over."""
        self._graph = self._output = self._kind = None
        self._inputs = ()
        self._met.clear()

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
                f"cuda_graph: this recipe's step cannot be recorded ({in_one_line(error)}); nothing in loss() may wait "
                "for the device (.item(), .tolist(), if on a tensor) or depend on the host; or leave --cuda_graph out"
            ) from error
        self._graph, self._kind = graph, kind

    def _call_into(self, graph: torch.cuda.CUDAGraph) -> Tensor:
        failure: Exception | None = None
        try:
            # On the stream that everything runs on: autograd adds up gradients on the stream where it first met them.
            # Other threads (that pin batches, or memory for checkpoints) may go on meanwhile.
            stream = torch.cuda.current_stream()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                try:
                    return self._function(*self._inputs)
                except Exception as error:
                    failure = error
                    raise
        except Exception as error:
            raise failure or error from None  # leaving a recording that failed fails too, and does not say why


def _kind_of(inputs: tuple[Any, ...]) -> Hashable:
    """What a recording depends on: shapes and types of tensors, and numbers and texts as they are."""
    return shape_of(inputs), tuple((type(leaf), leaf) for leaf in leaves(inputs) if isinstance(leaf, _PLAIN))


def _fixed(leaf: Any) -> Any:
    if isinstance(leaf, Rows):
        return leaf.with_indices(leaf.indices.clone())
    if isinstance(leaf, Tensor):
        return leaf.to(torch.cuda.current_device(), copy=True)
    if isinstance(leaf, _PLAIN):
        return leaf
    raise TrainingFailed(
        f"cuda_graph: the batch holds a {type(leaf).__name__}, of which a recorded step would see the first one only; "
        "let collate() give tensors (in dicts, lists, tuples or dataclasses), or leave --cuda_graph out"
    )
