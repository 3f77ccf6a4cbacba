"""Reads from the headers of shard files which tensors a checkpoint contains, and where the parts of each tensor are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import torch

from unisono.checkpoint.all_ranks import describe_failure
from unisono.checkpoint.manifest import SHARD_SUFFIX, CheckpointError
from unisono.checkpoint.shards import SHARDING_INFO
from unisono.checkpoint.tensor_file import BadTensorFile, TensorFile
from unisono.plain_files import parse_json

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Piece:
    """A part of a tensor: the file that contains it, its offsets in the tensor, and its size."""

    file: TensorFile
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Contents:
    """The tensors of a checkpoint, by name: the pieces of each tensor, its whole shape and its dtype."""

    path: Path
    pieces: Mapping[str, list[Piece]]
    shapes: Shapes


def read_header(shard: Path) -> TensorFile:
    """Reads the header of a shard; raises CheckpointError if it is damaged."""
    try:
        return TensorFile(shard)
    except (OSError, BadTensorFile) as error:
        raise _unreadable(shard, error) from None


def contents_of(path: Path, shards: Iterable[TensorFile] | None = None) -> Contents:
    """Returns the contents of a checkpoint; raises CheckpointError if it is damaged.

    `shards` are the headers of all shard files; without them, this function reads the headers.
    """
    if shards is None:
        shards = [read_header(shard) for shard in sorted(path.glob(f"*{SHARD_SUFFIX}"))]
    pieces = _pieces_in(shards)
    shapes: Shapes = {}
    for name, parts in pieces.items():
        dtypes = {piece.file.dtype(name) for piece in parts}
        if len(dtypes) > 1:
            raise CheckpointError(f"{path} stores {name!r} in parts of different dtypes; use another checkpoint")
        shape = whole_shape(parts)
        shapes[name] = shape, dtypes.pop()
        # Without this check, the reader would silently leave missing elements unchanged.
        if not _cover(parts, shape):
            raise CheckpointError(
                f"{path} contains only a part of {name!r}, because a shard is missing; use another checkpoint"
            )
    return Contents(path, pieces, shapes)


def describe(path: Path) -> Shapes:
    """Returns (whole shape, dtype) of every tensor in a checkpoint, by name, from the headers of its files."""
    return contents_of(path).shapes


def _pieces_in(shards: Iterable[TensorFile]) -> dict[str, list[Piece]]:
    pieces: dict[str, list[Piece]] = {}
    for file in shards:
        try:
            offsets = _offsets_in(file)
            for name, entry in file.entries.items():
                file.dtype(name)  # raises on a type that PyTorch does not have
                of_tensor = pieces.setdefault(name, [])
                of_tensor.append(Piece(file, offsets.get(name, (0,) * len(entry.shape)), entry.shape))
                if len(of_tensor[0].sizes) != len(entry.shape):
                    first = of_tensor[0].file.path.name
                    raise BadTensorFile(f"{name!r} does not have the same number of dimensions as in {first}")
        except BadTensorFile as error:
            raise _unreadable(file.path, error) from None
    return pieces


def _unreadable(shard: Path, error: Exception) -> CheckpointError:
    reason = str(error) if isinstance(error, BadTensorFile) else describe_failure(error)
    return CheckpointError(f"{shard} cannot be read ({reason}); use another checkpoint")


def whole_shape(pieces: Sequence[Piece]) -> tuple[int, ...]:
    """Returns the shape of the tensor that consists of these pieces."""
    ends = [[a + b for a, b in zip(piece.offsets, piece.sizes, strict=True)] for piece in pieces]
    return tuple(max(dimension) for dimension in zip(*ends, strict=True))


def _offsets_in(file: TensorFile) -> dict[str, tuple[int, ...]]:
    """Returns the offsets of each part in its tensor, by tensor name; empty for a file that contains whole tensors."""
    text = file.metadata.get(SHARDING_INFO)
    if text is None:
        return {}
    try:
        header = parse_json(text)
    except ValueError:
        raise BadTensorFile(f"its {SHARDING_INFO} is not JSON") from None
    offsets_by_name = {}
    for name, entry in file.entries.items():
        part: Any = header.get(name) if isinstance(header, dict) else None
        offsets: Any = part.get("saved_offsets") if isinstance(part, dict) else None
        is_list = isinstance(offsets, list) and len(offsets) == len(entry.shape)
        if not is_list or not all(type(number) is int and 0 <= number < 2**62 for number in offsets):
            raise BadTensorFile(f"its {SHARDING_INFO} lacks the offsets of {name!r}")
        offsets_by_name[name] = tuple(offsets)
    return offsets_by_name


def _cover(pieces: Sequence[Piece], shape: Sequence[int]) -> bool:
    """Whether the pieces cover each element of the shape exactly once."""
    if sum(math.prod(piece.sizes) for piece in pieces) != math.prod(shape):
        return False
    # Together the pieces have as many elements as the whole, so there is a gap only if two of them overlap.
    full = sorted((piece for piece in pieces if math.prod(piece.sizes)), key=lambda piece: piece.offsets)
    if all(tuple(piece.sizes[1:]) == tuple(shape[1:]) for piece in full):  # split by rows, as fsdp does
        return all(one.offsets[0] + one.sizes[0] == two.offsets[0] for one, two in pairwise(full))
    return not any(_overlap(one, two) for one, two in combinations(full, 2))


def _overlap(one: Piece, two: Piece) -> bool:
    sides = zip(one.offsets, one.sizes, two.offsets, two.sizes, strict=True)
    return all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in sides)
