"""Starts the runs of benchmarks/nccl.py on ranks that share one GPU, and compares them with a run of one rank."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from unisono.checkpoint.find import list_steps, step_folder, validate
from unisono.checkpoint.load import load_whole
from unisono.cluster.backend import SLOW

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PROBE, CONTRAST = (f"{HERE / 'nccl_recipe.py'}:{name}" for name in ("Probe", "Contrast"))
STEPS = 14
# The reference has one micro-batch on one rank; other runs must agree although they sum in another order.
RUN = [
    "--global_batch_size",
    "13",
    "--batch_size",
    "13",
    "--lr_schedule",
    "constant",
    "--seed",
    "5",
    "--preview_every",
    "-1",
]
IN_FLOAT64 = ["--dtype", "float64"]
ROUNDING = 1e-10
"""Largest difference in float64 of weights, and of losses and metrics (relative to the value if that exceeds 1)."""
PATIENCE_S = 240.0


class Failed(Exception):
    """A run ended in an unexpected way, or left something unexpected behind."""


class OutOfTime(Exception):
    """The time limit of this call (--seconds) is exceeded."""


class Runs:
    """Starts runs in a separate folder, and stops all runs when the time is over."""

    def __init__(self, root: Path, backend: str, seconds: float) -> None:
        self.root, self.backend = root, backend
        self._end = time.monotonic() + seconds
        self._references: dict[tuple[str, ...], Path] = {}
        self._making_references = threading.Lock()

    @property
    def seconds_left(self) -> float:
        return self._end - time.monotonic()

    def new(self, name: str) -> Path:
        """Returns the path of a new run folder."""
        return self.root / f"{name}-{uuid.uuid4().hex[:6]}"

    # --- start ---

    def train(self, folder: Path, num_ranks: int, *flags: str, recipe: str = PROBE, steps: int = STEPS) -> str:
        """Trains to the end on `num_ranks` ranks; returns the output of the run."""
        words = ["train", recipe, *RUN, "--max_steps", str(steps), "--output_dir", str(folder), *flags]
        printed = self.unisono([*words, *self._devices(num_ranks)], folder)
        if self.backend == "nccl" and num_ranks > 1 and SLOW not in printed:
            raise Failed("the run did not warn that its ranks share a GPU over NCCL")
        self._check_nccl(folder, num_ranks)
        return printed

    def verify(self, num_ranks: int, *flags: str, recipe: str = PROBE) -> float:
        """Compares 1 rank with `num_ranks` ranks; returns the largest difference that `unisono verify` printed."""
        folder = self.new("verify")
        words = ["verify", recipe, *RUN, "--ranks", f"1,{num_ranks}", *flags, "--backend", self.backend]
        printed = self.unisono([*words, *(["--gpus", "0"] if self.backend == "gloo" else [])], folder)
        self._check_nccl(folder, num_ranks)
        if "Same run" not in printed:
            raise Failed("verify did not say that the runs are the same")
        return largest_difference_in(printed, num_ranks)

    def reference(self, *flags: str, recipe: str = PROBE, steps: int = STEPS) -> Path:
        """The undisturbed run of one rank, with a checkpoint of every step; trained on the first call only."""
        key = (recipe, str(steps), *flags)
        with self._making_references:
            if key not in self._references:
                folder = self.new("reference")
                every = ["--save_every", "1", "--keep_last", "0", *flags]
                self.train(folder, 1, *every, recipe=recipe, steps=steps)
                self._references[key] = folder
            return self._references[key]

    def unisono(self, words: Sequence[str], folder: Path) -> str:
        """Runs a command and returns its output. Raises Failed if it fails, and OutOfTime if no time is left."""
        if self.seconds_left <= 0:
            raise OutOfTime
        folder.parent.mkdir(parents=True, exist_ok=True)
        log = folder.with_suffix(".log")
        with log.open("a") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "unisono", *words],
                env=self._environ(folder),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        limit = min(PATIENCE_S, self.seconds_left)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the ranks of the process end with it
            process.wait()
            if limit < PATIENCE_S:
                raise OutOfTime from None
            raise Failed(f"still running after {PATIENCE_S:.0f} s") from None
        printed = log.read_text(errors="replace")
        if code != 0:
            raise Failed(f"exit code {code}: {_last_line(printed)}")
        return printed

    def _devices(self, num_ranks: int) -> list[str]:
        if self.backend == "gloo":
            return ["--gpus", "0"] if num_ranks == 1 else ["--nproc", str(num_ranks)]
        shared = ["--nproc", str(num_ranks), "--backend", "nccl"]
        return ["--gpus", "1", *(shared if num_ranks > 1 else [])]

    def _environ(self, folder: Path) -> dict[str, str]:
        paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT / "src"), str(HERE)]))
        environ = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        if self.backend == "gloo":
            return environ | {"CUDA_VISIBLE_DEVICES": ""}
        # NCCL's own log, one file per process, shows that NCCL carried the data.
        log = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": f"{_nccl_log(folder)}.%p"}
        return environ | log

    def _check_nccl(self, folder: Path, num_ranks: int) -> None:
        """Raises if NCCL's own log does not show a communicator on each rank."""
        if self.backend != "nccl" or num_ranks == 1:
            return
        logs = folder.parent.glob(f"{_nccl_log(folder).name}.*")
        joined = sum("Init COMPLETE" in file.read_text(errors="replace") for file in logs)
        if joined < num_ranks:
            raise Failed(f"NCCL's own log shows communicators in {joined} processes, expected {num_ranks}")

    # --- compare ---

    def compare(self, folder: Path, reference: Path, steps: int = STEPS) -> float:
        """The largest difference of a run from the reference: losses and metrics of every step, and the last state."""
        if [number for number, _ in list_steps(folder / "checkpoints")][-1:] != [steps]:
            raise Failed(f"the last checkpoint is not that of step {steps}")
        return largest([compare_steps(folder, reference, steps), compare_weights(folder, reference, steps)])


