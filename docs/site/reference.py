"""Generates the reference pages: every command and setting, and the public Python names."""

from __future__ import annotations

import contextlib
import io
import os
import textwrap
from collections.abc import Sequence
from importlib import import_module

from unisono.cli.main import COMMANDS, main
from unisono.config.fields import Field, fields_of
from unisono.config.help import default_text, flag_text
from unisono.config.resolve import with_recipe_defaults
from unisono.engine.recipe import Recipe
from unisono.engine.start.registry import BUILT_IN, load_recipe
from unisono.settings import Settings


def pages() -> dict[str, str]:
    """Address -> Markdown of each page."""
    recipes = {name: load_recipe(name) for name in BUILT_IN}
    return {
        "reference/index.md": _commands(),
        "reference/train.md": _train(),
        **{f"reference/{name}.md": _recipe(name, recipe) for name, recipe in recipes.items()},
        "reference/python.md": _python(),
    }


def _commands() -> str:
    lines = [
        "# Command line reference",
        "",
        "Hyphens and underscores are interchangeable in flags: `--batch-size` is `--batch_size`.",
        "",
    ]
    for command, purpose in COMMANDS.items():
        lines += [f"## unisono {command}", "", f"{purpose[0].upper()}{purpose[1:]}.", ""]
        if command == "train":
            lines += ["[unisono train](train.md) lists every setting.", ""]
        else:
            lines += ["```text", _help(command), "```", ""]
    return "\n".join(lines)


def _help(command: str) -> str:
    printed, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "80"  # what fits beside the navigation
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([command, "--help"])
    finally:
        os.environ.pop("COLUMNS")
        if columns is not None:
            os.environ["COLUMNS"] = columns
    paragraphs = printed.getvalue().rstrip().split("\n\n")
    return "\n\n".join(text if "\n " in text else textwrap.fill(text, 80) for text in paragraphs)


def _train() -> str:
    head = (
        "# unisono train\n\n`unisono train RECIPE [--config FILE ...] [--print_config] [flags]`\n\n"
        "Each setting below is a flag and a key of a config file. Flags override files, and files override defaults. "
        "A recipe adds its own settings and may change these "
        f"defaults: {', '.join(f'[{name}]({name}.md)' for name in BUILT_IN)}.\n"
    )
    return head + _sections(fields_of(Settings), {})


def _recipe(name: str, recipe: type[Recipe]) -> str:
    resolved = with_recipe_defaults((Settings, recipe.Config), recipe.defaults)
    own = [field for field in fields_of(recipe.Config) if field.name in resolved.fields]
    other_names: dict[str, list[str]] = {}
    for alias, setting in recipe.aliases.items():
        other_names.setdefault(setting, []).append(alias)
    lines = [
        f"# Settings of {name}",
        "",
        f"Settings of `unisono train {name}`, in addition to [those of every run](train.md).",
        "",
    ]
    if recipe.defaults:
        lines += ["## Other defaults", "", "| setting | default here |", "|---|---|"]
        lines += [f"| `{key}` | `{default_text(value)}` |" for key, value in recipe.defaults.items()] + [""]
    return "\n".join(lines) + _sections(own, other_names)


def _sections(fields: Sequence[Field], other_names: dict[str, list[str]]) -> str:
    lines: list[str] = []
    group = None
    for field in fields:
        if field.group != group:
            group = field.group
            lines += ["", f"## {group}", ""]
        notes = ["required"] if field.required else [f"default `{default_text(field.default)}`"]
        if field.default is None and "efault: " in field.doc:
            notes = []  # the text describes it better than `none`
        if aliases := other_names.get(field.name):
            notes.append("also " + ", ".join(f"`--{alias}`" for alias in aliases))
        text = _prose(field.doc) + (f" ({'; '.join(notes)})" if notes else "")
        lines += [f"#### `{flag_text(field)}` {{ #{field.name} }}", "", text, ""]
    return "\n".join(lines)


def _prose(text: str) -> str:
    """Escapes a docstring for Markdown."""
    return " ".join(text.split()).replace("*", "\\*").replace("<", "&lt;").replace("[", "\\[")


def _python() -> str:
    lines = ["# Python API", "", "## unisono", ""]
    for module in ("unisono", "unisono.ray", "unisono.multi_gpu"):
        if module != "unisono":
            lines += [f"## {module}", ""]
        for name in import_module(module).__all__:
            if not name.startswith("_"):
                target = getattr(import_module(module), name)
                lines += [f"::: {target.__module__}.{target.__qualname__}", ""]
    return "\n".join(lines)
