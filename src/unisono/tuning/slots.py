"""Divides the devices of this machine between trials that run at the same time."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from unisono.config.resolve import Resolved
from unisono.devices import choose, locked_gpus, num_cpu_cores, visible_gpus
from unisono.engine.start.device_plan import check_ranks
from unisono.settings import Settings


@dataclass(frozen=True)
class Slot:
    """The devices of one trial."""

    number: int
    flags: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)
    devices: str = ""


def slots_of(resolved: Resolved, parallel: int) -> tuple[list[Slot], list[str]]:
    """Returns a slot for each of the `parallel` trials, and notes for the user.

    The GPUs of `--gpus` are divided evenly. If there are fewer GPUs than trials, several trials share a GPU. Trials on
    the CPU share the cores.
    """
    launch = resolved.build(Settings).launch
    check_ranks(launch)
    on_cpu = launch.nproc is not None and not resolved.explicit("gpus")
    gpus = []
    if not on_cpu:
        seen = visible_gpus()
        choice = choose(launch.gpus, seen, min_memory_gb=launch.min_memory_gb, locked=locked_gpus(seen))
        gpus = list(choice.gpus)
    if not gpus:
        return _on_cpu(launch.nproc or 1, parallel)
    if parallel == 1:
        return [Slot(0, devices=f"GPU {', '.join(str(gpu.index) for gpu in gpus)}")], []
    each = len(gpus) // parallel
    slots = []
    for number in range(parallel):
        mine = gpus[number * each : (number + 1) * each] or [gpus[number % len(gpus)]]
        names = ", ".join(str(gpu.index) for gpu in mine)
        flag = f"--gpus={','.join(gpu.uuid for gpu in mine)},"
        slots.append(Slot(number, (flag,), devices=f"GPU {names}"))
    notes = []
    if not each:
        notes.append(f"{parallel} trials share {len(gpus)} GPUs; --parallel {len(gpus)} gives each trial its own")
    elif len(gpus) % parallel:
        notes.append(f"{len(gpus) % parallel} of {len(gpus)} GPUs are idle; --parallel {len(gpus)} uses all")
    return slots, notes


def _on_cpu(ranks: int, parallel: int) -> tuple[list[Slot], list[str]]:
    cores = num_cpu_cores()
    environ = {}
    if parallel * ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
        environ["OMP_NUM_THREADS"] = str(max(1, cores // (parallel * ranks)))
    notes = []
    if parallel * ranks > cores:
        notes.append(f"{parallel} trials of {ranks} CPU ranks on {cores} cores: slower than fewer at a time")
    devices = f"{ranks} CPU rank{'s' * (ranks > 1)}"
    return [Slot(number, environ=environ, devices=devices) for number in range(parallel)], notes
