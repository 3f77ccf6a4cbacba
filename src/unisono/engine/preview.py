"""Writes what a recipe's preview() returned."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.errors import RecipeError


def write_previews(found: Mapping[str, Any], folder: Path, step: int) -> list[Path]:
    """Writes each entry to folder/step_<step>_<name>: text, bytes, PIL images and matplotlib figures."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, value in found.items():
        if Path(name).name != name or name.startswith("."):
            raise RecipeError(f"preview(): {name!r} is not a plain file name")
        path = folder / f"step_{step:08d}_{name}"
        if isinstance(value, str):
            path.write_text(value)
        elif isinstance(value, bytes):
            path.write_bytes(value)
        elif hasattr(value, "savefig"):
            value.savefig(path)
        elif hasattr(value, "save"):
            value.save(path)
        else:
            raise RecipeError(f"preview(): {name} is {type(value).__name__}; return text, bytes, an image or a figure")
        written.append(path)
    return written
