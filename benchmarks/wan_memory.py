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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import depends_on, machine, versions, without_folders

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"
sys.path.insert(0, str(ROOT / "src"))
FIRST, STEPS = 2, 5  # steps whose peak does not count, and all
GPUS = 8  # what the sharded columns are for
COMMON_GIB, FREE_GIB, COMMON_GPUS = 79.0, 6.0, (1, 2, 8)  # of a GPU of 80 GB; to be left; and how many there are
FLAGS = {"none": "", "every 2nd": "--activation_checkpointing --recompute_every 2", "all": "--activation_checkpointing"}
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
COLUMNS = ["none", "every 2nd", "all", "none, fsdp", "every 2nd, fsdp", "all, fsdp"]
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


@dataclass(frozen=True)
class Fullest:
    """GiB at the two moments of a step at which memory is fullest."""

    forward: float  # at the end of the forward pass: all is there that blocks keep for the backward pass
    backward: float  # at the end of the backward pass: all gradients are there, and what one block keeps

    @property
    def peak(self) -> float:
        return max(self.forward, self.backward)

    def between(self, other: Fullest) -> Fullest:
        return Fullest((self.forward + other.forward) / 2, (self.backward + other.backward) / 2)


class Whole:
    """Memory of a whole model for one shape, from cases with some of its blocks."""

    def __init__(self, model: str, found: dict[tuple[str, str, str, int], Row], quick: bool) -> None:
        from unisono.recipes.wan.models.load import CONFIGS

        self.model, self.found, config = model, found, config_of(model, 30, quick)
        self.layers, self.depths = CONFIGS[MODELS[model][0]]["num_layers"], MODELS[model][2]
        self.width = config["num_attention_heads"] * config["attention_head_dim"]
        self.block, rest = size(config, self.layers)
        self.weights = self.layers * self.block + rest
        self.is_trained = not MODELS[model][1]  # or a LoRA: its weights are few, all others lie in 16 bit
        self.state, self.gradient = (12, 4) if self.is_trained else (2, 0)  # bytes per weight
        self.copied = 2 if self.is_trained else 0  # by blocks that keep what they compute; not under fsdp

    def failed(self, shape: str, recompute: str) -> str:
        return next((case["failed"] for case in self._cases(shape, recompute) if case["failed"]), "")

    def tokens(self, shape: str) -> int:
        return int(self._cases(shape, "none")[0]["tokens"])

    def on_one(self, shape: str, recompute: str) -> Fullest:
        """On one GPU: what was measured, continued to all blocks; and what follows for the other moment."""
        few, each = self._cases(shape, recompute)[0]["gib"], self._each(shape, recompute)
        continued = few + (self.layers - self.depths[0]) * each
        if not self.is_trained:
            return Fullest(continued, 0)
        with_gradients = (self.state + self.gradient) * self.block / GIB
        if each < 1.01 * with_gradients:  # a block more is its gradients more
            kept = self.layers * self._kept(shape, recompute) - self.gradient * self.weights / GIB
            return Fullest(continued + kept, continued)
        one_block = self._cases(shape, "all")[0]["gib"] - self._with_gradients(self.depths[0])
        return Fullest(continued, self._with_gradients(self.layers) + one_block)

    def sharded(self, shape: str, recompute: str, gpus: int) -> Fullest:
        """By fsdp: weights, gradients and the optimizer's averages in 32 bit shared out, two blocks whole in 16 bit."""
        one, away = self.on_one(shape, recompute), self.weights * (1 - 1 / gpus) / GIB
        copies = self.copied * self.layers * self.block / GIB if recompute == "none" else 0
        two = 2 * self.block * 2 / GIB
        forward = one.forward - self.state * away - copies + two
        return Fullest(forward, one.backward - (self.state + self.gradient) * away + 2 * two)

    def peak(self, shape: str, recompute: str, gpus: int = 1) -> float:
        """GiB per GPU; of more than one, under fsdp. `recompute` may be "every 2nd" too."""
        kinds = ("none", "all") if recompute == "every 2nd" else (recompute, recompute)
        one, other = (self.sharded(shape, kind, gpus) if gpus > 1 else self.on_one(shape, kind) for kind in kinds)
        return one.between(other).peak

    def averages(self, gpus: int = 1) -> float:
        """GiB of the averaged weights, of a LoRA next to nothing."""
        return 4 * self.weights / gpus / GIB if self.is_trained else 0.0

    def flags(self, shape: str, gpus: int) -> str:
        """What to say so that a run fits on so many GPUs of the common size: what is fastest of all that does."""
        for recompute, flags in FLAGS.items():
            for shards in (1, gpus) if gpus > 1 else (1,):
                needed = self.peak(shape, recompute, shards) + self.averages(shards)
                if needed <= COMMON_GIB - FREE_GIB:
                    said = " ".join(filter(None, ["--strategy fsdp" if shards > 1 else "", flags]))
                    return f"`{said}`: {needed:.0f}" if said else f"{needed:.0f}"
        return "no"

    def _cases(self, shape: str, recompute: str) -> list[Row]:
        return [self.found[self.model, shape, recompute, depth] for depth in self.depths]

    def _each(self, shape: str, recompute: str) -> float:
        """GiB that a further block adds."""
        few, more = self._cases(shape, recompute)
        return float(more["gib"] - few["gib"]) / (self.depths[1] - self.depths[0])

    def _with_gradients(self, layers: int) -> float:
        weights = self.weights + (layers - self.layers) * self.block
        return (self.state + self.gradient) * weights / GIB

    def _kept(self, shape: str, recompute: str) -> float:
        """GiB that a block keeps for the backward pass, where gradients hide it: its input, or by the largest shape."""
        if recompute == "all":
            return self.tokens(shape) * self.width * 2 / GIB
        shapes = {shape for model, shape, *_ in self.found if model == self.model and not self.failed(shape, "none")}
        largest = max(shapes, key=self.tokens)
        copied = self.copied * self.block / GIB
        each = self._each(largest, "none") - self.state * self.block / GIB - copied
        return copied + each * self.tokens(shape) / self.tokens(largest)


