"""Runs unisono as a user does: the real command in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warm_python import WarmPython, is_possible

TESTS = Path(__file__).resolve().parent
TINY = f"{TESTS / 'tiny_recipe.py'}:Tiny"
MARK = "UNISONO_TEST_MARK"
PATIENCE_S = 240.0  # much longer than any command takes, because the machine may be busy


@dataclass(frozen=True)
class Ended:
    """The exit code and output of a command."""

    code: int
    out: str
    err: str


def environment(**more: str) -> dict[str, str]:
    """The environment of a command: it finds the sources from any folder, and sees no GPU on any machine."""
    paths = [str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]
    ours = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "COLUMNS": "100", "CUDA_VISIBLE_DEVICES": ""}
    return os.environ | ours | more


def start(
    words: Iterable[object], *, cwd: Path, program: Sequence[str] = (sys.executable,), **more: str
) -> subprocess.Popen[str]:
    """Starts python (`-m unisono …`, or a file) in its own session, so that its signals do not reach the tests.

    If it makes no difference to the test, the process is forked from one that has imported torch: see `warm_python.py`.
    """
    arguments, env = [*program, *map(str, words)], environment(**more)
    return popen_of(arguments, env)(
        arguments,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def popen_of(arguments: Sequence[str], env: Mapping[str, str]) -> type[subprocess.Popen[str]]:
    """The Popen class for this program; a marked program is not forked, because /proc would not show its mark."""
    is_python = arguments[0] == sys.executable and (arguments[1] == "-m" or arguments[1].endswith(".py"))
    return WarmPython if is_python and MARK not in env and is_possible(env) else subprocess.Popen


def end(process: subprocess.Popen[str], seconds: float = PATIENCE_S) -> Ended:
    """Waits for a started program; kills it and fails the test if it takes too long."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate(timeout=10)
        raise AssertionError(f"not done after {seconds} s: {process.args}\n{out}\n{err}") from None
    return Ended(process.returncode, out, err)


def unisono(*words: object, cwd: Path, seconds: float = PATIENCE_S, **more: str) -> Ended:
    """Runs `python -m unisono` with these arguments."""
    return end(start(["-m", "unisono", *words], cwd=cwd, **more), seconds)


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """A run's metrics or events, without a last line that is still being written."""
    file = folder / name
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def losses(folder: Path) -> list[float]:
    """The loss of each step; checks that every step occurs once, in order."""
    result = [line for line in lines(folder) if "loss" in line]
    assert [line["step"] for line in result] == list(range(1, len(result) + 1))
    return [line["loss"] for line in result]


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 60) -> None:
    """Waits until a condition is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def mark() -> dict[str, str]:
    """An environment variable that marks a command and all processes that it starts."""
    return {MARK: uuid.uuid4().hex}


def marked(with_mark: dict[str, str], **also: str) -> list[int]:
    """Living processes with this mark and these environment variables."""
    expected = {f"{name}={value}".encode() for name, value in (with_mark | also).items()}
    result = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if expected <= set((process / "environ").read_bytes().split(b"\0")):
                result.append(int(process.name))
        except OSError:  # the process has ended, or belongs to another user
            continue
    return result
