"""The values that a search may try for a setting, as the user writes them.

A range or a list of choices belongs to one setting of the recipe or of unisono, and the type of that setting decides
how its text is read: `1..8` is a range of integers for `warmup_steps` and of real numbers for `learning_rate`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.config.fields import Field
from unisono.config.values import Mismatch, RawText, coerce, describe, jsonable, shown, takes
from unisono.errors import ConfigError

_RANGE = re.compile(r"(?P<log>log:)?(?P<low>[^:]+?)\.\.(?P<high>[^:]+?)(?::(?P<step>[^:]+))?")
_EXAMPLES = "1e-5..1e-2, log:1e-5..1e-2, 16..256:16 (in steps of 16) or a|b|c"
_NOT_SEARCHABLE = {
    "output_dir": "each trial has its own folder",
    "resume": "a trial resumes from its own checkpoint",
    "gpus": "it decides where trials run",
    "nproc": "it decides where trials run",
    "nnodes": "it decides where trials run",
    "node_rank": "it decides where trials run",
    "rdzv_endpoint": "it decides where trials run",
}


@dataclass(frozen=True)
class Numbers:
    """A range of numbers, including both ends."""

    name: str
    low: float
    high: float
    whole: bool
    log: bool = False
    step: float | None = None

    @property
    def text(self) -> str:
        """The range as text for `--search`."""
        step = "" if self.step is None else f":{self.shown(self.step)}"
        return f"{'log:' if self.log else ''}{self.shown(self.low)}..{self.shown(self.high)}{step}"

    @property
    def ends(self) -> tuple[str, ...]:
        """The smallest and the largest value, as text."""
        return self.shown(self.low), self.shown(self.high)

    def shown(self, value: float) -> str:
        """Returns a value of this range as text for a flag."""
        return str(int(value)) if self.whole else repr(float(value))


@dataclass(frozen=True)
class Choices:
    """A list of values, as text."""

    name: str
    values: tuple[str, ...]

    @property
    def text(self) -> str:
        """The choices as text for `--search`."""
        return "|".join(self.values)

    @property
    def ends(self) -> tuple[str, ...]:
        """All values: each of them is checked before the study starts."""
        return self.values

    def shown(self, value: str) -> str:
        """Returns a value as text for a flag."""
        return value


Space = Numbers | Choices


def split_flag(flag: str) -> tuple[str, str]:
    """Splits the NAME=VALUES of `--search` into name and values."""
    name, equals, text = flag.partition("=")
    if not equals or not name.strip() or not text.strip():
        raise ConfigError(f"--search {shown(flag)}: expected NAME=VALUES, where VALUES is {_EXAMPLES}")
    return name.strip().removeprefix("--").replace("-", "_"), text.strip()


def read_space(field: Field, values: object) -> Space:
    """Reads the values to try for a setting, from text as in `--search` or, in Python, from a list of choices."""
    if reason := _NOT_SEARCHABLE.get(field.name):
        raise ConfigError(f"search {field.name}: it cannot be searched, because {reason}")
    if isinstance(values, Sequence) and not isinstance(values, str):
        return _choices(field, [_spelled(value) for value in values])
    if not isinstance(values, str):
        raise ConfigError(f"search {field.name}: expected a text such as {_EXAMPLES}, or a list; got {shown(values)}")
    text = values.strip()
    if "|" in text:
        return _choices(field, [part.strip() for part in text.split("|")])
    if match := _RANGE.fullmatch(text):
        return _numbers(field, text, match)
    raise ConfigError(
        f"search {field.name}: {shown(text)} is neither a range nor a list of choices; write {_EXAMPLES}, or fix the "
        f"value with --{field.name} {text}"
    )


def _choices(field: Field, values: list[str]) -> Choices:
    distinct = tuple(dict.fromkeys(values))
    if len(distinct) < 2:
        raise ConfigError(f"search {field.name}: the search space is empty; give at least two distinct choices")
    for value in distinct:
        try:
            coerce(field.annotation, RawText(value))
        except Mismatch as error:
            raise ConfigError(f"search {field.name}: {error}{error.hint}") from None
    return Choices(field.name, distinct)


def _numbers(field: Field, text: str, match: re.Match[str]) -> Numbers:
    whole = takes(field.annotation, int) and not takes(field.annotation, float)
    if not whole and not takes(field.annotation, float):
        expected = describe(field.annotation)
        raise ConfigError(f"search {field.name}: a range needs a number, and {field.name} is {expected}; write a|b|c")
    low, high = (_number(field, match[part], whole) for part in ("low", "high"))
    step = None if match["step"] is None else _number(field, match["step"], whole)
    log = match["log"] is not None
    if low >= high:
        raise ConfigError(
            f"search {field.name}: the search space is empty, because {text} is not ascending; swap its ends"
        )
    if log and low <= 0:
        raise ConfigError(f"search {field.name}: a logarithmic range must begin above 0, got {text}")
    if log and step is not None:
        raise ConfigError(f"search {field.name}: a logarithmic range has no steps; remove log: or :{match['step']}")
    if step is not None and not 0 < step <= high - low:
        raise ConfigError(f"search {field.name}: a step must be above 0 and not exceed the range, got {text}")
    return Numbers(field.name, low, high, whole, log, step)


def _number(field: Field, text: str, whole: bool) -> float:
    try:
        number = coerce(int if whole else float, RawText(text.strip()))
    except Mismatch as error:
        raise ConfigError(f"search {field.name}: {error}") from None
    if not math.isfinite(number):
        raise ConfigError(f"search {field.name}: a range needs finite ends, got {text}")
    return float(number) if not whole else int(number)


def _spelled(value: Any) -> str:
    """Returns a Python value as text for a flag."""
    plain = jsonable(value)
    if plain is None or isinstance(plain, bool):
        return str(plain).lower()
    if isinstance(plain, list):
        return ",".join(_spelled(item) for item in plain)
    if isinstance(plain, Mapping):
        raise ConfigError(f"a mapping cannot be searched: {shown(value)}")
    return str(plain)
