"""Records unusable files on disk; all ranks read these records, so they train on the same samples."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from unisono.errors import ConfigError, UserError
from unisono.recipes.common.cache_files import write_cache_file
from unisono.recipes.common.tree import one_line

_MAX_NAMED = 3  # maximum number of files to list in a message


class BadMedia(Exception):
    """Raised for an image, audio or video file that cannot be used; the message names the file and the problem."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(one_line(f"{path}: {problem}"))
        self.path, self.problem = path, problem

    def __reduce__(self) -> tuple[type[BadMedia], tuple[Path, str]]:
        return type(self), (self.path, self.problem)  # loader workers pickle it to send it to the main process


@contextmanager
def as_bad_media(path: Path, kind: str) -> Iterator[None]:
    """Converts any exception into a BadMedia; `kind` is the expected kind of file, such as "video"."""
    # Decoders can raise almost any exception on malicious input, so enclose only the calls to the decoder.
    try:
        yield
    except BadMedia:
        raise
    except Exception as error:
        message = str(getattr(error, "strerror", None) or error)
        message = " ".join(message.replace(repr(str(path)), "").replace(str(path), "it").split())
        article = "an" if kind[0] in "aeiou" else "a"
        raise BadMedia(path, f"cannot be read as {article} {kind} ({message[:200] or type(error).__name__})") from error


def check_file(path: Path) -> None:
    """Raises BadMedia if the file does not exist or is empty."""
    if not path.is_file():  # opening a FIFO would block forever
        raise BadMedia(path, "there is no such file")
    if not path.stat().st_size:
        raise BadMedia(path, "the file is empty")


class BadFiles:
    """A folder that stores, for each unusable file, the reason under the file's cache key."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def record(self, key: str, reason: str) -> None:
        """Records an unusable file. The next start tries it again, and a changed file gets a new key."""
        write_cache_file(self._folder / f"{key}.json", json.dumps({"why": reason}).encode())

    def reason(self, key: str) -> str | None:
        """Returns why a file is unusable, or None if it was not recorded."""
        try:
            return one_line(str(json.loads((self._folder / f"{key}.json").read_bytes())["why"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None


class Named(Protocol):
    """A sample with a name that can be shown to the user."""

    @property
    def name(self) -> str: ...


def usable_samples(
    sources: Sequence[Named],
    needed: Iterable[tuple[Container[str], Sequence[str]]],
    bad: BadFiles,
    leave_out_bad: bool,
) -> tuple[list[int], list[str]]:
    """Returns the indices of the usable samples, and notes about the unusable ones.

    `needed` is a list of caches, each with one key per sample. A sample is usable if every cache contains its key.
    """
    missing: dict[int, str] = {}
    for cache, keys in needed:
        missing.update((index, key) for index, key in enumerate(keys) if key not in cache)
    reasons = []
    for index, key in sorted(missing.items()):
        reason = bad.reason(key)
        if reason is None:
            raise UserError(
                f"{sources[index].name} is not in the cache: its files have changed since the run started, or the "
                "machines see different files; use a file system shared by all machines and start the run again"
            )
        reasons.append(reason)
    usable = [index for index in range(len(sources)) if index not in missing]
    if not reasons:
        return usable, []
    examples = first_few(list(dict.fromkeys(reasons)))  # several samples may come from one file
    if leave_out_bad and usable:
        return usable, [f"skipping {len(reasons):,} of {len(sources):,} samples that cannot be used: {examples}"]
    fix = "repair or remove them" if leave_out_bad else "repair or remove them, or skip them with --leave_out_bad"
    raise ConfigError(f"{len(reasons):,} of {len(sources):,} samples cannot be used ({examples}); {fix}")


def first_few(texts: Sequence[str]) -> str:
    """Joins the first few texts for use in a message."""
    return "; ".join(texts[:_MAX_NAMED]) + ("; …" if len(texts) > _MAX_NAMED else "")
