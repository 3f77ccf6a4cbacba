"""Reads images and videos from local or remote tar shards in WebDataset's layout: `a.mp4` and `a.txt` are one sample.

`unisono.datasets` indexes the shards: the index contains the offset of each image or video and of its caption. To
encode an image or video, the latent cache reads its byte range once, into a temporary file for the decoder.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from unisono.datasets import sources as files
from unisono.datasets.index import Array, Index, Kind, open_index
from unisono.datasets.patterns import expand
from unisono.datasets.tar_members import Member, TarError
from unisono.datasets.tar_samples import TarSample, samples
from unisono.datasets.tar_shards import Buffered
from unisono.engine.recipe import Work
from unisono.errors import ConfigError, UserError
from unisono.plain_files import parse_json
from unisono.recipes.common.bad_files import BadMedia
from unisono.recipes.common.streams import VIDEO_SUFFIXES
from unisono.recipes.common.tree import one_line
from unisono.recipes.wan.checks import is_unicode
from unisono.recipes.wan.data.decode import IMAGES
from unisono.storage.addresses import is_remote

_SUFFIXES = (*VIDEO_SUFFIXES, *IMAGES)
_CAPTIONS = ("txt", "json")
_KEYS = ("caption", "text", "prompt")  # keys under which a JSON file may contain the caption
_MOST_BYTES, _MOST_CHARACTERS = 2**20, 65_536
_AHEAD = 2**18  # bytes per read when indexing remote shards
_THREADS = 16  # number of threads that read captions


@dataclass(frozen=True)
class PackedMedia:
    """An image or video in a shard."""

    shard: files.Source
    start: int
    size: int
    suffix: str
    reader: files.RangeReader = field(repr=False, compare=False)

    @property
    def identity(self) -> str:
        """A string that changes whenever the content changes; part of the cache key."""
        return f"{self.start}\0{self.size}\0{self.suffix}\0{self.shard.size}\0{self.shard.stamp}"

    @contextmanager
    def as_file(self, name: str) -> Iterator[Path]:
        """Yields a temporary file with the content; a BadMedia raised inside the context then names the sample."""
        with tempfile.TemporaryDirectory(prefix="unisono-") as folder:
            path = Path(folder) / f"media{self.suffix}"
            path.write_bytes(_read(self.reader, self.shard, self.start, self.size))
            try:
                yield path
            except BadMedia as error:
                raise BadMedia(Path(f"{self.shard.name}, {name}"), error.problem) from None


@dataclass(frozen=True)
class PackedSample:
    """A sample in a shard."""

    name: str
    media: PackedMedia
    caption: str


def are_shards(path: str) -> bool:
    """Whether a path names tar shards rather than a folder."""
    return path.endswith(".tar") or is_remote(path)


def read_shards(
    pattern: str, index_dir: Path | None, work: Work, *, leave_out_bad: bool, report: Callable[[str], None]
) -> list[PackedSample]:
    """Returns the samples of all shards in order. Every rank must call this, because each reads a share of captions."""
    shards = files.examine(expand(str(Path(pattern).expanduser()) if pattern.startswith("~") else pattern, ".tar"))
    reader = files.RangeReader()

    def scan(shard: files.Source) -> Array:
        return np.array(_rows(reader, shard), dtype=np.int64).reshape(-1, 6)

    index = open_index(index_dir, Kind("media-1", "int64", 6, "images or videos", scan), shards)
    stems = [Path(shard.name).stem for shard in shards]
    if len(set(stems)) < len(stems):
        stems = [f"{number:05d}-{stem}" for number, stem in enumerate(stems)]
    good, bad = list[PackedSample](), list[str]()
    captions, before = _captions(index, shards, reader, work), Counter[int]()
    for row, (caption, problem) in enumerate(captions):
        number, (start, size, suffix, *_) = index.locate(row)
        name = f"{stems[number]}/{before[number]:06d}"
        before[number] += 1
        if problem:
            bad.append(one_line(f"{shards[number].name}, sample {before[number]} of it: {problem}"))
        else:
            media = PackedMedia(shards[number], int(start), int(size), _SUFFIXES[int(suffix)], reader)
            good.append(PackedSample(name, media, caption))
    if bad and not (good and leave_out_bad):
        more = f" ({len(bad) - 1:,} more of {len(captions):,} samples are bad)" if len(bad) > 1 else ""
        raise ConfigError(f"{bad[0]}{more}" + ("; skip it with --leave_out_bad" if good else ""))
    if bad:
        report(f"skipped {len(bad):,} of {len(captions):,} samples: {bad[0]}" + ("; …" if len(bad) > 1 else ""))
    return good


def _rows(reader: files.RangeReader, shard: files.Source) -> list[list[int]]:
    """Returns, for each sample of a shard, the offset, size and kind of its image or video and of its caption."""
    buffered = Buffered(reader.read, shard, _AHEAD if shard.is_remote else 0)
    try:
        return [row for sample in samples(buffered.read, shard.size) if (row := _row(sample, shard)) is not None]
    except TarError as error:
        raise UserError(f"{shard.name} cannot be used: {error}") from error
    except OSError as error:
        raise UserError(f"{shard.name} cannot be read ({error.strerror or type(error).__name__})") from error


def _row(sample: TarSample, shard: files.Source) -> list[int] | None:
    media = [name for name in sample.fields if f".{name}" in _SUFFIXES]
    captions = [name for name in _CAPTIONS if name in sample.fields]
    if not media:
        return None
    if len(media) > 1:
        raise UserError(
            f"{shard.name}: the sample {sample.key[:80]!r} has {' and '.join(media)}; expected one image or video"
        )
    caption: Member | None = sample.fields[captions[0]] if captions else None
    of_caption = [0, 0, -1] if caption is None else [caption.data, caption.size, _CAPTIONS.index(captions[0])]
    member = sample.fields[media[0]]
    return [member.data, member.size, _SUFFIXES.index(f".{media[0]}"), *of_caption]


def _captions(
    index: Index, shards: Sequence[files.Source], reader: files.RangeReader, work: Work
) -> list[tuple[str, str]]:
    """Reads the caption of each sample, or describes the problem with it."""

    def read(row: int) -> tuple[str, str]:
        number, (_, _, _, start, size, kind) = index.locate(row)
        if kind < 0:
            return "", "has no caption; write one into its .txt or .json"
        if size > _MOST_BYTES:
            return "", "its caption is too long"
        try:
            return _checked(_text(_read(reader, shards[number], int(start), int(size)), _CAPTIONS[kind]))
        except ValueError as error:
            return "", f"its caption cannot be read ({error})"

    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            mine: Any = list(pool.map(read, work.share(range(len(index)))))
        except UserError as error:  # not raised yet, because the other ranks wait for this rank
            mine = str(error)
    parts = work.gather(mine)
    for part in parts:
        if isinstance(part, str):
            raise UserError(part)
    return [parts[row % len(parts)][row // len(parts)] for row in range(len(index))]


def _text(data: bytes, kind: str) -> str:
    if kind == "txt":
        return data.decode("utf-8-sig").strip()
    value = parse_json(data)
    text = next((value[key] for key in _KEYS if key in value), None) if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise ValueError(f"expected a text, or an object with one of {', '.join(_KEYS)}")
    return text.strip()


def _checked(text: str) -> tuple[str, str]:
    if len(text) > _MOST_CHARACTERS or not is_unicode(text):
        return "", f"its caption is not Unicode, or has more than {_MOST_CHARACTERS:,} characters"
    return text, ""


def _read(reader: files.RangeReader, shard: files.Source, start: int, size: int) -> bytes:
    try:
        data = reader.read(shard, start, size)
    except UserError:
        raise
    except Exception as error:  # each fsspec file system raises its own exceptions
        raise UserError(f"{shard.name} cannot be read ({type(error).__name__})") from error
    if len(data) != size:
        raise UserError(f"{shard.name} has changed: it is shorter than in the index")
    return data
