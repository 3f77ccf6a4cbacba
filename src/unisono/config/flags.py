"""Parses the flags of settings: `--batch-size 4`, `--batch_size=4`, `--no_deterministic`, `--betas 0.9 0.99`.

Values stay text here. The field's type parses them later, in the same way as a scalar of a config file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from unisono.config.fields import Field
from unisono.config.values import RawText, describe, did_you_mean, shown, takes
from unisono.errors import ConfigError

SIMILAR = 0.7
"""Minimum similarity (0 to 1) of a name that is suggested for an unknown one: `width` is too unlike `log_with`."""

Explain = Callable[[str, Mapping[str, Field], str], str]
"""A function that returns the end of the error message for an unknown name, such as "; use …", or "".

Its arguments are the name, the fields, and the prefix of the name: "--" for a flag, "" for a key in a file.
"""


def parse_flags(
    flags: Sequence[str], fields: Mapping[str, Field], explain: Explain | None = None
) -> Iterator[tuple[str, Any]]:
    """Yields the field name and the text of each flag, in the order of the command line."""
    remaining = list(reversed(flags))
    while remaining:
        argument = remaining.pop()
        flag, equals, text = argument.partition("=")
        if not flag.startswith("--"):
            hint = did_you_mean(flag.lstrip("-").replace("-", "_"), list(fields), "--", SIMILAR)
            raise ConfigError(f"unexpected argument {shown(argument)}{hint}")
        name = flag.removeprefix("--").replace("-", "_")
        if name in fields:
            yield name, _value(fields[name], [text] if equals else None, remaining)
        elif (positive := _negated(name, fields)) in fields:
            if equals:
                raise ConfigError(f"{flag} takes no value; write --{positive} or --no_{positive}")
            yield positive, RawText("false")
        else:
            hint = (explain and explain(name, fields, "--")) or _nearest(name, fields)
            raise ConfigError(f"unknown flag {flag if flag.isprintable() else shown(flag)}{hint}")


def _value(field: Field, values: list[str] | None, remaining: list[str]) -> Any:
    if takes(field.annotation, dict):
        raise ConfigError(f"--{field.name}: its value is a mapping, which can only be set in a config file")
    if values is None:
        values = _take_values(field, remaining)
    return RawText(values[0]) if len(values) == 1 else [RawText(value) for value in values]


def _take_values(field: Field, remaining: list[str]) -> list[str]:
    """Removes the flag's values from `remaining` and returns them. An argument with a single dash (-3) is a value."""
    many = takes(field.annotation, list, tuple)
    values: list[str] = []
    while remaining and not remaining[-1].startswith("--") and (many or not values):
        values.append(remaining.pop())
    if not values and takes(field.annotation, bool):
        return ["true"]
    if not values:
        raise ConfigError(f"--{field.name} needs a value: {describe(field.annotation)}")
    return values


def _negated(name: str, fields: Mapping[str, Field]) -> str:
    positive = name.removeprefix("no_")
    is_switch = positive != name and positive in fields and takes(fields[positive].annotation, bool)
    return positive if is_switch else ""


def _nearest(name: str, fields: Mapping[str, Field]) -> str:
    switches = [f"no_{field.name}" for field in fields.values() if takes(field.annotation, bool)]
    names = [*fields, *switches] if name.startswith("no_") else list(fields)
    return did_you_mean(name, names, "--", SIMILAR) or "; --help lists all flags"
