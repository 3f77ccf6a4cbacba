"""Overhead of the status that every rank writes for `unisono watch`, in a real run with steps of about 20 ms.

One process trains by `unisono.train`. In turns of some seconds, its status thread writes nothing, writes as usual, or
writes as usual while a real `unisono watch` reads the folder. Every turn is compared with the one of its round in which
nothing was written: the elapsed time per step, and the CPU time of the process per step, which other programs on the
machine disturb far less. The CPU time of the thread itself is measured too.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from machine import depends_on, machine, versions, without_folders
from torch import Tensor, nn

import unisono
from unisono import Loss, Recipe
from unisono.observe.watch.rank_status import RankStatus

HERE = Path(__file__).resolve().parent
TARGET = 0.005
TURNS = ("nothing written", "written", "written and watched")


ASKS = """
import sys, time, urllib.request
while True:
    urllib.request.urlopen(sys.argv[1]).read()
    time.sleep(1)
"""


class Turns:
    """Changes what the status thread does every few seconds, and notes the time of each step."""

    def __init__(self, rounds: int, seconds: float) -> None:
        self.rounds, self.seconds = rounds, seconds
        self.steps: list[dict[str, dict[str, float]]] = []
        """Of each round and turn: number of steps, seconds and CPU seconds."""
        self.writes: list[float] = []
        self.watcher: subprocess.Popen[bytes] | None = None
        self.has_stopped = False
        self._began, self._kind = 0.0, -1
        self._last = (0.0, 0.0)
        write = RankStatus.write

        def measured(status: RankStatus, *, ended: bool = False) -> None:
            if ended or self.kind != TURNS[0]:
                before = time.thread_time()
                write(status, ended=ended)
                self.writes.append(time.thread_time() - before)

        RankStatus.write = measured  # type: ignore[method-assign]

    @property
    def kind(self) -> str:
        return TURNS[max(self._kind, 0) % len(TURNS)]

    def step(self, folder: Path) -> None:
        """Called at the start of each step."""
        now, cpu = time.perf_counter(), time.process_time()
        if self._kind >= 0:
            turn = self.steps[-1][self.kind]
            turn["steps"] += 1
            turn["seconds"] += now - self._last[0]
            turn["cpu_seconds"] += cpu - self._last[1]
        self._last = now, cpu
        if now - self._began >= self.seconds and (folder / "run.json").exists():
            self._began, self._kind = now, self._kind + 1
            if self._kind % len(TURNS) == 0:
                self.steps.append({kind: {"steps": 0, "seconds": 0.0, "cpu_seconds": 0.0} for kind in TURNS})
            self._watch(folder)
            self._last = time.perf_counter(), time.process_time()

    @property
    def is_over(self) -> bool:
        return self._kind >= self.rounds * len(TURNS)

    def _watch(self, folder: Path) -> None:
        if self.watcher is None:
            command = [sys.executable, "-m", "unisono", "watch", str(folder), "--web", "0"]
            self.watcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            assert self.watcher.stdout is not None
            self.address = self.watcher.stdout.readline().decode().strip()
            self.reader = subprocess.Popen([sys.executable, "-c", ASKS, f"{self.address}state"])
        awake = signal.SIGCONT if self.kind == TURNS[2] else signal.SIGSTOP
        for process in (self.reader, self.watcher):
            os.kill(process.pid, awake)

    def close(self) -> None:
        for process in (self.reader, self.watcher):
            assert process is not None
            os.kill(process.pid, signal.SIGCONT)
            process.kill()
            process.wait()


TURN: Turns


class Twenty(Recipe):
    """A model whose step takes about 20 ms on a CPU core."""

    defaults = {"num_workers": 0, "log_every": 10, "tensorboard": False, "max_steps": 10**7, "batch_size": 1}
    width = 512
    repeats = 1

    def model(self) -> nn.Module:
        return nn.Linear(self.width, self.width)

    def dataset(self, split: str) -> Any:
        return torch.utils.data.TensorDataset(torch.randn(64, 16, self.width)) if split == "train" else None

    def loss(self, model: nn.Module, batch: list[Tensor], noise: object) -> Loss:
        TURN.step(FOLDER)
        if TURN.is_over and not TURN.has_stopped:
            TURN.has_stopped = True  # a second signal would stop the run without a checkpoint
            os.kill(os.getpid(), signal.SIGINT)
        [x] = batch
        with torch.no_grad():
            for _ in range(self.repeats):
                x = torch.tanh(x @ self.weight)
        return Loss(model(x).square().sum(), x.numel())

    @property
    def weight(self) -> Tensor:
        if not hasattr(self, "_weight"):
            self._weight = torch.randn(self.width, self.width) / self.width**0.5
        return self._weight


FOLDER: Path


def calibrate(step_s: float) -> int:
    """The number of matrix products that take about this much CPU time on this machine."""
    x, weight, times = torch.randn(16, Twenty.width), torch.randn(Twenty.width, Twenty.width), []
    for _ in range(50):
        begin = time.process_time()
        for _ in range(20):
            torch.tanh(x @ weight)
        times.append((time.process_time() - begin) / 20)
    return max(1, round(0.9 * step_s / statistics.median(times)))


def result_of(turns: Turns) -> dict[str, Any]:
    """Compares the turns of each round with the one in which nothing was written."""
    rounds = [each for each in turns.steps if all(each[kind]["steps"] >= 5 for kind in TURNS)]
    rows: dict[str, Any] = {}
    for kind in TURNS:
        rows[kind] = {}
        for name, unit in (("step", "seconds"), ("cpu", "cpu_seconds")):
            means = [each[kind][unit] / each[kind]["steps"] for each in rounds]
            bases = [each[TURNS[0]][unit] / each[TURNS[0]]["steps"] for each in rounds]
            ratios = [mean / base for mean, base in zip(means, bases, strict=True)]
            low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
            rows[kind] |= {
                f"{name}_ms": 1e3 * statistics.median(means),
                f"{name}_ratio": statistics.median(ratios),
                f"{name}_quartiles": [low, high],
            }
    write_s = statistics.mean(turns.writes)
    return {
        "rows": rows,
        "rounds": len(rounds),
        "write_cpu_ms": 1e3 * write_s,
        "cpu_fraction": write_s / 1.0,
        "target": TARGET,
        "met": write_s / 1.0 <= TARGET,
    }


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    met = "met" if result["met"] else "missed"
    lines = [
        "# Overhead of unisono watch",
        "",
        *depends_on(result),
        f"- Measured: one run of one rank on one CPU thread, {result['rounds']} rounds of three turns of "
        f"{result['seconds']:g} s each; ratios are medians over the rounds",
        "",
        "| status | ms per step | ratio | quartiles | CPU ms per step | ratio | quartiles |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, row in result["rows"].items():
        cells = []
        for name in ("step", "cpu"):
            low, high = row[f"{name}_quartiles"]
            cells += [f"{row[f'{name}_ms']:.2f}", f"{row[f'{name}_ratio']:.4f}", f"{low:.4f} – {high:.4f}"]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    step_ms = result["rows"]["written"]["step_ms"]
    lines += [
        "",
        f"One write takes {result['write_cpu_ms']:.3f} ms of CPU time once per second: {result['cpu_fraction']:.3%} of "
        f"the time of a rank. Target {TARGET:.1%}: {met}. With a load of {result['machine']['load_average']} on "
        f"{result['machine']['cores']} cores, a step took {step_ms:.0f} ms, so one write fell on {1e3 / step_ms:.1f} "
        "steps; the ratios contain that, and the noise of the machine.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    global TURN, FOLDER
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=12, help="rounds of three turns (default 12)")
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds per turn (default 4)")
    parser.add_argument("--quick", action="store_true", help="smoke test; the numbers mean little")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder for the JSON and the table")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds = 2, 1.5
    torch.set_num_threads(1)
    TURN = Turns(options.rounds, options.seconds)
    Twenty.repeats = calibrate(0.02)
    before = {"date": time.strftime("%Y-%m-%d %H:%M:%S %Z"), "machine": machine()}
    with tempfile.TemporaryDirectory(prefix="watch-") as folder:
        FOLDER = Path(folder, "run")
        try:
            unisono.train(Twenty, output_dir=str(FOLDER), gpus="0")
        finally:
            TURN.close()
    result = {
        **before,
        "command": shlex.join(["python", "benchmarks/watch.py", *without_folders(sys.argv[1:])]),
        "versions": versions(["unisono", "torch", "rich"]),
        "seconds": options.seconds,
        **result_of(TURN),
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "watch.json").write_text(json.dumps(result, indent=2) + "\n")
    (options.output / "watch.md").write_text(table(result))
    print(table(result))


if __name__ == "__main__":
    main()
