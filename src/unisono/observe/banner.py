"""Formats the start-up banner."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

WIDTH = 100


def banner(lines: Mapping[str, str], title: str) -> str:
    """Returns a title rule, aligned rows of keys and values, and a closing rule; wraps long values."""
    indent = max((len(key) for key in lines), default=0) + 3
    rows: list[str] = []
    for key, value in lines.items():
        # Break only at spaces, so that paths and lists of devices can be copied.
        parts = [
            part
            for line in value.splitlines() or [""]
            for part in textwrap.wrap(line, WIDTH - indent, break_long_words=False, break_on_hyphens=False) or [""]
        ]
        rows += [f"{key if number == 0 else '':<{indent}}{part}".rstrip() for number, part in enumerate(parts)]
    width = min(WIDTH, max(len(row) for row in [*rows, f"── {title} ──"]))
    return "\n".join([f"── {title} ".ljust(width, "─"), *rows, "─" * width])


def effective_batch_text(
    global_batch: int, micro_batch: int, ranks: int, accumulation: int, device: str = "GPU"
) -> str:
    """Returns the factors of the effective batch: `64 = 8 per GPU × 2 GPUs × 4 accumulation`."""
    room = micro_batch * ranks * accumulation
    if room < global_batch:
        raise ValueError(
            f"{micro_batch} × {ranks} × {accumulation} = {room} samples are fewer than the batch of {global_batch}"
        )
    up_to = "" if room == global_batch else "up to "
    devices = device if ranks == 1 else f"{device}s"
    return f"{global_batch} = {up_to}{micro_batch} per {device} × {ranks} {devices} × {accumulation} accumulation"
