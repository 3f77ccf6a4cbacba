"""Recognises out-of-memory errors, and defines the two exceptions that a step raises after one."""

from __future__ import annotations

import re

import torch

_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory|ALLOC_FAILED", re.IGNORECASE)
_OTHERS = re.compile(
    r"(Process \d+ has|Including non-PyTorch memory, this process has) [^.]*\.\d+ \w+ memory in use\. "
)
IN_COUPLE = "in couple(): "
"""Prefix of an out-of-memory error in couple(), where smaller micro-batches save little memory."""


class OutOfMemoryTogether(Exception):
    """Raised on all ranks when any of them ran out of memory and the step changed nothing, so all can repeat it."""

    def __init__(self, here: str | None) -> None:
        super().__init__(here or "another rank ran out of memory")
        self.here = here  # this rank's error; None if another rank ran out of memory


class OutOfMemoryHere(Exception):
    """This rank ran out of memory and cannot notify the others: all must restart from the last checkpoint."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out, on a GPU or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def in_one_line(error: BaseException) -> str:
    """Returns the allocator's message in one line, without its advice."""
    text = _OTHERS.sub("", " ".join(str(error).split()))
    return text.partition(" If reserved but unallocated")[0].partition(" See documentation")[0] or type(error).__name__
