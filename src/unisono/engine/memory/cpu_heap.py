"""Keeps freed CPU memory from step to step, as PyTorch's allocator does on a GPU.

Every step allocates the same tensors again. The C library returns freed memory at the end of its heap to the system at
once, and the system has to clear the pages when they are allocated again: on a CPU that can take a tenth of a step.
While a run computes on the CPU, the process keeps this memory. Tensors of more than 32 MiB still go back to the system:
in the heap they would leave holes that are slightly too small for the next tensors.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_TRIM, _MMAP = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
_NEVER = -1
_LARGE = 2**25  # bytes; larger tensors get their own pages. The C library itself uses no larger threshold.
_TUNED_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")


@contextmanager
def kept_heap(device: torch.device) -> Iterator[None]:
    """A context in which a process that computes on the CPU keeps freed memory; on exit, it returns the memory."""
    library = _library() if device.type == "cpu" else None
    if library is None:
        yield
        return
    library.mallopt(_MMAP, _LARGE)
    library.mallopt(_TRIM, _NEVER)
    try:
        yield
    finally:
        library.mallopt(_TRIM, 2 * _LARGE)  # the C library's own choice
        library.malloc_trim(0)


def return_freed_memory() -> None:
    """Returns freed memory inside the heap to the system; the C library returns only memory at its end."""
    if (library := _library()) is not None:
        library.malloc_trim(0)


def _library() -> Any:
    """Returns the C library, if it has these functions and the user has not tuned it; else None."""
    if any(name in os.environ for name in _TUNED_BY_USER):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
