"""Numbers, times and long texts as people read them."""

from __future__ import annotations

import math


def compact(value: float, digits: int = 4) -> str:
    """A number in few characters: 0.00713, 12,840, 512 M, 3.2e-05."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if max(unit, 1e7) <= abs(value) < 1000 * unit:
            return f"{value / unit:.{digits}g} {name}"
    size = math.floor(math.log10(abs(value)))
    if -4 <= size < digits:
        return f"{value:.{digits - 1 - size}f}".rstrip("0").rstrip(".")
    return f"{value:,.0f}" if 0 <= size < 7 else f"{value:.{digits - 2}e}"


def a_count(count: int, thing: str) -> str:
    """1 rank, 2 ranks."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """3 h 20 min, 4 min 5 s, 12 s, 0.4 s."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    while parts[0][0] == 0:
        parts.pop(0)
    return " ".join(f"{count} {unit}" for count, unit in parts[:2] if count)


def bytes_text(size: float) -> str:
    """58 kB, 1.3 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"


def clipped(text: str, most: int = 400) -> str:
    """The beginning of a text that is too long."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
