"""Runs `unisono train darkroom` as a user does, and reports the results of several runs (see darkroom.py)."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from machine import depends_on, machine, versions, without_folders

ROOT = Path(__file__).resolve().parent.parent
FAST = ["--mixed_precision", "bf16", "--compile", "true", "--cuda_graph", "true"]
TINY = ["--n_transit", "60", "--compress_interval", "20", "--tf_n_embd", "16", "--tf_n_layer", "1"]
TINY += ["--batch_size", "8", "--n_stream", "4"]
TINY += ["--total_source_timesteps", "400", "--eval_episodes", "12", "--eval_repeats", "1"]
TINY_RUN = [*TINY, "--max_steps", "20", "--eval_every", "10", "--save_every", "10", "--log_every", "5"]
STOP_TIMEOUT_S = 60.0

Row = dict[str, Any]


@dataclass
class Run:
    """A finished process and its output."""

    wall_s: float
    failed: str | None
    printed: str
    metrics: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)
    config: Row = field(default_factory=dict)

    @property
    def steps(self) -> list[Row]:
        return [row for row in self.metrics if "samples_per_s" in row]

    @property
    def evaluations(self) -> list[Row]:
        return [row for row in self.metrics if "eval/validation_of_optimum" in row]

    @property
    def chosen(self) -> Row | None:
        """The evaluation with the best validation return; the earliest in case of a tie."""
        return max(self.evaluations, key=lambda row: row["eval/validation_of_optimum"], default=None)

    def training_s(self, until: float = float("inf")) -> float:
        """Seconds of training from the first step up to `step`, including compilation, without evaluations."""
        rows = [{"samples": 0}, *(row for row in self.metrics if "loss" in row)]
        return sum(
            (row["samples"] - before["samples"]) / row["samples_per_s"]
            for before, row in pairwise(rows)
            if row["step"] <= until and "samples_per_s" in row
        )

    def step_ms(self, after: int = 0) -> float | None:
        """The median of the logged step times."""
        times = [row["step_ms"] for row in self.steps if row["step"] > after]
        return statistics.median(times) if times else None

    @property
    def beginning_s(self) -> float:
        """Extra time of the first logged steps: compilation, graph recording, warm-up."""
        usual = self.step_ms(self.steps[0]["step"]) if self.steps else None
        return max(0.0, self.training_s(self.steps[0]["step"]) - self.steps[0]["step"] * usual / 1e3) if usual else 0.0


def run(command: Sequence[str], folder: Path, patience_s: float) -> Run:
    """Runs a command until it ends; its run folder is `folder`."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), environment.get("PYTHONPATH")]))
    folder.parent.mkdir(parents=True, exist_ok=True)
    log, failed, start = folder.with_suffix(".log"), None, time.perf_counter()
    with log.open("wb") as file:
        process = subprocess.Popen(
            list(command), cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            failed = f"took more than {patience_s:.0f} s"
        finally:
            end(process)
    wall = time.perf_counter() - start
    printed = log.read_text(errors="replace")
    if process.returncode and not failed:
        last = next((line for line in reversed(printed.splitlines()) if line.strip()), "nothing was printed")
        failed = f"exit status {process.returncode}: {without_paths(last.strip())[:300]}"
    if failed:
        print(f"--- {failed}\n{printed[-4000:]}\n---", file=sys.stderr, flush=True)
    config = folder / "run.json"
    return Run(
        wall,
        failed,
        printed,
        lines_of(folder / "metrics.jsonl"),
        lines_of(folder / "events.jsonl"),
        json.loads(config.read_text())["config"] if config.exists() else {},
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """Stops a running process. Sends SIGTERM first, so that unisono stops its ranks too."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def lines_of(file: Path) -> list[Row]:
    """The records of a JSON Lines file; ignores an incomplete last line of a killed process."""
    records = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def without_paths(text: str) -> str:
    """The output of a process without paths of this machine."""
    return re.sub(r"(?<![\w.])/(?:[^\s/'\":]+/)+", "…/", text)


def darkroom(folder: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "unisono", "train", "darkroom", *flags, "--output_dir", str(folder)]


class Report:
    """The result of a part, as JSON and as a table, rewritten after every row."""

    def __init__(self, options: argparse.Namespace, name: str, table: Callable[[Row], list[str]]) -> None:
        self.folder, self.name, self._table = options.output, f"darkroom_{name}", table
        self.result: Row = {
            "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
            "command": shlex.join(["python", "benchmarks/darkroom.py", *without_folders(sys.argv[1:])]),
            "machine": machine(),
            "versions": versions(["unisono", "torch", "triton", "accelerate"]),
            "quick": options.quick,
            "rows": {},
        }
        self._earlier = self._read() if options.keep else {}

    def _read(self) -> dict[str, Row]:
        """The successful rows of an existing result from the same kind of machine."""
        file = self.folder / f"{self.name}.json"
        if not file.exists():
            return {}
        before = json.loads(file.read_text())
        if before["quick"] != self.result["quick"] or before["machine"]["gpus"] != self.result["machine"]["gpus"]:
            return {}
        rows = {name: row for name, row in before["rows"].items() if not row["failed"]}
        return {name: row | {"kept_from": row.get("kept_from", before["date"])} for name, row in rows.items()}

    def begin(self, empty: dict[str, Row], same: Sequence[str]) -> list[str]:
        """Starts a result, with existing rows that agree in the keys `same`. Returns the names of rows to measure."""
        for name, row in empty.items():
            old = self._earlier.get(name, {})
            alike = bool(old) and all(old.get(key) == row[key] for key in same)
            self.result["rows"][name] = old if alike else row
        self.write()
        return [name for name, row in self.result["rows"].items() if row["failed"]]

    def write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{self.name}.json").write_text(json.dumps(self.result, indent=1) + "\n")
        (self.folder / f"{self.name}.md").write_text(self.text())

    def text(self) -> str:
        """The result as Markdown."""
        return "\n".join([*self._table(self.result), ""])

    def note(self, name: str, row: Row) -> None:
        self.result["rows"][name] = row
        self.write()
        outcome = row.get("failed") or "done"
        print(f"{time.strftime('%H:%M:%S')}  {name}: {outcome} ({row.get('wall_s', 0):.0f} s)", flush=True)

    def finish(self) -> int:
        """Prints the table; returns the exit status of the program."""
        self.write()
        print(self.text())
        print(f"wrote {self.folder / self.name}.json, .md")
        return 1 if any(row.get("failed") for row in self.result["rows"].values()) else 0


def header(result: Row, title: str, *notes: str) -> list[str]:
    quick = ["", "**A smoke test with a tiny model and a few steps; the numbers mean nothing.**"]
    return [
        f"# {title}",
        *(quick if result["quick"] else []),
        "",
        *depends_on(result),
        *(f"- {line}" for line in [*notes, *kept_rows(result)]),
        "",
    ]


def kept_rows(result: Row) -> list[str]:
    """Names the rows that were measured at an earlier date."""
    dates: dict[str, list[str]] = {}
    for name, row in result["rows"].items():
        if "kept_from" in row:
            dates.setdefault(row["kept_from"], []).append(name)
    return [f"Measured on {date}: {', '.join(names)}" for date, names in dates.items()]


def verdict_of(met: bool) -> str:
    return "met" if met else "**missed**"


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
