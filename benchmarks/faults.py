"""Injects hundreds of faults into real processes and checks that the loss curve does not change.

    python benchmarks/faults.py --output benchmarks/results        # all of it, about 40 minutes on 2 cores
    python benchmarks/faults.py --quick                            # a few of each kind

Each row of the table trains the same small run with other faults and compares it with an undisturbed run: the final
weights, optimizer state and average (bit for bit, or up to rounding if the arithmetic differs), the loss of every step,
and the samples of every step (none lost, none twice). After each run, no process may be left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from machine import machine, versions

from unisono.checkpoint.find import list_steps
from unisono.checkpoint.load import load_whole
from unisono.faults import SAVE_PHASES

HERE = Path(__file__).resolve().parent
RECIPE = f"{HERE / 'faults_recipe.py'}:Patient"
MARK = "UNISONO_FAULTS_MARK"
STEPS = 40
PHASES = ("data", "forward", "backward", "reduce", "optimizer")
RUN = ["--global_batch_size", "12", "--batch_size", "6", "--max_steps", str(STEPS), "--save_every", "4"]
RUN += ["--deterministic", "--eval_every", "15", "--max_restarts", "100", "--seed", "5"]
ROUNDING = 1e-10
IN_FLOAT64 = ("--disable_dropout", "--dtype", "float64")  # keeps differences by rounding small
EXACT = 0.0


class Failed(Exception):
    """A run ended in an unexpected way."""


@dataclass
class Row:
    """One line of the table."""

    name: str
    faults: int = 0
    tolerance: float = EXACT
    difference: float = 0.0
    samples_right: bool = True
    left: int = 0
    recoveries: list[float] = field(default_factory=list)  # seconds from a kill to the first new step
    seconds: float = 0.0
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error and self.difference <= self.tolerance and self.samples_right and self.left == 0


class Rehearsal:
    """Starts runs, and stores the undisturbed reference runs for comparison."""

    def __init__(self, root: Path, quick: bool) -> None:
        self.root, self.quick = root, quick
        self._references: dict[tuple[str, ...], Path] = {}
        self._making_references = threading.Lock()
        self._of_row = threading.local()

    def begin_row(self, number: int) -> None:
        """Starts a row with its own random generator, independent of other rows."""
        self._of_row.random = random.Random(number)

    @property
    def random(self) -> random.Random:
        return self._of_row.random

    def start(self, folder: Path, world: int, *flags: str) -> subprocess.Popen[str]:
        environ = {**os.environ, MARK: self.mark(folder), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        words = ["train", RECIPE, "--nproc", str(world), *RUN, "--output_dir", str(folder), *flags]
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.with_suffix(".log"), "a") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "unisono", *words],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def end(self, process: subprocess.Popen[str], folder: Path, *expected: int, seconds: float = 600) -> int:
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            for pid in self.pids(folder):
                os.kill(pid, signal.SIGKILL)
            raise Failed(f"hangs: still running after {seconds:.0f} s") from None
        if code not in (expected or (0,)):
            log = folder.with_suffix(".log").read_text().splitlines()
            raise Failed(f"exit code {code}: {log[-1] if log else ''}")
        return code

    def run(self, folder: Path, world: int, *flags: str, expected: int = 0) -> None:
        self.end(self.start(folder, world, *flags), folder, expected)

    def mark(self, folder: Path) -> str:
        return f"{self.root.name}-{folder.name}"

    def pids(self, folder: Path, rank: int | None = None) -> list[int]:
        """The live processes of a run, or only those of one rank (without its loader workers)."""
        pids = []
        for path in Path("/proc").iterdir():
            if not path.name.isdecimal():
                continue
            try:
                environ = (path / "environ").read_bytes().split(b"\0")
                command = (path / "cmdline").read_bytes()
            except OSError:
                continue
            if f"{MARK}={self.mark(folder)}".encode() not in environ:
                continue
            if rank is None or (f"RANK={rank}".encode() in environ and b"unisono.engine.start.rank" in command):
                pids.append(int(path.name))
        return sorted(pids)

    def reference(self, world: int, *flags: str) -> Path:
        """The undisturbed run with this world size."""
        key = (str(world), *flags)
        with self._making_references:
            if key not in self._references:
                folder = self.root / f"reference-{len(self._references)}"
                self.run(folder, world, *flags)
                self._references[key] = folder
            return self._references[key]

    def new(self, name: str) -> Path:
        return self.root / f"{name}-{uuid.uuid4().hex[:6]}"

    def compare(self, row: Row, folder: Path, reference: Path) -> None:
        """Compares a disturbed run with its reference and adds the result to its row."""
        ours, theirs = weights(folder), weights(reference)
        if ours.keys() != theirs.keys():
            raise Failed("the checkpoints contain different tensors")
        row.difference = max(
            row.difference, *(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)
        )
        a, b = steps(folder), steps(reference)
        if [line["step"] for line in a] != list(range(1, STEPS + 1)):
            raise Failed("metrics.jsonl does not contain each step once")
        for mine, other in zip(a, b, strict=True):
            same = all(mine[key] == other[key] for key in ("samples", "print", "squares", "count"))
            row.samples_right = row.samples_right and same
            if mine["loss"] != other["loss"]:
                row.difference = max(row.difference, abs(float(mine["loss"]) - float(other["loss"])))
        time.sleep(0.2)
        row.left += len(self.pids(folder))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    newest = list_steps(folder / "checkpoints")[-1][1]
    return load_whole(newest, "")


def lines(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def steps(folder: Path) -> list[dict]:
    return [line for line in lines(folder, "metrics.jsonl") if "loss" in line]


def events(folder: Path, kind: str) -> list[dict]:
    return [event for event in lines(folder, "events.jsonl") if event["kind"] == kind]


def kill_at_points(rehearsal: Rehearsal, world: int, rank: int, times: int) -> Row:
    """Kills a rank repeatedly in one run, at random steps and phases, including saves."""
    row = Row(f"kill rank {rank} of {world} at {times} random points of steps and saves")
    faults = []
    for step in sorted(rehearsal.random.sample(range(2, STEPS), times)):
        if rehearsal.random.random() < 0.4:
            faults.append(f"kill-during-save@rank{rank}:step{step}:{rehearsal.random.choice(SAVE_PHASES)}")
        else:
            faults.append(f"kill@rank{rank}:step{step}:{rehearsal.random.choice(PHASES)}")
    folder = rehearsal.new("points")
    rehearsal.run(folder, world, "--inject", ",".join(faults))
    row.faults = happened(folder)
    rehearsal.compare(row, folder, rehearsal.reference(world))
    return row


def happened(folder: Path) -> int:
    return len(list((folder / ".injected").iterdir()))


def kill_at_instants(rehearsal: Rehearsal, world: int, rank: int, times: int) -> Row:
    """Sends SIGKILL at random instants: while starting, training, saving, evaluating."""
    row = Row(f"kill rank {rank} of {world} at {times} random instants (SIGKILL from outside)")
    flags = ["--pace", "0.03"]
    reference = rehearsal.reference(world, *flags)
    while row.faults < times:
        folder = rehearsal.new("instants")
        process = rehearsal.start(folder, world, *flags)
        while row.faults < times and process.poll() is None:
            time.sleep(rehearsal.random.uniform(0.0, 7.0))
            for pid in rehearsal.pids(folder, rank)[:1]:
                if process.poll() is None:
                    os.kill(pid, signal.SIGKILL)
                    row.faults += 1
        rehearsal.end(process, folder)
        rehearsal.compare(row, folder, reference)
    return row


def kill_launcher(rehearsal: Rehearsal, times: int) -> Row:
    """Kills the launcher. Its ranks must end too, and the same command must continue the run."""
    row = Row(f"kill the launcher {times} times (SIGKILL), start again")
    flags = ["--pace", "0.03"]
    reference, folder = rehearsal.reference(2, *flags), rehearsal.new("launcher")
    while row.faults < times:
        process = rehearsal.start(folder, 2, *flags)
        time.sleep(rehearsal.random.uniform(4.0, 8.0))
        if process.poll() is not None:
            break
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        row.faults += 1
        deadline = time.monotonic() + 10
        while (left := rehearsal.pids(folder)) and time.monotonic() < deadline:
            time.sleep(0.1)
        row.left += len(left)
    rehearsal.run(folder, 2, *flags)
    rehearsal.compare(row, folder, reference)
    return row


def deaths(rehearsal: Rehearsal, times: int) -> Row:
    kinds = ["segfault", "exit", "error"] * times
    row = Row(f"segfault, silent exit, exception: {times} times each, on either rank")
    faults = [f"{kind}@rank{i % 2}:step{3 + 3 * i}:{PHASES[i % 5]}" for i, kind in enumerate(kinds)]
    folder = rehearsal.new("deaths")
    rehearsal.run(folder, 2, "--inject", ",".join(faults))
    row.faults = happened(folder)
    rehearsal.compare(row, folder, rehearsal.reference(2))
    return row


def out_of_memory(rehearsal: Rehearsal, phase: str, runs: int) -> Row:
    in_place = phase != "optimizer"
    row = Row(f"out of memory on 1 of 2 ranks, {phase} ({'in place' if in_place else 'restart'})", tolerance=ROUNDING)
    for number in range(runs):
        first = rehearsal.random.randint(1, 3) if in_place else rehearsal.random.randint(8, 12)
        faults = f"oom@rank{number % 2}:step{first}:{phase},oom@rank{(number + 1) % 2}:step{first + 2}:{phase}"
        folder = rehearsal.new("oom")
        # All steps are guarded; the next row tests the fast path.
        rehearsal.run(folder, 2, "--inject", faults, "--guard_steps", "-1", *IN_FLOAT64)
        oom_events = events(folder, "oom")
        if len(oom_events) != 2 or any(event["in_place"] != in_place for event in oom_events):
            raise Failed(f"not {'in place' if in_place else 'by restart'}: {oom_events}")
        row.faults += happened(folder)
        rehearsal.compare(row, folder, rehearsal.reference(2, *IN_FLOAT64))
    return row


def out_of_memory_fast(rehearsal: Rehearsal, runs: int) -> Row:
    row = Row("out of memory on 1 of 2 ranks, backward of a fast step (restart)", tolerance=ROUNDING)
    for number in range(runs):
        fault = f"oom@rank{number % 2}:step{rehearsal.random.randint(10, 30)}:backward"
        folder = rehearsal.new("fast")
        rehearsal.run(folder, 2, "--inject", fault, *IN_FLOAT64)
        if [event["in_place"] for event in events(folder, "oom")] != [False]:
            raise Failed("not by restart")
        row.faults += happened(folder)
        rehearsal.compare(row, folder, rehearsal.reference(2, *IN_FLOAT64))
    return row


def not_a_number(rehearsal: Rehearsal, times: int) -> Row:
    row = Row(f"nan loss on one rank, {times} times (reference: nan on the other rank)")
    chosen = sorted(rehearsal.random.sample(range(2, STEPS), times))
    reference, folder = rehearsal.new("nan0"), rehearsal.new("nan1")
    rehearsal.run(reference, 2, "--inject", ",".join(f"nan@rank0:step{step}" for step in chosen))
    rehearsal.run(folder, 2, "--inject", ",".join(f"nan@rank1:step{step}" for step in chosen))
    skipped = [event["step"] for event in events(folder, "nan")]
    if skipped != chosen:
        raise Failed(f"skipped {skipped}, not {chosen}")
    row.faults = happened(folder)
    rehearsal.compare(row, folder, reference)
    return row


def hangs(rehearsal: Rehearsal, times: int) -> Row:
    row = Row(f"a rank hangs, {times} times (hang_timeout 3 s)")
    # The steps are not consecutive: otherwise both ranks would hang at once, and only one would be reported.
    chosen = sorted(rehearsal.random.sample(range(2, STEPS, 3), times))
    faults = [f"hang@rank{i % 2}:step{step}:{PHASES[i % 5]}" for i, step in enumerate(chosen)]
    folder = rehearsal.new("hang")
    rehearsal.run(folder, 2, "--inject", ",".join(faults), "--hang_timeout", "3")
    if len(events(folder, "hang")) != times:
        raise Failed(f"{len(events(folder, 'hang'))} of {times} hangs detected")
    row.faults = happened(folder)
    rehearsal.compare(row, folder, rehearsal.reference(2))
    return row


def signals(rehearsal: Rehearsal, names: list[str], to: str) -> Row:
    row = Row(f"{', '.join(names)} to {to}: stops with a checkpoint (75), then resumed")
    flags = ["--pace", "0.2"]  # long enough for a signal to arrive before the end, even on a busy machine
    reference, folder = rehearsal.reference(2, *flags), rehearsal.new("signal")
    for name in names:
        process = rehearsal.start(folder, 2, *flags)
        before = len(steps(folder)) if (folder / "metrics.jsonl").exists() else 0
        wait_until(lambda before=before: len(steps(folder)) >= min(before + 3, STEPS - 4), folder / "metrics.jsonl")
        target = process.pid if to == "the launcher" else rehearsal.pids(folder, rank=1)[0]
        os.kill(target, getattr(signal, name))
        rehearsal.end(process, folder, 75)
        row.faults += 1
    rehearsal.run(folder, 2, *flags)
    rehearsal.compare(row, folder, reference)
    return row


def wait_until(condition: Callable[[], bool], file: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not (file.exists() and condition()):
        if time.monotonic() > deadline:
            raise Failed("no progress")
        time.sleep(0.05)


def damage(rehearsal: Rehearsal, quick: bool) -> Row:
    """Damages each file of the newest checkpoint: flips a bit, truncates it, deletes it."""
    row = Row("newest checkpoint damaged: each file with a flipped bit, truncated, deleted")
    half = rehearsal.new("half")
    rehearsal.run(half, 2, "--max_steps", "26", "--lr_schedule", "constant")
    newest = list_steps(half / "checkpoints")[-1][1]
    for number, name in enumerate(sorted(path.name for path in newest.iterdir())):
        for how, harm in HARM.items():
            if quick and (number > 1 or how != "a flipped bit"):
                continue
            folder = rehearsal.new("damaged")
            shutil.copytree(half, folder)
            harm(folder / "checkpoints" / newest.name / name)
            rehearsal.run(folder, 2)
            aside = list((folder / "checkpoints").glob(f"{newest.name}.bad-*"))
            if len(aside) != 1:
                raise Failed(f"{name}, {how}: not renamed")
            row.faults += 1
            rehearsal.compare(row, folder, rehearsal.reference(2))
    return row


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


HARM: dict[str, Callable[[Path], object]] = {
    "a flipped bit": flip,
    "cut short": lambda file: os.truncate(file, file.stat().st_size - 1),
    "gone": lambda file: file.unlink(),
}


def saves(rehearsal: Rehearsal, times: int) -> Row:
    row = Row(f"disk full or a bit flipped after a save, {times} times, then a kill")
    faults = []
    for number in range(times):
        step, kind = 4 + 4 * number, ("disk-full", "corrupt-save")[number % 2]
        faults += [f"{kind}@rank{number % 2}:step{step}", f"kill@rank1:step{step + 3}"]
    folder = rehearsal.new("saves")
    rehearsal.run(folder, 2, "--inject", ",".join(faults), "--pace", "0.03")
    row.faults = happened(folder)
    rehearsal.compare(row, folder, rehearsal.reference(2, "--pace", "0.03"))
    return row


def workers(rehearsal: Rehearsal, times: int) -> Row:
    row = Row(f"a loader worker is killed, {times} times")
    faults = [f"kill-worker@rank{i % 2}:step{3 + 3 * i}" for i in range(times)]
    folder = rehearsal.new("workers")
    rehearsal.run(folder, 2, "--num_workers", "2", "--inject", ",".join(faults))
    row.faults = len(events(folder, "worker_died"))
    if row.faults != times:
        raise Failed(f"{row.faults} of {times} deaths detected")
    rehearsal.compare(row, folder, rehearsal.reference(2))
    return row


def worlds(rehearsal: Rehearsal, pairs: list[tuple[int, int]]) -> Row:
    row = Row("killed on N ranks, resumed on M: " + ", ".join(f"{n}→{m}" for n, m in pairs), tolerance=ROUNDING)
    for before, after in pairs:
        folder = rehearsal.new("worlds")
        fault = f"kill@rank{before - 1}:step{rehearsal.random.randint(6, 34)}"
        rehearsal.run(
            folder,
            before,
            "--inject",
            fault,
            "--max_restarts",
            "0",
            *IN_FLOAT64,
            expected=3 if before > 1 else -9,
        )
        rehearsal.run(folder, after, *IN_FLOAT64)
        row.faults += 1
        rehearsal.compare(row, folder, rehearsal.reference(before, *IN_FLOAT64))
    return row


def recovery(rehearsal: Rehearsal, times: int) -> Row:
    """Measures the time from the kill of a rank to the first new step, on this process's clock."""
    row = Row(f"time to recover, {times} kills")
    flags = ["--pace", "0.1"]
    reference, folder = rehearsal.reference(2, *flags), rehearsal.new("recovery")
    process = rehearsal.start(folder, 2, *flags)
    metrics = folder / "metrics.jsonl"
    for _ in range(times):
        starts = number_of_starts(folder)
        wait_until(lambda starts=starts: number_of_starts(folder) > starts - (starts > 0), metrics)
        time.sleep(rehearsal.random.uniform(0.5, 1.0))
        before = number_of_starts(folder)
        os.kill(rehearsal.pids(folder, rank=1)[0], signal.SIGKILL)
        killed = time.monotonic()
        # run.json records the new start when its first step is complete.
        wait_until(lambda before=before: number_of_starts(folder) > before, metrics)
        row.recoveries.append(time.monotonic() - killed)
        row.faults += 1
    rehearsal.end(process, folder)
    rehearsal.compare(row, folder, reference)
    return row


