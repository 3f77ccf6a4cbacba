"""A run's folder: what the run is (run.json), what it measured (metrics.jsonl), what happened to it (events.jsonl).

The folder is opened only when the first step has shown that the recipe is sound; until then everything waits in
memory, so that a user's mistake leaves nothing behind. run.json is replaced atomically; the other two grow by whole
lines, one write each, so that the launcher and the main rank may both append and a kill tears the last line at most.
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
from unisono.observe.append import AppendedFile
from unisono.observe.lock import FolderLock
from unisono.plain_files import open_regular, parse_json, read_json

log = logging.getLogger(__name__)

RUN, METRICS, EVENTS = "run.json", "metrics.jsonl", "events.jsonl"


def check_writable(path: str | Path) -> None:
    """Says (UserError) if a run's folder could not be made or written at `path`; leaves nothing behind."""
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
        # Really tried, because os.access says yes to root, to a read-only mount and to a full disk.
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
    """Adds one event to the run in the folder `path`; does nothing if there is no run in it (yet)."""
    # run.json, not the folder, tells that there is a run: a user's own empty folder stays empty until then.
    NotesFromOutside(path).add(kind, step=step, rank=rank, **details)


class NotesFromOutside:
    """Events of somebody who looks on (the launcher); they wait until there is a run in the folder."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._events = AppendedFile(self._path / EVENTS)
        self._waiting: list[str] = []

    def add(self, kind: str, *, step: int | None = None, rank: int | None = None, **details: Any) -> None:
        """Notes an event now, or when it can be written."""
        self._waiting.append(_event_line(kind, step, rank, details))
        self.write()

    def write(self) -> None:
        """Writes what waits, if there is a run by now."""
        if self._waiting and (self._path / RUN).exists():
            for line in self._waiting:
                self._events.append(line.encode())
            self._waiting.clear()
            self._events.release()
        else:
            self._events.write()  # what a full disk made wait


class RunFolder:
    """The folder of one run. Until `open`, and for ever on ranks that never open it, it touches no file."""

    def __init__(self, path: str | Path, lock: FolderLock | None = None) -> None:
        """`lock`: of this folder, if it is held already."""
        self.path = Path(path)
        self.is_open = False
        self._files = {name: AppendedFile(self.path / name) for name in (METRICS, EVENTS)}
        # Bounded, because ranks other than the main one note things too and never open the folder.
        self._waiting: deque[tuple[str, str]] = deque(maxlen=1000)
        self._starts: list[dict[str, Any]] = []
        self._written: Mapping[str, Any] = {}  # run.json as this run has written it
        self._rewind_to: tuple[int, bool] | None = None
        self._lock = lock or FolderLock(self.path)

    @staticmethod
    def read(path: str | Path) -> dict[str, Any] | None:
        """What run.json in the folder `path` says; None if there is no run in it."""
        file = Path(path, RUN)
        try:
            record = read_json(file)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise UserError(f"{file} cannot be read ({error.strerror}); choose another --output_dir") from None
        except ValueError as error:
            _refuse(file, str(error))
        told = record if isinstance(record, dict) else {}
        starts = told.get("starts", [])
        is_run = isinstance(told.get("recipe"), str) and isinstance(starts, list)
        if not is_run or not all(isinstance(start, dict) for start in starts):
            _refuse(file, "it does not describe a run")
        return dict(told)

    def open(self, record: Mapping[str, Any]) -> None:
        """Makes the folder, writes run.json from `record` and then everything noted so far.

        In the folder of an earlier start, `created` and the history of `starts` are kept.
        """
        if self.is_open:
            raise RuntimeError(f"the run folder {self.path} is already open")
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock.take()
        before = self.read(self.path) or {}
        if before.get("id", record.get("id")) != record.get("id"):
            raise UserError(f"another run was made in {self.path} meanwhile; choose another output_dir")
        starts = [*before.get("starts", []), *self._starts]
        self._write_run({**before, **record, "created": before.get("created", _now()), "starts": starts})
        self.is_open = True
        if self._rewind_to is not None:
            self.rewind_metrics(self._rewind_to[0], evaluated=self._rewind_to[1])
        for name, line in self._waiting:
            self._files[name].append(line.encode())
        self._waiting.clear()
        self._starts.clear()

    def add_start(
        self, *, world: int, strategy: str, launcher: str, why: str, from_step: int, resume: str = "auto"
    ) -> None:
        """Adds this start to the run's history: how many ranks, how they were started, why, and from which step."""
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
        self._write_run({**record, "starts": [*record.get("starts", []), start]})

    def event(self, kind: str, *, step: int | None = None, rank: int | None = None, **details: Any) -> None:
        """Notes in events.jsonl that something happened (start, save, oom, …)."""
        self._restore_run()
        self._note(EVENTS, _event_line(kind, step, rank, details))

    def metrics(self, record: Mapping[str, Any]) -> None:
        """Notes the numbers of a step in metrics.jsonl; nan and inf become the strings "nan", "inf" and "-inf"."""
        self._note(METRICS, _to_json(record))

    def rewind_metrics(self, step: int, *, evaluated: bool = True) -> None:
        """On resume from `step`: drops what metrics.jsonl says of later steps, so that each step stands there once.

        Not `evaluated`: the evaluation of this step is still to come, or to be done again.
        """
        if not self.is_open:
            self._rewind_to = step, evaluated
            return
        self._files[METRICS].drop_waiting(lambda line: _is_upto(line, step, evaluated))
        file = self.path / METRICS
        if file.exists():
            _keep_lines(file, lambda line: _is_upto(line, step, evaluated))

    def evaluations(self, step: int, *, evaluated: bool = True) -> list[dict[str, Any]]:
        """What metrics.jsonl says of evaluations up to a step; as for `rewind_metrics`."""
        file = self.path / METRICS
        if not file.exists():
            return []
        with BufferedReader(open_regular(file)) as lines:
            kept = (line for line in lines if b'"eval/' in line and _is_upto(line, step, evaluated))
            return [{name: _number(value) for name, value in parse_json(line).items()} for line in kept]

    def close(self) -> None:
        """Closes the files (a later note opens them again) and lets other runs into the folder."""
        for file in self._files.values():
            file.close()
        self._lock.release()

    def _note(self, name: str, line: str) -> None:
        if self.is_open:
            self._files[name].append(line.encode())
        else:
            self._waiting.append((name, line))

    def _write_run(self, record: Mapping[str, Any]) -> None:
        text = _to_json(record, indent=2, other=str)
        _replace(self.path / RUN, [text.encode()])
        self._written = record

    def _restore_run(self) -> None:
        """Writes run.json again if it was deleted, for instance with the whole folder, which a save makes again."""
        if self.is_open and self.path.is_dir() and not os.path.lexists(self.path / RUN):
            log.warning("%s was deleted while the run was writing to its folder; it is written again", self.path / RUN)
            with suppress(UserError):  # a full disk: the next event tries again
                self._write_run(self._written)


