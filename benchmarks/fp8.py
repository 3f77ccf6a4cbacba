"""Training with fp8, int8 and 2:4 sparse products against bf16: time, memory, and what it costs in loss.

    python benchmarks/fp8.py                             # a GPU with fp8 units: everything
    python benchmarks/fp8.py --only products,14B         # parts of it
    python benchmarks/fp8.py --only loss --steps 300     # any machine

- products: one matrix product of Wan's shapes by each kernel, sustained, without rounding operands.
- 14B, 1.3B: a training step (forward, backward, AdamW) of a few of Wan's blocks at the model's width, compiled. bf16 is
  measured before and after the others, because a GPU at its power limit slows down over time.
- loss: a small GPT learns to predict the bytes of this project's documentation, over three seeds, with emulated
  products where the device has none.

Parts that are not measured again keep their previous results if machine and versions are the same.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, SIZES
from machine import depends_on, machine, versions, without_folders
from torch import Tensor, nn
from torch.utils.data import Dataset

import unisono
from unisono import Loss, Recipe
from unisono.parallel.blocks.repeated import compile_blocks
from unisono.quantize.operands import multiply, quantised_rows
from unisono.quantize.products import has_fp8_products
from unisono.quantize.reduced_layers import reduce_products
from unisono.quantize.reduced_products import Products
from unisono.quantize.sparse import has_sparse_products, pruned, sparse_linear

HERE = Path(__file__).resolve().parent
PARTS = ("products", "14B", "1.3B", "loss")
SEEDS = (0, 1, 2)
SIZE = replace(SIZES["tiny"], layers=3, width=128, heads=4)
Row = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """Blocks of a Wan model, and a micro-batch."""

    heads: int
    inner: int  # width of the feed-forward network
    blocks: int
    latent: tuple[int, int, int, int]  # channels, frames, height, width
    batch: int
    target: float  # speed-up over bf16 that fp8 should reach

    @property
    def tokens(self) -> int:
        _, frames, height, width = self.latent
        return self.batch * frames * height * width // 4

    @property
    def width(self) -> int:
        return 128 * self.heads


MODELS = {
    "14B": Model(40, 13824, 2, (16, 5, 60, 104), 1, 1.35),
    "1.3B": Model(12, 8960, 4, (16, 1, 64, 64), 16, 1.15),
}
VARIANTS: dict[str, Products | None] = {
    "bf16": None,
    "fp8": Products("fp8"),
    "fp8 + weight gradients": Products("fp8", True),
    "int8": Products("int8"),
    "int8 + weight gradients": Products("int8", True),
    "sparsity 2:4": Products(sparse=True),
}


def timed(call: Callable[[], Any], seconds: float) -> float:
    """Milliseconds per call, over about this many seconds after a warm-up."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    call()
    torch.cuda.synchronize()
    calls = max(3, round(seconds / (time.perf_counter() - begun)))
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / calls


def products(seconds: float) -> list[Row]:
    """Rates of the kernels on the shapes of Wan's layers."""
    rows = []
    for name, model in MODELS.items():
        layers = {(model.width, 3 * model.width), (model.width, model.inner), (model.inner, model.width)}
        for inputs, outputs in sorted(layers):
            x, weight = (torch.randn(size, inputs, device="cuda") for size in (model.tokens, outputs))
            flops = 2 * model.tokens * inputs * outputs
            row = {"model": name, "tokens": model.tokens, "inputs": inputs, "outputs": outputs}
            for kernel, call in kernels(x.bfloat16(), weight.bfloat16()).items():
                try:
                    row[kernel] = flops / timed(call, seconds) / 1e9
                except RuntimeError as error:
                    row[kernel] = f"failed: {str(error).splitlines()[0][:80]}"
            print(row, flush=True)
            rows.append(row)
    return rows


