"""Groups the settings of a run for the report: changed ones, the recipe's own, and those at their defaults."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from unisono.config import fields_of
from unisono.formatting import shorten
from unisono.settings import Settings

_MAX_SETTINGS = 1000
_SOURCES = {
    "flag": "flag",
    "file": "file",
    "recipe": "recipe",
    "run": "an earlier start",  # in a run.json of an earlier version
    "length": "the run's length",
}


@dataclasses.dataclass(frozen=True)
class SettingRow:
    """A setting as a row of a table."""

    name: str
    value: str
    default: str
    """Empty if the default is unknown, because the recipe defines the setting."""
    source: str
    doc: str


def settings_rows(
    config: Mapping[str, Any], sources: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[list[SettingRow], list[SettingRow], list[SettingRow]]:
    """Returns the settings that differ from their defaults, the recipe's own, and all others."""
    fields = {field.name: field for field in fields_of(Settings)}
    changed: list[SettingRow] = []
    own: list[SettingRow] = []
    unchanged: list[SettingRow] = []
    for name, value in list(config.items())[:_MAX_SETTINGS]:
        field = fields.get(name)
        default = shown(defaults[name]) if name in defaults else "" if field is None else shown(field.default)
        is_changed = shown(value) != default and (field is not None or name in defaults)
        source = _SOURCES.get(str(sources.get(name)), "unisono" if is_changed and name in sources else "")
        row = SettingRow(shorten(str(name), 80), shown(value), default, source, field.doc if field else "")
        (changed if is_changed else own if field is None else unchanged).append(row)
    return changed, own, unchanged


def shown(value: Any) -> str:
    """Formats a value as a user would type it, in limited length."""
    if isinstance(value, str):
        return shorten(value)
    if value is None:
        return "none"
    try:
        return shorten(json.dumps(value, default=str, ensure_ascii=False))
    except (ValueError, RecursionError):
        return shorten(str(value))
