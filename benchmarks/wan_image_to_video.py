"""Measures whether the tiny image-to-video model keeps its first frame and moves as the caption says.

    python benchmarks/wan_image_to_video.py            # two CPU ranks, three seeds
    python benchmarks/wan_image_to_video.py --quick    # smoke test with a few steps; the numbers mean nothing

A small real Wan transformer with the inputs of Wan 2.2 I2V is trained on synthetic clips of moving shapes. It gets the
first frame of held-out clips and a caption that names the direction. From the generated clips, the program computes how
far the first frame is from the given one, and whether the shape moves in that direction.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import depends_on, machine, versions
from wan_learning import QUICK, RESULTS, ROOT, Row, train

METRICS = ("moves", "colour", "shape", "first_frame_error", "first_frame_error_of_vae", "loss")
LEAST_MOVES = 0.9
SAMPLES = 96  # held-out clips for the measures themselves


def of_the_measures() -> Row:
    """The measures on held-out clips that went through the VAE: forwards, backwards, and the error of all frames."""
    sys.path.insert(0, str(ROOT / "src"))
    import torch

    from unisono.recipes.wan.models.vae import WanVae
    from unisono.recipes.wan.tiny.models import tiny_vae
    from unisono.recipes.wan.tiny.motion import moves
    from unisono.recipes.wan.tiny.shapes import Shapes, directions

    shapes, vae = Shapes(SAMPLES, 5, split="eval"), WanVae(tiny_vae())
    clips = torch.stack([shapes[index]["frames"] for index in range(SAMPLES)])
    named = directions([shapes.plan(index) for index in range(SAMPLES)])
    decoded = vae.decode(vae.encode(clips))
    return {
        "forwards": float(moves(decoded, named).float().mean()),
        "backwards": float(moves(decoded.flip(2), named).float().mean()),
        "error_of_all_frames": float((decoded - clips).abs().mean()),
    }


def table(result: Row) -> list[str]:
    measures = result["measures"]
    lines = [
        "# wan-flow: image to video with the tiny model",
        "",
        *depends_on(result),
        "- Runs: `unisono train wan-flow --model_config tiny-i2v --nproc 2`: 64 samples per step, 32 per process",
        f"- The measure of motion on {SAMPLES} held-out clips through the VAE: {measures['forwards']:.1%} move as "
        f"named, {measures['backwards']:.1%} when played backwards",
        f"- Errors are mean absolute differences in the range [-1, 1]; the VAE's over all frames of held-out clips is "
        f"{measures['error_of_all_frames']:.4f}",
        "",
        "| run | moves as the caption says | colour | shape | error of frame 0 | the VAE's own | steps | training |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in result["rows"].items():
        if row["failed"]:
            lines.append(f"| {name} | FAILED: {row['failed'].replace('|', ' ')} | | | | | | |")
            continue
        shares = " | ".join(f"{row[metric]:.1%}" for metric in ("moves", "colour", "shape"))
        errors = f"{row['first_frame_error']:.4f} | {row['first_frame_error_of_vae']:.4f}"
        lines.append(f"| {name} | {shares} | {errors} | {row['step']} | {row['training_s']:.0f} s |")
    rows = [row for row in result["rows"].values() if not row["failed"]]
    if rows and not result["quick"]:
        moves = min(row["moves"] for row in rows)
        excess = max(row["first_frame_error"] / row["first_frame_error_of_vae"] - 1 for row in rows)
        lines += [
            "",
            f"Targets: at least {LEAST_MOVES:.0%} of the samples move as the caption says: worst of "
            f"{len(rows)} seed{'s' * (len(rows) > 1)} "
            f"{moves:.1%}, {'met' if moves >= LEAST_MOVES else '**missed**'}. The error of frame 0 is at most the "
            f"VAE's own: worst {excess:+.1%}, {'met' if excess <= 0 else '**missed**'}.",
        ]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--patience_s", type=float, default=3600)
    parser.add_argument("--quick", action="store_true", help="smoke test with few steps; cannot write to results/")
    options = parser.parse_args()
    if options.quick and options.output.resolve() == RESULTS:
        parser.error("--quick needs --output, another folder than benchmarks/results")
    seeds = f" --seeds {options.seeds}" if options.seeds != 3 else ""
    result: dict[str, Any] = {
        "command": f"python benchmarks/wan_image_to_video.py{seeds}",
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "machine": machine(),
        "versions": versions(["torch", "diffusers", "transformers"]),
        "quick": options.quick,
        "measures": of_the_measures(),
        "rows": {f"seed {seed}": {"failed": "not run"} for seed in range(options.seeds)},
    }
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        for seed in range(options.seeds):
            flags = ["--seed", str(seed), *(QUICK if options.quick else [])]
            row = train(flags, Path(place, str(seed)), options.patience_s, "tiny-i2v", METRICS)
            result["rows"][f"seed {seed}"] = row
            (options.output / "wan_image_to_video.json").write_text(json.dumps(result, indent=1) + "\n")
            (options.output / "wan_image_to_video.md").write_text("\n".join(table(result)) + "\n")
            print(time.strftime("%H:%M:%S"), seed, row, flush=True)
    print("\n".join(table(result)))
    return int(any(row["failed"] for row in result["rows"].values()))


if __name__ == "__main__":
    sys.exit(main())
