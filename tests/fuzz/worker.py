"""Runs cases of some readers in a process of its own, so that a crash or an endless loop ends only this process.

Prints one JSON object per line: `{"reader": name}` when it begins one, `{"defect": ...}`, and `{"done": name, ...}`.
The files of the running case are in the folder CASES/case, so the process that started this one finds them if it dies.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import json
import os
import re
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from fuzz.mutations import Operation, apply, operations
from fuzz.reader import LONGEST_MESSAGE, MEMORY, OUTSIDE, Reader, files_in

_IN_ACCESS, _IN_OPEN, _IN_CREATE, _IN_MODIFY = 0x1, 0x20, 0x100, 0x2


class TooSlow(BaseException):
    """The reader took more CPU time than a case may take."""


class Defect(AssertionError):
    """What the reader did that it must not do. Two defects are the same if they have the same kind."""

    def __init__(self, kind: str, details: str) -> None:
        super().__init__(f"{kind}\n{details}")
        self.kind, self.details = kind, details


class Outside:
    """Watches a folder with inotify, which also sees what native libraries open."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for end in ("", ".txt", ".json", ".mp4", ".safetensors", ".html", ".h5"):
            (folder / f"secret{end}").write_text("{}")
        library = ctypes.CDLL(None, use_errno=True)
        self._handle = library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        mask = _IN_ACCESS | _IN_OPEN | _IN_CREATE | _IN_MODIFY
        if library.inotify_add_watch(self._handle, os.fsencode(folder), mask) < 0:
            raise OSError(ctypes.get_errno(), "inotify_add_watch")

    def touched(self) -> str:
        """The name of a file that was opened or changed since the last call; empty if there is none."""
        try:
            event = os.read(self._handle, 4096)
        except BlockingIOError:
            return ""
        return event[16:].partition(b"\0")[0].decode() or "the folder"


class Cases:
    """The cases of one reader."""

    def __init__(self, reader: Reader, root: Path, outside: Outside) -> None:
        self.reader, self.folder, self._outside = reader, root / "case", outside
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        with _quiet():
            reader.valid(self.folder)
        self.valid = files_in(self.folder)
        self.names = [name for name in self.valid if reader.may_damage(name)]
        assert self.names, f"{reader.name} has no file to damage"
        self.num_cases = self.num_rejected = 0
        self.known: set[str] = set()
        with _quiet():
            reader.read(self.folder)  # must succeed; also imports what the reader imports
        outside.touched()

    def run(self, name: str, changes: list[Operation], is_mended: bool) -> None:
        """Runs one case; raises Defect if the reader did something that it must not do."""
        content = apply(self.valid[name], changes)
        if is_mended and self.reader.mended is not None:
            content = self.reader.mended(name, content)
        self._restore()
        (self.folder / name).write_bytes(content)
        self.num_cases += 1
        peak = _peak_memory()
        try:
            with _limits(self.reader.cpu_seconds), _quiet():
                self.reader.read(self.folder)
        except self.reader.errors as error:
            self.num_rejected += 1
            message = str(error)
            if len(message.splitlines()) > 1 and not isinstance(error, OSError):
                raise Defect(f"{_where(error)}: the message has several lines", repr(message[:500])) from None
            if len(message) > LONGEST_MESSAGE:
                raise Defect(f"{_where(error)}: the message is too long", f"{len(message)} characters") from None
        except TooSlow as error:
            raise Defect(f"{_where(error)}: more than {self.reader.cpu_seconds:g} s", _trace(error)) from None
        except Exception as error:
            raise Defect(f"{_where(error)}: {type(error).__name__}", _trace(error)) from None
        if name := self._outside.touched():
            raise Defect(f"opened {name} outside of the folder", "")
        if (grown := _peak_memory() - peak) > MEMORY:
            raise Defect("too much memory", f"{grown >> 20} MiB")

    def _restore(self) -> None:
        for path in sorted(self.folder.rglob("*"), reverse=True):
            name = path.relative_to(self.folder).as_posix()
            if path.is_symlink() or not path.is_dir():
                if name not in self.valid:
                    path.unlink()
            elif not any(each.startswith(f"{name}/") for each in self.valid):
                shutil.rmtree(path)
        for name, content in self.valid.items():
            path = self.folder / name
            if not path.is_file() or path.stat().st_size != len(content) or path.read_bytes() != content:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)

    def search(self, number: int, num_examples: int, until: float) -> Iterator[Defect]:
        """Draws cases with this seed; yields each new defect with its smallest case."""
        case = st.tuples(st.sampled_from(self.names), operations(self.reader.words), st.booleans())
        smallest: list[Defect] = []

        @seed(number)
        @settings(
            max_examples=num_examples,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(case)
        def check(drawn: tuple[str, list[Operation], bool]) -> None:
            if time.monotonic() > until:
                return
            try:
                self.run(*drawn)
            except Defect as defect:
                if defect.kind in self.known or (smallest and smallest[-1].kind != defect.kind):
                    return
                smallest.append(defect)
                self._keep()
                raise

        try:
            check()
        except Defect as defect:
            self.known.add(defect.kind)
            yield defect
        except Exception as error:  # hypothesis' own: the case was not the same again, such as one that was too slow
            if not smallest:
                raise
            self.known.add(smallest[-1].kind)
            smallest[-1].add_note(type(error).__name__)
            yield smallest[-1]

    def _keep(self) -> None:
        """Keeps the files of the defect; hypothesis ends with the smallest one."""
        kept = self.folder.parent / "defect"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(self.folder, kept, symlinks=True)


def main() -> None:
    """Runs the cases of the readers that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", type=Path)
    parser.add_argument("readers", nargs="+")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="per reader")
    parser.add_argument("--examples", type=int, default=0, help="per reader; 0: until the time is over")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", default="fuzz.table", help="module with the readers")
    options = parser.parse_args()
    faulthandler.enable()
    warnings.simplefilter("ignore")
    options.cases.mkdir(parents=True, exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(options.cases / "cache")
    outside = Outside(options.cases / OUTSIDE)
    by_name = {reader.name: reader for reader in import_module(options.table).READERS}
    for name in options.readers:
        _say(reader=name)
        cases = Cases(by_name[name], options.cases, outside)
        began, number = time.monotonic(), options.seed
        until = began + options.seconds
        while time.monotonic() < until:
            for defect in cases.search(number, options.examples or 200, until):
                _say(defect=defect.kind, details=defect.details, reader=name)
            number += 1
            if options.examples:
                break
        seconds = time.monotonic() - began
        _say(done=name, cases=cases.num_cases, rejected=cases.num_rejected, seconds=round(seconds, 1))


def _say(**message: Any) -> None:
    print(json.dumps(message), file=_stdout, flush=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Discards what a reader prints, also native libraries."""
    sys.stdout.flush()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


@contextlib.contextmanager
def _limits(seconds: float) -> Iterator[None]:
    def give_up(number: int, frame: Any) -> None:
        raise TooSlow

    signal.signal(signal.SIGPROF, give_up)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 2 * MEMORY, hard))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def _peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _where(error: BaseException) -> str:
    """The innermost line of unisono in a traceback."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/unisono/" in frame.filename]
    if not frames:
        return "outside of unisono"
    return f"unisono/{frames[-1].filename.rpartition('/unisono/')[2]}:{frames[-1].lineno}"


def _trace(error: BaseException) -> str:
    lines = traceback.format_exception(error)
    return re.sub(r"\n{2,}", "\n", "".join(lines[-8:]))[-2500:]


if __name__ == "__main__":
    _stdout = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    main()
