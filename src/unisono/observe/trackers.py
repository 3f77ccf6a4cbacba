"""Trackers: where the numbers of a run also go, for people who look at curves elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from unisono.settings import ObserveSettings

log = logging.getLogger(__name__)
_MOST_POINTS = 16  # of a curve: each is a chart of its own


class Tracker(Protocol):
    """Something that takes the numbers of a step."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Takes the numbers of `step`."""
        ...

    def close(self) -> None:
        """Writes what is still held back."""
        ...


class TensorBoardTracker:
    """Writes the numbers to TensorBoard files in `folder`; needs the package tensorboard."""

    def __init__(self, folder: str | Path, step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A run that was killed after its last checkpoint does some steps twice. Everything from purge_step on in
        # earlier files is then hidden, so that a curve has each step once and does not run back.
        self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None, flush_secs=10)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Draws every number among `values` at `step`."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        numbers = {name: value for name, value in values.items() if isinstance(value, int | float) and name != "step"}
        # What add_scalar writes, but as one event: a call for each number would cost milliseconds at every logged step.
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()])
        self._writer.file_writer.add_summary(summary, step)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Writes what is still held back."""
        self._writer.close()


def points_of(metrics: Mapping[str, float | list[float]]) -> dict[str, float]:
    """The short curves of an evaluation as numbers: eval/loss_by_level/1 and so on."""
    return {
        f"{name}/{number}": value
        for name, curve in metrics.items()
        if isinstance(curve, list) and len(curve) <= _MOST_POINTS
        for number, value in enumerate(curve, 1)
    }


def open_trackers(settings: ObserveSettings, folder: str | Path, step: int) -> list[Tracker]:
    """The trackers that the settings ask for, for the run in `folder` that goes on from `step` (0: a new run).

    They write to the run's folder at once: open that first.
    """
    trackers: list[Tracker] = []
    if settings.tensorboard:
        try:
            trackers.append(TensorBoardTracker(Path(folder, "tb"), step))
        except ImportError:
            log.warning("TensorBoard is not installed: no curves in tb/ (pip install tensorboard brings them)")
    return trackers
