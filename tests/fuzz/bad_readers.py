"""Readers with one defect each, by which the tests check that fuzzing finds them."""

from __future__ import annotations

import os
from pathlib import Path

from fuzz.reader import OUTSIDE, Reader, write
from unisono.errors import UserError


def _is_damaged(folder: Path) -> bool:
    return (folder / "file").read_bytes() != b"a valid file"


def _raises(folder: Path) -> None:
    if _is_damaged(folder):
        raise KeyError("x")


def _several_lines(folder: Path) -> None:
    if _is_damaged(folder):
        raise UserError("one\ntwo")


def _loops(folder: Path) -> None:
    while _is_damaged(folder):
        pass


def _leaves(folder: Path) -> None:
    if _is_damaged(folder):
        (folder.parent / OUTSIDE / "secret.txt").read_bytes()


def _crashes(folder: Path) -> None:
    if _is_damaged(folder):
        os.abort()


def _allocates(folder: Path) -> None:
    if _is_damaged(folder):
        bytearray(3 * 2**30)


def _rejects(folder: Path) -> None:
    if _is_damaged(folder):
        raise UserError("it is damaged")


READERS = [
    Reader(read.__name__.strip("_"), __name__, write({"file": "a valid file"}), read, cpu_seconds=0.5)
    for read in (_raises, _several_lines, _loops, _leaves, _crashes, _allocates, _rejects)
]
