"""Writes tokens to disk in blocks, and joins the blocks into one file."""

from __future__ import annotations

import io
import json
from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.atomic_files import atomic_file
from unisono.errors import UserError
from unisono.recipes.common.cache_files import write_cache_file

DONE, TOKENS, STARTS = "texts.json", "tokens.npy", "starts.npy"

BLOCK_TEXTS = 8192
BLOCK_CHARACTERS = 2**24
"""Limits of a block, whose texts are in memory at the same time."""


class Facts(NamedTuple):
    """The contents of a complete token folder."""

    num_texts: int
    num_tokens: int
    num_cut: int
    sizes: dict[str, int]


def facts_of(folder: Path) -> Facts | None:
    """Returns what a token folder contains; None if the folder is incomplete or damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        content = json.loads((folder / DONE).read_bytes())
        num_texts, num_tokens, num_cut = (int(content[name]) for name in ("num_texts", "num_tokens", "num_cut"))
        facts = Facts(num_texts, num_tokens, num_cut, dict(content["sizes"]))
        if all((folder / name).stat().st_size == facts.sizes[name] for name in (TOKENS, STARTS)):
            return facts
    return None


def blocks_of(texts: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """Divides texts into blocks, in the same way in every process."""
    number, block, characters = 0, list[str](), 0
    for text in texts:
        block.append(text)
        characters += len(text)
        if len(block) >= BLOCK_TEXTS or characters >= BLOCK_CHARACTERS:
            yield number, block
            number, block, characters = number + 1, [], 0
    if block:
        yield number, block


def block_name(number: int) -> str:
    """Returns the file name of a block."""
    return f"block-{number:08d}.npy"


def packed(rows: list[list[int]], num_cut: int) -> bytes:
    """Returns a block as one array: number of texts, number of truncated texts, length of each text, all tokens."""
    numbers = array("i", [len(rows), num_cut, *(len(row) for row in rows)])
    for row in rows:
        numbers.extend(row)
    file = io.BytesIO()
    np.save(file, np.frombuffer(numbers, np.int32), allow_pickle=False)
    return file.getvalue()


def join(folder: Path, num_blocks: int) -> None:
    """Joins all blocks into one file and removes them, unless another run has done so."""
    if facts_of(folder) is None:
        try:
            _join(folder, num_blocks)
        except FileNotFoundError:  # another run that uses this folder has removed the block
            if facts_of(folder) is None:
                raise UserError(f"{folder}: blocks are missing; start again to create them") from None
        except OSError as error:
            raise UserError(
                f"{folder} cannot be written ({error.strerror}); free some space, or use another folder"
            ) from None
    for block in folder.glob("block-*.npy"):
        block.unlink(missing_ok=True)


def _join(folder: Path, num_blocks: int) -> None:
    lengths, num_cut = [np.zeros(0, np.int32)], 0
    for number in range(num_blocks):
        head, cut, _ = _unpacked(folder / block_name(number))
        lengths.append(np.array(head))
        num_cut += cut
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(lengths), dtype=np.int64)])
    file = io.BytesIO()
    np.save(file, starts, allow_pickle=False)
    write_cache_file(folder / STARTS, file.getvalue())
    with atomic_file(folder / TOKENS, durable=True) as temporary, temporary.open("xb") as new:
        _write_tokens(new, folder, num_blocks, int(starts[-1]))
    sizes = {name: (folder / name).stat().st_size for name in (TOKENS, STARTS)}
    facts = Facts(len(starts) - 1, int(starts[-1]), num_cut, sizes)
    write_cache_file(folder / DONE, json.dumps(facts._asdict()).encode())


def _write_tokens(new: BinaryIO, folder: Path, num_blocks: int, num_tokens: int) -> None:
    header = {"descr": np.dtype(np.int32).str, "fortran_order": False, "shape": (num_tokens,)}
    np.lib.format.write_array_header_1_0(new, header)
    for number in range(num_blocks):
        new.write(np.ascontiguousarray(_unpacked(folder / block_name(number))[2]).data)


def _unpacked(path: Path) -> tuple[NDArray[np.int32], int, NDArray[np.int32]]:
    """Reads a block; returns the length of each text, the number of truncated texts, and all tokens."""
    try:
        block = np.load(path, mmap_mode="r", allow_pickle=False)
        num_texts, num_cut = (int(number) for number in block[:2])
        lengths, tokens = block[2 : 2 + num_texts], block[2 + num_texts :]
        if block.dtype != np.int32 or len(lengths) != num_texts or int(lengths.sum()) != len(tokens):
            raise ValueError
    except (ValueError, EOFError):
        path.unlink(missing_ok=True)
        raise UserError(f"{path} was damaged and has been removed; run the command again to replace it") from None
    return lengths, num_cut, tokens
