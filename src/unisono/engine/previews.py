"""Draws a recipe's previews: all ranks share the work, and the main rank writes the files.

A preview must not end a run. If it does not fit into memory, it is skipped: ranks exchange failures together with
results, so no rank waits for a result that never comes. Under a sharded strategy a rank that fails leaves the others
inside a forward pass; the run restarts, and the next attempt skips previews.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unisono.cluster.agree import Agreement
from unisono.data.bits import Purpose, key_of
from unisono.data.seeding import seed_everything
from unisono.engine.step.out_of_memory import in_one_line, is_out_of_memory
from unisono.engine.step.precision import autocast
from unisono.engine.training_run import TrainingRun
from unisono.errors import RecipeError, TryAgain
from unisono.observe.note import leave_note
from unisono.parallel.strategy import Placement
from unisono.plain_files import read_json

if TYPE_CHECKING:  # avoids a circular import
    from unisono.engine.recorder import Recorder

TOO_LARGE = "previews_left_out.json"
"""The file in a run folder that records that previews do not fit into memory. Delete it to draw previews again."""


class PreviewSkipped(Exception):
    """Raised on all ranks if any rank ran out of memory while it drew a preview."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(why)
        self.rank = rank


class Drawing:
    """Draws a preview on all ranks, or on none of them if it does not fit into memory."""

    def __init__(self, placement: Placement, needs_all_ranks: bool, agreement: Agreement, run_folder: Path) -> None:
        """`needs_all_ranks`: whether forward passes wait for other ranks, because the model or a sample is divided."""
        self._placement, self._needs_all_ranks = placement, needs_all_ranks
        self._agreement, self._run_folder = agreement, run_folder

    def run(self, preview: Callable[[], Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
        """Calls `preview` and returns its result; raises PreviewSkipped on all ranks if one ran out of memory."""
        if (
            self._needs_all_ranks
            and (before := self._agreement.broadcast(_earlier_failure(self._run_folder))) is not None
        ):
            raise PreviewSkipped(*before)
        drawn: Mapping[str, Any] | None
        drawn, failure = self._unless_out_of_memory(preview)
        self._gather(failure, None)
        return drawn

    def over_ranks(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """Returns [function(item) for item in items] on all ranks; one rank or context group computes each item.

        If a forward pass needs all ranks, every rank makes the same number of calls; some repeat a call and discard the
        result.
        """
        rank, world = self._placement.data_rank, self._placement.data_world
        mine = range(rank, len(items), world)

        def compute() -> dict[int, Any]:
            results = {number: function(items[number]) for number in mine}
            if self._needs_all_ranks and len(items) % world and len(mine) <= len(items) // world:
                function(items[0])
            return results

        results, failure = self._unless_out_of_memory(compute)
        gathered = self._gather(failure, results)[:: self._placement.context]
        return [gathered[number % world][number] for number in range(len(items))]

    def _unless_out_of_memory(self, compute: Callable[[], Any]) -> tuple[Any, str | None]:
        """Returns the result of `compute`, or the allocator's error message."""
        try:
            return compute(), None
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = in_one_line(error)
        # Empty the cache only here: inside the except block, the exception's frames still hold the tensors.
        if self._placement.device.type == "cuda":
            torch.cuda.empty_cache()
        if self._needs_all_ranks:
            leave_note(self._run_folder / TOO_LARGE, {"rank": self._placement.rank, "why": failure})
            raise TryAgain(f"out of memory in a preview: {failure}; previews are skipped from now on")
        return None, failure

    def _gather(self, failure: str | None, results: Any) -> list[Any]:
        """Gathers the results of all ranks. A rank that failed joins the next gather of the other ranks."""
        answers = self._agreement.all_gather((failure, results))
        for rank, (why, _) in enumerate(answers):
            if why is not None:
                raise PreviewSkipped(rank, why)
        return [result for _, result in answers]


def _earlier_failure(run_folder: Path) -> tuple[int, str] | None:
    """Returns the rank on which previews did not fit in an earlier attempt, and the reason; None if there was none."""
    file = run_folder / TOO_LARGE
    try:
        note = read_json(file)
        return int(note["rank"]), f"{note['why']}; to try again, remove {file}"
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_previews(previews: Mapping[str, Any], folder: Path, step: int) -> Iterator[Path]:
    """Writes each entry (text, bytes, a PIL image or a matplotlib figure) to folder/step_<step>_<name>."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in previews.items():
        if Path(name).name != name or name.startswith("."):
            raise RecipeError(f"preview(): {name!r} is not a plain file name")
        path = folder / f"step_{step:08d}_{name}"
        try:
            path.unlink(missing_ok=True)  # writing to a FIFO of this name would block forever
            _write(path, name, value)
        except OSError:
            with suppress(OSError):
                path.unlink()  # an incomplete file is useless
            raise
        yield path


def _write(path: Path, name: str, value: Any) -> None:
    if isinstance(value, str):
        path.write_text(value, encoding="utf-8", errors="backslashreplace")  # text may contain lone surrogates
    elif isinstance(value, bytes):
        path.write_bytes(value)
    elif hasattr(value, "savefig"):
        value.savefig(path)
    elif hasattr(value, "save"):
        value.save(path)
    else:
        raise RecipeError(f"preview(): {name} is {type(value).__name__}; return text, bytes, an image or a figure")


def draw_preview(run: TrainingRun, step: int, recorder: Recorder) -> None:
    """Draws the preview of step `step` on all ranks; skips it if it does not fit into memory."""
    recipe, strategy, settings, folder = run.components.recipe, run.components.strategy, run.settings, run.folder
    # Use the same seed on all ranks: with a sharded model, all ranks must make the same number of forward passes.
    seed_everything(key_of(Purpose.PREVIEW, settings.run.seed, step), strategy.placement.devices)
    needs_all_ranks = strategy.sharded or strategy.placement.context > 1
    drawing = Drawing(strategy.placement, needs_all_ranks, run.rank.agreement, folder.path)
    recipe._over_ranks = drawing.over_ranks
    drawn: Mapping[str, Any] | None = None
    try:
        # Use autocast as in training: 16-bit weights (frozen or gathered) need 16-bit inputs.
        computing = autocast(strategy.placement.device, settings.precision)
        with recorder.message_if_slow(f"step {step}: drawing a preview"), strategy.evaluating(), computing:
            drawn = drawing.run(lambda: strategy.infer(lambda model: recipe.preview(model, step)))
    except PreviewSkipped as skipped:
        folder.event("preview_left_out", step=step, rank=skipped.rank, error=str(skipped))
        recorder.message(f"step {step}: preview skipped, rank {skipped.rank} ran out of memory: {skipped}")
    strategy.weights_changed()
    if drawn:
        recorder.save_previews(drawn, step)
