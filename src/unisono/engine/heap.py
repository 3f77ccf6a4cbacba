"""Memory of the CPU that is kept from step to step.

Every step asks for the same tensors again. The C library gives what lies at the end of its heap back to the system as
soon as it is freed, and when it comes back the system has to clear its pages: on a CPU that can be a tenth of a step.
While a run computes on the CPU it keeps them instead, as PyTorch itself does on a GPU. Tensors of more than 32 MiB are
the system's as before: kept, they would leave holes that the next ones just do not fit into.
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
_LARGE = 2**25  # bytes from which on a tensor has pages of its own: the most that the C library arrives at by itself
_USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")


@contextmanager
def kept_heap(device: torch.device) -> Iterator[None]:
    """Within it, a process that computes on the CPU keeps what it has freed; afterwards the system gets it back."""
    library = _library() if device.type == "cpu" else None
    if library is None:
        yield
        return
    library.mallopt(_MMAP, _LARGE)
    library.mallopt(_TRIM, _NEVER)
    try:
        yield
    finally:
        library.mallopt(_TRIM, 2 * _LARGE)  # as the C library would choose it
        library.malloc_trim(0)


def _library() -> Any:
    """The C library, where it is one that can be told, and nobody has told it yet."""
    if any(name in os.environ for name in _USERS_OWN):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
