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

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"
sys.path.insert(0, str(ROOT / "src"))
FIRST, STEPS = 2, 5  # steps whose peak does not count, and all
GPUS = 8  # what the sharded columns are for
LORA = {"lora_rank": 32}
# name -> model_config, further settings, numbers of blocks: far from each other, and so many that all else is small
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, int]]] = {
    "1.3B": ("1.3b", {}, (6, 18)),
    "TI2V-5B": ("ti2v-5b", {}, (4, 12)),
    "14B, LoRA of rank 32": ("14b", LORA, (2, 8)),
    "14B": ("14b", {}, (2, 6)),
}
# name -> batch, frames, height, width
SHAPES = {
    "512x512x1": (1, 1, 512, 512),
    "512x512x1, batch 16": (16, 1, 512, 512),
    "480x832x17": (1, 17, 480, 832),
    "480x832x81": (1, 81, 480, 832),
}
QUICK_SHAPES = {"32x32x1": (1, 1, 32, 32)}
RECOMPUTE = {"none": {}, "all": {"activation_checkpointing": True}}
SAME = {"480x832x17": "480x832x17", "480x832x81": "480x832x81", "512x512x1, batch 16": "512x512x1"}  # in wan_step.json
Row = dict[str, Any]
GIB = 2**30
PACKAGES = ["torch", "triton", "diffusers"]


