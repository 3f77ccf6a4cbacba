"""Measures the GPU memory that `unisono train wan-flow` needs.

    python benchmarks/wan_memory.py             # a GPU
    python benchmarks/wan_memory.py --quick     # smoke test on any machine; the numbers mean nothing

Each case is a real run of a few steps with blocks of the real size, once with a few blocks and once with more. Every
additional block adds the same amount of memory, which gives the memory of the whole model, even if no single GPU can
hold it. If results/wan_step.json has a run of the whole model, the two are compared. Bytes are torch's peak of
allocated memory after the first steps, in which the compiler tunes kernels. Cases share the GPU; all are forked from
one process that has imported everything once. Finished cases are stored in a file and reused with --keep.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from machine import code, depends_on, machine, versions, without_folders
from wan_fits import (
    COLUMNS,
    FREE_GIB,
    GIB,
    GPUS,
    MODELS,
    QUICK_SHAPES,
    RECOMPUTE,
    SHAPES,
    Row,
    cell,
    config_of,
    finished,
    fits,
    size,
)

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"
sys.path.insert(0, str(ROOT / "src"))
FIRST, STEPS = 2, 5  # warm-up steps whose peak does not count, and the total
SAME = {
    "480x832x17": "480x832x17",
    "480x832x81": "480x832x81",
    "512x512x1, batch 16": "512x512x1",
}  # the name in wan_step.json
PACKAGES = ["torch", "triton", "diffusers"]


def latent_of(model: str, shape: tuple[int, int, int, int], channels: int) -> tuple[int, int, int, int]:
    space = 16 if model == "TI2V-5B" else 8
    return channels, 1 + (shape[1] - 1) // 4, shape[2] // space, shape[3] // space


def estimate(config: Row, tokens: int, lora: bool, recomputed: bool) -> float:
    """Upper estimate of a case's memory in GiB, for running as many cases in parallel as fit."""
    width, layers = config["num_attention_heads"] * config["attention_head_dim"], config["num_layers"]
    block, rest = size(config)
    weights = (layers * block + rest) * (2 if lora else 16)
    each = tokens * 2 * (20 * width + 3 * config["ffn_dim"])
    return (weights + (2 * each + layers * tokens * 2 * width if recomputed else layers * each)) / GIB + 2


def write_data(folder: Path, batch: int, latent: tuple[int, ...], text_width: int) -> None:
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    for number in range(batch):
        save_file({"latent": torch.randn(latent)}, folder / f"{number:03d}.latent.safetensors")
        save_file({"embeddings": torch.randn(64, text_width).bfloat16()}, folder / f"{number:03d}.safetensors")


