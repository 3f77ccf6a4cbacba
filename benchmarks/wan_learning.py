"""Measures whether `unisono train wan-flow --model_config tiny` learns to generate what the captions say.

    python benchmarks/wan_learning.py                  # two CPU ranks: three seeds of images, one of videos
    python benchmarks/wan_learning.py --quick          # smoke test with a few steps; the numbers mean nothing

A small real Wan transformer is trained on synthetic images of shapes with captions. The EMA weights generate samples
from held-out captions, and a classifier trained only on the synthetic images predicts the colour and shape of each. The
loss alone proves nothing: runs whose samples the classifier does not recognise can have a low loss too.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import depends_on, machine, versions

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"
BARS = {"colour": 0.9, "shape": 0.8, "training_s": 300.0, "judge": 0.98}
VIDEOS = ["--num_frames", "5", "--max_steps", "1200"]
METRICS = ("colour", "shape", "loss")
QUICK = ["--max_steps", "4", "--num_shapes", "64", "--eval_every", "4", "--preview_every", "-1", "--log_every", "2"]
Row = dict[str, Any]


def train(
    flags: list[str], folder: Path, patience: float, model: str = "tiny", names: tuple[str, ...] = METRICS
) -> Row:
    """Trains a tiny model with two ranks; returns the results `names` of its last evaluation, and times."""
    words = ["train", "wan-flow", "--model_config", model, "--nproc", "2", "--log_every", "10", *flags]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    began = time.monotonic()
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "unisono", *words, "--output_dir", str(folder)],
            capture_output=True, text=True, env=environ, timeout=patience,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"failed": f"took more than {patience:.0f} s"}
    if ended.returncode:
        return {"failed": (ended.stderr.strip().splitlines() or ["no word"])[-1][:300]}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "eval/colour" in line][-1]
    steps = [line for line in lines if "step_ms" in line]
    spent = sum(line["step_ms"] for line in steps) / len(steps) * last["step"] / 1000
    row: Row = {"failed": "", "command": shlex.join(["unisono", *words]), "step": last["step"]}
    row |= {name: last[f"eval/{name}"] for name in names}
    return row | {"training_s": spent, "wall_s": time.monotonic() - began}


def classifier_accuracy() -> Row:
    """Accuracy of the classifier on held-out synthetic images, and on their reconstructions by the VAE."""
    sys.path.insert(0, str(ROOT / "src"))
    import torch

    from unisono.recipes.wan.models.vae import WanVae
    from unisono.recipes.wan.tiny.classifier import recognised
    from unisono.recipes.wan.tiny.models import tiny_vae
    from unisono.recipes.wan.tiny.shapes import Shapes, labels

    shapes = Shapes(480, split="eval")
    frames = torch.stack([shapes[index]["frames"] for index in range(len(shapes))])
    truth = labels([shapes.plan(index) for index in range(len(shapes))])
    vae = WanVae(tiny_vae())
    inputs = {"images": frames, "images through the VAE": vae.decode(vae.encode(frames))}
    return {
        name: {label: float(hits.float().mean()) for label, hits in recognised(images, *truth).items()}
        for name, images in inputs.items()
    }


def table(result: Row) -> list[str]:
    lines = ["# wan-flow: learning of the tiny model", "", *depends_on(result)]
    lines += [
        "- Runs: `unisono train wan-flow --model_config tiny --nproc 2`: 64 samples per step, 32 per process",
        "",
    ]
    for name, accuracy in result["judge"].items():
        lines.append(
            f"- The classifier on 480 held-out {name}: colour {accuracy['colour']:.1%}, shape {accuracy['shape']:.1%}"
        )
    lines += [
        "",
        "| run | colour | shape | held-out loss | steps | training | process |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in result["rows"].items():
        if row["failed"]:
            lines.append(f"| {name} | FAILED: {row['failed'].replace('|', ' ')} | | | | | |")
            continue
        numbers = f"**{row['colour']:.1%}** | **{row['shape']:.1%}** | {row['loss']:.3f} | {row['step']}"
        lines.append(f"| {name} | {numbers} | {row['training_s']:.0f} s | {row['wall_s']:.0f} s |")
    images = [row for name, row in result["rows"].items() if name.startswith("images") and not row["failed"]]
    if images and not result["quick"]:
        worst = {name: min(row[name] for row in images) for name in ("colour", "shape")}
        slowest = max(row["training_s"] for row in images)
        met = all(worst[name] >= BARS[name] for name in worst) and slowest <= BARS["training_s"]
        lines += [
            "",
            f"Targets for images: colour {BARS['colour']:.0%}, shape {BARS['shape']:.0%}, training in at most "
            f"{BARS['training_s']:.0f} s. In the worst of {len(images)} seeds: {worst['colour']:.1%}, "
            f"{worst['shape']:.1%}, {slowest:.0f} s: {'met' if met else '**missed**'}. "
            "There is no target for videos of 5 frames.",
        ]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--patience_s", type=float, default=1800)
    parser.add_argument("--quick", action="store_true", help="smoke test with few steps; cannot write to results/")
    options = parser.parse_args()
    if options.quick and options.output.resolve() == RESULTS:
        parser.error("--quick needs --output, another folder than benchmarks/results")
    runs = {f"images, seed {seed}": ["--seed", str(seed)] for seed in range(options.seeds)} | {
        "videos of 5 frames": VIDEOS
    }
    result: Row = {
        "command": "python benchmarks/wan_learning.py" + (f" --seeds {options.seeds}" if options.seeds != 3 else ""),
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "machine": machine(),
        "versions": versions(["torch", "diffusers", "transformers"]),
        "quick": options.quick,
        "judge": classifier_accuracy(),
        "rows": {name: {"failed": "not run"} for name in runs},
    }
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        for number, (name, flags) in enumerate(runs.items()):
            more = QUICK if options.quick else []
            result["rows"][name] = train([*flags, *more], Path(place, str(number)), options.patience_s)
            (options.output / "wan_learning.json").write_text(json.dumps(result, indent=1) + "\n")
            (options.output / "wan_learning.md").write_text("\n".join(table(result)) + "\n")
            print(time.strftime("%H:%M:%S"), name, result["rows"][name], flush=True)
    print("\n".join(table(result)))
    return int(any(row["failed"] for row in result["rows"].values()))


if __name__ == "__main__":
    sys.exit(main())
