"""Measures what trackers cost a step: W&B and MLflow in their own processes, and TensorBoard in the training process.

    PYTHONPATH=src python benchmarks/trackers.py [--bouts 60] [--steps 15] [--quick]

One run with steps of about 20 ms of computation on one core logs every step, which is the most that trackers can have
to do. The trackers' processes are paused and continued in turn (SIGSTOP, SIGCONT), so that bouts of steps with and
without them alternate within one run. After a pause, trackers also deliver the steps of the pause, so a bout with
trackers has twice their usual work. Compared are the wall-clock time of a step and the processor time of the training
process. TensorBoard is timed directly, call by call.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

import torch
from machine import depends_on, machine, versions
from torch import nn

import unisono
from unisono import Loss, Recipe
from unisono.observe.trackers.tensorboard import TensorBoardTracker

HERE = Path(__file__).resolve().parent
STEP_MS, LIMIT = 20.0, 0.005
SETTLE_S = 8.0
METRICS = 12  # numbers per logged step, about as many as an ordinary run logs


class Busy(Recipe):
    """A recipe whose step computes for about 20 ms; it measures its own steps."""

    defaults: ClassVar = {"batch_size": 8, "num_workers": 0, "log_every": 1, "save_every": 0, "gpus": "0"}
    steps, bouts = 15, 60
    size = 0
    times: ClassVar[list[tuple[bool, float, float]]] = []  # (with trackers, wall-clock seconds, processor seconds)
    _pids: ClassVar[list[int]] = []
    _before: tuple[float, float] | None = None

    def model(self) -> nn.Module:
        return nn.Linear(8, 1)

    def dataset(self, split: str) -> Any:
        return None if split == "eval" else torch.randn(4096, 8)

    def loss(self, model: nn.Module, batch: Any, noise: Any) -> Loss:
        self._measure(self.clock.step)
        matrix = torch.ones(self.size, self.size)
        for _ in range(10):
            matrix = matrix @ matrix * 1e-3
        return Loss(model(batch).square().sum() + 0 * matrix[0, 0], len(batch))

    def _measure(self, step: int) -> None:
        now = time.perf_counter(), time.process_time()
        bout, position = divmod(step - 3, self.steps)
        if step == 3:
            time.sleep(SETTLE_S)  # the trackers import their libraries
            Busy._pids[:] = tracker_processes()
            assert len(self._pids) >= 2, "no tracker runs"
        # The first steps of a bout are not counted: the trackers deliver what they missed, or are just being paused.
        elif self._before is not None and step > 3 and position > 2:
            with_trackers = bout % 2 == 0
            self.times.append((with_trackers, now[0] - self._before[0], now[1] - self._before[1]))
        if step >= 3 and position == 0:
            for pid in self._pids:
                os.kill(pid, signal.SIGCONT if bout % 2 == 0 or bout >= self.bouts else signal.SIGSTOP)
        self._before = time.perf_counter(), time.process_time()


def tracker_processes() -> list[int]:
    """The processes of this process's trackers, with their own children (W&B has one)."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(entry.parent.name)] = int(fields[1])
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {os.getpid()})


def matrix_size() -> int:
    """The size of a matrix product that makes a step take about 20 ms."""
    size = 64
    while True:
        size += 16
        matrix, rounds = torch.ones(size, size), []
        for _ in range(3):
            start = time.process_time()  # other programs may use the same core
            for _ in range(10):
                matrix = matrix @ matrix * 1e-3
            rounds.append(time.process_time() - start)
        if min(rounds) * 1e3 >= STEP_MS:
            return size


def tensorboard_us(folder: Path, calls: int) -> float:
    """Microseconds of a call that writes a logged step, as the median."""
    tracker, times = TensorBoardTracker(folder), []
    for step in range(calls):
        values = {f"metric_{number}": step * 0.1 for number in range(METRICS)}
        start = time.perf_counter()
        tracker.log(step, values)
        times.append(time.perf_counter() - start)
    tracker.close()
    return statistics.median(times) * 1e6


