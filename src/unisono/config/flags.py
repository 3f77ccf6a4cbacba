"""The command line: words to values of fields.

`--batch-size 4`, `--batch_size=4`, `--deterministic`, `--no_deterministic`, `--betas 0.9 0.99` or `--betas 0.9,0.99`.
Every value stays text here; the field's type reads it later, in the same way as a word of a config file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from unisono.config.fields import Field
from unisono.config.values import Plain, describe, did_you_mean, shown, takes
from unisono.errors import ConfigError

SIMILAR = 0.7
"""How alike a wrong name and a right one must be for a suggestion: `log_with` is not a slip for `width`."""

Explain = Callable[[str, Mapping[str, Field], str], str]
"""What a caller knows of a name that no field has: (name, fields, "--" for a flag) -> "; use …", or nothing."""


def parse_flags(
    words: Sequence[str], fields: Mapping[str, Field], explain: Explain | None = None
) -> Iterator[tuple[str, Any]]:
    """Field names and their text, in the order given."""
    rest = list(reversed(words))
    while rest:
        word = rest.pop()
        flag, equals, text = word.partition("=")
        if not flag.startswith("--"):
            near = did_you_mean(flag.lstrip("-").replace("-", "_"), list(fields), "--", SIMILAR)
            raise ConfigError(f"unexpected argument {shown(word)}{near}")
        name = flag.removeprefix("--").replace("-", "_")
        if name in fields:
            yield name, _given(fields[name], [text] if equals else None, rest)
        elif (positive := _negated(name, fields)) in fields:
            if equals:
                raise ConfigError(f"{flag} takes no value; write --{positive} or --no_{positive}")
            yield positive, Plain("false")
        else:
            hint = (explain and explain(name, fields, "--")) or _nearest(name, fields)
            raise ConfigError(f"unknown flag {flag if flag.isprintable() else shown(flag)}{hint}")


def _given(field: Field, values: list[str] | None, rest: list[str]) -> Any:
    if takes(field.annotation, dict):
        raise ConfigError(f"{field.name}: a mapping can only be given in a config file, not as --{field.name}")
    if values is None:
        values = _words_of(field, rest)
    return Plain(values[0]) if len(values) == 1 else [Plain(value) for value in values]


def _words_of(field: Field, rest: list[str]) -> list[str]:
    """Takes the words that belong to the flag. A word with one dash is a value (-3); flags have two."""
    many = takes(field.annotation, list, tuple)
    values: list[str] = []
    while rest and not rest[-1].startswith("--") and (many or not values):
        values.append(rest.pop())
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
