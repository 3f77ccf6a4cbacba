"""What a recipe's preview() draws: shared over the ranks, and written once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from unisono.errors import RecipeError
from unisono.parallel.strategy import Placement


def each_once(place: Placement, together: bool, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """[function(item) for item in items], each computed on one rank; all ranks get all results.

    `together`: every rank must make the same number of calls (of a sharded model), so some repeat one for nothing.
    """
    mine = range(place.rank, len(items), place.world)
    results = {number: function(items[number]) for number in mine}
    if together and len(items) % place.world and len(mine) <= len(items) // place.world:
        function(items[0])
    if place.world == 1:
        return [results[number] for number in range(len(items))]
    gathered: list[dict[int, Any]] = [{} for _ in range(place.world)]
    dist.all_gather_object(gathered, results)  # between our own ranks
    return [gathered[number % place.world][number] for number in range(len(items))]


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
