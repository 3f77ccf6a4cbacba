"""unisono as a user runs it: the real command in a process of its own, and what it left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
TINY = f"{TESTS / 'tiny_recipe.py'}:Tiny"
MARK = "UNISONO_TEST_MARK"


@dataclass(frozen=True)
class Ended:
    """How a command ended and what it said."""

    code: int
    out: str
    err: str


def environment(**more: str) -> dict[str, str]:
    """The environment of a command: the sources are found from any folder, and no GPU is there on any machine."""
    paths = [str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]
    ours = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "COLUMNS": "100", "CUDA_VISIBLE_DEVICES": ""}
    return os.environ | ours | more


def start(
    words: Iterable[object], *, cwd: Path, program: Sequence[str] = (sys.executable,), **more: str
) -> subprocess.Popen[str]:
    """Starts python (`-m unisono …`, a file) in a session of its own, so that no signal of it reaches the tests."""
    return subprocess.Popen(
        [*program, *map(str, words)],
        cwd=cwd,
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str], seconds: float = 90) -> Ended:
    """Waits for a started program; one that takes too long is killed and fails the test."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate(timeout=10)
        raise AssertionError(f"not done after {seconds} s: {process.args}\n{out}\n{err}") from None
    return Ended(process.returncode, out, err)


def unisono(*words: object, cwd: Path, seconds: float = 90, **more: str) -> Ended:
    """Runs `python -m unisono` with these words."""
    return end(start(["-m", "unisono", *words], cwd=cwd, **more), seconds)


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """A run's metrics or events; a last line that is being written is left out."""
    file = folder / name
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def losses(folder: Path) -> list[float]:
    """The loss of each step, all steps in order and each once."""
    found = [line for line in lines(folder) if "loss" in line]
    assert [line["step"] for line in found] == list(range(1, len(found) + 1))
    return [line["loss"] for line in found]


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 60) -> None:
    """Waits for something to become true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def mark() -> dict[str, str]:
    """A variable by which everything that a command starts can be found again."""
    return {MARK: uuid.uuid4().hex}


def marked(with_mark: dict[str, str], **also: str) -> list[int]:
    """Living processes that carry the mark, and these variables too."""
    wanted = {f"{name}={value}".encode() for name, value in (with_mark | also).items()}
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if wanted <= set((process / "environ").read_bytes().split(b"\0")):
                found.append(int(process.name))
        except OSError:  # it ended while we looked, or is not ours to read
            continue
    return found
