"""Which part of which tensor each shard file of a checkpoint holds, and reading them for PyTorch's planner."""

from __future__ import annotations

import json
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

from unisono.checkpoint.manifest import SHARD_SUFFIX, CheckpointError
from unisono.checkpoint.shards import SHARDING_INFO
from unisono.checkpoint.tensor_file import BadTensorFile, TensorFile
from unisono.checkpoint.together import describe_failure


@dataclass(frozen=True)
class Piece:
    """A part of a tensor: the file that holds it, where in the tensor it begins, and how large it is."""

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
                several = pieces.setdefault(name, [])
                several.append(Piece(file, offsets.get(name, (0,) * len(entry.shape)), entry.shape))
                if len(several[0].sizes) != len(entry.shape):
                    raise BadTensorFile(
                        f"{name!r} has another number of dimensions than in {several[0].file.path.name}"
                    )
        except (OSError, BadTensorFile) as error:
            what = str(error) if isinstance(error, BadTensorFile) else describe_failure(error)
            raise CheckpointError(f"{shard} cannot be read ({what}); use another checkpoint") from None
    return pieces


def _offsets_in(file: TensorFile) -> dict[str, tuple[int, ...]]:
    """Where in its tensor each part begins. A file that says nothing holds whole tensors."""
    text = file.metadata.get(SHARDING_INFO)
    if text is None:
        return {}
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise BadTensorFile(f"its {SHARDING_INFO} is not JSON") from None
    pieces = {}
    for name, entry in file.entries.items():
        part: Any = header.get(name) if isinstance(header, dict) else None
        offsets: Any = part.get("saved_offsets") if isinstance(part, dict) else None
        is_list = isinstance(offsets, list) and len(offsets) == len(entry.shape)
        if not is_list or not all(type(number) is int and 0 <= number < 2**62 for number in offsets):
            raise BadTensorFile(f"its {SHARDING_INFO} does not say where the part of {name!r} begins")
        pieces[name] = tuple(offsets)
    return pieces


class ShardReader(HuggingFaceStorageReader):
    """PyTorch's reader of such files, but with headers that were checked and files that need not be mapped."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._pieces = pieces_of(path)

    def read_metadata(self) -> Metadata:
        """What the checkpoint holds, for the planner."""
        tensors: dict[str, Any] = {}
        files: dict[MetadataIndex, TensorFile] = {}
        for name, pieces in self._pieces.items():
            chunks = [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)) for piece in pieces]
            ends = [[a + b for a, b in zip(piece.offsets, piece.sizes, strict=True)] for piece in pieces]
            size = torch.Size([max(each) for each in zip(*ends, strict=True)])
            properties = TensorProperties(dtype=pieces[0].file.dtype(name))
            tensors[name] = TensorStorageMetadata(properties=properties, size=size, chunks=chunks)
            files |= {MetadataIndex(fqn=name, offset=piece.offsets): piece.file for piece in pieces}
        metadata = Metadata(state_dict_metadata=tensors, storage_data=files, storage_meta=StorageMeta())
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills the tensors of a plan."""
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