def _is_upto(line: bytes, step: int, evaluated: bool) -> bool:
    # A kill or a crash of the machine leaves torn lines or blocks of zeros: those are dropped, never an error.
    if not line.endswith(b"\n"):
        return False
    try:
        record = parse_json(line)
    except ValueError:
        return False
    if not isinstance(record, dict):
        return False
    at = record.get("step")
    if at == step and not evaluated and any(name.startswith("eval/") for name in record):
        return False
    return not isinstance(at, int) or at <= step


def _keep_lines(file: Path, is_kept: Callable[[bytes], bool]) -> None:
    """Drops the other lines. Where these are the last ones the file is cut off, which a full disk allows too."""
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
    """Writes `file` anew so that at any moment the old or the new one is there in full."""
    try:
        write_atomically(file, chunks, durable=True, one_writer=True)
    except OSError as error:
        raise UserError(
            f"{file} cannot be written ({error.strerror}); make room, or choose another --output_dir"
        ) from None


def _refuse(file: Path, reason: str) -> NoReturn:
    raise UserError(f"{file} is damaged ({reason}); restore it or choose another --output_dir")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _event_line(kind: str, step: int | None, rank: int | None, details: Mapping[str, Any]) -> str:
    return _to_json({"time": _now(), "kind": kind, "step": step, "rank": rank, **details}, other=str)


def _to_json(record: Mapping[str, Any], *, indent: int | None = None, other: Callable[[Any], str] | None = None) -> str:
    """Strict JSON; `other` turns what JSON does not know into text, without it that is a TypeError."""
    return json.dumps(_finite(record), allow_nan=False, indent=indent, default=other)


def _number(value: Any) -> Any:
    """What `_finite` has made of a number, as a number again."""
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
