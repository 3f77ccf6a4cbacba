"""The tokens of many texts, computed once and kept in files that are mapped into memory.

A folder of tokens is named by everything it depends on: tokens of other texts, another tokenizer or another limit lie
in another folder beside it. It is filled in blocks, shared over the processes; each block appears whole or not at all,
so a killed fill goes on where it was. In the end the blocks become one file, and `texts.json`, written last, says that
all is there. Two runs that fill the same folder write the same bytes, and whichever comes last changes nothing.
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

_SAY_EVERY_S = 5.0


class Texts(Sequence["NDArray[np.int32]"]):
    """Tokens of texts by their numbers; loader workers share the memory."""

    def __init__(self, folder: Path, tokens: NDArray[np.int32], starts: NDArray[np.int64], num_cut: int) -> None:
        self._folder, self._tokens, self._starts = folder, tokens, starts
        self.num_cut = num_cut
        """How many texts were longer than the limit."""

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index = int(index) % len(self)
        # A copy, so that nobody holds a map of a file that is gone by then.
        return np.array(self._tokens[self._starts[index] : self._starts[index + 1]])

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """[n] tokens of each text."""
        return np.diff(self._starts).astype(np.int32)

    def __reduce__(self) -> tuple[Any, ...]:
        return open_texts, (self._folder,)  # a map would be copied into every worker that is sent it


def fill_texts(
    folder: Path,
    texts: Callable[[], Iterable[str]],
    tokenize: Callable[[Sequence[str]], list[list[int]]],
    fingerprint: str,
    work: Work,
    what: str = "texts",
) -> Path:
    """Keeps the tokens of texts under `folder`, unless they are there; all processes must call it.

    The folder for `open_texts` is given back. A process that is asked to stop returns early: see `work.stopping`.
    """
    place = folder / f"tokens-{fingerprint[:32]}"
    if any(work.gather(facts_of(place) is not None)):  # they look at one file system, at different times
        return place
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{place} cannot be made ({error.strerror}); use another cache_dir") from None
    remove_leftovers(place)
    num_blocks = _fill(place, texts, tokenize, work, what)
    if work.meet():
        return place
    if len(work.share([0])):
        join(place, num_blocks)
    work.meet()
    return place


def open_texts(folder: Path) -> Texts:
    """The tokens that fill_texts has left; also of the folder it was given, where only one of them lies there."""
    place = folder
    if not (folder / DONE).is_file():
        whole = [each for each in sorted(folder.glob("tokens-*")) if facts_of(each)]
        if len(whole) != 1:
            raise UserError(f"{folder}: expected one set of tokens in it, found {len(whole)}; prepare the run again")
        place = whole[0]
    facts = facts_of(place)
    if facts is None:
        raise UserError(f"{place}: damaged; remove that folder, and it is made anew")
    try:
        tokens = np.load(place / TOKENS, mmap_mode="r" if facts.num_tokens else None, allow_pickle=False)
        starts = np.load(place / STARTS, mmap_mode="r", allow_pickle=False)
        if tokens.shape != (facts.num_tokens,) or starts.shape != (facts.num_texts + 1,):
            raise ValueError
    except (ValueError, EOFError):  # as long as it should be, and something else
        raise UserError(f"{place}: damaged; remove that folder, and it is made anew") from None
    return Texts(place, tokens, starts, facts.num_cut)


def _fill(
    place: Path,
    texts: Callable[[], Iterable[str]],
    tokenize: Callable[[Sequence[str]], list[list[int]]],
    work: Work,
    what: str,
) -> int:
    """Makes this process's blocks, and says how many there are of all."""
    mine, number, done = work.share(range(2**40)), -1, 0
    begun, last = time.monotonic(), time.monotonic()
    for number, block in blocks_of(texts()):
        if number not in mine or (place / block_name(number)).is_file():
            continue
        if work.stopping or facts_of(place):  # another run was faster
            break
        before = getattr(tokenize, "num_cut", 0)
        rows = tokenize(block)
        write_cache_file(place / block_name(number), packed(rows, getattr(tokenize, "num_cut", 0) - before))
        done += len(block)
        if time.monotonic() - last > _SAY_EVERY_S:
            last = time.monotonic()
            work.message(f"  {done:,} {what} are tokens, {done / (last - begun):,.0f} per second")
    if done:
        work.message(f"  {done:,} {what} became tokens in {time.monotonic() - begun:.1f} s")
    return number + 1
