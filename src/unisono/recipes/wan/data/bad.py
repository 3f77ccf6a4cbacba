"""Files that cannot be used: noted where every rank can read it, so that all train on the same samples."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Sequence
from pathlib import Path

from unisono.errors import ConfigError, UserError
from unisono.recipes.wan.data.packs import write_whole
from unisono.recipes.wan.data.sources import Source
from unisono.recipes.wan.data.tree import one_line

_NAMED = 3  # in a message


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


def usable(
    sources: Sequence[Source],
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
    told = "; ".join(reasons[:_NAMED]) + ("; …" if len(reasons) > _NAMED else "")
    if leave_out_bad and kept:
        return kept, [f"left out {len(reasons):,} of {len(sources):,} samples that cannot be used: {told}"]
    what = "mend or remove them" if leave_out_bad else "mend or remove them, or leave them out with --leave_out_bad"
    raise ConfigError(f"{len(reasons):,} of {len(sources):,} samples cannot be used ({told}); {what}")
