"""Initial weights that rank 0 has built in host memory, sent to the other ranks piece by piece.

Only rank 0 builds a large model with real weights. The model of every rank is then on the meta device, and
`FromRankZero` fills it like weights from files. All ranks must request the same weights in the same order; each keeps
the rows that it needs. Rank 0 frees a weight once it has sent it, so a machine never holds more than one copy in host
memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from unisono.parallel.materialize import Weights

Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]

PIECE_BYTES = 8 * 2**20
"""Largest number of bytes of a weight that are in host memory at a time, besides rank 0's copy."""
_RETURN_EVERY = 16 * 2**20  # bytes that rank 0 frees before it returns them to the system


class NotMovable(Exception):
    """A model's weights cannot be replaced; the message names the weight and the reason."""


class FromRankZero:
    """The weights that rank 0 holds, as a source for all ranks; `files` is the source of all other weights.

    Every call is a collective.
    """

    def __init__(
        self,
        shapes: Shapes,
        held: dict[str, Tensor],
        device: torch.device,
        files: Weights | None = None,
        return_freed_memory: Callable[[], None] = lambda: None,
    ) -> None:
        """`shapes` describes the weights on all ranks; `held` contains them on rank 0 and is empty on the others."""
        self._shapes, self._held, self._device, self.files = shapes, held, device, files
        self._return_freed_memory, self._freed_bytes = return_freed_memory, 0
        self._memory: Tensor | None = None  # memory for the piece that is being sent or received

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Returns the rows start..stop-1 of a weight, valid until the next call. All ranks request the same rows."""
        shape, dtype = self._shapes[name]
        rows = self._memory_for((stop - start, *shape[1:]), dtype)
        if (held := self._held.get(name)) is not None:
            rows.copy_(held.view(shape or (1,))[start:stop])  # a view would keep `held` alive until gloo releases it
        broadcast_bytes(rows)
        return rows

    def _memory_for(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        # Use the same memory for every piece, because gloo's threads release tensors late, after a collective.
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._memory is None or len(self._memory) < num_bytes:
            self._memory = torch.empty(max(num_bytes, PIECE_BYTES), dtype=torch.uint8, device=self._device)
        return self._memory[:num_bytes].view(dtype).view(shape)

    def pieces(self, name: str, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yields (first row, rows) pairs that cover this rank's rows start..stop-1. Every rank receives all rows."""
        shape, dtype = self._shapes[name]
        num_rows = shape[0] if shape else 1
        at_once = rows_at_once(shape, dtype)
        for first in range(0, num_rows, at_once):
            last = min(first + at_once, num_rows)
            rows = self.rows(name, first, last)
            begin, end = max(first, start), min(last, stop)
            if begin < end:
                yield begin, rows[begin - first : end - first]
        self._free(name)

    def _free(self, name: str) -> None:
        weight = self._held.pop(name, None)
        if weight is None:
            return
        self._freed_bytes += weight.nbytes
        del weight
        if self._freed_bytes > _RETURN_EVERY or not self._held:
            self._return_freed_memory()  # weights of up to 32 MiB may be on the heap, which does not shrink by itself
            self._freed_bytes = 0


def rows_at_once(shape: torch.Size, dtype: torch.dtype) -> int:
    """Returns the number of rows of a weight that are read or sent at a time."""
    return max(1, PIECE_BYTES // max(1, shape[1:].numel() * dtype.itemsize))


def take_weights(model: nn.Module) -> dict[str, Tensor]:
    """Moves the model itself to the meta device and returns its real weights by name.

    Raises NotMovable if that is impossible. Weights that are already on meta are not returned.
    """
    taken: dict[str, Tensor] = {}
    try:
        for name, parameter in model.named_parameters():
            if not parameter.is_meta:
                taken[name] = exchange(name, parameter, torch.empty_like(parameter, device="meta"))
    except NotMovable:
        give_weights(model, taken)
        raise
    return taken


def give_weights(model: nn.Module, taken: Mapping[str, Tensor]) -> None:
    """Undoes `take_weights`."""
    parameters = dict(model.named_parameters())
    for name, weight in taken.items():
        exchange(name, parameters[name], weight)


def exchange(name: str, tensor: Tensor, other: Tensor) -> Tensor:
    """Moves the data of `other` into `tensor` and returns the old data; references to `tensor` stay valid."""
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.layout != torch.strided:
        raise NotMovable(f"{name} is a {type(tensor).__name__} with layout {tensor.layout}")
    attributes = dict(tensor.__dict__)  # attributes that a model sets on a weight, such as a learning rate
    as_parameter = isinstance(tensor, nn.Parameter)
    swapped = nn.Parameter(other.detach(), requires_grad=tensor.requires_grad) if as_parameter else other.detach()
    try:
        torch.utils.swap_tensors(tensor, swapped)  # type: ignore[no-untyped-call]
    except RuntimeError:  # autograd or a view refers to it
        raise NotMovable(f"{name} is also part of another tensor") from None
    tensor.__dict__.update(attributes)
    return swapped.detach()


def broadcast_buffers(model: nn.Module, device: torch.device, *, is_rank_zero: bool) -> None:
    """Copies the values of rank 0's buffers to all ranks, and moves the buffers to `device`."""
    for name, buffer in list(model.named_buffers()):
        if is_rank_zero:
            broadcast_bytes(buffer.detach().to(device).contiguous())
        else:
            received = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
            broadcast_bytes(received)
            exchange(name, buffer, received)


def broadcast_bytes(tensor: Tensor) -> None:
    """Broadcasts a contiguous tensor of any dtype from rank 0; backends do not support every dtype."""
    if tensor.numel():
        dist.broadcast(tensor.view(-1).view(torch.uint8), src=0)
