"""Measures how long a checkpoint stalls training, for a background save and for a synchronous save.

    PYTHONPATH=src python benchmarks/save_stall.py --parameters 1e9 [--device cuda] [--rounds 5] [--quick]

A model with that many parameters is trained in float32 with AdamW (three numbers to save per parameter). unisono's own
`Saver` writes it to a real disk, syncs it and reads it back. Three measurements take turns: steps without a save; a
background save with steps until it is complete; a synchronous save. The stall of a background save is the time of its
call plus the slow-down of the steps that run meanwhile. The first save of a run is measured separately, with and
without pinned memory that is allocated in advance.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from machine import depends_on, machine, versions
from torch import nn

from unisono.checkpoint.save import Saver

HERE = Path(__file__).resolve().parent
LAYERS = 24


class Training:
    """A training loop with a real forward and backward pass and the full optimizer state on the device."""

    def __init__(self, parameters: float, device: torch.device) -> None:
        torch.manual_seed(0)
        width = max(8, round(math.sqrt(parameters / LAYERS)))
        layers = [nn.Linear(width, width, bias=False) for _ in range(LAYERS)]
        self.device = device
        self.model = nn.Sequential(
            *(layer for pair in zip(layers, [nn.GELU()] * LAYERS, strict=True) for layer in pair)
        )
        self.model.to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batch = torch.randn(512 if device.type == "cuda" else 8, width, device=device)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())

    def step(self) -> None:
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def steps(self, number: int) -> float:
        """Returns the seconds that this many steps take."""
        self.wait()
        start = time.perf_counter()
        for _ in range(number):
            self.step()
        self.wait()
        return time.perf_counter() - start

    def settle(self, seconds: float) -> None:
        """Chooses the number of steps per bout (a tenth of a second) and the number of bouts."""
        self.steps(3)
        step_s = self.steps(3) / 3
        self.bout = max(1, round(0.1 / step_s))
        self.bouts = max(2, round(seconds / (self.bout * step_s)))

    def alone(self) -> float:
        """Seconds per step without a save, timed in the same bouts as during a save."""
        return sum(self.steps(self.bout) for _ in range(self.bouts)) / (self.bout * self.bouts)

    def tensors(self) -> dict[str, torch.Tensor]:
        tensors = {f"model.{name}": parameter for name, parameter in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            tensors |= {f"optimizer.{name}.{slot}": value for slot, value in self.optimizer.state[parameter].items()}
        return tensors


class Saves:
    """Saves the state of a training loop to one folder, which keeps one checkpoint."""

    def __init__(self, training: Training, folder: Path) -> None:
        self.training, self.folder, self.number, self.bytes = training, folder, 0, 0
        self.on_the_spot = self.saver(asynchronous=False)

    def saver(self, *, asynchronous: bool) -> Saver:
        return Saver(
            self.folder,
            rank=0,
            world=1,
            group=None,
            keep_last=1,
            asynchronous=asynchronous,
            identity={"recipe": "save_stall"},
        )

    def call(self, saver: Saver) -> float:
        """Seconds that the call of `save` takes on an idle device, so that it does not wait for earlier steps."""
        self.training.wait()
        self.number += 1
        start = time.perf_counter()
        saver.save(self.number, self.training.tensors(), {})
        return time.perf_counter() - start

    def finish(self, saver: Saver) -> None:
        for result in saver.wait():
            if result.error is not None:
                raise SystemExit(f"a save failed: {result.error}")
            self.bytes = result.bytes

    def synchronous(self) -> float:
        """Seconds of a synchronous save."""
        seconds = self.call(self.on_the_spot)
        self.finish(self.on_the_spot)
        return seconds

    def background(self, saver: Saver, step_s: float) -> dict[str, float]:
        """Times a background save, with training steps until the save is complete."""
        start = time.perf_counter()
        call = self.call(saver)
        number, steps_s = 0, 0.0
        while saver.is_saving or number == 0:
            steps_s += self.training.steps(self.training.bout)
            number += self.training.bout
        whole = time.perf_counter() - start
        self.finish(saver)
        return {"call_s": call, "slower_s": steps_s - number * step_s, "steps": number, "whole_s": whole}


def measure(training: Training, folder: Path, rounds: int, alone_s: float) -> dict[str, Any]:
    training.settle(alone_s)
    saves = Saves(training, folder)
    first: dict[str, float] = {}
    saver = saves.saver(asynchronous=True)
    first["not_warm_s"] = saves.call(saver)
    saves.finish(saver)
    del saver
    if training.device.type == "cuda":
        torch._C._host_emptyCache()  # frees the pinned memory of that saver, which would be reused otherwise
    saver = saves.saver(asynchronous=True)
    before = training.alone()
    start = time.perf_counter()
    saver.warm_up(training.tensors())
    steps = []
    while saver.is_warming_up:
        steps.append(training.steps(1))
    first["warm_up_s"] = time.perf_counter() - start
    first["slower_while_warming_up_s"] = sum(steps) - len(steps) * before
    first["warm_s"] = saves.call(saver)
    saves.finish(saver)
    saves.synchronous()  # allocates its own memory
    measured_rounds: list[dict[str, float]] = []
    for turn in range(rounds):
        one = {"step_s": training.alone()}
        # The order of the two alternates.
        if turn % 2:
            one["synchronous_s"] = saves.synchronous()
        one |= saves.background(saver, one["step_s"])
        # The speed of the machine may have changed: time steps alone again and take the mean of both.
        one["slower_s"] -= one["steps"] * (training.alone() - one["step_s"]) / 2
        one["stall_s"] = one["call_s"] + max(0.0, one["slower_s"])
        if not turn % 2:
            one["synchronous_s"] = saves.synchronous()
        measured_rounds.append(one)
        print(
            f"  round {turn + 1}/{rounds}: " + "  ".join(f"{key} {value:.3f}" for key, value in one.items()), flush=True
        )
    medians = {key: statistics.median(one[key] for one in measured_rounds) for key in measured_rounds[0]}
    return {
        "parameters": training.parameters,
        "bytes": saves.bytes,
        "rounds": measured_rounds,
        "medians": medians,
        "first": first,
        "stall_share": medians["stall_s"] / medians["synchronous_s"],
        "call_share": medians["call_s"] / medians["synchronous_s"],
    }


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    medians, first = result["medians"], result["first"]
    share = f"{100 * result['stall_share']:.2f} % of the synchronous save"
    rows = {
        "synchronous save: stall": f"{medians['synchronous_s']:.3f} s",
        "background save: time of the call": f"{medians['call_s']:.3f} s",
        "… total slow-down of the steps meanwhile": f"{medians['slower_s']:.3f} s",
        "**background save: stall**": f"**{medians['stall_s']:.3f} s, {share}**",
        "background save: time until it is complete": f"{medians['whole_s']:.3f} s, {medians['steps']:.0f} steps "
        "meanwhile",
        "a step alone": f"{1000 * medians['step_s']:.2f} ms",
        "first save of a run, nothing prepared: time of the call": f"{first['not_warm_s']:.3f} s",
        "first save of a run, memory allocated in advance: time of the call": f"{first['warm_s']:.3f} s",
        "allocating that memory, in the background": f"{first['warm_up_s']:.3f} s",
        "… total slow-down of the steps during that": f"{first['slower_while_warming_up_s']:.3f} s",
    }
    return "\n".join(
        [
            "# How long a checkpoint stalls training",
            "",
            *depends_on(result),
            f"- Model: {result['parameters']:,} parameters, float32, AdamW, on {result['device']}; a checkpoint has "
            f"{result['bytes'] / 1e9:.2f} GB",
            f"- Measured: {len(result['rounds'])} rounds, interleaved (steps alone; a background save with steps "
            "until it is complete; a synchronous save); medians. Both saves sync the files to disk and read them back.",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {text} |" for name, text in rows.items()),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parameters", type=float, default=2e7, help="number of parameters, e.g. 1e9")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="folder to save to (default: the system's temporary folder)")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder for the JSON and the table")
    parser.add_argument("--quick", action="store_true", help="smoke test of a few seconds; the numbers mean little")
    options = parser.parse_args()
    facts = machine()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    training = Training(options.parameters, device)
    print(f"{training.parameters:,} parameters on {device}", flush=True)
    with tempfile.TemporaryDirectory(prefix="save-stall-", dir=options.folder) as folder:
        measurements = measure(
            training, Path(folder), 1 if options.quick else options.rounds, 0.1 if options.quick else 2.0
        )
    result = {
        "machine": facts,
        "versions": versions(["unisono", "torch", "safetensors"]),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "command": shlex.join(["python", "benchmarks/save_stall.py", *without_places(sys.argv[1:])]),
        "device": options.device,
        **measurements,
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "save_stall.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.output / "save_stall.md").write_text(table(result))
    print(table(result))


def without_places(words: list[str]) -> list[str]:
    """The command without paths of this machine."""
    places = {"--output", "--folder"}
    return [word for before, word in zip(["", *words], words, strict=False) if not {before, word} & places]


if __name__ == "__main__":
    main()
