"""Trackers: where the numbers of a run also go, for people who look at curves elsewhere."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from unisono.observe.append import AppendedFile
from unisono.settings import ObserveSettings

log = logging.getLogger(__name__)
_NUMBERS = count()  # tells the files of one process apart
_LARGEST = 4 * 2**20  # bytes of a picture or text


class Tracker(Protocol):
    """Something that takes the numbers of a step."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Takes the numbers of `step`."""
        ...

    def show(self, step: int, path: Path) -> None:
        """Takes a preview of `step`: a picture or a text; other kinds of files are passed over."""
        ...

    def close(self) -> None:
        """Closes its files."""
        ...


class TensorBoardTracker:
    """Writes the numbers to TensorBoard files in `folder`; needs the package tensorboard.

    Not by torch's SummaryWriter: its thread dies on a full disk, and from then on each of its methods raises.
    """

    def __init__(self, folder: str | Path, step: int = 0) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        self._event, self._summary = Event, Summary
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        self._file = AppendedFile(Path(folder, name), lines=False)
        self._records = RecordWriter(_Appending(self._file))
        self._add(file_version="brain.Event:2")
        if step:
            # A run that was killed after its last checkpoint does some steps twice. Everything from here on in
            # earlier files is then hidden, so that a curve has each step once and does not run back.
            self._add(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Draws every number among `values` at `step`."""
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float) and name != "step"}
        # One event: an event for each number would cost milliseconds at every logged step.
        several = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._add(step=step, summary=self._summary(value=several))

    def show(self, step: int, path: Path) -> None:
        """Shows a preview under its own name, with a slider over the steps."""
        tag = f"previews/{path.stem.removeprefix(f'step_{step:08d}_')}"
        try:
            if path.stat().st_size > _LARGEST:
                return
            content = path.read_bytes()
        except OSError:  # it is looked at by the way: nothing ends because of it
            return
        if size := picture_size(content):
            image = self._summary.Image(width=size[0], height=size[1], encoded_image_string=content)
            self._add(step=step, summary=self._summary(value=[self._summary.Value(tag=tag, image=image)]))
        elif path.suffix == ".txt":
            self._add(step=step, summary=_as_text(tag, content))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _add(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())


def picture_size(content: bytes) -> tuple[int, int] | None:
    """Width and height of a PNG or GIF; None for anything else. (TensorBoard must be told, browsers show both.)"""
    if content.startswith(b"\x89PNG\r\n\x1a\n") and len(content) >= 24:
        return int.from_bytes(content[16:20]), int.from_bytes(content[20:24])
    if content[:6] in (b"GIF87a", b"GIF89a") and len(content) >= 10:
        return int.from_bytes(content[6:8], "little"), int.from_bytes(content[8:10], "little")
    return None


def _as_text(tag: str, content: bytes) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto  # type: ignore[import-untyped]

    # Markdown: four spaces keep lines and columns as they are.
    lines = content.decode("utf-8", errors="replace").splitlines()
    text = TensorProto(dtype="DT_STRING", string_val=["\n".join(f"    {line}" for line in lines).encode()])
    plugin = SummaryMetadata.PluginData(plugin_name="text")
    return Summary(value=[Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin), tensor=text)])


class _Appending:
    """What tensorboard's RecordWriter writes to: it gets one record at a time, whole."""

    def __init__(self, file: AppendedFile) -> None:
        self.write = file.append


def ends_of(metrics: Mapping[str, float | list[float]]) -> dict[str, float]:
    """The curves of an evaluation in three numbers each, whatever their length: eval/loss_by_level/first, mean, last.

    A chart for each point would bury all others; the curve itself is on the report page and in previews.
    """
    scalars: dict[str, float] = {}
    for name, curve in metrics.items():
        if isinstance(curve, list) and curve:
            ends = {"first": curve[0], "mean": sum(curve) / len(curve), "last": curve[-1]}
            scalars |= {f"{name}/{which}": value for which, value in ends.items()}
    return scalars


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