def finished(cases: list[Row], quick: bool) -> list[Row]:
    """A row for each model and shape: GiB of the whole model, on one GPU and sharded."""
    found = {(case["model"], case["shape"], case["recompute"], case["layers"]): case for case in cases}
    measured = {(case["model"], case["shape"]) for case in cases}
    rows = []
    for model in dict.fromkeys(model for model in MODELS for known, _ in measured if known == model):
        whole = Whole(model, found, quick)
        for shape in (shape for shape in SHAPES | QUICK_SHAPES if (model, shape) in measured):
            row: Row = {"model": model, "shape": shape, "layers": whole.layers, "weights": whole.weights}
            row["tokens"] = whole.tokens(shape)
            failed = {recompute: whole.failed(shape, recompute) for recompute in RECOMPUTE}
            row |= {f"{recompute}_failed": told for recompute, told in failed.items() if told}
            if not any(failed.values()):
                for suffix, gpus in (("", 1), (", fsdp", GPUS)):
                    row |= {name + suffix: whole.peak(shape, name, gpus) for name in FLAGS}
                row["fits"] = {str(gpus): whole.flags(shape, gpus) for gpus in COMMON_GPUS}
            rows.append(row)
    return rows


def fits(rows: list[Row]) -> list[str]:
    """The table of what to say on GPUs of 80 GB, for one sample at a time."""
    lines = [f"| model | shape | {' | '.join(f'{gpus} × 80 GB' for gpus in COMMON_GPUS)} |"]
    lines.append("|---" * (2 + len(COMMON_GPUS)) + "|")
    for row in rows:
        if "fits" in row and "batch" not in row["shape"]:
            lines.append(f"| {' | '.join([row['model'], row['shape'], *row['fits'].values()])} |")
    return lines


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


def cell(row: Row, name: str, gpu_gib: float) -> str:
    """GiB; slanted, if that was not measured: in part recomputed, sharded, or more than the GPU has."""
    if name not in row:
        return f"FAILED: {row[f'{name}_failed']}".replace("|", " ") if f"{name}_failed" in row else ""
    is_measured = name in RECOMPUTE and row[name] <= gpu_gib
    return f"{row[name]:.1f}" if is_measured else f"*{row[name]:.1f}*"


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
        f"- **fsdp on {GPUS} GPUs**: the same with weights, gradients and optimizer state shared out, and two blocks "
        "whole in 16 bit. Of a LoRA the frozen weights alone are counted, 2 bytes each",
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
        f"One sample at a time on each, with the averaged weights, {FREE_GIB:.0f} GiB left free: flags, and GiB. "
        "Predicted.",
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
                same = before if before.get("versions") == versions(PACKAGES) else {}
                case |= {"gib": None, "failed": "", **same}
            result["kept"] = sorted({case["date"] for case in cases if case["gib"] is not None})
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
