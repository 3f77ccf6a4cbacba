"""A dataset of tar files, with random access to their samples."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from unisono.datasets.index import Array, Kind, open_index
from unisono.datasets.patterns import expand
from unisono.datasets.read_ahead import Fetcher, ReadAhead
from unisono.datasets.shard_cache import ShardCache
from unisono.datasets.sources import RangeReader, Source, examine
from unisono.datasets.tar_members import BLOCK, TarError
from unisono.datasets.tar_samples import TarSample, samples
from unisono.errors import UserError

_MOST_BLOCKS = 2**32  # a row stores numbers of 512-byte blocks in 32 bits, for shards of up to 2 TiB
_ATTEMPTS = 20  # attempts to read a shard that other processes remove from the cache
_AHEAD = 2**18  # bytes that indexing reads at a time


class TarShards(Dataset[Any]):
    """Samples in tar files, in the layout of WebDataset: files that share a key are the fields of a sample.

    `shards` are paths, patterns (`train/*.tar`), brace ranges (`train-{000..099}.tar`), folders, or URLs that fsspec
    opens. A sample is a dict of bytes by field, with its key as `__key__`; `transform`, a module-level function,
    converts it to what the recipe needs. `fields` selects the fields to read; a sample without one raises an error.
    """

    def __init__(
        self,
        shards: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        fields: Sequence[str] | None = None,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        index_dir: str | os.PathLike[str] | None = None,
        storage_options: dict[str, Any] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int = 100 * 2**30,
    ) -> None:
        """Builds the index of the shards in `index_dir` if it is missing; passes `storage_options` to fsspec.

        With `cache_dir`, remote shards are copied to this folder before they are read, up to `cache_bytes`.
        """
        options = storage_options or {}
        self.shards = examine(expand(shards, ".tar", **options), **options)
        self.fields, self.transform = None if fields is None else tuple(fields), transform
        self._reader = RangeReader(options)
        self._cache: ShardCache | None = None
        if cache_dir is not None and any(shard.is_remote for shard in self.shards):
            self._cache = ShardCache(Path(cache_dir).expanduser().absolute(), cache_bytes, self._reader.download)
            self._cache.check(self.shards)
        kind = Kind("tar-1", "uint32", 2, "samples", self._rows)
        self._index = open_index(index_dir, kind, self.shards)
        self._fetcher = Fetcher()
        self._ahead = ReadAhead(self._begin, self._fetcher.forget)

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> Any:
        number, (first, blocks) = self._index.locate(index)
        fetched = self._fetcher.take(index)
        self._ahead.is_read(index)
        sample = self._sample(self.shards[number], int(first) * BLOCK, int(blocks) * BLOCK, fetched)
        return sample if self.transform is None else self.transform(sample)

    @property
    def block_starts(self) -> Array:
        """The first sample of each shard: `--shuffle_window` reads the samples of a shard together."""
        return self._index.starts

    def will_read(self, indices: Array) -> None:
        """Called by the loader with samples that it will read soon; fetches their shards in the background."""
        if self._cache is None:
            return
        numbers = np.searchsorted(self._index.ends, indices, side="right")
        soon, size = list[Source](), 0
        for number in dict.fromkeys(numbers.tolist()):
            size += self.shards[number].size
            if size > self._cache.limit // 2 and soon:
                break
            soon.append(self.shards[number])
        self._cache.prefetch([shard for shard in soon if shard.is_remote])

    def about_to_read(self, indices: Sequence[int]) -> None:
        """Called by the loader with the next samples in reading order; starts to read them ahead."""
        self._ahead.announce(index for index in indices if 0 <= index < len(self))

    def _begin(self, index: int) -> int:
        """Starts to read a sample; returns its size in bytes."""
        number, (first, blocks) = self._index.locate(index)
        shard, start, count = self.shards[number], int(first) * BLOCK, int(blocks) * BLOCK
        if not shard.is_remote:
            self._reader.advise(shard, start, count)
        elif self._cache is not None:
            return 0  # nothing to do: the cache fetches whole shards ahead
        else:
            self._fetcher.begin(index, lambda: self._reader.read(shard, start, count))
        return count

    def _sample(self, shard: Source, start: int, length: int, fetched: bytes | None) -> dict[str, Any]:
        try:
            sample, data = self._parsed(shard, start, length, fetched)
        except UserError:
            if self._cache is None or not shard.is_remote:
                raise
            self._cache.forget(shard)
            sample, data = self._parsed(shard, start, length)
        return {"__key__": sample.key, **self._contents(sample, data, shard)}

    def _parsed(
        self, shard: Source, start: int, length: int, fetched: bytes | None = None
    ) -> tuple[TarSample, memoryview]:
        data = memoryview(self._read(shard, start, length) if fetched is None else fetched)
        try:
            found = list(samples(lambda at, count: bytes(data[at : at + count]), length, whole=False))
        except TarError as error:
            raise UserError(f"{shard.name}: the sample at byte {start} cannot be read: {error}") from error
        if len(found) != 1 or (found[0].start, found[0].end) != (0, length):
            raise UserError(f"{shard.name} has changed: the sample at byte {start} differs from the index")
        return found[0], data

    def _read(self, shard: Source, start: int, count: int) -> bytes:
        if self._cache is None or not shard.is_remote:
            return self._reader.read(shard, start, count)
        for _ in range(_ATTEMPTS):
            with suppress(FileNotFoundError):  # another process removed the shard to make room
                return self._reader.read(self._cache.local(shard), start, count)
        raise UserError(f"{shard.name} was removed from the cache before it could be read; raise cache_bytes")

    def _rows(self, shard: Source) -> Array:
        """Returns the first block and the number of blocks of each sample in a shard."""
        if shard.size > _MOST_BLOCKS * BLOCK:
            raise UserError(f"{shard.name} is larger than 2 TiB; split it")
        ahead = _AHEAD if shard.is_remote and self._cache is None else 0
        rows = []
        try:
            for sample in samples(Buffered(self._read, shard, ahead).read, shard.size):
                rows.append((sample.start // BLOCK, (sample.end - sample.start) // BLOCK))
        except TarError as error:
            raise UserError(f"{shard.name} cannot be used: {error}") from error
        except OSError as error:
            raise UserError(f"{shard.name} cannot be read ({error.strerror or type(error).__name__})") from error
        return np.array(rows, dtype=np.uint32).reshape(-1, 2)

    def _contents(self, sample: TarSample, data: memoryview, shard: Source) -> dict[str, bytes]:
        names = sample.fields if self.fields is None else self.fields
        for name in names:
            if name not in sample.fields:
                others = ", ".join(sample.fields)
                raise UserError(f"{shard.name}: the sample {sample.key!r} has no field {name!r}, only {others}")
        members = {name: sample.fields[name] for name in names}
        return {name: bytes(data[member.data : member.data + member.size]) for name, member in members.items()}


class Buffered:
    """Serves small reads in ascending order from chunks of at least `ahead` bytes."""

    def __init__(self, read: Callable[[Source, int, int], bytes], shard: Source, ahead: int) -> None:
        self._read, self._shard, self._ahead = read, shard, ahead
        self._start, self._data = 0, b""

    def read(self, start: int, count: int) -> bytes:
        at = start - self._start
        if not 0 <= at <= len(self._data) - count:
            self._start, self._data = start, self._read(self._shard, start, max(count, self._ahead))
            at = 0
        return self._data[at : at + count]
