"""Writes the run folder: run.json (settings and starts), metrics.jsonl (logged steps) and events.jsonl (events).

The folder is created only after the first step, which shows that the recipe works. Until then all records wait in
memory, so that a user error leaves no files. run.json is replaced atomically. Every record of the other two files is a
line that is appended in a single write, so the launcher and rank 0 can both append, and a kill damages at most the last
line.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

from unisono.atomic_files import write_atomically
from unisono.errors import UserError
from unisono.observe.append_only_file import AppendOnlyFile
from unisono.observe.json_lines import parse_record
from unisono.observe.lock import FolderLock
from unisono.plain_files import open_regular, parse_json, read_json

log = logging.getLogger(__name__)

RUN, METRICS, EVENTS = "run.json", "metrics.jsonl", "events.jsonl"


def check_writable(path: str | Path) -> None:
    """Raises UserError if a run folder cannot be created or written at `path`. Leaves no files."""
    target = Path(os.path.abspath(path))
    try:
        str(target).encode()
    except UnicodeEncodeError:
        raise UserError(f"output_dir {path!r} is not UTF-8; choose another --output_dir") from None
    nearest = next(folder for folder in (target, *target.parents) if os.path.lexists(folder))
    if not nearest.is_dir():
        raise UserError(f"output_dir {path}: {nearest} is not a folder; choose another --output_dir")
    probe: str | None = None
    subject = f"output_dir {path}"
    try:
        # Try to write, because os.access returns True for root, on a read-only mount and on a full disk.
        probe = tempfile.mkdtemp(prefix=".unisono-", dir=nearest)
        inside = Path(probe, target.relative_to(nearest))
        inside.mkdir(parents=True, exist_ok=True)
        (inside / RUN).write_bytes(b"{}")
        for name in (METRICS, EVENTS):
            if (target / name).exists():
                subject = f"{path}/{name}"
                open_regular(target / name, os.O_WRONLY | os.O_APPEND).close()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{subject} cannot be written ({reason}); choose another --output_dir") from None
    finally:
        if probe is not None:
            shutil.rmtree(probe, ignore_errors=True)


def append_event(
    path: str | Path, kind: str, *, step: int | None = None, rank: int | None = None, **details: Any
) -> None:
    """Appends an event to the run in the folder `path`; does nothing if the folder contains no run."""
    LauncherEvents(path).add(kind, step=step, rank=rank, **details)


class LauncherEvents:
    """Records events from outside the ranks, such as the launcher's. They wait until the folder contains a run.json."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._events = AppendOnlyFile(self._path / EVENTS)
        self._pending: list[str] = []

    def add(self, kind: str, *, step: int | None = None, rank: int | None = None, **details: Any) -> None:
        """Writes an event now, or as soon as possible."""
        self._pending.append(_event_line(kind, step, rank, details))
        self.write()

    def write(self) -> None:
        """Writes the pending events if the folder contains a run.json."""
        if self._pending and (self._path / RUN).exists():
            for line in self._pending:
                self._events.append(line.encode())
            self._pending.clear()
            self._events.release()
        else:
            self._events.write()  # writes events that a full disk has delayed


