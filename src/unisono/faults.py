"""Injects faults into the ranks of a run, to test how the user's setup, or unisono itself, recovers from them.

`--inject "kill@rank1:step7"` kills rank 1 while it computes step 7. Separate several faults by commas; each has the
form

    kind@rankR:stepS[:phase][:2.5s][:x3]

Without `rankR` the fault happens on every rank. `phase` is the point of the step (see PHASES), `2.5s` the duration of a
hang or slowdown, `x3` the number of times. By default, a fault happens once per run. It does not happen again if a
restart repeats the step, because the rank records the fault in a file in the run folder just before it happens.
"""

from __future__ import annotations

import ctypes
import errno
import math
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import ConfigError

PHASES = ("prepare", "data", "forward", "backward", "reduce", "optimizer", "evaluate", "preview")
"""The points of a step at which a fault can happen, in order."""

SAVE_PHASES = ("save-begin", "save-write", "save-check", "save-commit", "saved")
"""The points of a save at which a fault can happen: before the first write, while shards are written, before they are
read back, before the manifest is written, after the rename that commits the checkpoint."""

_SAVE_KINDS = {"kill-during-save": "save-write", "disk-full": "save-write", "corrupt-save": "saved"}
_KINDS = {
    "kill": "the rank kills itself (SIGKILL)",
    "segfault": "the rank reads address 0",
    "exit": "the rank exits without writing an outcome",
    "error": "the rank raises an exception",
    "sigterm": "the rank receives SIGTERM (also: sigint, sigusr1)",
    "sigint": "",
    "sigusr1": "",
    "oom": "the rank runs out of memory",
    "nan": "the rank's loss is not a number",
    "hang": "the rank makes no progress",
    "slow": "the rank is slower from that step on",
    "kill-worker": "one of the rank's loader workers is killed",
    "kill-during-save": "the rank kills itself while it saves",
    "disk-full": "the disk is full while the rank saves",
    "corrupt-save": "one bit of the rank's saved files is flipped",
}
_PART = re.compile(
    r"rank(?P<rank>\d{1,9})|step(?P<step>\d{1,12})|x(?P<times>[1-9]\d{0,3})|(?P<seconds>\d{1,6}(?:\.\d{1,6})?)s"
    r"|(?P<phase>[a-z-]+)",
    re.ASCII,
)


@dataclass(frozen=True)
class Fault:
    """One fault: what happens, on which rank, at which step. Steps count from 1, as in metrics.jsonl."""

    kind: str
    rank: int | None
    step: int
    phase: str
    seconds: float
    times: int
    text: str  # the fault as the user wrote it

    @property
    def of_save(self) -> bool:
        """Whether the fault happens during a save, namely the first save at or after its step."""
        return self.phase in SAVE_PHASES


def parse(text: str | None) -> list[Fault]:
    """Parses the value of --inject."""
    return [_parse_one(part.strip()) for part in (text or "").split(",") if part.strip()]


def _parse_one(text: str) -> Fault:
    kind, at, where = text.partition("@")
    if kind not in _KINDS or not at:
        kinds = ", ".join(_KINDS)
        raise ConfigError(f"inject: {text!r} is not kind@rankR:stepS, for instance kill@rank1:step7; kinds are {kinds}")
    fields: dict[str, str] = {}
    for part in where.split(":"):
        match = _PART.fullmatch(part)
        if match is None or match.lastgroup in fields:
            raise ConfigError(f"inject: cannot read {part!r} in {text!r}; write kind@rankR:stepS[:phase][:2.5s][:x3]")
        assert match.lastgroup is not None
        fields[match.lastgroup] = match[match.lastgroup]
    phase = fields.get("phase", _SAVE_KINDS.get(kind, "data" if kind == "kill-worker" else "forward"))
    allowed = SAVE_PHASES if kind in _SAVE_KINDS else PHASES
    if phase not in allowed:
        raise ConfigError(f"inject: {text!r} has no phase {phase!r}; for {kind} use {', '.join(allowed)}")
    if kind == "nan" and phase != "forward":
        raise ConfigError(f"inject: {text!r}: the loss is always computed in forward; remove the phase")
    if "seconds" in fields and kind not in ("hang", "slow"):
        raise ConfigError(f"inject: {text!r}: only hang and slow have a duration; remove {fields['seconds']}s")
    if phase == "prepare":  # `prepare` has no step
        fields["step"] = "0"
    elif int(fields.get("step", 0)) < 1:
        raise ConfigError(f"inject: {text!r} needs a step, counted from 1, for instance {kind}@rank0:step7")
    return Fault(
        kind=kind,
        rank=int(fields["rank"]) if "rank" in fields else None,
        step=int(fields["step"]),
        phase=phase,
        seconds=float(fields.get("seconds", 0.5 if kind == "slow" else math.inf)),
        times=int(fields.get("times", 1)),
        text=text,
    )


