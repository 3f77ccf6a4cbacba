"""Records unusable files where every rank can read it, so that all ranks train on the same samples."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from unisono.errors import ConfigError, UserError
from unisono.recipes.common.cache_files import write_cache_file
from unisono.recipes.common.tree import one_line

_MAX_NAMED = 3  # in a message


class BadMedia(Exception):
    """A file that cannot be used as the media it should be; the message names the file and the problem."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(one_line(f"{path}: {problem}"))
        self.path, self.problem = path, problem

    def __reduce__(self) -> tuple[type[BadMedia], tuple[Path, str]]:
        return type(self), (self.path, self.problem)  # loader workers send it to the main process


@contextmanager
def as_bad_media(path: Path, kind: str) -> Iterator[None]:
    """Converts every exception into a BadMedia; `kind` is what the file should be."""
    # Decoders raise nearly any exception on hostile input, so this should enclose little but their calls.
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
    """Raises BadMedia if there is no such file or it is empty."""
    if not path.is_file():  # opening a FIFO would block forever
        raise BadMedia(path, "there is no such file")
    if not path.stat().st_size:
        raise BadMedia(path, "the file is empty")


class BadFiles:
    """The unusable files and the reasons, by key."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def record(self, key: str, reason: str) -> None:
        """Records an unusable file. The next start tries it again; a changed file has another key."""
        write_cache_file(self._folder / f"{key}.json", json.dumps({"why": reason}).encode())

    def reason(self, key: str) -> str | None:
        """Why the file is unusable; None if it was not recorded."""
        try:
            return one_line(str(json.loads((self._folder / f"{key}.json").read_bytes())["why"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None


class Named(Protocol):
    """A sample of the user's."""

    @property
    def name(self) -> str: ...


def usable_samples(
    sources: Sequence[Named],
    needed: Iterable[tuple[Container[str], Sequence[str]]],
    bad: BadFiles,
    leave_out_bad: bool,
) -> tuple[list[int], list[str]]:
    """Returns the indices of the usable samples, and notes about the others.

    `needed` lists caches, each with the keys of all samples; a sample is usable if every cache contains its key.
    """
    missing: dict[int, str] = {}
    for cache, keys in needed:
        missing.update((index, key) for index, key in enumerate(keys) if key not in cache)
    reasons = []
    for index, key in sorted(missing.items()):
        reason = bad.reason(key)
        if reason is None:
            raise UserError(
                f"{sources[index].name} is not in the cache: its files changed meanwhile, or the machines see other "
                "files; use a file system that all machines share, do not change the files, and start again"
            )
        reasons.append(reason)
    usable = [index for index in range(len(sources)) if index not in missing]
    if not reasons:
        return usable, []
    examples = first_few(list(dict.fromkeys(reasons)))  # several samples may be of one file
    if leave_out_bad and usable:
        return usable, [f"skipping {len(reasons):,} of {len(sources):,} samples that cannot be used: {examples}"]
    fix = "repair or remove them" if leave_out_bad else "repair or remove them, or skip them with --leave_out_bad"
    raise ConfigError(f"{len(reasons):,} of {len(sources):,} samples cannot be used ({examples}); {fix}")


def first_few(texts: Sequence[str]) -> str:
    """Joins the first few texts, for a message."""
    return "; ".join(texts[:_MAX_NAMED]) + ("; …" if len(texts) > _MAX_NAMED else "")