def number_of_starts(folder: Path) -> int:
    try:
        return len(json.loads((folder / "run.json").read_text())["starts"])
    except (OSError, ValueError):
        return 0


def plan(rehearsal: Rehearsal) -> Iterator[Callable[[], Row]]:
    """The rows in order; with --quick only a few faults of each kind."""
    quick = rehearsal.quick
    every = [(n, m) for n in (1, 2, 3) for m in (1, 2, 3)]
    for world, rank in [(2, 1)] if quick else [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)]:
        yield lambda world=world, rank=rank: kill_at_points(
            rehearsal, world, rank, 4 if quick else 20 if world == 2 else 10
        )
    if not quick:
        for rank in (0, 1):
            yield lambda rank=rank: kill_at_instants(rehearsal, 2, rank, 20)
        yield lambda: kill_launcher(rehearsal, 5)
        yield lambda: deaths(rehearsal, 4)
    for phase in ("forward", "backward", "optimizer"):
        if not (quick and phase == "forward"):
            yield lambda phase=phase: out_of_memory(rehearsal, phase, 1 if quick else 4)
    if not quick:
        yield lambda: out_of_memory_fast(rehearsal, 4)
    yield lambda: not_a_number(rehearsal, 2 if quick else 10)
    yield lambda: hangs(rehearsal, 1 if quick else 10)
    yield lambda: signals(rehearsal, ["SIGTERM"] if quick else ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"], "one rank")
    if not quick:
        yield lambda: signals(rehearsal, ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"], "the launcher")
    yield lambda: damage(rehearsal, quick)
    yield lambda: saves(rehearsal, 2 if quick else 6)
    if not quick:
        yield lambda: workers(rehearsal, 6)
    yield lambda: worlds(rehearsal, [(1, 3), (2, 1)] if quick else every)
    if not quick:
        yield lambda: recovery(rehearsal, 5)


def carry_out(rehearsal: Rehearsal, number: int, work: Callable[[], Row]) -> Row:
    rehearsal.begin_row(number)
    started = time.monotonic()
    try:
        row = work()
    except (Failed, OSError, ValueError, IndexError) as error:
        row = Row("failed", error=f"{type(error).__name__}: {error}")
    row.seconds = time.monotonic() - started
    print(
        f"{'ok  ' if row.ok else 'LOST'} {row.faults:3d} faults {row.seconds:6.1f} s  {row.name}  {row.error}",
        flush=True,
    )
    return row


def table(rows: list[Row], results: dict) -> str:
    total, lost = sum(row.faults for row in rows), sum(not row.ok for row in rows)
    recoveries = [seconds for row in rows for seconds in row.recoveries]
    out = ["# Faults", "", f"**{total} faults, {lost} runs lost.** `{results['command']}`, {results['when']}; "]
    out[-1] += f"{results['machine']['processor']}, {results['machine']['cores']} cores, torch "
    out[-1] += f"{results['versions']['torch']}, {results['seconds'] / 60:.0f} minutes."
    out += [
        "",
        "| fault | count | largest difference from the undisturbed run | tolerance | samples | processes left | ok |",
    ]
    out += ["|---|---|---|---|---|---|---|"]
    for row in rows:
        bar = "bit-identical" if row.tolerance == EXACT else f"rounding, {row.tolerance:.0e}"
        shown = row.error or ("0" if row.difference == 0 else f"{row.difference:.1e}")
        right = "each once" if row.samples_right else "WRONG"
        out.append(
            f"| {row.name} | {row.faults} | {shown} | {bar} | {right} | {row.left} | {'yes' if row.ok else 'NO'} |"
        )
    out += [
        "",
        "The difference is the largest over weights, optimizer state, EMA and the loss of every step.",
    ]
    if recoveries:
        out += [
            "",
            f"Time to recover (a rank killed → first new step, 2 CPU ranks): median "
            f"{statistics.median(recoveries):.1f} s of {len(recoveries)} "
            f"({min(recoveries):.1f}–{max(recoveries):.1f}), most of it the start of Python and torch.",
        ]
    return "\n".join([*out, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few faults of each kind")
    parser.add_argument("--output", type=Path, help="folder for faults.json and faults.md")
    parser.add_argument("--only", default="", help="run only rows whose function name contains this")
    parser.add_argument("--at_once", type=int, default=1, help="number of rows to run in parallel")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    options = parser.parse_args()
    signal.signal(
        signal.SIGHUP, signal.SIG_DFL
    )  # under nohup the runs would inherit the ignored SIGHUP and ignore it too
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="unisono-faults-") as temporary:
        root = options.keep or Path(temporary)
        rehearsal = Rehearsal(root.resolve(), options.quick)
        works = [w for w in plan(rehearsal) if not options.only or any(options.only in n for n in w.__code__.co_names)]
        with ThreadPoolExecutor(options.at_once) as pool:
            rows = list(pool.map(lambda job: carry_out(rehearsal, *job), enumerate(works)))
    results = {
        "command": shlex.join(["python", "benchmarks/faults.py", *sys.argv[1:]]),
        "when": time.strftime("%Y-%m-%d"),
        "seconds": time.monotonic() - started,
        "machine": machine(),
        "versions": versions(["torch"]),
        "rows": [vars(row) | {"ok": row.ok} for row in rows],
    }
    print("\n" + table(rows, results))
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "faults.json").write_text(json.dumps(results, indent=1) + "\n")
        (options.output / "faults.md").write_text(table(rows, results))
    return 0 if rows and all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
