"""Loads a checkpoint into existing tensors, on any number of ranks.

Every rank reads the slices it needs from the shard files, whichever rank wrote them. Names, shapes and dtypes are
compared first, from the file headers alone, so a checkpoint that does not match is rejected before anything changes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations, pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.tensor import DTensor

from unisono.checkpoint.all_ranks import RanksFailed, describe_failure, on_all_ranks
from unisono.checkpoint.find import validate
from unisono.checkpoint.manifest import CheckpointError
from unisono.checkpoint.pieces import Piece, ShardReader, pieces_of, whole_shape
from unisono.checkpoint.snapshot import shapes_of

# torch warns that there is no process group. This is intended: each rank reads on its own, and so does a single writer.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized, assuming")

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def load(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    group: dist.ProcessGroup | None,
    world: int,
    unused: Collection[str] = (),
) -> None:
    """Fills `tensors` in place from a checkpoint that any number of ranks saved; names must match.

    `unused`: names of tensors that the checkpoint may also contain. Every rank calls it; if one fails, all raise
    CheckpointError.
    """
    try:
        on_all_ranks(lambda: _check_and_fill(path, tensors, unused), world=world, group=group)
    except RanksFailed as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}") from None


def load_whole(path: Path, prefix: str) -> dict[str, torch.Tensor]:
    """The whole tensors whose names start with `prefix` ("model.", "ema."), on the CPU, by name without the prefix."""
    if (reason := validate(path, deep=False)) is not None:
        raise CheckpointError(f"{path} cannot be loaded: {reason}")
    shapes = {name: shape for name, shape in describe(path).items() if name.startswith(prefix)}
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    fill(path, tensors)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def describe(path: Path) -> Shapes:
    """Name -> (whole shape, dtype) of every tensor in a checkpoint, from the headers of its files."""
    shapes: Shapes = {}
    for name, pieces in pieces_of(path).items():
        dtypes = {piece.file.dtype(name) for piece in pieces}
        if len(dtypes) > 1:
            raise CheckpointError(f"{path} stores {name!r} in parts of different dtypes; use another checkpoint")
        shape = whole_shape(pieces)
        shapes[name] = shape, dtypes.pop()
        # Without this check, the reader would silently leave missing elements unchanged.
        if not _cover(pieces, shape):
            raise CheckpointError(f"{path} holds only a part of {name!r}; a shard is missing: use another checkpoint")
    return shapes


def _cover(pieces: Sequence[Piece], shape: Sequence[int]) -> bool:
    """Whether the pieces cover each element of the shape exactly once."""
    if sum(math.prod(piece.sizes) for piece in pieces) != math.prod(shape):
        return False
    # Together they have as many elements as the whole, so there is a gap only if two of them overlap.
    full = sorted((piece for piece in pieces if math.prod(piece.sizes)), key=lambda piece: piece.offsets)
    if all(tuple(piece.sizes[1:]) == tuple(shape[1:]) for piece in full):  # split by rows, as fsdp does
        return all(one.offsets[0] + one.sizes[0] == two.offsets[0] for one, two in pairwise(full))
    return not any(_overlap(one, two) for one, two in combinations(full, 2))


def _overlap(one: Piece, two: Piece) -> bool:
    sides = zip(one.offsets, one.sizes, two.offsets, two.sizes, strict=True)
    return all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in sides)


def fill(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Reads this process's part of each tensor from the shard files, independently of other ranks."""
    targets = {name: tensor for name, tensor in tensors.items() if _local_size(tensor) > 0}  # uneven shards
    if targets:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            dcp.load(dict(targets), storage_reader=ShardReader(path), planner=planner, no_dist=True)
        except CheckpointException as error:  # a BaseException
            raise RanksFailed("; ".join(describe_failure(failure[0]) for failure in error.failures.values())) from error


def _check_and_fill(path: Path, tensors: Mapping[str, torch.Tensor], unused: Collection[str]) -> None:
    reason = validate(path, deep=False)
    if reason is None:
        saved = {name: shape for name, shape in describe(path).items() if name not in unused}
        reason = difference(saved, shapes_of(tensors))
    if reason is not None:
        raise RanksFailed(reason)
    fill(path, tensors)


def difference(saved: Shapes, wanted: Shapes) -> str | None:
    """Why the saved tensors cannot be loaded into the `wanted` ones; None if they can."""
    missing, unexpected = sorted(wanted.keys() - saved.keys()), sorted(saved.keys() - wanted.keys())
    other = sorted(name for name in saved.keys() & wanted.keys() if saved[name] != wanted[name])
    problems = []
    if missing:
        problems.append(f"it lacks {_first(missing)}")
    if unexpected:
        problems.append(f"it also holds {_first(unexpected)}")
    if other:
        (shape, dtype), (shape_here, dtype_here) = saved[other[0]], wanted[other[0]]
        was, now = (f"{list(shape)}", f"{list(shape_here)}") if shape != shape_here else (f"{dtype}", f"{dtype_here}")
        more = f" ({len(other) - 1} more differ)" if len(other) > 1 else ""
        problems.append(f"{other[0]!r} is {was} in the checkpoint and {now} in this run{more}")
    if not problems:
        return None
    return f"it does not match this run: {'; '.join(problems)}; use the settings it was saved with"


def _first(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _local_size(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel()
