"""Starts workers, restarts them after a crash or a block, and collects the defects."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fuzz.reader import WALL_SECONDS

TESTS = Path(__file__).resolve().parent.parent


@dataclass
class Result:
    """What happened to one reader."""

    reader: str
    defects: list[str] = field(default_factory=list)
    num_cases: int = 0
    num_rejected: int = 0
    seconds: float = 0.0


def fuzz(
    readers: Sequence[str],
    cases: Path,
    *,
    seconds: float | None = None,
    examples: int = 0,
    seed: int = 0,
    report: Callable[[Result], None] = lambda result: None,
    table: str = "fuzz.table",
) -> dict[str, Result]:
    """Fuzzes the readers one after another, for `seconds` or with a number of `examples` each.

    `table` is the module with the readers. The files of every defect are left in the folder `cases`/defects.
    """
    results = {name: Result(name) for name in readers}
    waiting = list(readers)
    while waiting:
        options = ["--examples", str(examples), "--seed", str(seed), "--table", table]
        failed = _work(waiting, cases, seconds, options, results, report)
        if failed is None:
            break
        waiting = waiting[waiting.index(failed) + 1 :]
    return results


def _work(
    readers: Sequence[str],
    cases: Path,
    seconds: float | None,
    options: Sequence[str],
    results: dict[str, Result],
    report: Callable[[Result], None],
) -> str | None:
    """Runs one worker; returns the reader with which it ended early, if it did."""
    words = [str(cases), *readers, *options]
    if seconds is not None:
        words += ["--seconds", str(seconds)]
    errors_file = cases / "stderr"
    cases.mkdir(parents=True, exist_ok=True)
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": paths, "MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with open(errors_file, "wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "fuzz.worker", *words], stdout=subprocess.PIPE, stderr=errors, env=env, cwd=TESTS
        )
    assert process.stdout is not None
    running, buffer, is_blocked = readers[0], b"", False
    patience = (seconds or 0) + WALL_SECONDS
    try:
        while True:
            if not select.select([process.stdout], [], [], patience)[0]:
                is_blocked = True
                break
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                break
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "done" in message:
                    result = results[message["done"]]
                    result.num_cases, result.num_rejected = message["cases"], message["rejected"]
                    result.seconds = message["seconds"]
                    report(result)
                    running = ""
                elif "defect" in message:
                    _add(results[running], f"{message['defect']}\n{message['details']}", cases, "defect")
                else:
                    running = message["reader"]
    finally:
        process.kill()
        status = process.wait()
    if not running:
        return None
    last = errors_file.read_text(errors="replace")[-3000:]
    what = f"blocked for {patience:g} s" if is_blocked else f"the process ended with status {status}"
    _add(results[running], f"{what}\n{last}", cases, "case")
    report(results[running])
    return running


def _add(result: Result, defect: str, cases: Path, folder: str) -> None:
    kept = cases / "defects" / f"{result.reader}-{len(result.defects)}"
    if (cases / folder).is_dir():
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(cases / folder, kept, symlinks=True)
    result.defects.append(f"{defect}\nfiles: {kept}")
