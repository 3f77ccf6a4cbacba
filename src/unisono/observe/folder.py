"""A run's folder: what the run is (run.json), what it measured (metrics.jsonl), what happened to it (events.jsonl).

The folder is opened only when the first step has shown that the recipe is sound; until then everything waits in
memory, so that a user's mistake leaves nothing behind. run.json is replaced atomically; the other two grow by whole
lines, one write each, so that the launcher and the main rank may both append and a kill tears the last line at most.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

from unisono.errors import UserError

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
    try:
        # Really tried, because os.access says yes to root, to a read-only mount and to a full disk.
        probe = tempfile.mkdtemp(prefix=".unisono-", dir=nearest)
        inside = Path(probe, target.relative_to(nearest))
        inside.mkdir(parents=True, exist_ok=True)
        (inside / RUN).write_bytes(b"{}")
        for name in (METRICS, EVENTS):
            if (target / name).exists():
                open(target / name, "ab").close()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"output_dir {path} cannot be written ({reason}); choose another --output_dir") from None
    finally:
        if probe is not None:
            shutil.rmtree(probe, ignore_errors=True)


def is_held(folder: Path) -> bool:
    """Whether a run is writing to the folder now: it holds a lock on it."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    else:
        return False
    finally:
        os.close(handle)


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
        self._waiting: list[str] = []

    def add(self, kind: str, *, step: int | None = None, rank: int | None = None, **details: Any) -> None:
        """Notes an event now, or when it can be written."""
        self._waiting.append(_event_line(kind, step, rank, details))
        self.write()

    def write(self) -> None:
        """Writes what waits, if there is a run by now."""
        if self._waiting and (self._path / RUN).exists():
            events = _Lines(self._path / EVENTS)
            for line in self._waiting:
                events.append(line)
            events.close()
            self._waiting.clear()


