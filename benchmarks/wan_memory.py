"""How much memory does `unisono train wan-flow` need on a GPU?

    python benchmarks/wan_memory.py             # a GPU
    python benchmarks/wan_memory.py --quick     # does it work? Tiny, anywhere; the numbers mean nothing

Each case is a real run of a few steps with the blocks of the real model, but only some of them, and the same with more:
memory grows by the same amount with each further block, so the whole model follows, also one that no single GPU holds.
Where results/wan_step.json has a run of the whole model, the two are compared. Bytes are torch's peak of allocated
memory, of steps after the first ones, in which the compiler tries out kernels. Cases share the GPU; all are forked from
one process, which has imported everything once. What is done so far is kept in a file, and taken up with --keep.
"""

from __future__ import annotations

import argparse
import hashlib
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

from machine import depends_on, machine, versions, without_folders
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
FIRST, STEPS = 2, 5  # steps whose peak does not count, and all
SAME = {"480x832x17": "480x832x17", "480x832x81": "480x832x81", "512x512x1, batch 16": "512x512x1"}  # in wan_step.json
PACKAGES = ["torch", "triton", "diffusers"]


def latent_of(model: str, shape: tuple[int, int, int, int], channels: int) -> tuple[int, int, int, int]:
    space = 16 if model == "TI2V-5B" else 8
    return channels, 1 + (shape[1] - 1) // 4, shape[2] // space, shape[3] // space


def estimate(config: Row, tokens: int, lora: bool, recomputed: bool) -> float:
    """GiB that a case may take, to let so many run at a time as fit."""
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
    """Forks a run; its process."""
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
    """Weights of any value: to draw them takes longer than the steps, and no value needs more memory than another."""
    import torch

    def fill(tensor: Any, *_: Any, **__: Any) -> Any:
        with torch.no_grad():
            return tensor.fill_(1e-3)

    torch.nn.init.kaiming_uniform_ = torch.nn.init.uniform_ = fill


def _forget_first_peak() -> None:
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    stepped = iter(range(1, 1000))

    def count(*_: Any) -> None:  # once more than there are steps: the optimizer's state is made by one that is skipped
        if next(stepped) == 1 + FIRST and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    register_optimizer_step_post_hook(count)


