"""Writes safetensors files one tensor at a time, so a file may be larger than the free memory.

The safetensors library, in contrast, takes all tensors of a file at once and serialises them before it writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_ALIGNMENT = 8  # the header's length in bytes is a multiple of this


@dataclass(frozen=True)
class ToWrite:
    """A tensor to write to a file; its values are read only when it is written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_tensors(path: Path, tensors: Mapping[str, ToWrite]) -> None:
    """Writes a new safetensors file; holds only one tensor in memory at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in tensors.items():
        place = [start, start + tensor.num_bytes]
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        start = place[1]
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % _ALIGNMENT)
    with path.open("xb") as file:
        file.write(len(content).to_bytes(8, "little"))
        file.write(content)
        for name, tensor in tensors.items():
            whole = tensor.read().detach().cpu().contiguous()
            if tuple(whole.shape) != tensor.shape or whole.dtype != tensor.dtype:
                raise ValueError(f"{name} is {whole.dtype} {tuple(whole.shape)}, not as announced")
            values: Any = whole.reshape(-1).view(torch.uint8).numpy()
            file.write(values)


def write_sharded(folder: Path, stem: str, tensors: Mapping[str, ToWrite], most_bytes: int) -> None:
    """Writes tensors to STEM.safetensors, or to several files of at most `most_bytes` with an index."""
    shards = list(_shards(tensors, most_bytes))
    if len(shards) == 1:
        write_tensors(folder / f"{stem}.safetensors", tensors)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(folder / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.num_bytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    # Written last, so that an incomplete set of files cannot be taken for a complete one.
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(tensors: Mapping[str, ToWrite], most_bytes: int) -> Iterator[dict[str, ToWrite]]:
    shard: dict[str, ToWrite] = {}
    for name, tensor in tensors.items():
        if shard and sum(each.num_bytes for each in shard.values()) + tensor.num_bytes > most_bytes:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard
