"""Loads a checkpoint into existing tensors, on any number of ranks.

Every rank reads the slices it needs from the shard files, whichever rank wrote them. Before that, it compares the
names, shapes and dtypes in the file headers, so a checkpoint that does not match is rejected before any tensor changes.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.tensor import DTensor

from unisono.checkpoint.all_ranks import RanksFailed, describe_failure, on_all_ranks
from unisono.checkpoint.contents import Contents, Shapes, contents_of
from unisono.checkpoint.find import validate
from unisono.checkpoint.manifest import CheckpointError
from unisono.checkpoint.pieces import ShardReader
from unisono.checkpoint.snapshot import shapes_of

# torch warns if there is no process group. Here each rank intentionally reads on its own, without one.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized, assuming")


def load(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    group: dist.ProcessGroup | None,
    world: int,
    unused: Collection[str] = (),
    contents: Contents | None = None,
) -> None:
    """Fills `tensors` in place from a checkpoint that any number of ranks saved; the names must match.

    `unused` names tensors that the checkpoint may also contain. With `contents`, from an examination of the checkpoint,
    a rank opens only the files that it needs. Every rank must call it; if one fails, all raise CheckpointError.
    """
    try:
        on_all_ranks(lambda: _check_and_fill(path, contents, tensors, unused), world=world, group=group)
    except RanksFailed as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}") from None


def load_whole(path: Path, prefix: str, without: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """Loads the tensors whose names begin with `prefix` ("model.", "ema.") to the CPU, each of them whole.

    Returns them by name without the prefix. Skips the tensors named in `without`.
    """
    if (reason := validate(path, deep=False)) is not None:
        raise CheckpointError(f"{path} cannot be loaded: {reason}")
    contents = contents_of(path)
    shapes = {
        name: shape
        for name, shape in contents.shapes.items()
        if name.startswith(prefix) and name.removeprefix(prefix) not in without
    }
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    fill(contents, tensors)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def fill(contents: Contents, tensors: Mapping[str, torch.Tensor]) -> None:
    """Reads this process's part of each tensor from the shard files, independently of other ranks."""
    targets = {name: tensor for name, tensor in tensors.items() if _local_size(tensor) > 0}  # skips empty shards
    if targets:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            dcp.load(dict(targets), storage_reader=ShardReader(contents), planner=planner, no_dist=True)
        except CheckpointException as error:  # derives from BaseException, not from Exception
            raise RanksFailed("; ".join(describe_failure(failure[0]) for failure in error.failures.values())) from error


def _check_and_fill(
    path: Path, contents: Contents | None, tensors: Mapping[str, torch.Tensor], unused: Collection[str]
) -> None:
    if contents is None:
        if (reason := validate(path, deep=False)) is not None:
            raise RanksFailed(reason)
        contents = contents_of(path)
    saved = {name: shape for name, shape in contents.shapes.items() if name not in unused}
    if (reason := difference(saved, shapes_of(tensors))) is not None:
        raise RanksFailed(reason)
    fill(contents, tensors)


def difference(saved: Shapes, current: Shapes) -> str | None:
    """Returns why the saved tensors cannot be loaded into the run's current tensors, or None if they can."""
    missing, unexpected = sorted(current.keys() - saved.keys()), sorted(saved.keys() - current.keys())
    different = sorted(name for name in saved.keys() & current.keys() if saved[name] != current[name])
    problems = []
    if missing:
        problems.append(f"it lacks {_first(missing)}")
    if unexpected:
        problems.append(f"it also contains {_first(unexpected)}")
    if different:
        (shape, dtype), (shape_here, dtype_here) = saved[different[0]], current[different[0]]
        was, now = (f"{list(shape)}", f"{list(shape_here)}") if shape != shape_here else (f"{dtype}", f"{dtype_here}")
        more = f" ({len(different) - 1} more differ)" if len(different) > 1 else ""
        problems.append(f"{different[0]!r} is {was} in the checkpoint and {now} in this run{more}")
    if not problems:
        return None
    return f"it does not match this run: {'; '.join(problems)}; use the settings it was saved with"


def _first(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _local_size(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel()
