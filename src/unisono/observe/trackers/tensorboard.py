"""Writes TensorBoard files to tb/ in the run folder, in the training process (microseconds per logged step)."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from unisono.errors import UserError
from unisono.observe.append_only_file import AppendOnlyFile
from unisono.observe.folder import EVENTS, RUN
from unisono.observe.json_lines import JsonLines
from unisono.observe.redaction import redacted
from unisono.observe.trackers.named import wants_tensorboard
from unisono.plain_files import read_json
from unisono.settings import ObserveSettings

log = logging.getLogger(__name__)
_NUMBERS = count()  # numbers in file names that distinguish the files of one process
_MOST_EVENTS = 1000
_LARGEST = 4 * 2**20  # largest image or text, in bytes


class TensorBoardTracker:
    """Writes TensorBoard files to `folder`; needs the package tensorboard.

    It does not use torch's SummaryWriter, whose thread dies on a full disk, after which all of its methods raise.
    """

    def __init__(self, folder: str | Path, step: int = 0) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        self._event, self._summary = Event, Summary
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        self._file = AppendOnlyFile(Path(folder, name), lines=False)
        self._records = RecordWriter(SimpleNamespace(write=self._file.append))  # one record per write
        self._add(file_version="brain.Event:2")
        if step:
            # A run that was killed after its last checkpoint repeats some steps. This event makes TensorBoard ignore
            # these steps in earlier files, so that a curve contains each step once.
            self._add(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Records every number among `values` at `step`."""
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float) and name != "step"}
        # Write a single event, because an event per number would take milliseconds at every logged step.
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._add(step=step, summary=self._summary(value=scalars))

    def show(self, step: int, path: Path) -> None:
        """Records a preview under its name. TensorBoard shows its versions with a slider over the steps."""
        tag = f"previews/{path.stem.removeprefix(f'step_{step:08d}_')}"
        try:
            if path.stat().st_size > _LARGEST:
                return
            content = path.read_bytes()
        except OSError:  # a missing preview must not end the run
            return
        if size := image_size(content):
            image = self._summary.Image(width=size[0], height=size[1], encoded_image_string=content)
            self._add(step=step, summary=self._summary(value=[self._summary.Value(tag=tag, image=image)]))
        elif path.suffix == ".txt":
            self._add(step=step, summary=_as_text(tag, content))

    def show_settings(self, folder: str | Path, step: int) -> None:
        """Records the settings in run.json as a text."""
        try:
            config = read_json(Path(folder, RUN))["config"]
            lines = [f"{name}: {value}" for name, value in sorted(redacted(config).items())]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # a missing text must not end the run
            return
        self._add(step=step, summary=_as_text("settings", "\n".join(lines).encode()))

    def show_events(self, folder: str | Path, step: int) -> None:
        """Records the last events of the run as a text."""
        lines: deque[str] = deque(maxlen=_MOST_EVENTS)
        try:
            for event in JsonLines(Path(folder, EVENTS)):
                lines.append(json.dumps(event))
        except UserError:
            return
        self._add(step=step, summary=_as_text("events", "\n".join(lines).encode()))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _add(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())


def image_size(content: bytes) -> tuple[int, int] | None:
    """Returns the width and height of a PNG or GIF; None for other formats, which are not sent to TensorBoard."""
    if content.startswith(b"\x89PNG\r\n\x1a\n") and len(content) >= 24:
        return int.from_bytes(content[16:20]), int.from_bytes(content[20:24])
    if content[:6] in (b"GIF87a", b"GIF89a") and len(content) >= 10:
        return int.from_bytes(content[6:8], "little"), int.from_bytes(content[8:10], "little")
    return None


def _as_text(tag: str, content: bytes) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto  # type: ignore[import-untyped]

    # TensorBoard renders Markdown, in which an indent of four spaces preserves lines and columns.
    lines = content.decode("utf-8", errors="replace").splitlines()
    text = TensorProto(dtype="DT_STRING", string_val=["\n".join(f"    {line}" for line in lines).encode()])
    plugin = SummaryMetadata.PluginData(plugin_name="text")
    return Summary(value=[Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin), tensor=text)])


def open_tensorboard(settings: ObserveSettings, folder: str | Path, step: int) -> TensorBoardTracker | None:
    """Opens TensorBoard's files for the run in `folder` that continues from `step` (0: a new run), if it is enabled.

    The run folder must exist, because the settings are written immediately.
    """
    if not (settings.tensorboard or wants_tensorboard(settings.track)):
        return None
    try:
        tracker = TensorBoardTracker(Path(folder, "tb"), step)
    except ImportError:
        log.warning("TensorBoard is not installed, so tb/ stays empty; run pip install tensorboard")
        return None
    tracker.show_settings(folder, step)
    return tracker