def compare_steps(folder: Path, reference: Path, steps: int) -> float:
    """The largest difference of a loss or a metric in steps 1 to `steps`; each step must be recorded once."""
    ours, theirs = step_lines(folder), step_lines(reference)[:steps]
    if [line["step"] for line in ours] != list(range(1, steps + 1)):
        raise Failed(f"metrics.jsonl does not contain each of {steps} steps once")
    names = [name for name in theirs[0] if name in ("loss", "print", "squares", "long", "samples", "count")]
    pairs = [(one[name], other[name]) for one, other in zip(ours, theirs, strict=True) for name in names]
    return largest(_difference(one, other) for one, other in pairs)


def compare_weights(folder: Path, reference: Path, step: int) -> float:
    """The largest difference of the weights and the optimizer's state at a step."""
    ours, theirs = (load_whole(run / "checkpoints" / step_folder(step), "") for run in (folder, reference))
    if ours.keys() != theirs.keys() or not ours:
        raise Failed("the checkpoints contain different tensors")
    return largest(
        float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours if ours[name].numel()
    )


def compare_evaluations(folder: Path, reference: Path) -> float:
    """The largest difference of a metric of any evaluation."""
    ours, theirs = ([line for line in lines(run) if "eval/loss" in line] for run in (folder, reference))
    if not ours or [line["step"] for line in ours] != [line["step"] for line in theirs]:
        raise Failed("the runs did not evaluate at the same steps")
    names = [name for name in theirs[0] if name.startswith("eval/") and name != "eval/seconds"]
    return largest(
        _difference(one[name], other[name]) for one, other in zip(ours, theirs, strict=True) for name in names
    )


def check_all_checkpoints(folder: Path, steps: int) -> None:
    """Raises unless every step has a checkpoint whose bytes match its manifest."""
    saved = list_steps(folder / "checkpoints")
    if [number for number, _ in saved] != list(range(1, steps + 1)):
        raise Failed(f"{len(saved)} checkpoints, expected {steps}")
    for _, path in saved:
        if (reason := validate(path)) is not None:
            raise Failed(f"{path.name}: {reason}")


def largest_difference_in(printed: str, num_ranks: int) -> float:
    """The largest difference in the table of `unisono verify`, over the runs with `num_ranks` ranks."""
    rows = [[cell.strip() for cell in line.split("│")] for line in printed.splitlines() if "│" in line]
    ours = [row for row in rows if len(row) > 7 and row[1] == str(num_ranks)]
    if not ours or any(row[7] != "same" for row in ours):
        raise Failed(f"verify's table has no runs of {num_ranks} ranks that are all the same")
    # In 16 bit verify compares losses only; it prints the other differences nevertheless.
    columns = slice(4, 5) if "are not compared in 16 bit" in printed else slice(4, 7)
    return max(float(cell) for row in ours for cell in row[columns])


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def step_lines(folder: Path) -> list[dict[str, Any]]:
    return [line for line in lines(folder) if "loss" in line]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in lines(folder, "events.jsonl") if event["kind"] == kind]


def largest(differences: Iterable[float]) -> float:
    """The largest difference; infinite if one of them is nan, which `max` would ignore."""
    return max(math.inf if math.isnan(each) else each for each in differences)


def expect(condition: bool, otherwise: Callable[[], str]) -> None:
    if not condition:
        raise Failed(otherwise())


def _difference(one: object, other: object) -> float:
    """The difference relative to the larger of 1 and the second value; nan equals nan."""
    a, b = (float(value) for value in (one, other))  # type: ignore[arg-type]
    return 0.0 if a == b or (math.isnan(a) and math.isnan(b)) else abs(a - b) / max(1.0, abs(b))


def _nccl_log(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.nccl")


def _last_line(printed: str) -> str:
    """The line of a run's output that most likely gives the reason of its failure."""
    messages = [line for line in printed.strip().splitlines() if re.match("unisono: ", line)]
    return (messages or printed.strip().splitlines() or ["no output"])[-1][:300]