def compare(times: list[tuple[bool, float, float]], steps: int) -> dict[str, float]:
    """Medians with and without trackers, and the median ratio of neighbouring bouts."""
    counted = steps - 3
    bouts = [times[start : start + counted] for start in range(0, len(times) - counted + 1, counted)]
    result: dict[str, float] = {"bouts": len(bouts)}
    for name, column in (("wall", 1), ("processor", 2)):
        medians = [(bout[0][0], statistics.median(row[column] for row in bout)) for bout in bouts]
        fastest = [(bout[0][0], min(row[column] for row in bout)) for bout in bouts]
        with_, without = ([value for on, value in medians if on is state] for state in (True, False))
        pairs = [a / b for a, b in zip(with_, without, strict=False)]
        result[f"{name}_ms_with"] = statistics.median(with_) * 1e3
        result[f"{name}_ms_without"] = statistics.median(without) * 1e3
        result[f"{name}_ratio"] = statistics.median(pairs)
        quartiles = statistics.quantiles(pairs, n=4)
        result[f"{name}_ratio_low"], result[f"{name}_ratio_high"] = quartiles[0], quartiles[2]
        best = [min(value for on, value in fastest if on is state) for state in (True, False)]
        result[f"{name}_fastest_ratio"] = best[0] / best[1]
    return result


def main() -> None:
    """Measures, prints the table and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bouts", type=int, default=60, help="bouts of steps, alternately with and without trackers")
    parser.add_argument("--steps", type=int, default=15, help="steps of a bout")
    parser.add_argument("--quick", action="store_true", help="a smoke test; the numbers mean little")
    options = parser.parse_args()
    if options.quick:
        options.bouts, options.steps = 4, 6
    torch.set_num_threads(1)
    Busy.steps, Busy.bouts, Busy.size = options.steps, options.bouts, matrix_size()
    with tempfile.TemporaryDirectory() as folder:
        total = 6 + options.bouts * options.steps  # the last steps let the trackers finish
        unisono.train(
            Busy, max_steps=total, output_dir=f"{folder}/run", track="wandb,mlflow", track_offline=True, num_epochs=None
        )
        logged = len((Path(folder) / "run" / "metrics.jsonl").read_text().splitlines())
        stored = next(Path(folder).glob("run/mlruns/*/*/metrics/loss"))
        assert logged == total == len(stored.read_text().splitlines()), "each step once, with all pauses"
        board = tensorboard_us(Path(folder, "tb"), 200 if options.quick else 5000)
    result = {
        "command": shlex.join(["python", "benchmarks/trackers.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(["unisono", "torch", "wandb", "mlflow-skinny", "tensorboard"]),
        "steps": len(Busy.times),
        "step_ms": STEP_MS,
        "limit": LIMIT,
        **compare(Busy.times, options.steps),
        "tensorboard_us": board,
        "tensorboard_share": board / (STEP_MS * 1e3),
    }
    table = table_of(result)
    print(table)
    if not options.quick:
        (HERE / "results" / "trackers.json").write_text(json.dumps(result, indent=2) + "\n")
        (HERE / "results" / "trackers.md").write_text(table)


def table_of(result: dict[str, Any]) -> str:
    """The results as Markdown."""
    rows = []
    for name, title in (("wall", "time of a step"), ("processor", "processor time of the training process")):
        low, high = result[f"{name}_ratio_low"], result[f"{name}_ratio_high"]
        ratio, met = result[f"{name}_ratio"], "met" if result[f"{name}_ratio"] <= 1 + LIMIT else "missed"
        rows.append(
            f"| {title} | {result[f'{name}_ms_without']:.2f} ms | {result[f'{name}_ms_with']:.2f} ms | "
            f"{ratio:.4f} ({low:.4f} to {high:.4f}) | {result[f'{name}_fastest_ratio']:.4f} | {met} |"
        )
    share = result["tensorboard_share"]
    return "\n".join(
        [
            "# Overhead of trackers",
            "",
            *depends_on(result),
            "",
            f"W&B and MLflow, both offline, in processes of their own; {result['steps']} steps in {result['bouts']} "
            "bouts, each step logged.",
            "The ratio is the median over pairs of neighbouring bouts, with the quartiles in brackets. Target: at most "
            "1.005.",
            "",
            "| | without trackers | with trackers | ratio | ratio of the fastest steps | target |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            f"TensorBoard, in the training process: {result['tensorboard_us']:.0f} µs per logged step, "
            f"{share:.2%} of a step of {STEP_MS:.0f} ms: target 0.5 % {'met' if share <= LIMIT else 'missed'}.",
            "",
        ]
    )


if __name__ == "__main__":
    main()
