"""The settings of a run, those that somebody chose before those that nobody touched."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from unisono.config import fields_of
from unisono.observe.report.words import clipped
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


def choices(config: Mapping[str, Any], sources: Mapping[str, Any]) -> tuple[list[Choice], list[Choice], list[Choice]]:
    """Settings that differ from their defaults, the recipe's own, and all others."""
    known = {field.name: field for field in fields_of(Settings)}
    changed, own, others = [], [], []
    for name, value in list(config.items())[:1000]:
        source = sources.get(name)
        # A run that goes on says "run" of what the start before it was told.
        told = {"flag": "flag", "file": "file", "recipe": "recipe"}.get(source, "") if isinstance(source, str) else ""
        field = known.get(name)
        default = "" if field is None else shown(field.default)
        choice = Choice(clipped(str(name), 80), shown(value), default, told, field.doc if field else "")
        if field is None:
            own.append(choice)
        elif choice.value != default:
            changed.append(choice)
        else:
            others.append(choice)
    return changed, own, others


def shown(value: Any) -> str:
    """A value as it would be typed."""
    if isinstance(value, str):
        return clipped(value)
    if value is None:
        return "none"
    try:
        return clipped(json.dumps(value, default=str, ensure_ascii=False))
    except (ValueError, RecursionError):
        return clipped(str(value))
