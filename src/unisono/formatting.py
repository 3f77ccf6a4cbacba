"""Formats numbers, sizes, durations and exceptions for messages."""

from __future__ import annotations

import math

from unisono.errors import UnisonoError

LONGEST_MESSAGE = 2_000
"""Maximum length of an exception's message; some libraries put whole tensors into their messages."""


def format_number(value: float, digits: int = 4) -> str:
    """Formats a number compactly, rounding decimals to `digits` significant digits: 0.00713, 12,840, 512 M, 3.2e-05."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if max(unit, 1e7) <= abs(value) < 1000 * unit:
            return f"{_fixed(value / unit, digits)} {name}"
    if 1e-4 <= abs(value) < 1e7:
        return _fixed(value, digits)
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{_without_zeros(mantissa)}e{exponent}"


def _fixed(value: float, digits: int) -> str:
    return _without_zeros(f"{value:,.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}")


def _without_zeros(text: str) -> str:
    """Removes trailing zeros after a decimal point; a whole number keeps its zeros."""
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_rate(rate: float) -> str:
    """Formats a rate: 0.25, 3.1, 812, 1,200."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def format_count(count: int, thing: str) -> str:
    """Formats a count with its noun, given in the singular as `thing`: 1 rank, 2 ranks, 1,200 queries."""
    return f"{count:,} {plural(thing, count)}"


def plural(thing: str, count: int) -> str:
    """Returns the singular or plural of a noun, depending on the count."""
    if count == 1:
        return thing
    if thing.endswith("y") and thing[-2] not in "aeiou":
        return f"{thing[:-1]}ies"
    return f"{thing}es" if thing.endswith(("ch", "sh", "s", "x")) else f"{thing}s"


def format_bytes(num_bytes: float) -> str:
    """Formats a number of bytes in binary units: 512 bytes, 1.5 MiB, 12.0 GiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes:.0f} bytes"


def format_duration(seconds: float, *, precise: bool = False) -> str:
    """Formats a duration in its two largest units: 45s, 3m10s, 2h05m, 3d04h. `precise` shows 0.25 s below 10 s."""
    if precise and seconds < 10:
        return f"{seconds:.2g} s"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def format_clock(seconds: float) -> str:
    """Formats a position in a video, in seconds, as players show it: 0:07, 12:34, 1:02:03, 2 d 3:04:05."""
    whole = int(max(seconds, 0) + 0.5)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    begin = f"{days} d " if days else ""
    return begin + (f"{hours}:{minutes:02}" if days or hours else f"{minutes}") + f":{whole % 60:02}"


def describe_exception(error: BaseException, *, bare: tuple[type[BaseException], ...] = (UnisonoError,)) -> str:
    """Describes an exception in one line, with its class name unless it is an instance of a class in `bare`."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # its __str__ fails
        text = "(its message cannot be shown)"
    text = shorten_middle(text, LONGEST_MESSAGE)
    return text if text and isinstance(error, bare) else f"{type(error).__name__}: {text}"


def shorten_middle(text: str, longest: int) -> str:
    """Shortens a text to about `longest` characters by cutting out its middle."""
    return text if len(text) <= longest else f"{text[: longest // 2]} … {text[-longest // 2 :]}"


def shorten(text: str, longest: int = 400) -> str:
    """Shortens a text to at most `longest` characters by cutting off its end."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def printable(text: str) -> str:
    """Replaces unprintable characters. File names and titles may contain terminal or bidi control characters."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else " " if char.isspace() else "�" for char in text)
