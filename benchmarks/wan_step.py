"""Compares the step time of `unisono train wan-flow` with that of the usual hand-written loop.

    python benchmarks/wan_step.py                        # a GPU: the real 1.3B architecture, three shapes
    python benchmarks/wan_step.py --shapes 512x512x1     # one of them
    python benchmarks/wan_step.py --only selective,usual --budget 500   # some rows; starts none after 500 s
    python benchmarks/wan_step.py --quick                # smoke test on any machine; the numbers mean nothing

Every variant trains all weights with AdamW, bf16 and clipping. It starts from random weights, and the data is a folder
of random latents and embeddings. Variants run in separate processes and take turns. unisono's variants are plain
`unisono train` runs that share a compiler cache; their numbers come from metrics.jsonl. The loss curves of all variants
of a shape are compared. MFU counts the model's own operations (without recomputation) against a measured
8192 × 8192 × 8192 bf16 product.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import depends_on, machine, versions

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"
USUAL = "usual: Accelerate, gradient checkpointing"
USUAL_STORING = "usual: Accelerate, without gradient checkpointing"
OURS = "unisono"
GRAPH = "unisono, --cuda_graph"
SELECTIVE = "unisono, --activation_checkpointing selective"
EQUAL = "unisono, --activation_memory_gb 9.5"  # about what the usual loop leaves for activations
RECOMPUTE = "unisono, --activation_checkpointing"
BARS = {"512x512x1": 2.5, "480x832x17": 2.5, "480x832x81": 1.6}
FIRST = 5  # untimed steps: compilation, guarding, choice of kernels
TOLERANCE = 2e-2  # relative, for a loss in bf16
Row = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """Training data: latents [channels, frames, height, width] and the batch size."""

    batch: int
    latent: tuple[int, int, int, int]
    steps: int
    variants: tuple[str, ...] = (USUAL, OURS)

    @property
    def tokens(self) -> int:
        return self.latent[1] * self.latent[2] * self.latent[3] // 4


SHAPES = {
    "480x832x17": Shape(1, (16, 5, 60, 104), 16, (GRAPH, USUAL, OURS, SELECTIVE, EQUAL, RECOMPUTE, USUAL_STORING)),
    "512x512x1": Shape(16, (16, 1, 64, 64), 14, (GRAPH, USUAL, OURS, SELECTIVE, EQUAL, RECOMPUTE, USUAL_STORING)),
    "480x832x81": Shape(1, (16, 21, 60, 104), 9, (OURS, USUAL, SELECTIVE, RECOMPUTE)),
}
QUICK = {"16x16x1": Shape(2, (16, 1, 4, 4), 9, (OURS, USUAL, SELECTIVE, EQUAL, RECOMPUTE, USUAL_STORING))}
TINY = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 16, "out_channels": 16, "text_dim": 32}
TINY |= {"freq_dim": 32, "ffn_dim": 32, "num_layers": 2}


def write_data(folder: Path, shape: Shape, text_width: int) -> None:
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for number in range(2 * shape.batch):
        latent = torch.randn(shape.latent, generator=generator)
        text = torch.randn(64 + number % 64, text_width, generator=generator)
        save_file({"latent": latent}, folder / f"{number:03d}.latent.safetensors")
        save_file({"embeddings": text.bfloat16()}, folder / f"{number:03d}.safetensors")


def flops(shape: Shape, config: Row) -> float:
    """FLOPs of one step: forward, and twice that for backward."""
    heads, wide, layers = (config[name] for name in ("num_attention_heads", "attention_head_dim", "num_layers"))
    d, f, s, c = heads * wide, config["ffn_dim"], shape.tokens, 512
    each = 12 * d * d * s + 4 * d * d * c + 4 * d * f * s + 4 * s * s * d + 4 * s * c * d
    return 3.0 * layers * each * shape.batch


def ceiling() -> float:
    """FLOP/s of a large bf16 matrix product."""
    import torch

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        a @ b
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 2 * 8192.0**3 / (statistics.median(times[5:]) / 1000)


def run(
    words: list[str], environ: dict[str, str], cwd: Path, metrics: Path | None, steps: int, patience: float
) -> tuple[int, str, str]:
    """Runs a command; returns exit code, output and errors.

    A run with `metrics` is stopped after `steps` logged steps, before it saves.
    """
    with (cwd / "out").open("w+") as out, (cwd / "err").open("w+") as err:
        process = subprocess.Popen(words, stdout=out, stderr=err, env=environ, cwd=cwd, start_new_session=True)
        ends, enough = time.monotonic() + patience, False
        while process.poll() is None and time.monotonic() < ends and not enough:
            time.sleep(0.1)
            enough = metrics is not None and metrics.exists() and metrics.read_text().count("step_ms") >= steps
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        err.seek(0)
        code = 0 if enough else process.returncode
        return code, out.read(), err.read() + (f"took more than {patience:.0f} s" if time.monotonic() >= ends else "")


def measure(variant: str, shape: Shape, data: Path, scratch: Path, model: str, patience: float) -> Row:
    # Runs one more step than it counts, because unisono logs one step late.
    common = ["--batch_size", str(shape.batch), "--max_steps", str(shape.steps + 1), "--model_config", model]
    common += ["--learning_rate", "1e-5", "--shift", "3"]
    folder = Path(tempfile.mkdtemp(dir=scratch)) / "run"
    is_usual = variant in (USUAL, USUAL_STORING)
    if is_usual:
        words = [sys.executable, str(HERE / "wan_usual.py"), str(data), *common]
        words += ["--store_activations"] if variant == USUAL_STORING else []
    else:
        words = [sys.executable, "-m", "unisono", "train", "wan-flow", "--dataset_path", str(data), *common]
        words += ["--output_dir", str(folder), "--log_every", "1", "--warmup_steps", "0", "--ema_decay", "0"]
        words += [
            "--caption_dropout",
            "0",
            "--guidance",
            "1",
            "--save_every",
            "0",
            "--eval_every",
            "-1",
            "--preview_every",
            "-1",
        ]
        words += ["--tensorboard", "false", "--num_workers", "1", "--seed", "0"]
        words += shlex.split(variant.partition(", ")[2])  # a row is named by its flags
    compiled = scratch / f"{data.name}-{'usual' if is_usual else 'ours'}-compiled"
    environ = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(compiled)}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), environ.get("PYTHONPATH", "")])
    began = time.monotonic()
    metrics = None if is_usual else folder / "metrics.jsonl"
    code, out, err = run(words, environ, scratch, metrics, shape.steps, patience)
    if code:
        print(err[-4000:], file=sys.stderr)
        return {"failed": (err.strip().splitlines() or ["no word"])[-1][:300]}
    row: Row = {"failed": "", "command": shlex.join(words[1:] if is_usual else ["unisono", *words[3:]])}
    row["command"] = row["command"].replace(str(scratch), "SCRATCH").replace(str(ROOT) + "/", "")
    row["wall_s"] = round(time.monotonic() - began, 1)
    if is_usual:
        measured = json.loads(out.strip().splitlines()[-1])
        return row | measured | {"rounds": [measured.pop("step_ms")]}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "step_ms" in line]
    peak = max((line.get("mem_gib") or 0.0 for line in steps), default=0.0)
    return row | {
        "losses": [line["loss"] for line in steps],
        "rounds": [[line["step_ms"] for line in steps]],
        "mem_gib": peak,
    }


def joined(before: Row | None, row: Row) -> Row:
    """Adds one round to the row of a variant."""
    if before is None or before["failed"]:
        return row
    if row["failed"]:
        return before
    return before | {
        "rounds": before["rounds"] + row["rounds"],
        "mem_gib": max(before["mem_gib"], row["mem_gib"]),
        "wall_s": before["wall_s"] + row["wall_s"],
    }


def finished(rows: dict[str, Row], shape: Shape, config: Row, most: float | None) -> None:
    """Adds derived numbers to the rows."""
    usual = rows.get(USUAL, {"failed": "not run"})
    for row in rows.values():
        if row["failed"]:
            continue
        row["rounds_ms"] = [statistics.median(steps[FIRST:]) for steps in row["rounds"]]
        row["ms"] = statistics.median(row["rounds_ms"])
        row["tokens_per_s"] = shape.tokens * shape.batch / row["ms"] * 1000
        row["mfu"] = flops(shape, config) / row["ms"] * 1000 / most if most else None
        row["times_usual"] = row["loss_difference"] = None
        if not usual["failed"]:
            theirs_ms = [statistics.median(steps[FIRST:]) for steps in usual["rounds"]]
            row["times_usual"] = statistics.median(theirs_ms) / row["ms"]
            row["times_between"] = [min(theirs_ms) / max(row["rounds_ms"]), max(theirs_ms) / min(row["rounds_ms"])]
            pairs = zip(row["losses"], usual["losses"], strict=False)
            row["loss_difference"] = max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)


def keep(result: Row, before: Row, names: list[str]) -> list[str]:
    """Copies the shapes that both loops completed in an earlier result; returns the remaining shapes."""
    for name, rows in before["rows"].items():
        if all(variant in rows and not rows[variant]["failed"] for variant in (USUAL, OURS)):
            since = before.get("kept", {}).get(name, before["date"])
            result.setdefault("kept", {})[name] = since
            for row in rows.values():
                if "step_ms" in row:  # a result of an older version without rounds
                    row["rounds"] = [row.pop("step_ms")]
            result["rows"][name], result["shapes"][name] = rows, before["shapes"][name]
    return [name for name in names if name not in result.get("kept", {})]


def table(result: Row) -> list[str]:
    lines = ["# wan-flow: step time", "", *depends_on(result)]
    lines += [f"- Measured on {date}: {name}" for name, date in result.get("kept", {}).items()]
    if result["ceiling"]:
        lines.append(
            f"- MFU against {result['ceiling'] / 1e12:.0f} TFLOP/s, measured on this machine with a bf16 product of "
            "8192³"
        )
    lines += [
        f"- Median of the steps after the first {FIRST} (with several rounds their median, with the smallest and "
        "largest ratio of any two); the usual loop reads its loss in every step, as is usual",
        "",
    ]
    columns = ["shape", "batch", "loop", "ms/step", "× usual", "tokens/s", "MFU", "peak GiB", "largest loss difference"]
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, rows in result["rows"].items():
        for variant, row in sorted(rows.items(), key=lambda item: (not item[0].startswith("usual"), item[0] != USUAL)):
            cells = [name, str(result["shapes"][name]["batch"]), variant]
            if row["failed"]:
                cells.append(f"FAILED: {row['failed']}".replace("|", " "))
                lines.append(f"| {' | '.join([*cells, *[''] * (len(columns) - len(cells))])} |")
                continue
            mfu = f"{row['mfu']:.3f}" if row["mfu"] else ""
            times = f"{row['times_usual']:.2f}" if row["times_usual"] else "not measured"
            if row["times_usual"] and len(row["rounds"]) > 1 and variant != USUAL:
                times += " ({:.2f} – {:.2f})".format(*row["times_between"])
            far = f"{row['loss_difference']:.1e}" if row["times_usual"] else ""
            cells += [f"**{row['ms']:.1f}**", times, f"{row['tokens_per_s']:,.0f}", mfu, f"{row['mem_gib']:.1f}", far]
            lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    for name, bar in BARS.items():
        rows = result["rows"].get(name, {})
        ours = [row for variant, row in rows.items() if variant.startswith(OURS) and row.get("times_usual")]
        if not ours and rows and not result["quick"]:
            lines.append(f"- {name}: target {bar} × the usual loop; not measured, because one of the two has not run.")
        if ours and not result["quick"]:
            best = max(row["times_usual"] for row in ours)
            close = max(row["loss_difference"] for row in ours) < TOLERANCE
            verdict = "met" if best >= bar else "**missed**"
            lines.append(
                f"- {name}: target {bar} × the usual loop; measured {best:.2f} ×: {verdict}. "
                f"Loss curves {'agree' if close else 'DIFFER'} within {TOLERANCE:.0%}."
            )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--shapes", default="", help="separated by commas (default all)")
    parser.add_argument("--patience_s", type=float, default=600)
    parser.add_argument("--only", default="", help="only rows whose names contain one of these texts, by commas")
    parser.add_argument("--budget", type=float, default=86400, help="seconds after which no row starts any more")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of all variants, interleaved")
    parser.add_argument(
        "--keep", action="store_true", help="run only shapes for which --output lacks one of the two loops"
    )
    parser.add_argument("--quick", action="store_true", help="smoke test; cannot write to results/")
    options = parser.parse_args()
    if options.quick and options.output.resolve() == RESULTS:
        parser.error("--quick needs --output, another folder than benchmarks/results")
    shapes = QUICK if options.quick else SHAPES
    names = [name for name in options.shapes.split(",") if name] or list(shapes)
    sys.path.insert(0, str(ROOT / "src"))
    from unisono.recipes.wan.models.load import CONFIGS

    config = TINY if options.quick else CONFIGS["1.3b"]
    texts = [text for text in options.only.split(",") if text]
    variants = {
        name: [row for row in shapes[name].variants if not texts or any(text in row for text in texts)]
        for name in names
    }
    if not any(variants.values()):
        parser.error(f"--only {options.only}: no row's name contains that")
    import torch

    words = ["python", "benchmarks/wan_step.py", *(["--quick"] if options.quick else [])]
    words += ["--shapes", options.shapes] if options.shapes else []
    words += ["--only", options.only] if options.only else []
    words += ["--budget", f"{options.budget:g}"] if options.budget < 86400 else []
    words += ["--rounds", str(options.rounds)] if options.rounds > 1 else []
    words += ["--keep"] if options.keep else []
    result: Row = {
        "command": shlex.join(words),
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "machine": machine(),
        "versions": versions(["torch", "triton", "diffusers", "accelerate", "transformers"]),
        "quick": options.quick,
        "ceiling": ceiling() if torch.cuda.is_available() else None,
        "shapes": {name: {"batch": shapes[name].batch, "latent": shapes[name].latent} for name in names},
        "rows": {name: {} for name in names},
    }
    options.output.mkdir(parents=True, exist_ok=True)
    if options.keep and (options.output / "wan_step.json").exists():
        names = keep(result, json.loads((options.output / "wan_step.json").read_text()), names)
    latest = time.monotonic() + options.budget
    with tempfile.TemporaryDirectory() as place:
        scratch = Path(place)
        model = "1.3b"
        if options.quick:
            model = str(scratch / "config.json")
            Path(model).write_text(json.dumps(config))
        for name in names:
            write_data(scratch / name, shapes[name], config["text_dim"])
        most = max((len(variants[name]) for name in names), default=0)
        for turn in [turn for _ in range(options.rounds) for turn in range(most)]:
            for name in names:
                if turn < len(variants[name]) and time.monotonic() < latest:
                    variant = variants[name][turn]
                    row = measure(variant, shapes[name], scratch / name, scratch, model, options.patience_s)
                    row = result["rows"][name][variant] = joined(result["rows"][name].get(variant), row)
                    finished(result["rows"][name], shapes[name], config, result["ceiling"])
                    (options.output / "wan_step.json").write_text(json.dumps(result, indent=1) + "\n")
                    (options.output / "wan_step.md").write_text("\n".join(table(result)) + "\n")
                    outcome = f"{row['ms']:.1f} ms" if "ms" in row else row["failed"]
                    print(f"{time.strftime('%H:%M:%S')}  {name}  {variant}: {outcome}", flush=True)
    print("\n".join(table(result)))
    return int(any(row["failed"] for rows in result["rows"].values() for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
