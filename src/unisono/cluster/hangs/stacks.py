"""Takes and saves the Python stacks of ranks.

A rank that hangs cannot report its own position. So each rank registers SIGUSR2 with Python's faulthandler as soon as
it starts (`write_stacks_on_signal`). The handler writes the stacks of all threads to a file in the job folder. It runs
in C and works even while an extension holds the GIL. The launcher sends the signal, waits up to `ANSWER_S` seconds and
reads the files.
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
"""Seconds to wait for ranks to write their stacks; a running rank needs milliseconds."""

FILES_S = 5.0
"""Maximum number of seconds to wait for a few lines to be written to the run folder."""

_open: list[FileIO] = []  # keeps the files open, because faulthandler stores only their descriptors
# Frames in which a rank may be waiting for others; DDP reduces gradients inside autograd's engine.
_WAITING = re.compile(r"[/\\]torch[/\\]distributed[/\\]|in _engine_run_backward|in synchronize$")
_DEBUGGER = re.compile(r'[/\\](pdb|bdb|ipdb|_?pydevd\w*)\.py"')
_STATES = {
    "T": "it is stopped (SIGSTOP, or a debugger)",
    "t": "it is stopped (SIGSTOP, or a debugger)",
    "D": "it is blocked in the kernel (a disk, a network file system, a driver)",
    "Z": "it has exited",
}


def write_stacks_on_signal(job_folder: Path, rank: int) -> None:
    """Makes SIGUSR2 write the stacks of all threads of this process to a file in the job folder."""
    if hasattr(faulthandler, "register"):
        file = FileIO(_file(job_folder, rank), "a")  # opened for appending; `take_stacks` truncates the file
        _open.append(file)
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)


def clear_stacks(job_folder: Path, ranks: Collection[int]) -> None:
    """Removes the stack files of these ranks, before the launcher restarts them."""
    for rank in ranks:
        _file(job_folder, rank).unlink(missing_ok=True)


def take_stacks(job_folder: Path, pids: Mapping[int, int]) -> dict[int, str]:
    """Returns the stack of each rank, or the reason why it could not be taken; `pids` are process ids by rank."""
    for rank, pid in pids.items():
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            # If the file does not exist, the rank has no handler yet, and the signal would kill it. Then os.truncate
            # raises before the signal is sent.
            os.truncate(_file(job_folder, rank), 0)
            os.kill(pid, signal.SIGUSR2)
    deadline = time.monotonic() + ANSWER_S
    stacks: dict[int, str] = {}
    while True:
        before, stacks = stacks, {rank: _read(_file(job_folder, rank)) for rank in pids}
        if all(stacks.values()) and stacks == before:  # unchanged since the last read, and therefore complete
            break
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return {rank: text or f"no stack: {_why_no_stack(pids[rank])}\n" for rank, text in stacks.items()}


def finishes_within(seconds: float, work: Callable[[], None]) -> bool:
    """Runs `work` in a thread, so that a hanging disk cannot block the caller. Returns whether it finished in time."""
    thread = threading.Thread(target=work, name="files", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def save_stacks(run_folder: Path | None, step: int, attempt: int, stacks: Mapping[int, str]) -> str:
    """Saves stacks (by rank) in the run folder; returns where they are, or why not, as the end of a message."""
    if run_folder is None:
        return ""
    folder, name = run_folder, f"step_{step:08d}-attempt{attempt}"
    results: list[str] = []

    def save() -> None:
        try:
            results.append(f"; all stacks are in {_write_stacks(folder, name, stacks)}")
        except OSError as error:
            results.append(f"; the stacks could not be saved ({error.strerror})")

    finished = finishes_within(FILES_S, save)
    return results[0] if finished and results else f"; the stacks could not be saved ({folder} does not respond)"


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
    """Returns the stacks of all threads of this process."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")


def own_main_thread() -> list[str]:
    """Returns the frames of this process's main thread, innermost call first; callable from any thread."""
    ident = threading.main_thread().ident
    frame = sys._current_frames().get(ident) if ident is not None else None
    calls = traceback.walk_stack(frame) if frame is not None else ()  # reads no source files, because the disk may hang
    return [f'  File "{call.f_code.co_filename}", line {line} in {call.f_code.co_name}' for call, line in calls]


def main_thread(stacks: str) -> list[str]:
    """Returns the frames of the main thread in a text that faulthandler wrote, innermost call first."""
    blocks: list[list[str]] = []
    for line in stacks.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            blocks.append([line])
        elif blocks and line.strip():
            blocks[-1].append(line)
    if not blocks:
        return [line for line in stacks.splitlines() if line.strip()]
    # The kernel delivers a signal to the main thread if it can; faulthandler lists the oldest thread last.
    current = [block for block in blocks if block[0].startswith("Current")]
    return (current or blocks[-1:])[0][1:]


def is_in_collective(calls: Sequence[str]) -> bool:
    """Whether a thread seems to be inside a collective, judged by its three innermost frames."""
    return any(_WAITING.search(line) for line in calls[:3])


def is_debugged(calls: Sequence[str]) -> bool:
    """Whether a thread is at the prompt of a debugger."""
    return any(_DEBUGGER.search(line) for line in calls)


def _file(job_folder: Path, rank: int) -> Path:
    return job_folder / f"stack_rank{rank}.txt"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _why_no_stack(pid: int) -> str:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "it has exited"
    return _STATES.get(state, "it did not respond")
