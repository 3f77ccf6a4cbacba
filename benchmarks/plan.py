"""Compares what `unisono plan` predicts with what was measured: memory and time on an H200, collectives on CPU ranks.

    python benchmarks/plan.py                      # any machine: reads the measurements in results/
    python benchmarks/plan.py --only times         # times, memory, collectives or speed
    python benchmarks/plan.py --quick              # smoke test: few cases

The measurements are those of wan_step.py, wan_memory.py and darkroom.py on an H200, so no GPU is needed here.
Collectives are measured on this machine: gloo on 2 and 4 CPU ranks. Latency and bandwidth are fitted to the smallest
and the largest tensor of each collective, and predict the sizes between.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from machine import depends_on, machine, versions

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"
sys.path.insert(0, str(ROOT / "src"))
Row = dict[str, Any]
GIB = 2**30
TARGETS = {"memory": 0.05, "time": 0.15}
SHAPES = {  # batch, frames, height, width
    "512x512x1": (1, 1, 512, 512),
    "512x512x1, batch 16": (16, 1, 512, 512),
    "480x832x17": (1, 17, 480, 832),
    "480x832x49": (1, 49, 480, 832),
    "480x832x81": (1, 81, 480, 832),
}
STEP_SHAPES = {"480x832x17": "480x832x17", "512x512x1": "512x512x1, batch 16", "480x832x81": "480x832x81"}
MODELS = {"1.3B": "1.3b", "TI2V-5B": "ti2v-5b", "14B": "14b"}
MEGABYTES = (1, 4, 16, 64)


def plan_row(recipe: str, **settings: Any) -> Any:
    """The prediction for one H200 with exactly these settings."""
    from unisono.engine.checks import check_run
    from unisono.engine.plan.plan import Planner
    from unisono.engine.start.registry import load_recipe
    from unisono.engine.start.run import configure
    from unisono.planning.speed.gpus import parse_cluster

    kind = load_recipe(recipe)
    fixed = {"activation_checkpointing": False, "strategy": "single", "base_precision": "auto", **settings}
    flags = [f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in fixed.items()]
    resolved = configure(kind, flags=flags)
    (row,) = Planner(check_run(kind, resolved), resolved, parse_cluster("H200")).plan().rows
    return row


def wan_settings(shape: str, model: str) -> Row:
    batch, frames, height, width = SHAPES[shape]
    data = {"num_frames": frames, "height": height, "width": width, "batch_size": batch, "ema_decay": 0}
    return {**data, "model_config": model, "caption_dropout": 0, "guidance": 1}


def times(quick: bool) -> Iterator[Row]:
    """Steps whose time was measured on an H200."""
    measured = json.loads((RESULTS / "darkroom_speed.json").read_text())["rows"]
    for name, flags in (
        ("unisono", {"compile": False, "cuda_graph": False}),
        ("unisono, compiled", {"compile": True, "cuda_graph": False}),
        ("unisono, CUDA graph", {"compile": False, "cuda_graph": True}),
    ):
        predicted = plan_row("darkroom", batch_size=512, mixed_precision="bf16", **flags)
        yield time_row(
            f"darkroom, {name.removeprefix('unisono').strip(', ') or 'eager'}", predicted, measured[name]["step_ms"]
        )
    measured = json.loads((RESULTS / "wan_step.json").read_text())["rows"]
    for shape in list(STEP_SHAPES)[: 0 if quick else None]:
        for name, row in measured[shape].items():
            if not name.startswith("unisono") or row["failed"]:
                continue
            flags = {"cuda_graph": "--cuda_graph" in row["command"]}
            words = row["command"].split()
            if "--activation_checkpointing" in words:
                value = words[words.index("--activation_checkpointing") + 1 :][:1]
                flags["activation_checkpointing"] = "selective" if value == ["selective"] else True
            predicted = plan_row("wan-flow", **wan_settings(STEP_SHAPES[shape], "1.3b"), **flags)
            variant = name.removeprefix("unisono").strip(", ")
            yield time_row(f"1.3B, {shape}{', ' + variant if variant else ''}", predicted, row["ms"], row["mem_gib"])


def time_row(case: str, predicted: Any, measured_ms: float, measured_gib: float | None = None) -> Row:
    row: Row = {"case": case, "predicted_ms": 1e3 * predicted.time.total, "measured_ms": measured_ms}
    row["time_error"] = row["predicted_ms"] / measured_ms - 1
    row["bottleneck"] = predicted.time.bottleneck
    if measured_gib is not None and "graph" not in case:
        row |= {"predicted_gib": predicted.memory.total / GIB, "measured_gib": measured_gib}
        row["memory_error"] = row["predicted_gib"] / measured_gib - 1
    print(f"{case}: {row['predicted_ms']:.1f} ms predicted, {measured_ms:.1f} measured", file=sys.stderr, flush=True)
    return row


def memory(quick: bool, scratch: Path) -> Iterator[Row]:
    """Runs with a few blocks of real size whose memory was measured on an H200."""
    from unisono.recipes.wan.models.load import CONFIGS

    cases = json.loads((RESULTS / "wan_memory.json").read_text())["cases"]
    cases = [case for case in cases if not case["failed"] and case["model"] in MODELS and case["shape"] in SHAPES]
    for case in cases[: 2 if quick else None]:
        config = scratch / f"{case['model']}-{case['layers']}.json"
        config.write_text(json.dumps({**CONFIGS[MODELS[case["model"]]], "num_layers": case["layers"]}))
        settings = wan_settings(case["shape"], str(config))
        lora = {"lora_rank": case["lora_rank"]} if case.get("lora_rank") else {}
        predicted = (
            plan_row("wan-flow", **settings, **lora, activation_checkpointing=case["recompute"] == "all").memory.total
            / GIB
        )
        name = f"{case['model']}, {case['layers']} blocks, {case['shape']}, recompute {case['recompute']}"
        print(f"{name}: {predicted:.2f} GiB predicted, {case['gib']:.2f} measured", file=sys.stderr, flush=True)
        yield {
            "case": name, "predicted_gib": predicted, "measured_gib": case["gib"],
            "memory_error": predicted / case["gib"] - 1,
        }  # fmt: skip


def collectives(quick: bool) -> Iterator[Row]:
    """Collectives of gloo on CPU ranks of this machine."""
    from unisono.planning.speed.collectives import Ring

    for ranks in (2,) if quick else (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "times.json"
            words = [sys.executable, __file__, "--rank_times", str(output), "--ranks", str(ranks)]
            subprocess.run([*words, *(["--quick"] if quick else [])], check=True)
            measured = json.loads(output.read_text())
        for name, seconds in measured.items():
            small, large = (mib * 2**20 for mib in (MEGABYTES[0], MEGABYTES[-1]))
            factor = 2 if name == "all_reduce" else 1
            per_byte = (seconds[-1] - seconds[0]) / (large - small)
            ring = Ring(ranks, bandwidth=factor * (ranks - 1) / ranks / per_byte)
            start = seconds[0] - (ring.all_reduce if factor == 2 else ring.gather)(small)
            ring = Ring(ranks, ring.bandwidth, ring.latency + start / factor / (ranks - 1))
            for mib, measured_s in list(zip(MEGABYTES, seconds, strict=True))[1:-1]:
                predicted = (ring.all_reduce if factor == 2 else ring.gather)(mib * 2**20)
                yield {
                    "case": f"{name} of {mib} MiB, {ranks} ranks", "predicted_ms": 1e3 * predicted,
                    "measured_ms": 1e3 * measured_s, "time_error": predicted / measured_s - 1,
                }  # fmt: skip


def time_collectives(rank: int, ranks: int, port: int, output: str, rounds: int) -> None:
    """One rank: the median time of each collective, by size."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    result: dict[str, list[float]] = {"all_reduce": [], "all_gather": []}
    for mib in MEGABYTES:
        whole = torch.zeros(mib * 2**18 // ranks * ranks)
        part = whole[: len(whole) // ranks].clone()
        calls = {
            "all_reduce": lambda tensor=whole: dist.all_reduce(tensor),
            "all_gather": lambda tensor=whole, own=part: dist.all_gather_into_tensor(tensor, own),
        }
        for name, call in calls.items():
            durations = []
            for _ in range(rounds):
                dist.barrier()
                began = time.perf_counter()
                call()
                durations.append(time.perf_counter() - began)
            result[name].append(statistics.median(durations[rounds // 4 :]))
    if rank == 0:
        Path(output).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(output: str, ranks: int, quick: bool) -> None:
    import socket

    import torch.multiprocessing as processes

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes.spawn(time_collectives, (ranks, port, output, 8 if quick else 40), nprocs=ranks)


def duration() -> Iterator[Row]:
    """The time that the command itself takes for a 14B model."""
    words = (
        "plan wan-flow --gpus 8xH100-80GB --model_config 14b --lora_rank 32 --num_frames 17 --height 480 --width 832"
    )
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "unisono", *words.split(), "--batch_size", "1"], check=True, capture_output=True
    )
    yield {"case": f"unisono {words} --batch_size 1", "seconds": time.monotonic() - began}


def table(result: Row) -> list[str]:
    lines = ["# Predictions of `unisono plan`", "", *depends_on(result)]
    lines.append(f"- Targets: memory within {TARGETS['memory']:.0%}, time within {TARGETS['time']:.0%}")
    parts = result["parts"]
    if rows := parts.get("times"):
        lines += [
            "",
            "### Steps on one H200",
            "",
            "| case | measured ms | predicted ms | error | bottleneck | measured GiB | predicted GiB | error |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in rows:
            cells = [
                row["case"],
                f"{row['measured_ms']:.1f}",
                f"{row['predicted_ms']:.1f}",
                f"{row['time_error']:+.1%}",
                row["bottleneck"],
            ]
            has = "memory_error" in row
            cells += (
                [f"{row['measured_gib']:.1f}", f"{row['predicted_gib']:.1f}", f"{row['memory_error']:+.1%}"]
                if has
                else [""] * 3
            )
            lines.append(f"| {' | '.join(cells)} |")
        lines += ["", within(rows, "time_error", TARGETS["time"], "times")]
    if rows := parts.get("memory"):
        lines += [
            "",
            "### Memory on one H200",
            "",
            within(rows, "memory_error", TARGETS["memory"], "cases"),
            "",
            "| case | measured GiB | predicted GiB | error |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {row['case']} | {row['measured_gib']:.2f} | {row['predicted_gib']:.2f} | {row['memory_error']:+.1%} |"
            for row in rows
        ]
    if rows := parts.get("collectives"):
        lines += [
            "",
            "### Collectives of gloo on CPU ranks",
            "",
            "| case | measured ms | predicted ms | error |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {row['case']} | {row['measured_ms']:.2f} | {row['predicted_ms']:.2f} | {row['time_error']:+.1%} |"
            for row in rows
        ]
    for row in parts.get("speed", []):
        lines += [
            "",
            "### Time of the command",
            "",
            f"`{row['case']}` took {row['seconds']:.1f} s on this machine "
            f"(target 30 s: {'met' if row['seconds'] <= 30 else 'missed'}).",
        ]
    return lines


def within(rows: list[Row], name: str, target: float, what: str) -> str:
    good = sum(abs(row[name]) <= target for row in rows)
    worst = max(rows, key=lambda row: abs(row[name]))
    return f"{good} of {len(rows)} {what} are within {target:.0%}; largest error {worst[name]:+.1%} ({worst['case']})."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", help="times, memory, collectives, speed; separated by commas (default all)"
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="smoke test; cannot write to results/")
    parser.add_argument("--rank_times", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_times:
        run_ranks(options.rank_times, options.ranks, options.quick)
        return 0
    if options.quick and options.output.resolve() == RESULTS:
        parser.error("--quick needs --output FOLDER")
    chosen = options.only.split(",") if options.only else ["times", "memory", "collectives", "speed"]
    file = options.output / "plan.json"
    parts: Row = json.loads(file.read_text())["parts"] if file.exists() and options.only else {}
    with tempfile.TemporaryDirectory() as folder:
        work = {
            "times": lambda: times(options.quick),
            "memory": lambda: memory(options.quick, Path(folder)),
            "collectives": lambda: collectives(options.quick),
            "speed": duration,
        }
        for name in chosen:
            parts[name] = list(work[name]())
    result = {
        "command": "python benchmarks/plan.py",
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        "quick": options.quick,
        "machine": machine(),
        "versions": versions(["torch", "diffusers"]),
        "parts": parts,
    }
    options.output.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n")
    text = "\n".join(table(result)) + "\n"
    (options.output / "plan.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
