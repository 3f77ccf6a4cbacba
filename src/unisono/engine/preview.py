"""What a recipe's preview() draws: shared over the ranks, and written once.

Somebody wants to look, and that must not end a run. A preview that does not fit into memory is left out: ranks tell
each other of it wherever they meet, and none of them waits for a result that will not come. Under a sharded strategy a
rank that fails leaves the others inside a forward pass; then the next attempt knows that previews do not fit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from unisono.cluster.agree import Agreement
from unisono.engine.memory import in_one_line, is_out_of_memory
from unisono.errors import RecipeError, TryAgain
from unisono.parallel.strategy import Placement

TOO_LARGE = "previews_left_out.json"
"""The file in a run's folder that says that its previews do not fit; without it they are tried again."""


class LeftOut(Exception):
    """Some rank ran out of memory, and all know it."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(why)
        self.rank = rank


class Drawing:
    """One preview, drawn by all ranks together or by none."""

    def __init__(self, place: Placement, together: bool, agreement: Agreement, run_folder: Path) -> None:
        """`together`: a forward pass needs all ranks (of a sharded model)."""
        self._place, self._together = place, together
        self._agreement, self._run_folder = agreement, run_folder

    def run(self, preview: Callable[[], Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
        """What `preview` returns; LeftOut on every rank if any of them ran out of memory."""
        if self._together and (before := self._agreement.main_says(_known(self._run_folder))) is not None:
            raise LeftOut(*before)
        found: Mapping[str, Any] | None
        found, failure = self._unless_out_of_memory(preview)
        self._meet(failure, None)
        return found

    def each_once(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """[function(item) for item in items], each computed on one rank; all ranks get all results.

        Where a forward pass needs all ranks, each makes the same number of calls: some repeat one for nothing.
        """
        rank, world = self._place.rank, self._place.world
        mine = range(rank, len(items), world)

        def compute() -> dict[int, Any]:
            results = {number: function(items[number]) for number in mine}
            if self._together and len(items) % world and len(mine) <= len(items) // world:
                function(items[0])
            return results

        results, failure = self._unless_out_of_memory(compute)
        gathered = self._meet(failure, results)
        return [gathered[number % world][number] for number in range(len(items))]

    def _unless_out_of_memory(self, compute: Callable[[], Any]) -> tuple[Any, str | None]:
        """What it computes, or what the allocator said."""
        try:
            return compute(), None
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = in_one_line(error)
        # Out here, where the frames that held the tensors are gone.
        if self._place.device.type == "cuda":
            torch.cuda.empty_cache()
        if self._together:
            _note(self._run_folder, self._place.rank, failure)
            raise TryAgain(f"out of memory in a preview: {failure}; from now on without previews")
        return None, failure

    def _meet(self, failure: str | None, results: Any) -> list[Any]:
        """The results of all ranks. A rank that failed is here too, at whichever of the meetings comes first."""
        said = self._agreement.agree_all((failure, results))
        for rank, (why, _) in enumerate(said):
            if why is not None:
                raise LeftOut(rank, why)
        return [theirs for _, theirs in said]


def _known(run_folder: Path) -> tuple[int, str] | None:
    """On which rank previews of this run do not fit and why, if an attempt before has found that out."""
    file = run_folder / TOO_LARGE
    try:
        told = json.loads(file.read_bytes())
        return int(told["rank"]), f"{told['why']}; to try again, remove {file}"
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _note(run_folder: Path, rank: int, why: str) -> None:
    run_folder.mkdir(parents=True, exist_ok=True)
    draft = run_folder / f".{TOO_LARGE}.{rank}"
    draft.write_text(json.dumps({"rank": rank, "why": why}))
    draft.replace(run_folder / TOO_LARGE)


def write_previews(found: Mapping[str, Any], folder: Path, step: int) -> Iterator[Path]:
    """Writes each entry to folder/step_<step>_<name>: text, bytes, PIL images and matplotlib figures."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in found.items():
        if Path(name).name != name or name.startswith("."):
            raise RecipeError(f"preview(): {name!r} is not a plain file name")
        path = folder / f"step_{step:08d}_{name}"
        try:
            _write(path, name, value)
        except OSError:
            with suppress(OSError):
                path.unlink()  # half a picture helps nobody
            raise
        yield path


def _write(path: Path, name: str, value: Any) -> None:
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
