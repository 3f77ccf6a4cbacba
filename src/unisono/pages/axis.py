"""Axes of charts, which map values to SVG coordinates and choose round ticks."""

from __future__ import annotations

import math
from dataclasses import dataclass

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_UNITS = (
    (1e12, 1e12, "T"),
    (1e9, 1e9, "G"),
    (1e6, 1e6, "M"),
    (1e3, 1e4, "k"),
)  # unit, smallest value, name


@dataclass(frozen=True)
class Axis:
    """Maps values from `low` to `high` to coordinates from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool
    ticks: list[tuple[float, str]]

    def position(self, value: float) -> float:
        """Returns the coordinate of a value."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, 1e-300))
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def linear(
    low: float,
    high: float,
    start: float,
    end: float,
    *,
    num_ticks: int = 5,
    tight: bool = False,
    least: float | None = None,
    most: float | None = None,
) -> Axis:
    """Returns a linear axis with round ticks. Unless `tight` is set, it is extended to begin and end at ticks.

    The axis is not extended beyond `least` and `most`, so the axis of a fraction can end at 1.
    """
    if high - low <= max(abs(low), abs(high)) * 1e-9:  # all values are equal, so add some room around them
        room = abs(low) * 0.1 or 1.0
        low, high = low - room, high + room
        low = low if least is None else max(low, least)
        high = high if most is None else min(high, most)
    step = _round_step((high - low) / num_ticks)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if tight:
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    else:
        low, high = first * step, last * step
        if most is not None and high > most * (1 + 1e-9):
            high, last = most, last - 1
    largest = max(abs(first), abs(last)) * step
    ticks = [(index * step, _label(index * step, step, largest)) for index in range(first, last + 1)]
    return Axis(low, high, start, end, False, ticks)


def logarithmic(low: float, high: float, start: float, end: float) -> Axis:
    """Returns a logarithmic axis for positive values that span several decades."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    last = max(last, first + 1)
    every = -(-(last - first) // 6)
    steps = (1, 2, 5) if last - first <= 3 else (1,)
    values = [m * 10.0**power for power in range(first, last + 1, every) for m in steps]
    # End the axis at the ticks next to the values, because an empty half decade would squeeze the line.
    below = [value for value in values if value <= low * 1.0001] or values[:1]
    above = [value for value in values if value >= high * 0.9999] or values[-1:]
    low, high = min(below[-1], low), max(above[0], high)
    ticks = [(value, _power(value)) for value in values if low * 0.9999 <= value <= high * 1.0001]
    return Axis(low, high, start, end, True, ticks)


def spans_decades(low: float, high: float) -> bool:
    """Returns whether values from `low` to `high` span enough decades for a logarithmic axis."""
    return low > 1e-300 and high / low >= 50


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= step * 0.999)


def _label(value: float, step: float, largest: float) -> str:
    """Returns the label of a tick. `largest` determines the unit, which is the same for all ticks of the axis."""
    if value == 0:
        return "0"
    if largest >= 1e15 or step < 1e-5:
        return f"{value:.3g}"
    unit, name = next(((u, n) for u, least, n in _UNITS if largest >= least and step >= u / 1000), (1.0, ""))
    return f"{value / unit:.{_decimals(step / unit)}f}{name}"


def _decimals(step: float) -> int:
    return max(0, -math.floor(math.log10(step) + 1e-9))


def _power(value: float) -> str:
    if 0.9999e-3 <= value < 1e5:
        return f"{value:g}"
    mantissa, power = f"{value:.0e}".split("e")
    exponent = str(int(power)).translate(_SUPERSCRIPTS)
    return f"10{exponent}" if mantissa == "1" else f"{mantissa}·10{exponent}"
