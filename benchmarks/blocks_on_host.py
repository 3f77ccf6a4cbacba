"""What does `--blocks_on_host` cost in time, and what does it save in memory?

    python benchmarks/blocks_on_host.py --only full        # a GPU: a full fine-tune of Wan 1.3B
    python benchmarks/blocks_on_host.py --only lora-bf16   # a LoRA on blocks of Wan 14B, base in bf16
    python benchmarks/blocks_on_host.py --only lora-fp8    # the same, base in fp8
    python benchmarks/blocks_on_host.py --quick --output FOLDER   # smoke test on any machine; the numbers mean nothing

Each row is a real `unisono train wan-flow` run of a few steps, with activation checkpointing, on random data of
480x832x17 and batch 1. A full fine-tune is compared with `--strategy fsdp --fsdp_cpu_offload` on one GPU, which steps
AdamW on the CPU. Rows are measured one after the other and added to the file, next to those of earlier calls.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from machine import code, depends_on, machine, versions, without_folders
from wan_fits import config_of
from wan_memory import latent_of, write_data

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
sys.path.insert(0, str(HERE.parent / "src"))
Row = dict[str, Any]
FIRST, STEPS = 3, 7  # warm-up steps (compilation, guarded steps, the choice of kernels), and the total
FULL, BF16, FP8 = "full", "lora-bf16", "lora-fp8"
TITLES = {
    FULL: "1.3B, full fine-tune: weights, gradients and AdamW state of N blocks on the host",
    BF16: "Blocks of 14B with a LoRA of rank 32: frozen bf16 weights of N blocks on the host",
    FP8: "Blocks of 14B with a LoRA of rank 32: frozen fp8 weights of N blocks on the host",
}
MODELS = {FULL: "1.3B", BF16: "14B, LoRA of rank 32", FP8: "14B, LoRA of rank 32"}
OFFLOAD = "fsdp --fsdp_cpu_offload"


def cases_of(group: str, blocks: int, quick: bool) -> dict[str, Row]:
    """The runs of a group: name -> settings."""
    cases: dict[str, Row] = {str(num): {"blocks_on_host": num} if num else {} for num in (0, blocks // 2, blocks)}
    if group == FULL:  # torch cannot offload without a GPU
        return cases | ({} if quick else {OFFLOAD: {"strategy": "fsdp", "fsdp_cpu_offload": True}})
    lora = {"lora_rank": 32} | ({"base_precision": "fp8"} if group == FP8 else {})
    return {name: lora | settings for name, settings in cases.items()}


def run(folder: Path, settings: Row, patience: float) -> Row:
    """Trains in a forked process until there are enough steps; returns milliseconds and GiB."""
    folder.mkdir()
    process = os.fork()
    if not process:
        _train(folder, settings)
    metrics, begun, ended = folder / "run" / "metrics.jsonl", time.monotonic(), False
    steps: list[Row] = []
    while len(steps) < STEPS and not ended and time.monotonic() < begun + patience:
        time.sleep(0.2)
        ended = os.waitpid(process, os.WNOHANG)[0] == process
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        steps = [row for row in (json.loads(line) for line in lines if line.endswith("}")) if "step_ms" in row]
    if not ended:
        os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
    row = {"wall_s": round(time.monotonic() - begun, 1), "failed": ""}
    if len(steps) < STEPS:
        log = (folder / "log").read_text()
        print(log[-3000:], file=sys.stderr)
        return row | {"failed": (log.strip().splitlines() or ["no output"])[-1][:300]}
    timed = [step["step_ms"] for step in steps[FIRST:]]
    return row | {"ms": statistics.median(timed), "all_ms": timed, "gib": steps[-1].get("mem_gib") or 0.0}


def _train(folder: Path, settings: Row) -> None:
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
    """Fills weights with a constant: random initialisation takes longer than the steps, which do not depend on it."""
    import torch

    def fill(tensor: Any, *_: Any, **__: Any) -> Any:
        with torch.no_grad():
            return tensor.fill_(1e-3)

    torch.nn.init.kaiming_uniform_ = torch.nn.init.uniform_ = fill


def _forget_first_peak() -> None:
    """The compiler tunes kernels in the first steps, which may take memory of its own."""
    import torch

    from unisono.engine.step.optimizer_step import OptimizerStep

    step, numbers = OptimizerStep.run, iter(range(1, 10**6))

    def counted(*arguments: Any, **keywords: Any) -> Any:
        if next(numbers) == FIRST and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        return step(*arguments, **keywords)

    OptimizerStep.run = counted  # type: ignore[method-assign]


def settings_of(group: str, blocks: int, scratch: Path, quick: bool) -> Row:
    """What all runs of a group have in common."""
    config = config_of(MODELS[group], blocks, quick)
    batch, frames, height, width = (1, 1, 32, 32) if quick else (1, 17, 480, 832)
    file, data = scratch / f"{group}.json", scratch / f"{group}-data"
    file.write_text(json.dumps(config))
    latent = latent_of(MODELS[group], (batch, frames, height, width), config["in_channels"])
    write_data(data, 2, latent, config["text_dim"])
    settings = {"dataset_path": str(data), "batch_size": batch, "model_config": str(file), "max_steps": 1000}
    settings |= {"log_every": 1, "ema_decay": 0, "caption_dropout": 0, "guidance": 1, "save_every": 0}
    settings |= {"eval_every": -1, "preview_every": -1, "tensorboard": False, "num_workers": 0, "gpus": "1"}
    settings |= {"num_frames": frames, "height": height, "width": width, "activation_checkpointing": True}
    return settings if quick else settings | {"attention": "cudnn"}  # trying kernels out would take time


def bandwidth() -> dict[str, float] | None:
    """GB/s between page-locked host memory and the GPU, in each direction."""
    import torch

    if not torch.cuda.is_available():
        return None
    host = torch.empty(2**29, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(2**29, dtype=torch.uint8, device="cuda")
    rates = {}
    for name, source, target in (("to_device", host, device), ("to_host", device, host)):
        times = []
        for _ in range(4):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        rates[name] = host.nbytes / min(times) / 1e6
    return rates


def table(result: Row) -> list[str]:
    lines = ["# Blocks on the host", "", *depends_on(result)]
    if result["bandwidth"]:
        to_device, to_host = (result["bandwidth"][name] for name in ("to_device", "to_host"))
        lines.append(f"- Page-locked copies: {to_device:.1f} GB/s to the GPU, {to_host:.1f} GB/s to the host")
    lines += [
        "- Runs of `unisono train wan-flow` with `--activation_checkpointing`, compiled, bf16, 480x832x17, batch 1; "
        f"the median of {STEPS - FIRST} steps; GiB are torch's peak of allocated memory",
        "- A group that an earlier call measured has its own date",
    ]
    for group, title in TITLES.items():
        if group not in result["groups"]:
            continue
        measured = result["groups"][group]
        lines += ["", f"## {title}", "", f"{measured['blocks']} blocks, {measured['date']}.", ""]
        lines += ["| N | ms/step | times N = 0 | GiB |", "|---|---|---|---|"]
        rows = measured["rows"]
        base = rows["0"].get("ms")
        for name, row in rows.items():
            if row["failed"]:
                lines.append(f"| {name} | failed: {row['failed']} | | |")
            else:
                times = f"{row['ms'] / base:.2f}" if base else ""
                lines.append(f"| {name} | {row['ms']:,.0f} | {times} | {row['gib']:.1f} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(TITLES), action="append", help="groups to measure (default: all)")
    parser.add_argument("--blocks", type=int, help="blocks of the model (default: 30 for 1.3B, 12 for 14B)")
    parser.add_argument("--patience_s", type=float, default=100, help="seconds after which a run is stopped")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="smoke test; cannot write to results/")
    options = parser.parse_args()
    if options.quick and options.output.resolve() == RESULTS:
        parser.error("--quick needs --output, another folder than benchmarks/results")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # does not initialise CUDA, so that processes can be forked
    from diffusers import WanTransformer3DModel  # noqa: F401  # imported once for all forked processes

    import unisono.recipes.wan_flow.recipe  # noqa: F401

    options.output.mkdir(parents=True, exist_ok=True)
    file = options.output / "blocks_on_host.json"
    groups: Row = json.loads(file.read_text())["groups"] if file.exists() else {}
    failed = False
    with tempfile.TemporaryDirectory() as place:
        for group in options.only or list(TITLES):
            blocks = options.blocks or (4 if options.quick else 30 if group == FULL else 12)
            common = settings_of(group, blocks, Path(place), options.quick)
            rows = {}
            for number, (name, settings) in enumerate(cases_of(group, blocks, options.quick).items()):
                folder = Path(place) / f"{group}-{number}"
                own = {"strategy": "single", "output_dir": str(folder / "run")} | settings
                rows[name] = run(folder, common | own, options.patience_s)
                failed |= bool(rows[name]["failed"])
                print(f"{group}, {name}: {rows[name]}", flush=True)
            date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
            groups[group] = {"blocks": blocks, "date": date, "code": code(HERE / "blocks_on_host.py"), "rows": rows}
    # Not earlier: these initialise CUDA, which forked processes could not use.
    result = {
        "command": shlex.join(["python", "benchmarks/blocks_on_host.py", *without_folders(sys.argv[1:])]),
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "quick": options.quick,
        "machine": machine(),
        "versions": versions(["torch", "triton", "diffusers"]),
        "bandwidth": bandwidth(),
        "groups": groups,
    }
    file.write_text(json.dumps(result, indent=1) + "\n")
    file.with_suffix(".md").write_text("\n".join(table(result)) + "\n")
    print("\n".join(table(result)))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
