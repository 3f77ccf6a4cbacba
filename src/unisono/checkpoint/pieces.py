"""Which part of which tensor each shard file holds, and a reader of these parts for PyTorch's load planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from unisono.checkpoint.all_ranks import describe_failure
from unisono.checkpoint.manifest import SHARD_SUFFIX, CheckpointError
from unisono.checkpoint.shards import SHARDING_INFO
from unisono.checkpoint.tensor_file import BadTensorFile, TensorFile
from unisono.plain_files import parse_json


@dataclass(frozen=True)
class Piece:
    """A part of a tensor: the file that holds it, its offsets in the tensor, and its size."""

    file: TensorFile
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def pieces_of(path: Path) -> dict[str, list[Piece]]:
    """The pieces of each tensor of a checkpoint, from the headers of its shards; CheckpointError if one is damaged."""
    pieces: dict[str, list[Piece]] = {}
    for shard in sorted(path.glob(f"*{SHARD_SUFFIX}")):
        try:
            file = TensorFile(shard)
            offsets = _offsets_in(file)
            for name, entry in file.entries.items():
                file.dtype(name)  # raises on a type that PyTorch does not have
                of_tensor = pieces.setdefault(name, [])
                of_tensor.append(Piece(file, offsets.get(name, (0,) * len(entry.shape)), entry.shape))
                if len(of_tensor[0].sizes) != len(entry.shape):
                    first = of_tensor[0].file.path.name
                    raise BadTensorFile(f"{name!r} does not have the same number of dimensions as in {first}")
        except (OSError, BadTensorFile) as error:
            reason = str(error) if isinstance(error, BadTensorFile) else describe_failure(error)
            raise CheckpointError(f"{shard} cannot be read ({reason}); use another checkpoint") from None
    return pieces


def whole_shape(pieces: Sequence[Piece]) -> tuple[int, ...]:
    """The shape of the tensor that consists of these pieces."""
    ends = [[a + b for a, b in zip(piece.offsets, piece.sizes, strict=True)] for piece in pieces]
    return tuple(max(dimension) for dimension in zip(*ends, strict=True))


def _offsets_in(file: TensorFile) -> dict[str, tuple[int, ...]]:
    """The offsets of each part in its tensor; empty for a file that holds whole tensors."""
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


class ShardReader(HuggingFaceStorageReader):
    """PyTorch's safetensors reader, but with checked headers, and without mapping files into memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._pieces = pieces_of(path)

    def read_metadata(self) -> Metadata:
        """The contents of the checkpoint, for the planner."""
        tensors: dict[str, Any] = {}
        files: dict[MetadataIndex, TensorFile] = {}
        for name, pieces in self._pieces.items():
            chunks = [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)) for piece in pieces]
            properties = TensorProperties(dtype=pieces[0].file.dtype(name))
            tensors[name] = TensorStorageMetadata(properties, torch.Size(whole_shape(pieces)), chunks)
            files |= {MetadataIndex(fqn=name, offset=piece.offsets): piece.file for piece in pieces}
        return Metadata(tensors, storage_data=files, storage_meta=StorageMeta(load_id=self.load_id))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills the tensors of a load plan."""
        for item in plan.items:
            file: TensorFile = self.storage_data[item.storage_index]
            target = planner.resolve_tensor(item).detach()
            target.copy_(_read(file, item.storage_index.fqn, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _read(file: TensorFile, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    if not offsets:
        return file.tensor(name)
    rows = file.rows(name, offsets[0], offsets[0] + lengths[0])
    return rows[(slice(None), *(slice(a, a + b) for a, b in zip(offsets[1:], lengths[1:], strict=True)))]
