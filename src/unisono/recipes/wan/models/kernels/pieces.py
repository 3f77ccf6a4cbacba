"""Splits the queries of one video into pieces so that cross-attention to the text uses the whole GPU.

The backward kernel of attention launches one program per sample, head and block of keys. A text has few keys: with a
micro-batch of one video, the programs occupied only a third of an H200 when measured. The kernel therefore gets each
piece as a separate sample with the same keys and values.
"""

from __future__ import annotations

import torch
from torch import Tensor

_KEYS, _QUERIES = 128, 512  # keys per program of attention's backward pass, and minimum number of queries per piece
_BUSY = (0.65, 0.9)  # splits if at most the first fraction of the GPU is busy, and then more than the second would be


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def multiprocessors() -> int:
    """Returns the number of multiprocessors of the current GPU; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def possible_pieces(heads: int, keys: int, num_multiprocessors: int) -> tuple[int, ...]:
    """Returns the numbers of pieces worth splitting a sample's queries into; none if the GPU is busy anyway."""

    def busy(pieces: int) -> float:
        programs = pieces * heads * -(-keys // _KEYS)
        return programs / (num_multiprocessors * -(-programs // num_multiprocessors))

    if not num_multiprocessors or busy(1) > _BUSY[0]:
        return ()
    return tuple(pieces for pieces in range(2, 17) if busy(pieces) > _BUSY[1])


def num_pieces(query: Tensor, numbers: tuple[int, ...]) -> int:
    """Returns the first of these numbers of pieces that the queries of a single sample divide into; 1 if none does."""
    queries = query.shape[1]
    for pieces in numbers if len(query) == 1 else ():
        # Compiled code guards only on the remainder, so a video of another length does not cause a recompilation.
        if queries % pieces == 0 and queries >= pieces * _QUERIES:
            return pieces
    return 1


def in_pieces(split: list[Tensor], numbers: tuple[int, ...]) -> list[Tensor]:
    """Splits the queries [1, tokens, heads, width] into several samples with the same keys and values."""
    pieces = num_pieces(split[0], numbers)
    if pieces == 1:
        return split
    repeated = [part.repeat(pieces, 1, 1, 1) for part in split[1:]]
    return [split[0].reshape(pieces, -1, *split[0].shape[2:]), *repeated]
