"""Trains, stops, resumes and verifies on a CUDA machine: every strategy, bf16 and fp16.

    python benchmarks/cuda.py --output benchmarks/results

For each strategy and precision, this compares an uninterrupted run of 20 steps with a run of 10 steps that continues to
20; their losses must agree (exactly, unless something is random). Then `unisono verify` runs with two ranks that share
the GPU. nn.DataParallel is tested with the same GPU used twice.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
RECIPE = f"{HERE / 'cuda_recipe.py'}:TinyGpt"


def unisono(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "unisono", *words], capture_output=True, text=True, env=os.environ)


def losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: float(line["loss"]) for line in lines if "loss" in line}


def resume_case(strategy: str, precision: str, ranks: int, extra: tuple[str, ...]) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--strategy", strategy, "--mixed_precision", precision, "--gpus", "1", "--log_every", "1"]
        flags += ["--global_batch_size", "16", "--batch_size", "4", "--ema_decay", "0.9", "--deterministic", *extra]
        flags += ["--tensorboard", "false", "--eval_every", "-1"]
        if ranks > 1:
            flags += ["--nproc", str(ranks)]
        started = time.time()
        whole = unisono("train", RECIPE, *flags, "--max_steps", "20", "--output_dir", f"{folder}/whole")
        first = unisono("train", RECIPE, *flags, "--max_steps", "10", "--output_dir", f"{folder}/parts")
        second = unisono("train", RECIPE, *flags, "--max_steps", "20", "--output_dir", f"{folder}/parts")
        row = {"strategy": strategy, "precision": precision, "ranks": ranks, "flags": " ".join(extra)}
        for run in (whole, first, second):
            if run.returncode != 0:
                return row | {"ok": False, "error": run.stderr[-1500:]}
        a, b = losses(Path(folder) / "whole"), losses(Path(folder) / "parts")
        difference = max(abs(a[step] - b[step]) for step in a)
        learned = a[1] - a[20]
        ok = a.keys() == b.keys() and difference < 1e-6 and learned > 0
        shown = {"loss_first": a[1], "loss_last": a[20], "resume_difference": difference}
        return row | {"ok": ok, **shown, "seconds": round(time.time() - started, 1)}


def verify_case(precision: str) -> dict:
    words = ["verify", RECIPE, "--ranks", "1,2", "--strategies", "ddp,fsdp", "--precision", precision]
    done = unisono(*words, "--batch_size", "8")
    return {
        "precision": precision,
        "ok": done.returncode == 0,
        "output": done.stdout if done.returncode < 2 else done.stderr[-1500:],
    }


def never_waits_case() -> dict:
    """Trains 40 steps in which torch raises if the host waits for the GPU (except in logging steps)."""
    recipe = f"{HERE / 'cuda_recipe.py'}:NeverWaits"
    flags = [
        "--gpus",
        "1",
        "--max_steps",
        "40",
        "--log_every",
        "1000",
        "--ema_decay",
        "0.9",
        "--mixed_precision",
        "fp16",
    ]
    with tempfile.TemporaryDirectory() as folder:
        done = unisono(
            "train", recipe, *flags, "--num_workers", "2", "--tensorboard", "false", "--output_dir", f"{folder}/run"
        )
    return {"ok": done.returncode == 0, "error": done.stderr[-1500:] if done.returncode else ""}


def replicas_case() -> dict:
    """Compares nn.DataParallel on one GPU used twice with the plain model."""
    sys.path.insert(0, str(HERE))
    from cuda_recipe import TinyGpt

    from unisono.data.noise import Noise
    from unisono.engine.step.accumulate import flatten_loss
    from unisono.parallel.data_parallel import DataParallel
    from unisono.parallel.single import Single
    from unisono.parallel.strategy import Placement
    from unisono.settings import ParallelSettings

    recipe = TinyGpt(TinyGpt.Config(dropout=0.0))
    device = torch.device("cuda", 0)
    batch = recipe.collate([recipe.dataset("train")[i] for i in range(8)]).to(device)
    positions = torch.arange(8, device=device)

    def call(model: torch.nn.Module, data: torch.Tensor, places: torch.Tensor) -> dict[str, torch.Tensor]:
        return flatten_loss(recipe.loss(model, data, Noise(0, places)))

    gradients = []
    for kind, devices in ((Single, [device]), (DataParallel, [device, device])):
        torch.manual_seed(0)
        strategy = kind(recipe.model(), [], Placement(device, 0, 1, devices, None), ParallelSettings())
        strategy.train(call, batch, positions)["total"].backward()
        gradients.append(torch.cat([gradient.flatten() for gradient in strategy.gradients()]))
    difference = float((gradients[0] - gradients[1]).abs().max() / gradients[0].abs().max())
    return {"relative_gradient_difference": difference, "ok": difference < 1e-4}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=HERE / "results")
    parser.add_argument("--jobs", type=int, default=6)
    options = parser.parse_args()
    os.environ.setdefault("PYTHONPATH", str(HERE.parent / "src"))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # many processes at once
    cases = [(s, p, 1, ()) for s in ("single", "dp", "ddp", "fsdp") for p in ("bf16", "fp16")]
    cases += [(s, p, 2, ()) for s in ("ddp", "fsdp") for p in ("bf16", "fp16")]
    cases += [("single", "bf16", 1, ("--activation_checkpointing",)), ("fsdp", "bf16", 1, ("--fsdp_cpu_offload",))]
    cases += [("single", "bf16", 1, ("--compile",))]
    with ThreadPoolExecutor(options.jobs) as pool:  # starts the long cases first
        verifying = [pool.submit(verify_case, precision) for precision in ("float64", "bf16", "fp16")]
        resuming = [pool.submit(resume_case, *case) for case in reversed(cases)]
        waiting = pool.submit(never_waits_case)
        replicas = replicas_case()
        resumed = [future.result() for future in reversed(resuming)]
        verified = [future.result() for future in verifying]
        never_waits = waiting.result()
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    machine |= {"python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}
    report = {"machine": machine, "command": "python benchmarks/cuda.py", "resume": resumed}
    report |= {"verify": verified, "data_parallel_replicas": replicas, "never_waits": never_waits}
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "cuda.json").write_text(json.dumps(report, indent=1) + "\n")
    text = as_markdown(report)
    (options.output / "cuda.md").write_text(text)
    print(text)
    failures = [row for row in [*report["resume"], *verified, replicas, never_waits] if not row["ok"]]
    for row in failures:
        print(json.dumps(row, indent=1))
    return 1 if failures else 0


def as_markdown(report: dict) -> str:
    machine = " · ".join(f"{key} {value}" for key, value in report["machine"].items())
    lines = ["# On CUDA: train, resume, verify", "", machine, "", f"Made by `{report['command']}`.", ""]
    lines += ["20 steps in one run compared with 10 + 10 steps in two; two ranks share the GPU over gloo.", ""]
    lines += [
        "| strategy | ranks | precision | flags | loss 1 → 20 | resume difference | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in report["resume"]:
        if "loss_first" not in row:
            lines.append(f"| {row['strategy']} | {row['ranks']} | {row['precision']} | {row['flags']} | | | FAILED |")
            continue
        shown = f"{row['loss_first']:.4f} → {row['loss_last']:.4f} | {row['resume_difference']:.1e}"
        verdict = "ok" if row["ok"] else "FAILED"
        lines.append(
            f"| {row['strategy']} | {row['ranks']} | {row['precision']} | {row['flags']} | {shown} | {verdict} |"
        )
    for row in report["verify"]:
        lines += ["", f"## verify --precision {row['precision']}: {'same' if row['ok'] else 'DIFFERS'}", ""]
        lines += ["```", row["output"].strip(), "```"]
    difference = report["data_parallel_replicas"]["relative_gradient_difference"]
    against = "nn.DataParallel with one GPU used twice, difference of the gradient from the plain model"
    lines += ["", f"{against}: {difference:.1e}.", ""]
    waits = "none" if report["never_waits"]["ok"] else "FOUND"
    lines += [f"Host waits for the GPU in 40 steps (torch.cuda.set_sync_debug_mode): {waits}.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
