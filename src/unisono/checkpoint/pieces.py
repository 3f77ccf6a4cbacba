"""Reads parts of tensors from shard files, for PyTorch's load planner.

The reader opens only the files that contain a part of a tensor that this rank loads.
"""

from __future__ import annotations

import math
from collections import defaultdict
from io import FileIO
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
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from unisono.checkpoint.contents import Contents, whole_shape
from unisono.checkpoint.tensor_file import TensorFile

_BYTES_AT_ONCE = 8 * 2**20


class ShardReader(HuggingFaceStorageReader):
    """PyTorch's safetensors reader, changed to use headers that were checked, and not to map files into memory."""

    def __init__(self, contents: Contents) -> None:
        super().__init__(str(contents.path))
        self._pieces = contents.pieces

    def read_metadata(self) -> Metadata:
        """Returns the contents of the checkpoint in the form that the planner expects."""
        tensors: dict[str, Any] = {}
        files: dict[MetadataIndex, TensorFile] = {}
        for name, pieces in self._pieces.items():
            chunks = [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)) for piece in pieces]
            properties = TensorProperties(dtype=pieces[0].file.dtype(name))
            tensors[name] = TensorStorageMetadata(properties, torch.Size(whole_shape(pieces)), chunks)
            files |= {MetadataIndex(fqn=name, offset=piece.offsets): piece.file for piece in pieces}
        return Metadata(tensors, storage_data=files, storage_meta=StorageMeta(load_id=self.load_id))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills the tensors of a load plan, one file after the other."""
        by_file: dict[Path, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self.storage_data[item.storage_index].path].append(item)
        for items in by_file.values():
            source: TensorFile = self.storage_data[items[0].storage_index]
            with source.open() as file:
                for item in items:
                    target = planner.resolve_tensor(item).detach()
                    _read_into(target, source, file, item)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _read_into(target: torch.Tensor, source: TensorFile, file: FileIO, item: ReadItem) -> None:
    """Copies a part of a tensor into `target`, a few rows at a time to save host memory."""
    name, offsets, lengths = item.storage_index.fqn, item.storage_offsets, item.lengths
    if not offsets:
        target.copy_(source.tensor(name, file))
        return
    row = source.entries[name].shape[1:]
    at_once = max(1, _BYTES_AT_ONCE // max(1, math.prod(row) * source.dtype(name).itemsize))
    columns = tuple(slice(start, start + length) for start, length in zip(offsets[1:], lengths[1:], strict=True))
    for start in range(0, lengths[0], at_once):
        stop = min(start + at_once, lengths[0])
        rows = source.rows(name, offsets[0] + start, offsets[0] + stop, file)
        target[start:stop].copy_(rows[(slice(None), *columns)])