def config_of(model: str, layers: int, quick: bool) -> Row:
    from unisono.recipes.wan.models.load import CONFIGS

    config = dict(CONFIGS[MODELS[model][0]]) | {"num_layers": layers}
    small = {"num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32, "text_dim": 32, "freq_dim": 32}
    return config | (small if quick else {})


def latent_of(model: str, shape: tuple[int, int, int, int], channels: int) -> tuple[int, int, int, int]:
    space = 16 if model == "TI2V-5B" else 8
    return channels, 1 + (shape[1] - 1) // 4, shape[2] // space, shape[3] // space


def size(config: Row, layers: int) -> tuple[int, int]:
    """Weights of one block and of all else, counted on a model of no memory."""
    import torch
    from diffusers import WanTransformer3DModel

    with torch.device("meta"):
        one, two = (WanTransformer3DModel(**config | {"num_layers": number}) for number in (1, 2))
    counts = [sum(part.numel() for part in model.parameters()) for model in (one, two)]
    return counts[1] - counts[0], 2 * counts[0] - counts[1]


def estimate(config: Row, tokens: int, lora: bool, recomputed: bool) -> float:
    """GiB that a case may take, to let so many run at a time as fit."""
    width, layers = config["num_attention_heads"] * config["attention_head_dim"], config["num_layers"]
    block, rest = size(config, 1)
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


def ran_out(folder: Path) -> bool:
    file = folder / "run" / "events.jsonl"
    return file.exists() and any(json.loads(line)["kind"] == "oom" for line in file.read_text().splitlines())


def keep(so_far: Path, cases: list[Row]) -> None:
    """Adds what was measured to the file, beside what other calls have measured."""
    found = json.loads(so_far.read_text()) if so_far.exists() else {}
    mine = {"versions": versions(PACKAGES)}
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


def finished(cases: list[Row], quick: bool) -> list[Row]:
    """A row for each model and shape: GiB of the whole model, on one GPU and sharded."""
    found = {(case["model"], case["shape"], case["recompute"], case["layers"]): case for case in cases}
    rows = []
    measured = {(case["model"], case["shape"]) for case in cases}
    for model, shape in ((model, shape) for model in MODELS for shape in SHAPES | QUICK_SHAPES):
        if (model, shape) not in measured:
            continue
        config = config_of(model, 30, quick)
        from unisono.recipes.wan.models.load import CONFIGS

        layers, lora = CONFIGS[MODELS[model][0]]["num_layers"], bool(MODELS[model][1])
        block, rest = size(config, layers)
        row: Row = {"model": model, "shape": shape, "layers": layers, "weights": layers * block + rest}
        depths = MODELS[model][2]
        row["tokens"] = found[model, shape, "none", depths[0]]["tokens"]
        for recompute in RECOMPUTE:
            few, more = (found[model, shape, recompute, depth] for depth in depths)
            if few["failed"] or more["failed"]:
                row |= {recompute: None, f"{recompute}_failed": few["failed"] or more["failed"]}
                continue
            each = (more["gib"] - few["gib"]) / (depths[1] - depths[0])
            row[recompute] = few["gib"] + (layers - depths[0]) * each
        if row["none"] and row["all"]:
            row["every 2nd"] = (row["none"] + row["all"]) / 2
        for name in ("none", "every 2nd", "all"):
            if row.get(name):
                # Weights, gradients and AdamW's two averages in 32 bit are sharded; two blocks at a time are there
                # whole, weights and gradients in 16 bit. Of a LoRA the frozen weights alone count, in 16 bit.
                sharded = row["weights"] * (2 if lora else 16) * (1 - 1 / GPUS)
                row[f"{name}, fsdp"] = row[name] - (sharded - 2 * block * (2 if lora else 4)) / GIB
        rows.append(row)
    return rows


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
        "- **One GPU**: those two runs continued to all blocks. Every 2nd block recomputed (`--recompute_every 2`) is "
        "the middle of none and all",
        f"- **fsdp on {GPUS} GPUs** is calculated, not run: from the column for one GPU, with weights, gradients and "
        "optimizer state shared out, and two blocks whole in 16 bit",
    ]
    lines.append(
        "- The first steps, in which the compiler tries out kernels, may need some hundred MiB more. Attention by "
        "cuDNN, which is what `--attention auto` chooses on this GPU"
    )
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
        for name in ("none", "every 2nd", "all", "none, fsdp", "every 2nd, fsdp", "all, fsdp"):
            failed = f"FAILED: {row[f'{name}_failed']}".replace("|", " ") if f"{name}_failed" in row else ""
            cells.append(f"{row[name]:.1f}" if row.get(name) else failed)
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", "GiB per GPU."]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--at_once", type=int, default=12)
    parser.add_argument("--models", default="", help="separated by / (default all)")
    parser.add_argument("--room_gib", type=float, default=120, help="memory of the GPU to use")
    parser.add_argument("--patience_s", type=float, default=1200)
    parser.add_argument("--keep", action="store_true", help="goes on with what an earlier call has measured")
    parser.add_argument("--quick", action="store_true", help="does it work? Never into results")
    given = parser.parse_args()
    if given.quick and given.output.resolve() == RESULTS:
        parser.error("--quick needs --output, another folder than benchmarks/results")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asks without CUDA, for what is forked later
    os.environ["OMP_NUM_THREADS"] = "1"  # threads do not live on in what is forked, and a dozen cases share the cores
    from diffusers import WanTransformer3DModel  # noqa: F401  # once, for all that are forked

    import unisono.recipes.wan_flow.recipe  # noqa: F401

    result: Row = {
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
                same = before if before.get("versions") == versions(PACKAGES) else {}
                case |= {"gib": None, "failed": "", **same}
            result["kept"] = sorted({case["date"] for case in cases if case["gib"] is not None})
        measure(cases, given.room_gib, given.at_once, given.patience_s, so_far)
        rows = finished(cases, given.quick)
    # Not before: it asks torch about GPUs, and what is forked from a process with CUDA has none.
    result |= {"machine": machine(), "versions": versions(PACKAGES)}
    kept = ("model", "shape", "recompute", "layers", "gib", "failed")
    result |= {"cases": [{name: case[name] for name in kept} for case in cases], "rows": rows}
    result["check"] = check(rows, RESULTS / "wan_step.json")
    (given.output / "wan_memory.json").write_text(json.dumps(result, indent=1) + "\n")
    (given.output / "wan_memory.md").write_text("\n".join(table(result)) + "\n")
    print("\n".join(table(result)))
    return int(any(case["failed"] for case in cases))


if __name__ == "__main__":
    sys.exit(main())
