"""Writes the files of datasets: tar shards whose samples are known by their number."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path

BLOCK = 512


def content(number: int) -> bytes:
    """The bytes of a sample, of a length that depends on its number."""
    return f"sample {number} ".encode() * (1 + number % 7 * 40)


def write_shards(folder: Path, sizes: Sequence[int], tar_format: int = tarfile.USTAR_FORMAT) -> list[Path]:
    """Writes shards with these numbers of samples, which have the fields `txt` and `cls`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths, number = [], 0
    for shard, size in enumerate(sizes):
        path = folder / f"{shard:03d}.tar"
        members = [
            (f"{each:06d}.{field}", data)
            for each in range(number, number + size)
            for field, data in (("txt", content(each)), ("cls", str(each).encode()))
        ]
        write_tar(path, members, tar_format)
        paths.append(path)
        number += size
    return paths


def write_tar(path: Path, members: Iterable[tuple[str, bytes]], tar_format: int = tarfile.USTAR_FORMAT) -> None:
    """Writes a tar file with these members."""
    with tarfile.open(path, "w", format=tar_format) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def header(name: str, size: int = 0, kind: bytes = b"0", **parts: bytes) -> bytes:
    """A tar header with any values; `parts` are raw fields: `length` of 12 bytes, `extended` of one."""
    block = bytearray(BLOCK)
    block[: len(name)] = name.encode()
    block[124:136] = parts.get("length", f"{size:011o}\0".encode())
    block[156:157] = kind
    block[257:265] = b"ustar\x0000"
    block[482:483] = parts.get("extended", b"\0")
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    return bytes(block)


def padded(data: bytes) -> bytes:
    """The content of a member, filled up to whole blocks."""
    return data + bytes(-len(data) % BLOCK)