def kernels(x: Tensor, weight: Tensor) -> dict[str, Callable[[], Tensor]]:
    """The same product by each kernel, and rounding x; TFLOP/s as if each of them were the product."""
    found: dict[str, Callable[[], Tensor]] = {"bf16": lambda: x @ weight.t()}
    x8, x8_scales = quantised_rows(x, "int8")
    weight8, weight8_scales = quantised_rows(weight, "int8")
    found["int8"] = torch.compile(lambda: multiply(x8, x8_scales, weight8, weight8_scales.t(), torch.bfloat16))
    if has_fp8_products(x.device):
        a, a_scales = quantised_rows(x, "fp8")
        b, b_scales = quantised_rows(weight, "fp8")
        one = torch.ones((), device="cuda")
        for speed, fast in (("", True), (", exact sums", False)):
            found[f"fp8 rowwise{speed}"] = lambda fast=fast: multiply(  # type: ignore[misc]
                a, a_scales, b, b_scales.t(), torch.bfloat16, fp8_units=True, fast=fast
            )
            found[f"fp8 tensorwise{speed}"] = lambda fast=fast: torch._scaled_mm(  # type: ignore[misc]
                a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast
            )
        found["rounding x to fp8"] = torch.compile(lambda: quantised_rows(x, "fp8")[0])
    if has_sparse_products(x.device):
        sparse = pruned(weight)
        found["2:4, pruning not included"] = lambda: sparse_linear(x, sparse, None, sparse_units=True)
    return found