class Injector:
    """Triggers the faults of this rank at the points of a run that call `at`."""

    def __init__(
        self,
        faults: Sequence[Fault] = (),
        rank: int = 0,
        memory: Path | None = None,
        record: Callable[[Fault, int], None] | None = None,
    ) -> None:
        """`memory` is the folder in which past faults are recorded. The injector calls `record` just before a fault."""
        self._faults = [fault for fault in faults if fault.rank in (None, rank)]
        self._rank, self._memory, self._record = rank, memory, record

    def at(self, phase: str, step: int, saved: Path | None = None) -> None:
        """Triggers the faults of `phase` in `step`; `saved` is the checkpoint folder that a save has just written."""
        for fault in self._faults:
            if fault.phase == phase and self._due(fault, step) and fault.kind != "nan":
                self._trigger(fault, step, saved)

    def makes_loss_nan(self, step: int) -> bool:
        """Whether this rank's loss in `step` has to become NaN."""
        due = [fault for fault in self._faults if fault.kind == "nan" and fault.step == step]
        return any([self._claim(fault, step) for fault in due])  # claims all matching faults, not only the first

    def _due(self, fault: Fault, step: int) -> bool:
        if fault.phase == "prepare":  # `prepare` runs before any step, so the step number does not matter
            return True
        from_its_step_on = fault.of_save or fault.kind == "slow"
        return step >= fault.step if from_its_step_on else step == fault.step

    def _trigger(self, fault: Fault, step: int, saved: Path | None) -> None:
        if fault.kind == "slow":
            time.sleep(fault.seconds)
        elif self._claim(fault, step):
            _EFFECTS[fault.kind](fault, saved)

    def _claim(self, fault: Fault, step: int) -> bool:
        """Records in a file that the fault happens now; returns False if it has already happened `times` times."""
        if self._memory is None:
            return False
        self._memory.mkdir(parents=True, exist_ok=True)
        for number in range(1, fault.times + 1):
            try:
                name = f"{re.sub(r'[^a-z0-9.-]', '-', fault.text)}-rank{self._rank}-{number}"
                (self._memory / name).touch(exist_ok=False)
            except FileExistsError:
                continue
            if self._record is not None:
                self._record(fault, step)
            return True
        return False


Effect = Callable[[Fault, Path | None], object]


def _signal(number: int) -> Effect:
    return lambda fault, saved: os.kill(os.getpid(), number)


def _error(fault: Fault, saved: Path | None) -> None:
    raise RuntimeError(f"injected: {fault.text}")


def _out_of_memory(fault: Fault, saved: Path | None) -> None:
    import torch

    raise torch.OutOfMemoryError(f"out of memory. Tried to allocate 1.00 GiB. (injected: {fault.text})")


def _hang(fault: Fault, saved: Path | None) -> None:
    end = time.monotonic() + fault.seconds
    while time.monotonic() < end:
        time.sleep(min(60.0, max(0.0, end - time.monotonic())))


def _kill_worker(fault: Fault, saved: Path | None) -> None:
    workers = sorted(child.pid for child in multiprocessing.active_children() if child.pid is not None)
    if workers:
        os.kill(workers[0], signal.SIGKILL)


def _disk_full(fault: Fault, saved: Path | None) -> None:
    raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (injected: {fault.text})")


def _corrupt(fault: Fault, saved: Path | None) -> None:
    """Flips one bit in the middle of the largest file."""
    assert saved is not None
    file = max((path for path in saved.iterdir() if path.is_file()), key=lambda path: path.stat().st_size)
    with open(file, "r+b") as data:
        # Every rank flips a different bit, because flipping the same bit twice would restore it.
        data.seek(file.stat().st_size // 2 + int(os.environ.get("RANK", "0")))
        byte = data.read(1)[0]
        data.seek(-1, os.SEEK_CUR)
        data.write(bytes([byte ^ 1]))


_EFFECTS: dict[str, Effect] = {
    "kill": _signal(signal.SIGKILL),
    "kill-during-save": _signal(signal.SIGKILL),
    "sigterm": _signal(signal.SIGTERM),
    "sigint": _signal(signal.SIGINT),
    "sigusr1": _signal(signal.SIGUSR1),
    "segfault": lambda fault, saved: ctypes.string_at(0),
    "exit": lambda fault, saved: os._exit(13),
    "error": _error,
    "oom": _out_of_memory,
    "hang": _hang,
    "kill-worker": _kill_worker,
    "disk-full": _disk_full,
    "corrupt-save": _corrupt,
}
