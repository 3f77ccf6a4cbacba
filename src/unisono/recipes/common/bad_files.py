"""Files that cannot be used: noted where every rank can read it, so that all train on the same samples."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from unisono.errors import ConfigError, UserError
from unisono.recipes.common.tree import one_line
from unisono.recipes.common.whole_files import write_whole

_NAMED = 3  # in a message


class BadMedia(Exception):
    """A file that cannot be used as what it should be; the message names it and says what is wrong."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(one_line(f"{path}: {what}"))
        self.path, self.what = path, what

    def __reduce__(self) -> tuple[type[BadMedia], tuple[Path, str]]:
        return type(self), (self.path, self.what)  # a loader's worker sends it to the main process


@contextmanager
def faults(path: Path, kind: str) -> Iterator[None]:
    """Makes whatever goes wrong with a file a BadMedia; `kind` is what it should be."""
    # Given hostile bytes, the decoders raise nearly anything; little but their calls should stand inside this.
    try:
        yield
    except BadMedia:
        raise
    except Exception as error:
        told = str(getattr(error, "strerror", None) or error)
        told = " ".join(told.replace(repr(str(path)), "").replace(str(path), "it").split())  # who asks names it
        raise BadMedia(
            path, f"cannot be read as {_with_article(kind)} ({told[:200] or type(error).__name__})"
        ) from error


def _with_article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def check_file(path: Path) -> None:
    """BadMedia where there is no file, or nothing in it."""
    if not path.is_file():  # a pipe would be waited for, for ever
        raise BadMedia(path, "there is no such file")
    if not path.stat().st_size:
        raise BadMedia(path, "it is empty")


class BadFiles:
    """Which files could not be used and why, by key."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def note(self, key: str, why: str) -> None:
        """Notes that a file is bad. It is tried again at the next start, and another file has another key."""
        write_whole(self._folder / f"{key}.json", json.dumps({"why": why}).encode())

    def why(self, key: str) -> str | None:
        """What is wrong with it; None if nothing is known."""
        try:
            return one_line(str(json.loads((self._folder / f"{key}.json").read_bytes())["why"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None


class Named(Protocol):
    """A sample of the user's."""

    @property
    def name(self) -> str: ...


def usable(
    sources: Sequence[Named],
    needed: Iterable[tuple[Container[str], Sequence[str]]],
    bad: BadFiles,
    leave_out_bad: bool,
) -> tuple[list[int], list[str]]:
    """Which samples have all that is needed, and what to say of the others.

    `needed` are pairs: what is there, and the key of each sample in it.
    """
    lacking: dict[int, str] = {}
    for there, keys in needed:
        lacking.update((index, key) for index, key in enumerate(keys) if key not in there)
    reasons = []
    for index, key in sorted(lacking.items()):
        why = bad.why(key)
        if why is None:
            raise UserError(
                f"{sources[index].name} is not in the cache: its files changed while it was made, or the machines see "
                "different ones; leave them as they are, on a file system that all machines share, and start again"
            )
        reasons.append(why)
    kept = [index for index in range(len(sources)) if index not in lacking]
    if not reasons:
        return kept, []
    told = few(list(dict.fromkeys(reasons)))  # several samples may be of one file
    if leave_out_bad and kept:
        return kept, [f"left out {len(reasons):,} of {len(sources):,} samples that cannot be used: {told}"]
    what = "mend or remove them" if leave_out_bad else "mend or remove them, or leave them out with --leave_out_bad"
    raise ConfigError(f"{len(reasons):,} of {len(sources):,} samples cannot be used ({told}); {what}")


def few(texts: Sequence[str]) -> str:
    """The first of many, for a message."""
    return "; ".join(texts[:_NAMED]) + ("; …" if len(texts) > _NAMED else "")