def code() -> str:
    """A fingerprint of unisono's own code: what other code needs is not what this needs."""
    files = sorted((ROOT / "src").rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def ran_out(folder: Path) -> bool:
    file = folder / "run" / "events.jsonl"
    return file.exists() and any(json.loads(line)["kind"] == "oom" for line in file.read_text().splitlines())


def keep(so_far: Path, cases: list[Row]) -> None:
    """Adds what was measured to the file, beside what other calls have measured."""
    found = json.loads(so_far.read_text()) if so_far.exists() else {}
    mine = {"versions": versions(PACKAGES), "code": code()}
    for case in cases:
        if case.get("gib") is not None:
            found[case["name"]] = {"gib": case["gib"], "date": case["date"], **mine}
    draft = so_far.with_suffix(".new")
    draft.write_text(json.dumps(found, indent=1) + "\n")
    os.replace(draft, so_far)


def peak_of(folder: Path) -> float | None:
    """The peak after enough steps, if there were so many."""
    file = folder / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []
    rows = [row for row in rows if "step_ms" in row]
    return rows[-1]["mem_gib"] if len(rows) >= STEPS else None


def measure(cases: list[Row], room: float, at_once: int, patience: float, so_far: Path) -> None:
    """Runs all cases, so many at a time as have room, and writes into each what it took."""
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
            said = (case["folder"] / "log").read_text().strip().splitlines() or ["no word"]
            case["failed"] = "" if peak is not None else "took too long" if not gone else said[-1][:300]
            if ran_out(case["folder"]):  # it went on with smaller micro-batches, which need less
                peak, case["failed"] = None, "ran out of memory"
            case["gib"] = peak
            told = f"{peak:.2f} GiB" if peak is not None else case["failed"]
            print(f"{time.monotonic() - begun:4.0f} s  {case['name']}: {told}", flush=True)
            case["date"] = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
            keep(so_far, cases)
            del running[process]
        used = sum(case["estimate"] for case in running.values())
        for case in list(waiting):
            if late:
                case |= {"gib": None, "failed": "did not come to its turn"}
                waiting.remove(case)
            elif len(running) < at_once and (not running or used + case["estimate"] <= room):
                running[start(case["folder"], case["settings"])] = case
                used += case["estimate"]
                waiting.remove(case)
        time.sleep(0.2)


def cases_in(scratch: Path, shapes: dict[str, tuple[int, int, int, int]], models: list[str], quick: bool) -> list[Row]:
    cases = []
    for turn in range(2):  # the second one finds its kernels compiled
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
                    settings |= {} if quick else {"attention": "cudnn"}  # what is chosen here; beside others it is luck
                    tokens = batch * latent[1] * latent[2] * latent[3] // 4
                    case = {"model": model, "shape": shape, "recompute": recompute, "layers": layers, "tokens": tokens}
                    case["turn"] = turn
                    case |= {"name": f"{model}, {shape}, recompute {recompute}, {layers} blocks", "folder": folder}
                    case["estimate"] = estimate(config, tokens, bool(MODELS[model][1]), bool(flags))
                    cases.append(case | {"settings": settings | flags | MODELS[model][1]})
    return sorted(cases, key=lambda case: (case["turn"], -case["estimate"]))


def check(rows: list[Row], file: Path) -> list[Row]:
    """What wan_step.py measured of the whole 1.3B model, beside what follows from a few blocks."""
    if not file.exists():
        return []
    measured, found = json.loads(file.read_text())["rows"], []
    for row in rows:
        whole = measured.get(SAME.get(row["shape"], ""), {})
        for recompute, loop in (("none", "unisono"), ("all", "unisono, --activation_checkpointing")):
            peak = whole.get(loop, {}).get("mem_gib")
            if row["model"] == "1.3B" and peak and row.get(recompute):
                found.append({"shape": row["shape"], "recompute": recompute, "whole": peak, "said": row[recompute]})
    return found


def table(result: Row) -> list[str]:
    lines = ["# Wan: the memory of a step", "", *depends_on(result)]
    run = dict.fromkeys(row["model"] for row in result["rows"])
    told = ", ".join(f"{name} {MODELS[name][2][0]} and {MODELS[name][2][1]}" for name in run)
    lines += [
        f"- Runs of some blocks of the real size ({told}), as `unisono train wan-flow` does by itself (bf16, compiled, "
        "fused AdamW), without the averaged weights (`--ema_decay 0`; they add 4 bytes per weight)",
        "- **One GPU**: those two runs continued to all blocks. *Slanted* is predicted: what is more than this GPU has "
        f"({result['gpu_gib']:.1f} GiB), every 2nd block recomputed (`--recompute_every 2`), and all of fsdp",
        "- Memory is fullest at the end of the forward pass (12 bytes per weight, 2 more in blocks that are not "
        "recomputed, and what blocks keep) or at the end of the backward pass (16 bytes per weight, and what one block "
        "keeps); with every 2nd block recomputed there is half as much kept",
        f"- **fsdp on {GPUS} GPUs**: the same with weights, gradients and optimizer state shared out; whole are the "
        "weights in 32 bit, those outside blocks in 16 bit, and 10 bytes per weight of one block (its weights and "
        "gradients, the next one's weights, the gradients of the one before). Of a LoRA the frozen weights alone are "
        "counted, 2 bytes each",
        "- One micro-batch in a step: with more (`--gradient_accumulation_steps`) all gradients lie there in the "
        "forward pass too, 4 bytes per weight. ddp needs 4 bytes per weight more than one GPU alone",
        "- GiB are those that torch has allocated. Fragments that it holds besides, CUDA and NCCL are not in them",
        "- The first steps, in which the compiler tries out kernels, may need some hundred MiB more. Attention by "
        "cuDNN, which is what torch itself takes on this GPU",
    ]
    if result.get("kept"):
        kept = result["kept"]
        lines.append(f"- {len(kept)} cases were measured by earlier calls with the same versions, from {kept[0]} on")
    for row in result["check"]:
        lines.append(
            f"- Checked: 1.3B, {row['shape']}, recompute {row['recompute']}: the whole model took {row['whole']:.1f} "
            f"GiB, {row['said']:.1f} is said here"
        )
    columns = ["model", "shape", "tokens", "none", "every 2nd", "all"]
    columns += [f"fsdp × {GPUS}: none", "every 2nd", "all"]
    lines += ["", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in result["rows"]:
        cells = [row["model"], row["shape"], f"{row['tokens']:,}"]
        cells += [cell(row, name, result["gpu_gib"]) for name in COLUMNS]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "GiB per GPU.", "", "## What to say on GPUs of 80 GB", ""]
    lines += [
        "One sample at a time on each, any number of micro-batches in a step, with the averaged weights, "
        f"{FREE_GIB:.0f} GiB left for CUDA, NCCL and fragments: flags, and GiB. Predicted; without fsdp several GPUs "
        "mean ddp.",
        "",
        *fits(result["rows"]),
    ]
    return lines


def write(folder: Path, result: Row, quick: bool) -> None:
    """The rows that follow from the cases, and the page."""
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
    parser.add_argument("--room_gib", type=float, default=120, help="memory of the GPU to use")
    parser.add_argument("--patience_s", type=float, default=1200)
    parser.add_argument("--keep", action="store_true", help="goes on with what an earlier call has measured")
    parser.add_argument("--again", action="store_true", help="measures nothing; rows and page anew from what was")
    parser.add_argument("--quick", action="store_true", help="does it work? Never into results")
    given = parser.parse_args()
    if given.quick and given.output.resolve() == RESULTS:
        parser.error("--quick needs --output, another folder than benchmarks/results")
    if given.again:
        result = json.loads((given.output / "wan_memory.json").read_text())
        write(given.output, result, result["quick"])
        return 0
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asks without CUDA, for what is forked later
    os.environ["OMP_NUM_THREADS"] = "1"  # threads do not live on in what is forked, and a dozen cases share the cores
    from diffusers import WanTransformer3DModel  # noqa: F401  # once, for all that are forked

    import unisono.recipes.wan_flow.recipe  # noqa: F401

    result = {
        "command": shlex.join(["python", "benchmarks/wan_memory.py", *without_folders(sys.argv[1:])]),
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "quick": given.quick,
    }
    models = [name for name in given.models.split("/") if name] or list(MODELS)
    given.output.mkdir(parents=True, exist_ok=True)
    so_far = given.output / "wan_memory_so_far.json"
    with tempfile.TemporaryDirectory() as place:
        shapes = QUICK_SHAPES if given.quick else SHAPES
        cases = cases_in(Path(place), shapes, models, given.quick)
        if given.keep and so_far.exists():
            measured = json.loads(so_far.read_text())
            for case in cases:
                before = measured.get(case["name"], {})
                is_same = (before.get("versions"), before.get("code")) == (versions(PACKAGES), code())
                same = before if is_same else {}
                case |= {"gib": None, "failed": "", **same}
            result["kept"] = sorted(case["date"] for case in cases if case["gib"] is not None)
        measure(cases, given.room_gib, given.at_once, given.patience_s, so_far)
    import torch

    # Not before: it asks torch about GPUs, and what is forked from a process with CUDA has none.
    result |= {"machine": machine(), "versions": versions(PACKAGES)}
    result["gpu_gib"] = torch.cuda.mem_get_info()[1] / GIB if torch.cuda.is_available() else 0.0
    kept = ("model", "shape", "recompute", "layers", "tokens", "gib", "failed")
    result["cases"] = [{name: case[name] for name in kept} for case in cases]
    write(given.output, result, given.quick)
    return int(any(case["failed"] for case in cases))


if __name__ == "__main__":
    sys.exit(main())
