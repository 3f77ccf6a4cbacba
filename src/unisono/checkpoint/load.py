"""Loading a checkpoint into tensors that are there already, on any number of ranks.

Every rank reads the slices it needs from the shard files, whoever wrote them. Names, shapes and dtypes are compared
first, from the file headers alone, so a checkpoint that does not fit is refused before anything has been changed.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import state_dict_loader as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor

from unisono.checkpoint.find import validate
from unisono.checkpoint.manifest import SHARD_SUFFIX, CheckpointError
from unisono.checkpoint.shards import SHARDING_INFO
from unisono.checkpoint.snapshot import shapes_of
from unisono.checkpoint.together import RanksFailed, in_words, together

# Reading (and, on one rank, writing) without asking other ranks is what we want; torch warns that it assumes so.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized, assuming")

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def load(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    group: dist.ProcessGroup | None,
    world: int,
    unused: Collection[str] = (),
) -> None:
    """Fills the tensors in place from a checkpoint, whatever number of ranks saved it; the names must be the same.

    `unused` names what the checkpoint may hold besides. Every rank calls it; if it fails on one, all raise
    CheckpointError.
    """
    try:
        together(lambda: _check_and_fill(path, tensors, unused), world=world, group=group)
    except RanksFailed as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}") from None


def describe(path: Path) -> Shapes:
    """Name -> (whole shape, dtype) of every tensor in a checkpoint, from the headers of its files only."""
    shapes: Shapes = {}
    filled: dict[str, int] = {}
    for file in sorted(path.glob(f"*{SHARD_SUFFIX}")):
        try:
            with safe_open(file, framework="pt") as shard:
                offsets = json.loads((shard.metadata() or {}).get(SHARDING_INFO, "{}"))
                for name in shard.keys():  # noqa: SIM118 (not a dict)
                    part = shard.get_slice(name)
                    size, dtype = part.get_shape(), _DTYPES[part.get_dtype()]
                    start = offsets.get(name, {}).get("saved_offsets", [0] * len(size))
                    end = [first + length for first, length in zip(start, size, strict=True)]
                    before = shapes.get(name, (tuple(end), dtype))[0]
                    shapes[name] = (tuple(max(a, b) for a, b in zip(before, end, strict=True)), dtype)
                    filled[name] = filled.get(name, 0) + math.prod(size)
        except (OSError, SafetensorError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{file} cannot be read ({in_words(error)}); use another checkpoint") from None
    for name, (shape, _) in shapes.items():
        # The reader leaves what no file holds as it was, without a word.
        if filled[name] != math.prod(shape):
            raise CheckpointError(f"{path} holds only a part of {name!r}; a shard is missing: use another checkpoint")
    return shapes


def fill(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Reads this process's part of each tensor from the shard files, without asking other ranks."""
    # An empty part (uneven shards) needs no reading.
    targets = {name: tensor for name, tensor in tensors.items() if _local_size(tensor) > 0}
    if targets:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        reader = HuggingFaceStorageReader(str(path))
        try:
            dcp.load(dict(targets), storage_reader=reader, planner=planner, no_dist=True)
        except CheckpointException as error:  # a BaseException
            raise RanksFailed("; ".join(in_words(failure[0]) for failure in error.failures.values())) from error


def _check_and_fill(path: Path, tensors: Mapping[str, torch.Tensor], unused: Collection[str]) -> None:
    reason = validate(path, deep=False)
    if reason is None:
        saved = {name: shape for name, shape in describe(path).items() if name not in unused}
        reason = _difference(saved, shapes_of(tensors))
    if reason is not None:
        raise RanksFailed(reason)
    fill(path, tensors)


def _difference(saved: Shapes, wanted: Shapes) -> str | None:
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
        problems.append(f"{other[0]!r} is {was} in it and {now} here{more}")
    if not problems:
        return None
    return "it does not fit this run: " + "; ".join(problems) + "; use the settings it was saved with"


def _first(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _local_size(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel()
