"""The token cache: texts are tokenized once, into files that are mapped into memory.

The name of a cache folder contains a digest of everything the tokens depend on: texts, tokenizer and length limit. The
processes write the tokens in blocks, each atomically, so an interrupted run continues where it stopped. The blocks are
then joined into one file, and `texts.json` is written last. Two runs that fill the same folder write the same bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.engine.recipe import Work
from unisono.errors import UserError
from unisono.recipes.common.cache_files import remove_leftovers, write_cache_file
from unisono.recipes.seo.data.blocks import DONE, STARTS, TOKENS, block_name, blocks_of, facts_of, join, packed
from unisono.recipes.seo.data.tokens import Tokenize, fingerprint_of

__all__ = ["Texts", "Tokenize", "fill_texts", "fingerprint_of", "open_texts"]

_PROGRESS_EVERY_S = 5.0


class Texts(Sequence["NDArray[np.int32]"]):
    """The tokens of each text, by text number; loader workers share the memory."""

    def __init__(self, folder: Path, tokens: NDArray[np.int32], starts: NDArray[np.int64], num_cut: int) -> None:
        self._folder, self._tokens, self._starts = folder, tokens, starts
        self.num_cut = num_cut
        """Number of truncated texts."""

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index = int(index) % len(self)
        # Return a copy, so that no caller holds a memory map of a deleted file.
        return np.array(self._tokens[self._starts[index] : self._starts[index + 1]])

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """The number of tokens of each text [n]."""
        return np.diff(self._starts).astype(np.int32)

    def __reduce__(self) -> tuple[Any, ...]:
        return open_texts, (self._folder,)  # pickling the array would copy it into every worker


def fill_texts(
    folder: Path,
    texts: Callable[[], Iterable[str]],
    tokenize: Callable[[Sequence[str]], list[list[int]]],
    fingerprint: str,
    work: Work,
    what: str = "texts",
) -> Path:
    """Tokenizes texts into a subfolder of `folder`, unless that is complete; all processes must call it.

    Returns the folder for `open_texts`. A process that is asked to stop returns early: see `work.stopping`.
    """
    place = folder / f"tokens-{fingerprint[:32]}"
    if any(work.gather(facts_of(place) is not None)):  # processes may reach this line at different times
        return place
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{place} cannot be created ({error.strerror}); use another cache_dir") from None
    remove_leftovers(place)
    num_blocks = _fill(place, texts, tokenize, work, what)
    if work.meet():
        return place
    if len(work.share([0])):
        join(place, num_blocks)
    work.meet()
    return place


def open_texts(folder: Path) -> Texts:
    """Opens the tokens in a folder that fill_texts returned, or in its parent folder if that contains only one."""
    place = folder
    if not (folder / DONE).is_file():
        whole = [each for each in sorted(folder.glob("tokens-*")) if facts_of(each)]
        if len(whole) != 1:
            raise UserError(f"{folder}: expected one folder of tokens, found {len(whole)}; prepare the run again")
        place = whole[0]
    facts = facts_of(place)
    if facts is None:
        raise UserError(f"{place}: damaged; remove that folder to create it again")
    try:
        tokens = np.load(place / TOKENS, mmap_mode="r" if facts.num_tokens else None, allow_pickle=False)
        starts = np.load(place / STARTS, mmap_mode="r", allow_pickle=False)
        if tokens.shape != (facts.num_tokens,) or starts.shape != (facts.num_texts + 1,):
            raise ValueError
    except (ValueError, EOFError):  # the file has the right size but wrong content
        raise UserError(f"{place}: damaged; remove that folder to create it again") from None
    return Texts(place, tokens, starts, facts.num_cut)


def _fill(
    place: Path,
    texts: Callable[[], Iterable[str]],
    tokenize: Callable[[Sequence[str]], list[list[int]]],
    work: Work,
    what: str,
) -> int:
    """Writes this process's blocks; returns the total number of blocks."""
    mine, number, done = work.share(range(2**40)), -1, 0
    begun, last = time.monotonic(), time.monotonic()
    for number, block in blocks_of(texts()):
        if number not in mine or (place / block_name(number)).is_file():
            continue
        if work.stopping or facts_of(place):  # the run is to stop, or another run has completed the folder
            break
        before = getattr(tokenize, "num_cut", 0)
        rows = tokenize(block)
        write_cache_file(place / block_name(number), packed(rows, getattr(tokenize, "num_cut", 0) - before))
        done += len(block)
        if time.monotonic() - last > _PROGRESS_EVERY_S:
            last = time.monotonic()
            work.message(f"  {done:,} {what} tokenized, {done / (last - begun):,.0f} per second")
    if done:
        work.message(f"  {done:,} {what} tokenized in {time.monotonic() - begun:.1f} s")
    return number + 1
