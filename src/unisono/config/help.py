"""Formats the part of `--help` that lists all fields, by group, with type, default and documentation."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

from unisono.config.fields import Field
from unisono.config.resolve import with_recipe_defaults
from unisono.config.values import choices_of, jsonable, members

_TYPE_NAMES = {int: "int", float: "float", str: "text", bool: "true|false", Path: "path", NoneType: "none"}


def help_text(
    classes: Sequence[type], recipe_defaults: Mapping[str, Any], aliases: Mapping[str, str] | None = None
) -> str:
    """Returns the list of all fields and their aliases, wrapped to the width of the terminal (at most 120)."""
    import shutil

    width = min(shutil.get_terminal_size().columns, 120)
    resolved = with_recipe_defaults(classes, recipe_defaults)
    other_names: dict[str, list[str]] = {}
    for alias, name in (aliases or {}).items():
        other_names.setdefault(name, []).append(f"--{alias}")
    groups: dict[str, list[str]] = {}
    for name, field in resolved.fields.items():
        default = default_text(resolved.values[name]) if name in resolved.values else None
        note = f"default: {default}" if default is not None else "required"
        note += ", set by the recipe" if resolved.sources.get(name) == "recipe" else ""
        note += f"; also {', '.join(other_names[name])}" if name in other_names else ""
        lines = textwrap.wrap(f"{flag_text(field)}  ({note})", width, initial_indent="  ", subsequent_indent="      ")
        indent = " " * 6
        lines += textwrap.wrap(" ".join(field.doc.split()), width, initial_indent=indent, subsequent_indent=indent)
        groups.setdefault(field.group, []).extend(lines)
    return "\n\n".join("\n".join([f"{title}:", *lines]) for title, lines in groups.items()) + "\n"


def flag_text(field: Field) -> str:
    """Returns a flag and the type of its value, as in `--batch_size int`."""
    if field.annotation is bool and field.name.startswith("no_"):
        return f"--{field.name} [true|false]"
    if field.annotation is bool:
        return f"--[no_]{field.name}"
    if bool in (kinds := members(field.annotation)):
        others = "|".join(_type(kind) for kind in kinds if kind not in (bool, NoneType))
        return f"--[no_]{field.name} [{others}]"
    return f"--{field.name} {_type(field.annotation)}"


def _type(annotation: Any) -> str:
    kinds = members(annotation)
    if len(kinds) > 1:
        return "|".join(_type(kind) for kind in sorted(kinds, key=lambda kind: kind is NoneType))
    kind, args = get_origin(annotation) or annotation, get_args(annotation)
    if choices := choices_of(annotation):
        return "|".join(choices)
    if kind is tuple and args and args[-1] is not Ellipsis:
        return " ".join(_type(arg) for arg in args)
    if kind in (list, tuple):
        return f"{_type(args[0])} ..." if args else "text ..."
    return "(a mapping; config file only)" if kind is dict else _TYPE_NAMES.get(kind, "value")


def default_text(value: Any) -> str:
    """Returns a default as users would type it."""
    value = jsonable(value)
    if isinstance(value, str):
        return value or '""'
    if isinstance(value, list):
        return ",".join(default_text(item) for item in value) or "empty"
    if isinstance(value, dict):
        return json.dumps(value) if value else "empty"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