def start(folder: Path, settings: Row) -> int:
    """Forks a run and returns its process."""
    process = os.fork()
    if process:
        return process
    try:
        os.setsid()
        with (folder / "log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            import unisono

            _begin_at_once()
            _forget_first_peak()
            unisono.train("wan-flow", **settings)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _begin_at_once() -> None:
    """Leaves weights uninitialised: random initialisation takes longer than the steps and does not affect memory."""
    import torch

    def fill(tensor: Any, *_: Any, **__: Any) -> Any:
        with torch.no_grad():
            return tensor.fill_(1e-3)

    torch.nn.init.kaiming_uniform_ = torch.nn.init.uniform_ = fill


def _forget_first_peak() -> None:
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    stepped = iter(range(1, 1000))

    # Called once more than the number of steps, because a skipped step creates the optimizer's state.
    def count(*_: Any) -> None:
        if next(stepped) == 1 + FIRST and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    register_optimizer_step_post_hook(count)


def ran_out(folder: Path) -> bool:
    file = folder / "run" / "events.jsonl"
    return file.exists() and any(json.loads(line)["kind"] == "oom" for line in file.read_text().splitlines())


def keep(so_far: Path, cases: list[Row]) -> None:
    """Adds measurements to the file, next to those of other calls."""
    results = json.loads(so_far.read_text()) if so_far.exists() else {}
    mine = {"versions": versions(PACKAGES), "code": code()}
    for case in cases:
        if case.get("gib") is not None:
            results[case["name"]] = {"gib": case["gib"], "date": case["date"], **mine}
    draft = so_far.with_suffix(".new")
    draft.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(draft, so_far)


def peak_of(folder: Path) -> float | None:
    """The peak after the warm-up steps, or None if there were too few steps."""
    file = folder / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []
    rows = [row for row in rows if "step_ms" in row]
    return rows[-1]["mem_gib"] if len(rows) >= STEPS else None


def measure(cases: list[Row], room: float, at_once: int, patience: float, so_far: Path) -> None:
    """Runs all cases, as many in parallel as fit, and stores the memory of each."""
    waiting, running, begun = [case for case in cases if case.get("gib") is None], {}, time.monotonic()
    while waiting or running:
        late = time.monotonic() > begun + patience
        for process, case in list(running.items()):
            peak, gone = peak_of(case["folder"]), os.waitpid(process, os.WNOHANG)[0] == process
            if peak is None and not gone and not late:
                continue
            if not gone:
                os.killpg(process, signal.SIGKILL)
                os.waitpid(process, 0)
            log = (case["folder"] / "log").read_text().strip().splitlines() or ["no word"]
            case["failed"] = "" if peak is not None else "took too long" if not gone else log[-1][:300]
            if ran_out(case["folder"]):  # the run continued with smaller micro-batches, which need less memory
                peak, case["failed"] = None, "ran out of memory"
            case["gib"] = peak
            outcome = f"{peak:.2f} GiB" if peak is not None else case["failed"]
            print(f"{time.monotonic() - begun:4.0f} s  {case['name']}: {outcome}", flush=True)
            case["date"] = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
            keep(so_far, cases)
            del running[process]
        used = sum(case["estimate"] for case in running.values())
        for case in list(waiting):
            if late:
                case |= {"gib": None, "failed": "not run"}
                waiting.remove(case)
            elif len(running) < at_once and (not running or used + case["estimate"] <= room):
                running[start(case["folder"], case["settings"])] = case
                used += case["estimate"]
                waiting.remove(case)
        time.sleep(0.2)


def cases_in(scratch: Path, shapes: dict[str, tuple[int, int, int, int]], models: list[str], quick: bool) -> list[Row]:
    cases = []
    for turn in range(2):  # the second run finds compiled kernels
        for model in models:
            layers = MODELS[model][2][turn]
            config = config_of(model, layers, quick)
            file = scratch / f"{len(cases)}.json"
            file.write_text(json.dumps(config))
            for shape, (batch, frames, height, width) in shapes.items():
                latent = latent_of(model, (batch, frames, height, width), config["in_channels"])
                data = scratch / f"{config['in_channels']}-{shape}"
                if not data.exists():
                    write_data(data, batch, latent, config["text_dim"])
                for recompute, flags in RECOMPUTE.items():
                    folder = scratch / f"case{len(cases)}"
                    folder.mkdir()
                    settings = {"dataset_path": str(data), "batch_size": batch, "model_config": str(file)}
                    settings |= {"max_steps": 1000, "log_every": 1, "ema_decay": 0, "caption_dropout": 0, "guidance": 1}
                    settings |= {"save_every": 0, "eval_every": -1, "preview_every": -1, "tensorboard": False}
                    settings |= {"num_workers": 0, "strategy": "single", "output_dir": str(folder / "run")}
                    settings |= {"num_frames": frames, "height": height, "width": width, "gpus": "1"}
                    settings |= (
                        {} if quick else {"attention": "cudnn"}
                    )  # a fixed choice, because timings of kernels next to other cases would be random
                    tokens = batch * latent[1] * latent[2] * latent[3] // 4
                    case = {"model": model, "shape": shape, "recompute": recompute, "layers": layers, "tokens": tokens}
                    case["turn"] = turn
                    case |= {"name": f"{model}, {shape}, recompute {recompute}, {layers} blocks", "folder": folder}
                    case["estimate"] = estimate(config, tokens, bool(MODELS[model][1]), bool(flags))
                    cases.append(case | {"settings": settings | flags | MODELS[model][1]})
    return sorted(cases, key=lambda case: (case["turn"], -case["estimate"]))


def check(rows: list[Row], file: Path) -> list[Row]:
    """Compares wan_step.py's measurements of the whole 1.3B model with the predictions from fewer blocks."""
    if not file.exists():
        return []
    measured, comparisons = json.loads(file.read_text())["rows"], []
    for row in rows:
        whole = measured.get(SAME.get(row["shape"], ""), {})
        for recompute, loop in (("none", "unisono"), ("all", "unisono, --activation_checkpointing")):
            peak = whole.get(loop, {}).get("mem_gib")
            if row["model"] == "1.3B" and peak and row.get(recompute):
                comparisons.append(
                    {"shape": row["shape"], "recompute": recompute, "whole": peak, "said": row[recompute]}
                )
    return comparisons


def table(result: Row) -> list[str]:
    lines = ["# wan-flow: memory", "", *depends_on(result)]
    run = dict.fromkeys(row["model"] for row in result["rows"])
    depths = ", ".join(f"{name} {MODELS[name][2][0]} and {MODELS[name][2][1]}" for name in run)
    lines += [
        f"- Runs with two numbers of blocks of the real size ({depths}), with the defaults of `unisono train wan-flow` "
        "(bf16, compiled, fused AdamW), without EMA (`--ema_decay 0`; it adds 4 bytes per weight)",
        "- **One GPU**: those two runs extrapolated to all blocks. Numbers in *italics* are predicted: what exceeds "
        f"this GPU ({result['gpu_gib']:.1f} GiB), every 2nd block recomputed (`--recompute_every 2`), and everything "
        "with fsdp",
        "- Memory peaks at the end of the forward pass (12 bytes per weight, 2 more in blocks that are not "
        "recomputed, and the activations) or at the end of the backward pass (16 bytes per weight, and the "
        "activations of one block); with every 2nd block recomputed, activations take half as much",
        f"- **fsdp on {GPUS} GPUs**: the same with sharded weights, gradients and optimizer state. Each rank holds "
        "unsharded: the weights that stay in 32 bit, the weights outside blocks in 16 bit, and 10 bytes per weight of "
        "one block (its weights and gradients, the next block's weights, the previous block's gradients). For a LoRA "
        "only the frozen weights are counted, 2 bytes each",
        "- One micro-batch per step: with more (`--gradient_accumulation_steps`), all gradients exist during the "
        "forward pass too, 4 bytes per weight. ddp needs 4 bytes per weight more than a single GPU",
        "- GiB are torch's allocated memory, without fragmentation, CUDA and NCCL",
        "- The first steps, in which the compiler tunes kernels, may need a few hundred MiB more. Attention uses "
        "cuDNN, torch's own choice on this GPU",
    ]
    if result.get("kept"):
        kept = result["kept"]
        lines.append(f"- {len(kept)} cases were measured by earlier calls with the same versions, since {kept[0]}")
    for row in result["check"]:
        lines.append(
            f"- Checked: 1.3B, {row['shape']}, recompute {row['recompute']}: the whole model took {row['whole']:.1f} "
            f"GiB, predicted {row['said']:.1f}"
        )
    columns = ["model", "shape", "tokens", "none", "every 2nd", "all"]
    columns += [f"fsdp × {GPUS}: none", "every 2nd", "all"]
    lines += ["", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in result["rows"]:
        cells = [row["model"], row["shape"], f"{row['tokens']:,}"]
        cells += [cell(row, name, result["gpu_gib"]) for name in COLUMNS]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "GiB per GPU.", "", "## Flags for 80 GB GPUs", ""]
    lines += [
        "Flags, and predicted GiB per GPU, for one sample at a time, any number of micro-batches per step, with EMA, "
        f"and {FREE_GIB:.0f} GiB left for CUDA, NCCL and fragmentation. Without fsdp, several GPUs use ddp.",
        "",
        *fits(result["rows"]),
    ]
    return lines


def write(folder: Path, result: Row, quick: bool) -> None:
    """Derives the rows from the cases, and writes the page."""
    result["rows"] = finished(result["cases"], quick)
    result["check"] = check(result["rows"], RESULTS / "wan_step.json")
    (folder / "wan_memory.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "wan_memory.md").write_text("\n".join(table(result)) + "\n")
    print("\n".join(table(result)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--at_once", type=int, default=12)
    parser.add_argument("--models", default="", help="separated by / (default all)")
    parser.add_argument("--room_gib", type=float, default=120, help="GiB of the GPU to use")
    parser.add_argument("--patience_s", type=float, default=1200)
    parser.add_argument("--keep", action="store_true", help="reuse the cases that an earlier call measured")
    parser.add_argument("--again", action="store_true", help="measure nothing; rewrite rows and page from stored cases")
    parser.add_argument("--quick", action="store_true", help="smoke test; cannot write to results/")
    options = parser.parse_args()
    if options.quick and options.output.resolve() == RESULTS:
        parser.error("--quick needs --output, another folder than benchmarks/results")
    if options.again:
        result = json.loads((options.output / "wan_memory.json").read_text())
        write(options.output, result, result["quick"])
        return 0
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # does not initialise CUDA, so that processes can be forked later
    os.environ["OMP_NUM_THREADS"] = "1"  # threads do not survive a fork, and a dozen cases share the cores
    from diffusers import WanTransformer3DModel  # noqa: F401  # imported once for all forked processes

    import unisono.recipes.wan_flow.recipe  # noqa: F401

    result = {
        "command": shlex.join(["python", "benchmarks/wan_memory.py", *without_folders(sys.argv[1:])]),
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "quick": options.quick,
    }
    models = [name for name in options.models.split("/") if name] or list(MODELS)
    options.output.mkdir(parents=True, exist_ok=True)
    so_far = options.output / "wan_memory_so_far.json"
    with tempfile.TemporaryDirectory() as place:
        shapes = QUICK_SHAPES if options.quick else SHAPES
        cases = cases_in(Path(place), shapes, models, options.quick)
        if options.keep and so_far.exists():
            measured = json.loads(so_far.read_text())
            for case in cases:
                before = measured.get(case["name"], {})
                is_same = (before.get("versions"), before.get("code")) == (versions(PACKAGES), code())
                same = before if is_same else {}
                case |= {"gib": None, "failed": "", **same}
            result["kept"] = sorted(case["date"] for case in cases if case["gib"] is not None)
        measure(cases, options.room_gib, options.at_once, options.patience_s, so_far)
    import torch

    # Called only here, because it initialises CUDA, which forked processes could not use.
    result |= {"machine": machine(), "versions": versions(PACKAGES)}
    result["gpu_gib"] = torch.cuda.mem_get_info()[1] / GIB if torch.cuda.is_available() else 0.0
    kept = ("model", "shape", "recompute", "layers", "tokens", "gib", "failed")
    result["cases"] = [{name: case[name] for name in kept} for case in cases]
    write(options.output, result, options.quick)
    return int(any(case["failed"] for case in cases))


if __name__ == "__main__":
    sys.exit(main())
