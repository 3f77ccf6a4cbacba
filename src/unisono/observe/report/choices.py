"""The settings of a run, those that somebody chose before those that nobody touched."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from unisono.config import fields_of
from unisono.formatting import shorten
from unisono.settings import Settings


@dataclasses.dataclass(frozen=True)
class Choice:
    """One setting."""

    name: str
    value: str
    default: str
    """What it is when nobody says anything; empty if only the recipe knows."""
    source: str
    doc: str


def choices(
    config: Mapping[str, Any], sources: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[list[Choice], list[Choice], list[Choice]]:
    """Settings that differ from their defaults (as `--help` shows them), the recipe's own, and all others."""
    known = {field.name: field for field in fields_of(Settings)}
    changed, own, others = [], [], []
    for name, value in list(config.items())[:1000]:
        source = sources.get(name)
        # "run" in a run.json of an earlier version: an earlier start knew it.
        words = {
            "flag": "flag",
            "file": "file",
            "recipe": "recipe",
            "run": "an earlier start",
            "length": "the run's length",
        }
        words_of_source = words.get(source, "") if isinstance(source, str) else ""
        field = known.get(name)
        default = shown(defaults[name]) if name in defaults else "" if field is None else shown(field.default)
        choice = Choice(shorten(str(name), 80), shown(value), default, words_of_source, field.doc if field else "")
        if choice.value != default and (field is not None or name in defaults):
            changed.append(choice)
        elif field is None:
            own.append(choice)
        else:
            others.append(choice)
    return changed, own, others


def shown(value: Any) -> str:
    """A value as it would be typed."""
    if isinstance(value, str):
        return shorten(value)
    if value is None:
        return "none"
    try:
        return shorten(json.dumps(value, default=str, ensure_ascii=False))
    except (ValueError, RecursionError):
        return shorten(str(value))
