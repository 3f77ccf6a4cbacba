"""How long training stands still for a checkpoint: saved in the background, beside saved on the spot.

    PYTHONPATH=src python benchmarks/save_stall.py --parameters 1e9 [--device cuda] [--rounds 5] [--quick]

A model of so many parameters is trained in float32 with AdamW (three numbers to save per parameter), and saved by
unisono's own `Saver` to a real disk, forced to it and read back. In turns: steps alone; a save in the background while
steps go on until it is done; a save on the spot. The stall of the background save is the time its call takes plus what
the steps beside it took longer than steps alone. The first save of a run is shown by itself, without and with the
page-locked memory made in advance.
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
    """A loop with a real forward and backward pass and the whole optimizer state on the device."""

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
        """Seconds that so many steps take."""
        self.wait()
        start = time.perf_counter()
        for _ in range(number):
            self.step()
        self.wait()
        return time.perf_counter() - start

    def settle(self, seconds: float) -> None:
        """Finds out how many steps make a bout of a tenth of a second, and how many bouts so many seconds."""
        self.steps(3)
        step_s = self.steps(3) / 3
        self.bout = max(1, round(0.1 / step_s))
        self.bouts = max(2, round(seconds / (self.bout * step_s)))

    def alone(self) -> float:
        """Seconds that a step takes when nothing is saved; in the same bouts as beside a save."""
        return sum(self.steps(self.bout) for _ in range(self.bouts)) / (self.bout * self.bouts)

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {f"model.{name}": parameter for name, parameter in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            found |= {f"optimizer.{name}.{slot}": value for slot, value in self.optimizer.state[parameter].items()}
        return found


class Saves:
    """Saves of one training into one folder, one checkpoint kept."""

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
        """Seconds that the call of `save` takes; the device is idle, so that it does not wait for earlier steps."""
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
        """Seconds of a save on the spot."""
        seconds = self.call(self.on_the_spot)
        self.finish(self.on_the_spot)
        return seconds

    def background(self, saver: Saver, step_s: float) -> dict[str, float]:
        """A save in the background with steps beside it until it is done."""
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
        torch._C._host_emptyCache()  # or the page-locked memory of that saver would be used again
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
    saves.synchronous()  # it allocates memory of its own
    found: list[dict[str, float]] = []
    for turn in range(rounds):
        one = {"step_s": training.alone()}
        # Which of the two is first takes turns too.
        if turn % 2:
            one["synchronous_s"] = saves.synchronous()
        one |= saves.background(saver, one["step_s"])
        # The machine may be slower or faster by now: steps alone once more, and the mean of both.
        one["slower_s"] -= one["steps"] * (training.alone() - one["step_s"]) / 2
        one["stall_s"] = one["call_s"] + max(0.0, one["slower_s"])
        if not turn % 2:
            one["synchronous_s"] = saves.synchronous()
        found.append(one)
        print(
            f"  round {turn + 1}/{rounds}: " + "  ".join(f"{key} {value:.3f}" for key, value in one.items()), flush=True
        )
    medians = {key: statistics.median(one[key] for one in found) for key in found[0]}
    return {
        "parameters": training.parameters,
        "bytes": saves.bytes,
        "rounds": found,
        "medians": medians,
        "first": first,
        "stall_share": medians["stall_s"] / medians["synchronous_s"],
        "call_share": medians["call_s"] / medians["synchronous_s"],
    }


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    medians, first = result["medians"], result["first"]
    share = f"{100 * result['stall_share']:.2f} % of the save on the spot"
    rows = {
        "save on the spot: training stands still for": f"{medians['synchronous_s']:.3f} s",
        "save in the background: the call takes": f"{medians['call_s']:.3f} s",
        "… and steps beside it take longer, together, by": f"{medians['slower_s']:.3f} s",
        "**stall under background saving**": f"**{medians['stall_s']:.3f} s, {share}**",
        "until the background save is complete": f"{medians['whole_s']:.3f} s, {medians['steps']:.0f} steps meanwhile",
        "a step alone": f"{1000 * medians['step_s']:.2f} ms",
        "first save of a run, nothing prepared: the call takes": f"{first['not_warm_s']:.3f} s",
        "first save of a run, memory made in advance: the call takes": f"{first['warm_s']:.3f} s",
        "making that memory, in the background": f"{first['warm_up_s']:.3f} s",
        "… slows the steps beside it, together, by": f"{first['slower_while_warming_up_s']:.3f} s",
    }
    return "\n".join(
        [
            "# How long training stands still for a checkpoint",
            "",
            *depends_on(result),
            f"- Model: {result['parameters']:,} parameters, float32, AdamW, on {result['device']}; a checkpoint has "
            f"{result['bytes'] / 1e9:.2f} GB",
            f"- Measured: {len(result['rounds'])} rounds in turns (steps alone, save in the background with steps "
            "until it is complete, save on the spot); medians. Both force the files to disk and read them back.",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {text} |" for name, text in rows.items()),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parameters", type=float, default=2e7, help="how many, e.g. 1e9")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to save to (default: the system's folder for such files)")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder for the JSON and the table")
    parser.add_argument("--quick", action="store_true", help="seconds only: does it work? The numbers mean little")
    given = parser.parse_args()
    facts = machine()
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device("cpu")
    training = Training(given.parameters, device)
    print(f"{training.parameters:,} parameters on {device}", flush=True)
    with tempfile.TemporaryDirectory(prefix="save-stall-", dir=given.folder) as folder:
        found = measure(training, Path(folder), 1 if given.quick else given.rounds, 0.1 if given.quick else 2.0)
    result = {
        "machine": facts,
        "versions": versions(["unisono", "torch", "safetensors"]),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "command": shlex.join(["python", "benchmarks/save_stall.py", *without_places(sys.argv[1:])]),
        "device": given.device,
        **found,
    }
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / "save_stall.json").write_text(json.dumps(result, indent=1) + "\n")
    (given.output / "save_stall.md").write_text(table(result))
    print(table(result))


def without_places(words: list[str]) -> list[str]:
    """The command without folders on somebody's machine."""
    places = {"--output", "--folder"}
    return [word for before, word in zip(["", *words], words, strict=False) if not {before, word} & places]


if __name__ == "__main__":
    main()
