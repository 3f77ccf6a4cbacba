"""Makes runs exceed a GPU's memory; checks that they continue with smaller micro-batches and the same loss curve.

    python benchmarks/memory.py --output benchmarks/results

A *cramped* rank may allocate only a few GiB (`torch.cuda.set_per_process_memory_fraction`). Each case is compared step
by step with a run without a memory limit that used the small micro-batch from the start. Ranks share the one GPU over
gloo; a case with one rank uses NCCL.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from machine import machine, versions

HERE = Path(__file__).resolve().parent
RECIPE = f"{HERE / 'cuda_recipe.py'}:Cramped"
MODEL = ["--width", "1024", "--depth", "8", "--length", "1024", "--num_samples", "256", "--dropout", "0"]
RUN = ["--global_batch_size", "32", "--max_steps", "10", "--log_every", "1", "--save_every", "3", "--gpus", "1"]
RUN += ["--tensorboard", "false", "--learning_rate", "3e-4", "--preview_every", "-1"]
TOLERANCE = {"no": 2e-5, "bf16": 5e-3}
LIMIT = ["--limit_gib", "7"]
FIXED = ["--fixed_length", "true"]


# name -> ranks, precision, flags, whether recovery must happen in place
CASES = {
    "single": (1, "no", ["--strategy", "single", "--batch_size", "32", *LIMIT], True),
    "ddp, 1 rank (NCCL)": (1, "no", ["--strategy", "ddp", "--batch_size", "32", *LIMIT], True),
    "ddp, 2 ranks, rank 1 cramped": (2, "no", ["--strategy", "ddp", "--cramped_rank", "1", *LIMIT], True),
    "ddp, 2 ranks, rank 1 cramped, bf16": (
        2,
        "bf16",
        ["--strategy", "ddp", "--cramped_rank", "1", "--limit_gib", "4.5"],
        True,
    ),
    "ddp, 2 ranks, both cramped": (2, "no", ["--strategy", "ddp", *LIMIT], True),
    "ddp, 2 ranks, less memory after step 6 (fast path)": (
        2,
        "no",
        ["--strategy", "ddp", "--cramped_rank", "1", "--limit_gib", "16", "--hog_after", "7", "--hog_gib", "7", *FIXED],
        False,
    ),
    "fsdp, 2 ranks, rank 1 cramped": (
        2,
        "no",
        ["--strategy", "fsdp", "--cramped_rank", "1", "--limit_gib", "4"],
        False,
    ),
    "micro_batch auto, ddp, rank 1 cramped": (
        2,
        "no",
        ["--strategy", "ddp", "--cramped_rank", "1", "--micro_batch", "auto", *LIMIT],
        None,
    ),
}


def train(folder: Path, ranks: int, precision: str, flags: list[str]) -> subprocess.CompletedProcess[str]:
    words = ["train", RECIPE, *MODEL, *RUN, "--mixed_precision", precision, "--output_dir", str(folder), *flags]
    if "--batch_size" not in flags:
        words += ["--batch_size", str(32 // ranks)]
    if ranks > 1:
        words += ["--nproc", str(ranks)]
    return subprocess.run([sys.executable, "-m", "unisono", *words], capture_output=True, text=True, env=os.environ)


def read(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def case(name: str, root: Path) -> dict:
    ranks, precision, flags, in_place = CASES[name]
    folder = root / str(list(CASES).index(name))
    started = time.time()
    ended = train(folder / "cramped", ranks, precision, flags)
    row = {"case": name, "ranks": ranks, "precision": precision}
    if ended.returncode != 0:
        return row | {"ok": False, "error": ended.stderr[-2000:]}
    events = read(folder / "cramped", "events.jsonl")
    size_events = [event for event in events if event["kind"] in ("oom", "micro_batch")]
    size = size_events[-1]["micro_batch"] if size_events else 0
    unlimited = [
        word for pair in zip(flags[::2], flags[1::2], strict=True) if pair[0] in FLAGS_WITHOUT_LIMIT for word in pair
    ]
    calm = train(folder / "calm", ranks, precision, [*unlimited, "--micro_batch", str(size)])
    if calm.returncode != 0:
        return row | {"ok": False, "error": calm.stderr[-2000:]}
    a, b = ({line["step"]: line["loss"] for line in read(folder / run, "metrics.jsonl")} for run in ("cramped", "calm"))
    difference = max(abs(a[step] - b[step]) / abs(b[step]) for step in b)
    ooms = [event for event in events if event["kind"] == "oom"]
    restarts = sum(event["kind"] == "restart" for event in events)
    right_way = in_place is None or (bool(ooms) and all(event["in_place"] == in_place for event in ooms))
    return row | {
        "ok": a.keys() == b.keys() and difference < TOLERANCE[precision] and right_way,
        "ooms": [f"step {event['step']}, rank {event['rank']} -> {event['micro_batch']}" for event in ooms],
        "micro_batch": size,
        "in_place": len(ooms) - sum(not event["in_place"] for event in ooms),
        "restarts": restarts,
        "difference": difference,
        "first": ooms[0]["error"] if ooms else "",
        "seconds": round(time.time() - started, 1),
    }


FLAGS_WITHOUT_LIMIT = ("--strategy", "--batch_size", "--fixed_length")


def does_not_fit(root: Path) -> dict:
    flags = ["--strategy", "ddp", "--limit_gib", "2.3", "--cramped_rank", "1"]
    ended = train(root / "hopeless", 2, "no", flags)
    last_line = ended.stderr.strip().splitlines()[-1]
    return {"ok": ended.returncode == 3 and "even one sample does not fit" in last_line, "said": last_line}


def report(results: dict) -> str:
    lines = ["# Real out-of-memory on a GPU", "", f"`{results['command']}`, {results['when']}", ""]
    lines += [f"{results['machine']['gpus']}, {results['versions']}", ""]
    lines += ["| case | precision | out of memory (→ micro-batch) | in place | restarts | largest difference | ok |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in results["cases"]:
        if "error" in row:
            lines.append(f"| {row['case']} | {row['precision']} | {row['error'].strip().splitlines()[-1]} | | | | no |")
            continue
        happened = "; ".join(row["ooms"]) or f"none: {row['micro_batch']} chosen before step 1"
        lines.append(
            f"| {row['case']} | {row['precision']} | {happened} | {row['in_place']} | {row['restarts']} "
            f"| {row['difference']:.1e} | {'yes' if row['ok'] else 'NO'} |"
        )
    lines += ["", "The largest difference is relative, over the losses of all steps, to a run without a memory limit"]
    lines += ["that used the small micro-batch from the start.", "", "If not even one sample fits, the run prints:", ""]
    return "\n".join([*lines, f"> {results['hopeless']['said']}", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--at_once", type=int, default=3, help="number of cases to run in parallel")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root, ThreadPoolExecutor(options.at_once) as pool:
        rows = pool.map(lambda name: case(name, Path(root)), CASES)
        hopeless = pool.submit(does_not_fit, Path(root))
        results = {
            "command": "python benchmarks/memory.py --output benchmarks/results",
            "when": time.strftime("%Y-%m-%d"),
            "machine": machine(),
            "versions": versions(["torch"]),
            "cases": list(rows),
            "hopeless": hopeless.result(),
        }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "memory.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.output / "memory.md").write_text(report(results))
    print(report(results))
    for row in results["cases"]:
        print(row.get("error", ""), file=sys.stderr)
    return 0 if all(row["ok"] for row in [*results["cases"], results["hopeless"]]) else 1


if __name__ == "__main__":
    sys.exit(main())
