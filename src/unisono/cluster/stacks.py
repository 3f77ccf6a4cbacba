"""Python stacks of ranks, taken from outside.

A rank that hangs cannot say where. It therefore asks, before anything else, for SIGUSR2 to write the stacks of all its
threads to a file; python's faulthandler does that in C, also while an extension holds the interpreter's lock. Whoever
looks after the ranks sends the signal, waits a moment, and keeps what was written.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from io import FileIO
from pathlib import Path

ANSWER_S = 2.0
"""How long ranks have to write their stacks; a running one needs milliseconds."""

FILES_S = 5.0
"""How long the run's folder has to take a few lines."""

_open: list[FileIO] = []  # faulthandler keeps the number of the file only: it must not be closed
# Frames in which a rank waits for others, or cannot be told from one that does: autograd's engine, where DDP reduces.
_WAITING = re.compile(r"[/\\]torch[/\\]distributed[/\\]|in _engine_run_backward|in synchronize$")
_DEBUGGER = re.compile(r'[/\\](pdb|bdb|ipdb|_?pydevd\w*)\.py"')
_STATES = {
    "T": "it is stopped (SIGSTOP, or a debugger)",
    "t": "it is stopped (SIGSTOP, or a debugger)",
    "D": "it waits inside the kernel (a disk, a network file system, a driver)",
    "Z": "it has ended",
}


def write_stacks_on_signal(job_folder: Path, rank: int) -> None:
    """From now on SIGUSR2 makes this process write the stacks of its threads to a file in the job's folder."""
    if hasattr(faulthandler, "register"):
        file = FileIO(_file(job_folder, rank), "a")  # appends: `take_stacks` empties it
        _open.append(file)
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)


def forget_stacks(job_folder: Path, ranks: Collection[int]) -> None:
    """Before these ranks are started again."""
    for rank in ranks:
        _file(job_folder, rank).unlink(missing_ok=True)


def take_stacks(job_folder: Path, pids: Mapping[int, int]) -> dict[int, str]:
    """The stacks of the ranks with these process ids, or why there is none, by rank."""
    for rank, pid in pids.items():
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            os.truncate(_file(job_folder, rank), 0)  # not there: the rank has not asked for the signal, and would die
            os.kill(pid, signal.SIGUSR2)
    deadline = time.monotonic() + ANSWER_S
    found: dict[int, str] = {}
    while True:
        before, found = found, {rank: _read(_file(job_folder, rank)) for rank in pids}
        if all(found.values()) and found == before:  # nothing was added since the last look
            break
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return {rank: text or f"no stack: {_why_silent(pids[rank])}\n" for rank, text in found.items()}


def within(seconds: float, work: Callable[[], None]) -> bool:
    """Does something with files, and goes on without it when that takes too long: the disk may be what hangs."""
    thread = threading.Thread(target=work, name="files", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def keep_stacks(run_folder: Path, name: str, stacks: Mapping[int, str]) -> str:
    """Writes the stacks to the run's folder, where nothing is overwritten, and says where they are, or why not."""
    said: list[str] = []

    def keep() -> None:
        try:
            said.append(f"all stacks are in {_write_stacks(run_folder, name, stacks)}")
        except OSError as error:
            said.append(f"the stacks could not be kept ({error.strerror})")

    done = within(FILES_S, keep)
    return said[0] if done and said else f"the stacks could not be kept ({run_folder} does not answer)"


def _write_stacks(run_folder: Path, name: str, stacks: Mapping[int, str]) -> Path:
    for number in itertools.count(1):
        folder = run_folder / "stacks" / (name if number == 1 else f"{name}-{number}")
        folder.mkdir(parents=True, exist_ok=True)
        if not any((folder / f"rank{rank}.txt").exists() for rank in stacks):
            break
    for rank, text in stacks.items():
        (folder / f"rank{rank}.txt").write_text(text)
    return folder


def own_stacks() -> str:
    """The stacks of all threads of this process."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")


def own_main_thread() -> list[str]:
    """The main thread of this process as the calling thread sees it, innermost call first."""
    ident = threading.main_thread().ident
    frame = sys._current_frames().get(ident) if ident is not None else None
    calls = traceback.walk_stack(frame) if frame is not None else ()  # reads no source file: the disk may be what hangs
    return [f'  File "{call.f_code.co_filename}", line {line} in {call.f_code.co_name}' for call, line in calls]


def main_thread(stacks: str) -> list[str]:
    """The lines of the main thread, innermost call first, without those of other threads."""
    blocks: list[list[str]] = []
    for line in stacks.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            blocks.append([line])
        elif blocks and line.strip():
            blocks[-1].append(line)
    if not blocks:
        return [line for line in stacks.splitlines() if line.strip()]
    # The kernel hands a signal to the main thread if it can; faulthandler lists the oldest thread last.
    current = [block for block in blocks if block[0].startswith("Current")]
    return (current or blocks[-1:])[0][1:]


def waits_for_others(calls: Sequence[str]) -> bool:
    """Whether a thread is inside a collective, as far as its innermost calls tell."""
    return any(_WAITING.search(line) for line in calls[:3])


def is_debugged(calls: Sequence[str]) -> bool:
    """Whether a thread waits for a person at a debugger's prompt."""
    return any(_DEBUGGER.search(line) for line in calls)


def _file(job_folder: Path, rank: int) -> Path:
    return job_folder / f"stack_rank{rank}.txt"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _why_silent(pid: int) -> str:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "it has ended"
    return _STATES.get(state, "it did not answer")