class RunFolder:
    """The folder of one run. It writes no file before `open`, so ranks that do not call `open` write none."""

    def __init__(self, path: str | Path, lock: FolderLock | None = None) -> None:
        """`lock` is the lock of this folder, if the caller has already acquired it."""
        self.path = Path(path)
        self.is_open = False
        self._files = {name: AppendOnlyFile(self.path / name) for name in (METRICS, EVENTS)}
        # Bounded, because ranks other than 0 also record events and metrics but never open the folder.
        self._pending: deque[tuple[str, str]] = deque(maxlen=1000)
        self._starts: list[dict[str, Any]] = []
        self._record: Mapping[str, Any] = {}  # the content of run.json
        self._rewind_to: tuple[int, bool] | None = None
        self._lock = lock or FolderLock(self.path)

    @staticmethod
    def read(path: str | Path) -> dict[str, Any] | None:
        """Returns the content of run.json in the folder `path`; None if it contains no run."""
        file = Path(path, RUN)
        try:
            record = read_json(file)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise UserError(f"{file} cannot be read ({error.strerror}); choose another --output_dir") from None
        except ValueError as error:
            _refuse(file, str(error))
        if not isinstance(record, dict) or not isinstance(record.get("recipe"), str):
            _refuse(file, "it does not describe a run")
        starts = record.get("starts", [])
        if not isinstance(starts, list) or not all(isinstance(start, dict) for start in starts):
            _refuse(file, "it does not describe a run")
        return record

    def open(self, record: Mapping[str, Any]) -> None:
        """Creates the folder, writes `record` to run.json, and then writes everything recorded so far.

        If the folder already contains this run, the fields `created` and `starts` of its run.json are preserved.
        """
        if self.is_open:
            raise RuntimeError(f"the run folder {self.path} is already open")
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock.take()
        before = self.read(self.path) or {}
        if before.get("id", record.get("id")) != record.get("id"):
            raise UserError(f"another run was started in {self.path} meanwhile; choose another output_dir")
        starts = [*before.get("starts", []), *self._starts]
        self._write_run_json({**before, **record, "created": before.get("created", _now()), "starts": starts})
        self.is_open = True
        if self._rewind_to is not None:
            self.rewind_metrics(self._rewind_to[0], evaluated=self._rewind_to[1])
        for name, line in self._pending:
            self._files[name].append(line.encode())
        self._pending.clear()
        self._starts.clear()

    def add_start(
        self, *, world: int, strategy: str, launcher: str, why: str, from_step: int, resume: str = "auto"
    ) -> None:
        """Adds this start to the list of starts in run.json; `why` is the reason for the start."""
        start = {
            "time": _now(),
            "world": world,
            "strategy": strategy,
            "launcher": launcher,
            "why": why,
            "from_step": from_step,
            "resume": resume,
        }
        if not self.is_open:
            self._starts.append(start)
            return
        record = self.read(self.path) or {}
        self._write_run_json({**record, "starts": [*record.get("starts", []), start]})

    def event(self, kind: str, *, step: int | None = None, rank: int | None = None, **details: Any) -> None:
        """Appends an event (start, save, oom, …) to events.jsonl."""
        self._restore_run_json()
        self._append(EVENTS, _event_line(kind, step, rank, details))

    def metrics(self, record: Mapping[str, Any]) -> None:
        """Appends the metrics of a step to metrics.jsonl; nan and inf become the strings "nan", "inf" and "-inf"."""
        self._append(METRICS, _to_json(record))

    def rewind_metrics(self, step: int, *, evaluated: bool = True) -> None:
        """Removes the steps after `step` from metrics.jsonl on resume, so that the file contains each step once.

        Pass `evaluated=False` if `step` itself will be evaluated, or evaluated again, after the resume.
        """
        if not self.is_open:
            self._rewind_to = step, evaluated
            return
        self._files[METRICS].drop_pending(lambda line: _is_kept(line, step, evaluated))
        file = self.path / METRICS
        if file.exists():
            _keep_lines(file, lambda line: _is_kept(line, step, evaluated))

    def evaluations(self, step: int, *, evaluated: bool = True) -> list[dict[str, Any]]:
        """Returns the evaluations in metrics.jsonl up to `step`. `evaluated` means the same as in `rewind_metrics`."""
        file = self.path / METRICS
        if not file.exists():
            return []
        with BufferedReader(open_regular(file)) as lines:
            kept = (line for line in lines if b'"eval/' in line and _is_kept(line, step, evaluated))
            return [{name: _number(value) for name, value in parse_json(line).items()} for line in kept]

    def close(self) -> None:
        """Closes the files and releases the lock. A later record reopens its file."""
        for file in self._files.values():
            file.close()
        self._lock.release()

    def _append(self, name: str, line: str) -> None:
        if self.is_open:
            self._files[name].append(line.encode())
        else:
            self._pending.append((name, line))

    def _write_run_json(self, record: Mapping[str, Any]) -> None:
        text = _to_json(record, indent=2, other=str)
        _replace(self.path / RUN, [text.encode()])
        self._record = record

    def _restore_run_json(self) -> None:
        """Writes run.json again if it was deleted. (If the whole folder was deleted, the next save recreates it.)"""
        if self.is_open and self.path.is_dir() and not os.path.lexists(self.path / RUN):
            log.warning("%s was deleted during the run; it is written again", self.path / RUN)
            with suppress(UserError):  # for instance because the disk is full; the next event tries again
                self._write_run_json(self._record)


def _is_kept(line: bytes, step: int, evaluated: bool) -> bool:
    # A kill or a crash of the machine leaves incomplete lines or blocks of zeros, which are dropped.
    record = parse_record(line) if line.endswith(b"\n") else None
    if record is None:
        return False
    at = record.get("step")
    if at == step and not evaluated and any(name.startswith("eval/") for name in record):
        return False
    return not isinstance(at, int) or at <= step


def _keep_lines(file: Path, is_kept: Callable[[bytes], bool]) -> None:
    """Removes the lines for which `is_kept` is False. If these are all at the end, it only truncates the file."""
    position, cut = 0, None
    with BufferedReader(open_regular(file)) as lines:
        for line in lines:
            if cut is None and not is_kept(line):
                cut = position
            elif cut is not None and is_kept(line):
                lines.seek(0)
                _replace(file, filter(is_kept, lines))
                return
            position += len(line)
    if cut is None:
        return
    try:
        with open_regular(file, os.O_RDWR) as shortened:
            shortened.truncate(cut)
            os.fsync(shortened.fileno())
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror}); choose another --output_dir") from None


def _replace(file: Path, chunks: Iterable[bytes]) -> None:
    """Replaces `file` atomically."""
    try:
        write_atomically(file, chunks, durable=True, one_writer=True)
    except OSError as error:
        raise UserError(
            f"{file} cannot be written ({error.strerror}); free some space, or choose another --output_dir"
        ) from None


def _refuse(file: Path, reason: str) -> NoReturn:
    raise UserError(f"{file} is damaged ({reason}); restore it or choose another --output_dir")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _event_line(kind: str, step: int | None, rank: int | None, details: Mapping[str, Any]) -> str:
    return _to_json({"time": _now(), "kind": kind, "step": step, "rank": rank, **details}, other=str)


def _to_json(record: Mapping[str, Any], *, indent: int | None = None, other: Callable[[Any], str] | None = None) -> str:
    """Returns strict JSON; `other` converts values that JSON does not support, which otherwise raise TypeError."""
    return json.dumps(_finite(record), allow_nan=False, indent=indent, default=other)


def _number(value: Any) -> Any:
    """Converts "nan", "inf" and "-inf" back to numbers, also inside a list."""
    if isinstance(value, list):
        return [_number(item) for item in value]
    return float(value) if value in ("nan", "inf", "-inf") else value


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