class RunFolder:
    """The folder of one run. Until `open`, and for ever on ranks that never open it, it touches no file."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.is_open = False
        self._files = {name: _Lines(self.path / name) for name in (METRICS, EVENTS)}
        # Bounded, because ranks other than the main one note things too and never open the folder.
        self._waiting: deque[tuple[str, str]] = deque(maxlen=1000)
        self._starts: list[dict[str, Any]] = []
        self._rewind_to: tuple[int, bool] | None = None
        self._lock: int | None = None

    @staticmethod
    def read(path: str | Path) -> dict[str, Any] | None:
        """What run.json in the folder `path` says; None if there is no run in it."""
        file = Path(path, RUN)
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise UserError(f"{file} cannot be read ({error.strerror}); choose another --output_dir") from None
        except (ValueError, RecursionError) as error:
            _refuse(file, str(error))
        told = record if isinstance(record, dict) else {}
        starts = told.get("starts", [])
        is_run = isinstance(told.get("recipe"), str) and isinstance(starts, list)
        if not is_run or not all(isinstance(start, dict) for start in starts):
            _refuse(file, "it does not describe a run")
        return dict(told)

    def hold(self, patience_s: float = 5.0) -> None:
        """Keeps a second run out of the folder until this one closes it or dies.

        One that goes on with a run does so before it looks for a checkpoint: what it finds must still be true when it
        writes. It waits a little, because the attempt before this one may just be dying.
        """
        if self._lock is not None or not self.path.is_dir():
            return
        lock = os.open(self.path, os.O_RDONLY)
        end = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < end:
                    time.sleep(0.1)
                    continue
                os.close(lock)
                raise UserError(
                    f"another run is writing to {self.path}; wait for it, or choose another output_dir"
                ) from None
            except OSError:  # a file system without locks
                pass
            self._lock = lock
            return

    def open(self, record: Mapping[str, Any]) -> None:
        """Makes the folder, writes run.json from `record` and then everything noted so far.

        In the folder of an earlier start, `created` and the history of `starts` are kept.
        """
        if self.is_open:
            raise RuntimeError(f"the run folder {self.path} is already open")
        self.path.mkdir(parents=True, exist_ok=True)
        self.hold()
        before = self.read(self.path) or {}
        if before.get("id", record.get("id")) != record.get("id"):
            raise UserError(f"another run was made in {self.path} meanwhile; choose another output_dir")
        starts = [*before.get("starts", []), *self._starts]
        self._write_run({**before, **record, "created": before.get("created", _now()), "starts": starts})
        self.is_open = True
        if self._rewind_to is not None:
            self.rewind_metrics(self._rewind_to[0], evaluated=self._rewind_to[1])
        for name, line in self._waiting:
            self._files[name].append(line)
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
        self._files[METRICS].close()
        file = self.path / METRICS
        if file.exists():
            with open(file, "rb") as lines:
                _replace(file, (line for line in lines if _is_upto(line, step, evaluated)))

    def evaluations(self, step: int, *, evaluated: bool = True) -> list[dict[str, Any]]:
        """What metrics.jsonl says of evaluations up to a step; as for `rewind_metrics`."""
        file = self.path / METRICS
        if not file.exists():
            return []
        with open(file, "rb") as lines:
            kept = (line for line in lines if b'"eval/' in line and _is_upto(line, step, evaluated))
            return [{name: _number(value) for name, value in json.loads(line).items()} for line in kept]

    def close(self) -> None:
        """Closes the files (a later note opens them again) and lets other runs into the folder."""
        for file in self._files.values():
            file.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _note(self, name: str, line: str) -> None:
        if self.is_open:
            self._files[name].append(line)
        else:
            self._waiting.append((name, line))

    def _write_run(self, record: Mapping[str, Any]) -> None:
        text = _to_json(record, indent=2, other=str)
        _replace(self.path / RUN, [text.encode()])


class _Lines:
    """A file that grows by whole lines and never stops the run: days of training do not end for a log line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._torn = self._failing = False

    def append(self, line: str) -> None:
        try:
            if self._file is None:
                self._file = open(self._path, "a+b", buffering=0)  # noqa: SIM115  kept open: NFS flushes at each close
                self._torn = _ends_torn(self._file)
            # One unbuffered write in append mode: lines of two processes do not mix.
            data = ("\n" * self._torn + line + "\n").encode()
            self._torn = self._file.write(data) != len(data)
            self._failing = False
        except OSError as error:
            if not self._failing:
                log.warning("%s cannot be written (%s); lines are lost, the run goes on", self._path, error.strerror)
            self._failing = True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _ends_torn(file: FileIO) -> bool:
    end = file.seek(0, os.SEEK_END)
    if end == 0 or os.pread(file.fileno(), 1, end - 1) == b"\n":
        return False
    # The other process may be in the middle of its write, which then grows: only what stays is torn.
    time.sleep(0.01)
    return file.seek(0, os.SEEK_END) == end


def _is_upto(line: bytes, step: int, evaluated: bool) -> bool:
    # A kill or a crash of the machine leaves torn lines or blocks of zeros: those are dropped, never an error.
    if not line.endswith(b"\n"):
        return False
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return False
    if not isinstance(record, dict):
        return False
    at = record.get("step")
    if at == step and not evaluated and any(name.startswith("eval/") for name in record):
        return False
    return not isinstance(at, int) or at <= step


def _replace(file: Path, chunks: Iterable[bytes]) -> None:
    """Writes `file` anew so that at any moment the old or the new one is there in full."""
    new = file.with_name(f".{file.name}.new")
    try:
        with open(new, "wb") as out:
            out.writelines(chunks)
            out.flush()
            os.fsync(out.fileno())
        os.replace(new, file)
    except OSError as error:
        with suppress(OSError):
            new.unlink()  # it may have taken the last of the disk
        raise UserError(
            f"{file} cannot be written ({error.strerror}); make room, or choose another --output_dir"
        ) from None
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # a crash of the machine may undo the rename otherwise
    finally:
        os.close(folder)


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