def step_of(name: str, seconds: float) -> list[Row]:
    """Step time, memory and gradients of each variant of a model's blocks."""
    rows: list[Row] = []
    exact: list[Tensor] = []
    for variant in (*VARIANTS, "bf16"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            row, gradients = train(MODELS[name], VARIANTS[variant], seconds)
        except RuntimeError as error:
            rows.append({"variant": variant, "error": str(error).splitlines()[0][:200]})
            print(name, rows[-1], flush=True)
            continue
        exact = exact or gradients
        gap = sum(float((a - b).square().sum()) for a, b in zip(gradients, exact, strict=True))
        whole = sum(float(a.square().sum()) for a in exact)
        rows.append({"variant": variant, "gradient_distance": (gap / whole) ** 0.5, **row})
        print(name, rows[-1], flush=True)
    baseline = statistics.mean(row["step_ms"] for row in rows if row["variant"] == "bf16" and "step_ms" in row)
    for row in rows:
        row["speed_up"] = baseline / row["step_ms"] if "step_ms" in row else None
    return rows


def train(shape: Model, kind: Products | None, seconds: float) -> tuple[Row, list[Tensor]]:
    """Trains the blocks on one batch; the gradients are those of the first step, on the CPU."""
    from diffusers import WanTransformer3DModel

    from unisono.recipes.wan.models.kernels.block import use_fast_blocks

    torch._dynamo.reset()
    torch.manual_seed(0)
    device = torch.device("cuda")
    with device:
        model = WanTransformer3DModel(
            num_attention_heads=shape.heads, attention_head_dim=128, ffn_dim=shape.inner, num_layers=shape.blocks
        )
    use_fast_blocks(model)
    if kind is not None:
        units = {"fp8_units": has_fp8_products(device), "sparse_units": kind.sparse and has_sparse_products(device)}
        reduce_products(model, model.blocks, kind._replace(**units), 512)
    compile_blocks(model, list(model.blocks))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    noisy = torch.randn(shape.batch, *shape.latent, device=device)
    text = torch.randn(shape.batch, 512, 4096, device=device, dtype=torch.bfloat16)
    timestep, losses = torch.full((shape.batch,), 500.0, device=device), []

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            velocity = model(noisy, timestep, text, return_dict=False)[0]
        loss = (velocity.float() - noisy).square().mean()
        loss.backward()
        losses.append(loss.detach())

    begun = time.perf_counter()
    step()
    gradients = [each.grad.cpu() for each in model.blocks.parameters() if each.grad is not None]
    compile_s = time.perf_counter() - begun

    def whole_step() -> None:
        optimizer.zero_grad(set_to_none=True)
        step()
        optimizer.step()

    milliseconds = timed(whole_step, seconds)
    return {
        "step_ms": milliseconds,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "first_loss": float(losses[0]),
        "last_loss": float(losses[-1]),
        "compile_s": compile_s,
    }, gradients


@cache
def documentation() -> bytes:
    """The text that the GPT learns."""
    return b"".join(file.read_bytes() for file in sorted(HERE.parent.glob("docs/*.md")))[: 10 * 2**16]


class Bytes(Recipe):
    """A recipe that trains a small GPT to predict the next byte of a text."""

    defaults = {"batch_size": 16, "num_workers": 0, "tensorboard": False, "log_every": 1, "warmup_steps": 20}

    def model(self) -> nn.Module:
        return GPT(SIZE)

    def dataset(self, split: str) -> Dataset[Any]:
        data, length = documentation(), SIZE.sequence + 1
        pieces = torch.frombuffer(bytearray(data[: len(data) // length * length]), dtype=torch.uint8).view(-1, length)
        is_held_out = torch.arange(len(pieces)) % 10 == 0
        return (pieces[is_held_out][:128] if split == "eval" else pieces[~is_held_out]).long()  # type: ignore[return-value]

    def loss(self, model: nn.Module, batch: Tensor, noise: Any) -> Loss:
        return Loss(model(batch[:, :-1], batch[:, 1:], "sum"), len(batch) * SIZE.sequence)


LOSSES: dict[str, Row] = {
    "bf16": {},
    "fp8": {"quantize": "fp8"},
    "fp8 + weight gradients": {"quantize": "fp8", "quantize_weight_gradient": True},
    "int8": {"quantize": "int8"},
    "int8 + weight gradients": {"quantize": "int8", "quantize_weight_gradient": True},
    "sparsity 2:4": {"sparsity": "2:4"},
}


def losses(steps: int) -> Row:
    """Held-out losses of every variant and seed, and how far the curves lie from those of bf16."""
    curves: dict[str, dict[int, list[float]]] = {}
    for variant, settings in LOSSES.items():
        for seed in SEEDS:
            with tempfile.TemporaryDirectory() as folder:
                run = unisono.train(
                    Bytes,
                    **{"seed": seed, "max_steps": steps, "eval_every": max(1, steps // 5), "learning_rate": 2e-3},
                    **{"mixed_precision": "bf16", "quantize_min_size": 128, "save_every": 0, "eval_first": True},
                    **{"output_dir": f"{folder}/run", **settings},
                )
                lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
            curves.setdefault(variant, {})[seed] = [line["eval/loss"] for line in lines if "eval/loss" in line]
        print(variant, [curve[-1] for curve in curves[variant].values()], flush=True)
    return {"steps": steps, "curves": curves}


def spread(curves: list[list[float]]) -> float:
    """The mean distance between two curves."""
    pairs = [(a, b) for number, a in enumerate(curves) for b in curves[:number]]
    return statistics.mean(distance(a, b) for a, b in pairs)


def distance(one: list[float], two: list[float]) -> float:
    """The mean absolute difference of two curves."""
    return statistics.mean(abs(a - b) for a, b in zip(one, two, strict=True))


def page(result: Row) -> str:
    """The result as Markdown."""
    lines = ["# Training with fp8, int8 and sparse products", "", *depends_on(result)]
    if rows := result.get("products"):
        names = [name for name in rows[0] if name not in ("model", "tokens", "inputs", "outputs")]
        lines += [
            "",
            "## Products",
            "",
            "TFLOP/s of x @ weight.T, sustained; *rounding x* as if it were the product.",
            "",
        ]
        lines += [f"| model | tokens × inputs × outputs | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
        for row in rows:
            cells = [f"{row[name]:,.0f}" if isinstance(row[name], float) else str(row[name]) for name in names]
            sizes = f"{row['tokens']:,} × {row['inputs']:,} × {row['outputs']:,}"
            lines.append(f"| {row['model']} | {sizes} | {' | '.join(cells)} |")
    for name, model in MODELS.items():
        if name in result:
            lines += ["", f"## {model.blocks} blocks of {name}", "", *blocks_table(model, result[name])]
    if "loss" in result:
        lines += ["", "## Loss", "", *loss_table(result["loss"])]
    return "\n".join([*lines, ""])


def blocks_table(model: Model, rows: list[Row]) -> list[str]:
    """Times and memory of a model's blocks."""
    lines = [
        f"Width {model.width:,}, feed-forward {model.inner:,}, {model.tokens:,} tokens; forward, backward and AdamW, "
        "compiled. *Gradient distance*: of the first step's gradients to those of bf16, relative to their norm.",
        "",
        "| products | ms | speed-up | peak GiB | gradient distance | last loss |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['variant']} | failed: {row['error']} | | | | |")
            continue
        lines.append(
            f"| {row['variant']} | {row['step_ms']:.1f} | {row['speed_up']:.2f} | {row['peak_gib']:.1f} | "
            f"{row['gradient_distance']:.3f} | {row['last_loss']:.4f} |"
        )
    best = max((row["speed_up"] or 0 for row in rows if row["variant"].startswith("fp8")), default=0)
    return [*lines, "", f"Target for fp8: {model.target:.2f}: {'met' if best >= model.target else 'missed'}."]


def loss_table(result: Row) -> list[str]:
    """Held-out losses, beside the spread over seeds."""
    curves = {name: list(by_seed.values()) for name, by_seed in result["curves"].items()}
    between = spread(curves["bf16"])
    lines = [
        f"A GPT with 3 blocks of width 128, {result['steps']} steps, seeds {', '.join(map(str, SEEDS))}. *Distance*: "
        "mean absolute difference of held-out curves to bf16 with the same seed, over the seeds. Two bf16 curves with "
        f"different seeds: {between:.4f}.",
        "",
        "| products | final held-out loss | distance | within the spread over seeds |",
        "|---|---|---|---|",
    ]
    for name, by_seed in curves.items():
        gap = statistics.mean(distance(a, b) for a, b in zip(by_seed, curves["bf16"], strict=True))
        final = statistics.mean(curve[-1] for curve in by_seed)
        verdict = "" if name == "bf16" else "yes" if gap < between else "no"
        lines.append(f"| {name} | {final:.4f} | {gap:.4f} | {verdict} |")
    return lines


def main() -> None:
    """Measures the parts and writes the results after each of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts to measure: {', '.join(PARTS)}")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of each run of the part loss")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds to time each variant of the blocks")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder for fp8.json and fp8.md")
    options = parser.parse_args()
    parts = options.only.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"--only {unknown[0]}: expected {', '.join(PARTS)}")
    needs_gpu = [part for part in parts if part != "loss"]
    if needs_gpu and not torch.cuda.is_available():
        parts = [part for part in parts if part == "loss"]
        print(f"without a GPU, skipping {', '.join(needs_gpu)}")
    options.output.mkdir(parents=True, exist_ok=True)
    file = options.output / "fp8.json"
    result: Row = {
        "machine": machine(),
        "versions": versions(["torch", "diffusers", "triton"]),
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "command": shlex.join(["python", "benchmarks/fp8.py", *without_folders(sys.argv[1:])]),
    }
    before = json.loads(file.read_text()) if file.exists() else {}
    same = before.get("versions") == result["versions"] and before["machine"]["gpus"] == result["machine"]["gpus"]  # type: ignore[index]
    result |= {part: before[part] for part in PARTS if same and part in before and part not in parts}
    for part in parts:
        if part == "loss":
            result[part] = losses(options.steps)
        else:
            result[part] = products(options.seconds / 10) if part == "products" else step_of(part, options.seconds)
        file.write_text(json.dumps(result, indent=1) + "\n")
        (options.output / "fp8.md").write_text(page(json.loads(file.read_text())))


if __name__ == "__main__":
    main()
