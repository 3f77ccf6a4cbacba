"""Compares the optimizers by memory, time and held-out loss, and checks that ranks and shards give the same run.

    python benchmarks/optimizers.py [--steps 300] [--output FOLDER]

A small GPT learns to predict the bytes of this project's documentation, from the same initial weights and the same
samples with each optimizer. Then `unisono verify` runs each optimizer on 1, 2 and 3 ranks, with ddp and fsdp.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, SIZES
from machine import depends_on, machine, versions
from torch import Tensor, nn
from torch.utils.data import Dataset

import unisono
from unisono import Loss, Recipe
from unisono.checkpoint.load import load_whole

HERE = Path(__file__).resolve().parent
RATES = {  # learning rates from a small sweep; the three kinds of AdamW share one rate
    "adamw": 1e-3,
    "adamw8bit": 1e-3,
    "adamw4bit": 1e-3,
    "adafactor": 1e-2,
    "muon": 1e-2,
    "prodigy": 1.0,
    "schedule_free_adamw": 3e-3,
}
WITHOUT_SCHEDULE = ("schedule_free_adamw",)


class Bytes(Dataset[Tensor]):
    """A dataset of pieces of the documentation; every tenth piece is held out."""

    def __init__(self, sequence: int, *, held_out: bool) -> None:
        pages = sorted((HERE.parent / "docs").glob("*.md"))
        text = torch.frombuffer(bytearray(b"".join(page.read_bytes() for page in pages)), dtype=torch.uint8)
        pieces = text[: len(text) // (sequence + 1) * (sequence + 1)].view(-1, sequence + 1)
        is_held_out = torch.arange(len(pieces)) % 10 == 0
        self.pieces = pieces[is_held_out if held_out else ~is_held_out].long()

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> Tensor:
        return self.pieces[index]


class Text(Recipe):
    """A recipe that predicts the next byte of the documentation."""

    defaults = {"batch_size": 16, "num_workers": 0, "tensorboard": False, "log_every": 10, "warmup_steps": 20}

    @dataclass
    class Config:
        layers: int = 2
        """Number of blocks."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.size = replace(SIZES["tiny"], layers=config.layers, width=96, heads=4, vocabulary=256)

    def model(self) -> nn.Module:
        return GPT(self.size)

    def dataset(self, split: str) -> Dataset[Tensor]:
        return Bytes(self.size.sequence, held_out=split == "eval")

    def loss(self, model: nn.Module, batch: Tensor, noise: Any) -> Loss:
        count = len(batch) * self.size.sequence
        return Loss(model(batch[:, :-1], batch[:, 1:]) * count, count)


def learned(name: str, steps: int, folder: Path) -> dict[str, Any]:
    """Trains with one optimizer; returns held-out loss, bytes of state per weight, and milliseconds per step."""
    schedule = {} if name in WITHOUT_SCHEDULE else {"lr_schedule": "cosine"}
    settings = {"optimizer": name, "learning_rate": RATES[name], "max_steps": steps, "eval_every": steps, **schedule}
    run = unisono.train(Text, **settings, gpus="0", save_every=0, output_dir=str(folder))
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    times = sorted(line["step_ms"] for line in lines if "step_ms" in line)
    checkpoint = max((run.folder / "checkpoints").glob("step_*"))
    state, weights = load_whole(checkpoint, "optimizer."), load_whole(checkpoint, "model.")
    num_weights = sum(weight.numel() for weight in weights.values())
    return {
        "eval_loss": run.last["eval/loss"],
        "bytes_per_weight": sum(slot.nbytes for slot in state.values()) / num_weights,
        "step_ms": times[len(times) // 2],
        "num_weights": num_weights,
    }


def verified(name: str) -> dict[str, Any]:
    """Whether `unisono verify` reports the same run on 1, 2 and 3 ranks."""
    words = ["verify", f"{__file__}:Text", "--ranks", "1,2,3", "--strategies", "ddp,fsdp", "--optimizer", name]
    words += ["--batch_size", "6", "--learning_rate", str(RATES[name]), "--warmup_steps", "0"]
    done = subprocess.run([sys.executable, "-m", "unisono", *words], capture_output=True, text=True)
    return {"same": done.returncode == 0 and "Same run" in done.stdout}


def page(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    plain = result["optimizers"]["adamw"]
    rows = [
        f"| `{name}` | {each['learning_rate']:g} | {each['eval_loss']:.3f} | {each['bytes_per_weight']:.2f} | "
        f"{each['step_ms'] / plain['step_ms']:.2f} | {'same' if each['same'] else 'DIFFERENT'} |"
        for name, each in result["optimizers"].items()
    ]
    return "\n".join(
        [
            "# Optimizers",
            "",
            *depends_on(result),
            f"- Model: a GPT of {plain['num_weights']:,} weights, {result['steps']} steps of 16 pieces of text, "
            "float32; cosine schedule (none for schedule_free_adamw).",
            "- *State*: bytes of optimizer state per weight. *Time*: median step relative to adamw on the CPU; the "
            "runs do not take turns, so a fifth more or less is noise. "
            "*Ranks*: `unisono verify` on 1, 2 and 3 ranks with ddp and fsdp, in float64.",
            "",
            "| optimizer | learning rate | held-out loss | state | time | ranks |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps per run")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder for optimizers.json and .md")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "machine": machine(),
        "versions": versions(["torch", "numpy"]),
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "command": f"python benchmarks/optimizers.py --steps {options.steps}",
        "steps": options.steps,
        "optimizers": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, rate in RATES.items():
            measured = {"learning_rate": rate, **learned(name, options.steps, Path(folder, name)), **verified(name)}
            result["optimizers"][name] = measured
            print(name, measured, flush=True)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "optimizers.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.output / "optimizers.md").write_text(page(result))


if __name__ == "__main__":
    main()
