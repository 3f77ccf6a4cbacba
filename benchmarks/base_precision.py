"""Compares storage formats of frozen weights by size, by the loss of a LoRA trained on them, and across ranks.

    python benchmarks/base_precision.py [--steps 200] [--output FOLDER]

A small GPT learns to predict the bytes of this project's documentation. Then, for each format, the GPT's linear layers
are frozen in that format and a LoRA learns the project's source code, always from the same initial LoRA and the same
samples. Runs with other seeds show how far apart two runs are without quantisation. Finally, `unisono verify` runs each
format on 1, 2 and 3 ranks.
Speed on a GPU, where fp8 products would be used, is not measured here.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, SIZES
from machine import depends_on, machine, versions
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import Dataset

import unisono
from unisono import Loss, Recipe
from unisono.checkpoint.load import load_whole
from unisono.quantize.formats import FORMATS

HERE = Path(__file__).resolve().parent
SIZE = replace(SIZES["tiny"], layers=3, width=128, heads=4)
PRETRAINING_STEPS, EVALUATIONS, SEEDS = 400, 10, (1, 2, 3)
TEXTS = {"docs": "docs/*.md", "code": "src/unisono/**/*.py"}


@cache  # all runs train on the same bytes, even if the files change meanwhile
def read(text: str) -> bytes:
    """Reads the first bytes of a text."""
    return b"".join(file.read_bytes() for file in sorted(HERE.parent.glob(TEXTS[text])))[: 10 * 2**16]


class Bytes(Dataset[Tensor]):
    """A dataset of pieces of text files; every tenth piece is held out."""

    def __init__(self, text: str, *, held_out: bool) -> None:
        data = read(text)
        length = SIZE.sequence + 1
        pieces = torch.frombuffer(bytearray(data[: len(data) // length * length]), dtype=torch.uint8).view(-1, length)
        is_held_out = torch.arange(len(pieces)) % 10 == 0
        self.pieces = pieces[is_held_out][:256].long() if held_out else pieces[~is_held_out].long()

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> Tensor:
        return self.pieces[index]


class Pretraining(Recipe):
    """A recipe that predicts the next byte of a text."""

    defaults = {"batch_size": 16, "num_workers": 0, "tensorboard": False, "log_every": 1, "warmup_steps": 20}

    @dataclass
    class Config:
        text: str = "docs"
        """The text to train on: docs or code."""

    def model(self) -> nn.Module:
        return GPT(SIZE)

    def dataset(self, split: str) -> Dataset[Tensor]:
        return Bytes(self.config.text, held_out=split == "eval")

    def loss(self, model: nn.Module, batch: Tensor, noise: Any) -> Loss:
        count = len(batch) * SIZE.sequence
        return Loss(model(batch[:, :-1], batch[:, 1:], "sum"), count)


class Lora(nn.Module):
    """A frozen linear layer plus the trained product of two small matrices, which is 0 at first."""

    def __init__(self, base_layer: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down = nn.Linear(base_layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base_layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 2 * self.up(self.down(x))  # type: ignore[no-any-return]


class Adapter(Pretraining):
    """A recipe that trains a LoRA on the blocks of a pretrained GPT."""

    @dataclass
    class Config(Pretraining.Config):
        text: str = "code"
        base: str | None = None
        """File with the weights of the GPT; without a file, the weights are random."""

    def model(self) -> nn.Module:
        model = GPT(SIZE)
        if self.config.base:
            model.load_state_dict(load_file(self.config.base), strict=False)  # the tied head is not in the file
        model.requires_grad_(False)
        for block in model.blocks:
            for name, layer in list(block.named_children()):
                if isinstance(layer, nn.Linear):
                    setattr(block, name, Lora(layer))
        return model


def trained(folder: Path, **settings: Any) -> dict[str, Any]:
    """Trains a LoRA; returns its training losses, its held-out losses, and the size of its frozen layers in bytes."""
    run = unisono.train(Adapter, **settings, gpus="0", save_every=0, learning_rate=2e-3, output_dir=str(folder))
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    weights = load_whole(max((run.folder / "checkpoints").glob("step_*")), "model.")
    frozen = [tensor for name, tensor in weights.items() if ".base_layer." in name]
    return {
        "losses": [line["loss"] for line in lines if "loss" in line],
        "eval_losses": [line["eval/loss"] for line in lines if "eval/loss" in line],
        "bytes": sum(tensor.nbytes for tensor in frozen),
    }


def distance(one: list[float], two: list[float]) -> float:
    """The mean absolute difference of two curves."""
    return sum(abs(a - b) for a, b in zip(one, two, strict=True)) / len(one)


def verified(name: str) -> bool:
    """Whether `unisono verify` finds the same run on 1, 2 and 3 ranks."""
    words = ["verify", f"{__file__}:Adapter", "--ranks", "1,2,3", "--strategies", "ddp,fsdp", "--base_precision", name]
    words += ["--batch_size", "6", "--steps", "3", "--eval_every", "-1"]
    done = subprocess.run([sys.executable, "-m", "unisono", *words], capture_output=True, text=True)
    return done.returncode == 0 and "Same run" in done.stdout


def measure(steps: int, folder: Path) -> dict[str, Any]:
    """Trains all runs, and computes their distances to the run with a float32 base."""
    pretrained = unisono.train(
        Pretraining,
        **{"gpus": "0", "max_steps": PRETRAINING_STEPS, "learning_rate": 2e-3, "lr_schedule": "cosine"},
        **{"save_every": 0, "eval_every": 0, "output_dir": str(folder / "pretrained")},
    )
    base = folder / "base.safetensors"
    save_file(load_whole(max((pretrained.folder / "checkpoints").glob("step_*")), "model."), base)
    common = {"base": str(base), "max_steps": steps, "eval_every": max(1, steps // EVALUATIONS), "eval_first": True}
    exact = trained(folder / "exact", **common)
    others = [exact, *(trained(folder / f"seed {seed}", seed=seed, **common) for seed in SEEDS)]
    pairs = list(combinations(others, 2))
    result: dict[str, Any] = {
        "pretrained_eval_loss": pretrained.last["eval/loss"],
        "exact": exact,
        "seeds": {
            "eval_distance": sum(distance(a["eval_losses"], b["eval_losses"]) for a, b in pairs) / len(pairs),
            "final": [each["eval_losses"][-1] for each in others],
        },
        "formats": {},
    }
    for name in FORMATS:
        run = trained(folder / name, base_precision=name, **common)
        result["formats"][name] = run | {
            "distance": distance(run["losses"], exact["losses"]),
            "eval_distance": distance(run["eval_losses"], exact["eval_losses"]),
            "same_on_ranks": verified(name),
        }
        print(name, {key: value for key, value in result["formats"][name].items() if "losses" not in key}, flush=True)
    return result


def page(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    exact, seeds = result["exact"], result["seeds"]
    rows = [f"| float32 | {exact['bytes'] / 2**10:.0f} | {exact['eval_losses'][-1]:.4f} | | | |"]
    rows += [
        f"| `{name}` | {each['bytes'] / 2**10:.0f} | {each['eval_losses'][-1]:.4f} | {each['distance']:.5f} | "
        f"{each['eval_distance']:.5f} | {'same' if each['same_on_ranks'] else 'DIFFERENT'} |"
        for name, each in result["formats"].items()
    ]
    spread = max(seeds["final"]) - min(seeds["final"])
    return "\n".join(
        [
            "# Base precision",
            "",
            *depends_on(result),
            f"- Model: a GPT with 3 blocks of width 128, pretrained for {PRETRAINING_STEPS} steps on the "
            f"documentation; a LoRA of rank 8 on all linear layers of its blocks, {result['steps']} steps of 16 pieces "
            "of source code, float32, AdamW.",
            "- *Frozen*: KiB of the frozen linear layers. *Training* and *held-out distance*: mean absolute difference "
            "of the loss curves to those of the float32 base, same samples and initial LoRA. *Ranks*: `unisono verify` "
            "on 1, 2 and 3 ranks with ddp and fsdp, in float64.",
            f"- Held-out loss before the LoRA: {exact['eval_losses'][0]:.4f}.",
            f"- Other seeds (order of samples, initial LoRA), float32 base, {len(seeds['final'])} runs: mean distance "
            f"of two held-out curves {seeds['eval_distance']:.5f}; final losses within {spread:.4f} of each other.",
            "- Speed on a GPU is not measured yet.",
            "",
            "| base | frozen | held-out loss | training distance | held-out distance | ranks |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps per LoRA")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder for base_precision.json and .md")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "machine": machine(),
        "versions": versions(["torch", "numpy"]),
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "command": f"python benchmarks/base_precision.py --steps {options.steps}",
        "steps": options.steps,
    }
    with tempfile.TemporaryDirectory() as folder:
        result |= measure(options.steps, Path(folder))
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "base_precision.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.output / "base_precision.md").write_text(page(result))


if __name__ == "__main__":
    main()
