"""A LoRA on blocks of Wan 14B's width: milliseconds and stored activations per block, by base and by recomputation.

    python benchmarks/lora_blocks.py                              # a GPU; about three minutes, most of it compilation
    python benchmarks/lora_blocks.py --only "fp8 base" --profile  # variants with this in the name, and their kernels
    python benchmarks/lora_blocks.py --quick --output /tmp/lora   # smoke test, also on a CPU; the numbers mean nothing

Each variant trains six blocks on one sample of 480 x 832 x 17 (7,800 tokens) with a LoRA of rank 32 on all projections:
forward, loss and backward, compiled, in bf16. `peft` computes the adapters by peft's modules, as other trainers do. The
gradients of each variant are compared with those of the first one.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from machine import depends_on, machine, versions, without_folders

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("torch", "triton", "diffusers", "peft")
GIB = 2**30
WIDE = {"num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": 13824, "num_layers": 6}
SMALL = {"num_attention_heads": 2, "attention_head_dim": 32, "ffn_dim": 96, "num_layers": 2, "text_dim": 64}


@dataclass(frozen=True)
class Variant:
    name: str
    base: str = "bf16"
    recomputes: bool = False
    uses_peft: bool = False


VARIANTS = [
    Variant("bf16 base, peft", uses_peft=True),
    Variant("bf16 base"),
    Variant("fp8 base, peft", "fp8", uses_peft=True),
    Variant("fp8 base", "fp8"),
    Variant("bf16 base, recomputed", recomputes=True),
    Variant("fp8 base, recomputed", "fp8", recomputes=True),
    Variant("int8 base, recomputed", "int8", recomputes=True),
    Variant("nf4 base, recomputed", "nf4", recomputes=True),
]


def build(variant: Variant, sizes: dict[str, int], device: torch.device) -> Any:
    from diffusers import WanTransformer3DModel

    from unisono.parallel.blocks.repeated import compile_blocks, recompute_activations
    from unisono.quantize.layers import frozen_linears, quantize
    from unisono.quantize.products import has_fp8_products
    from unisono.recipes.wan.models.kernels.block import use_fast_blocks
    from unisono.recipes.wan.models.lora import add_lora

    torch.manual_seed(0)
    torch._dynamo.reset()
    with device:
        model = WanTransformer3DModel(**sizes)
    add_lora(model, 32)
    for name, weight in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(weight, std=0.01)
    linears = frozen_linears(model, list(model.blocks))
    for name in linears:
        model.get_submodule(name).to(torch.bfloat16)
    if variant.base != "bf16":
        quantize(model, linears, variant.base, fp8_products=has_fp8_products(device))
    use_fast_blocks(model)
    if variant.recomputes:
        for block in model.blocks:
            recompute_activations(block)
    compile_blocks(model, list(model.blocks))
    return model


class Step:
    """Forward, loss and backward on one sample."""

    def __init__(self, model: Any, latent: tuple[int, ...], device: torch.device) -> None:
        drawn = torch.Generator(device).manual_seed(1)
        self._model, self._device = model, device
        self._noisy = torch.randn(1, *latent, device=device, generator=drawn)
        self._target = torch.randn(1, *latent, device=device, generator=drawn)
        self._text = torch.randn(1, 512, model.config.text_dim, device=device, generator=drawn).bfloat16()
        self._time = torch.full((1,), 500.0, device=device)

    def __call__(self) -> None:
        with torch.autocast(self._device.type, torch.bfloat16):
            velocity = self._model(self._noisy, self._time, self._text, return_dict=False)[0]
        (velocity.float() - self._target).square().mean().backward()

    def timed(self) -> float:
        """Milliseconds."""
        if self._device.type != "cuda":
            started = time.perf_counter()
            self()
            return 1e3 * (time.perf_counter() - started)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))


def measure(variant: Variant, options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    from unisono.recipes.wan.models.kernels import adapter, fused

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fused.is_adapted = (lambda layer: False) if variant.uses_peft else adapter.is_adapted
    sizes = SMALL if options.quick else WIDE
    model = build(variant, sizes, device)
    step, count = Step(model, (16, 1, 8, 8) if options.quick else (16, 5, 60, 104), device), sizes["num_layers"]
    started = time.monotonic()
    for _ in range(3):
        step()
    model.zero_grad(set_to_none=True)
    step()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.requires_grad}
    row = {"variant": variant.name, "first_steps_s": round(time.monotonic() - started, 1)}
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    times = [step.timed() for _ in range(3 if options.quick else 12)]
    row["ms_per_block"] = statistics.median(times) / count
    row["range_ms"] = [min(times) / count, max(times) / count]
    if device.type == "cuda":
        row["gib_per_block"] = (torch.cuda.max_memory_allocated() - before) / count / GIB
    if options.profile:
        row["kernels"] = kernels(step, count)
    return row, gradients


def kernels(step: Step, count: int) -> list[dict[str, Any]]:
    """The kernels that take most time, per block."""
    with torch.profiler.profile() as profile:
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)[:24]
    return [
        {"ms": event.self_device_time_total / 1e3 / count, "calls": event.count / count, "name": event.key[:120]}
        for event in events
        if event.self_device_time_total
    ]


def distance(gradients: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """The relative distance of all gradients together."""
    whole = sum(float(gradient.norm()) ** 2 for gradient in reference.values())
    return (sum(float((gradients[name] - reference[name]).norm()) ** 2 for name in reference) / whole) ** 0.5


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = ["# A LoRA on blocks of Wan 14B", "", *depends_on(result), ""]
    lines += [
        "One sample of 480 × 832 × 17, rank 32, compiled, forward and backward. *40 blocks*: the time per block times",
        "40, without the layers outside of blocks and the optimizer.",
        "",
        "| variant | ms per block | range | 40 blocks, ms | activations per block, GiB | distance of gradients |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        low, high = row["range_ms"]
        gib = f"{row['gib_per_block']:.2f}" if "gib_per_block" in row else ""
        times = f"{row['ms_per_block']:.2f} | {low:.2f} to {high:.2f} | {40 * row['ms_per_block']:.0f}"
        lines.append(f"| {row['variant']} | {times} | {gib} | {row['gradient_distance']:.1e} |")
    for row in result["rows"]:
        if "kernels" in row:
            lines += ["", f"## Kernels, {row['variant']}", "", "| ms per block | calls | kernel |"]
            lines.append("|---|---|---|")
            for each in row["kernels"]:
                lines.append(f"| {each['ms']:.3f} | {each['calls']:.1f} | {each['name']} |")
    return "\n".join([*lines, ""])


def main() -> int:
    """Measures the variants one after the other and writes the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT;TEXT", help="variants whose names contain one of these")
    parser.add_argument("--profile", action="store_true", help="also list the kernels that take most time")
    parser.add_argument("--quick", action="store_true", help="smoke test; cannot write to results/")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for lora_blocks.json and lora_blocks.md")
    options = parser.parse_args()
    if options.quick and options.output.resolve() == RESULTS:
        parser.error("--quick needs --output, another folder than benchmarks/results")
    if not options.quick and not torch.cuda.is_available():
        parser.error("there is no GPU here; --quick --output FOLDER tries the program out on a CPU")
    parts = [part for part in options.only.split(";") if part]
    chosen = [variant for variant in VARIANTS if not parts or any(part in variant.name for part in parts)]
    if not chosen:
        parser.error(f"--only {options.only}: no variant has this in its name")
    result: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/lora_blocks.py", *without_folders(sys.argv[1:])]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(PACKAGES),
        "rows": [],
    }
    options.output.mkdir(parents=True, exist_ok=True)
    reference: dict[str, torch.Tensor] = {}
    for variant in chosen:
        row, gradients = measure(variant, options)
        reference = reference or gradients
        row["gradient_distance"] = distance(gradients, reference)
        result["rows"].append(row)
        print(f"{variant.name:24s} {row['ms_per_block']:8.2f} ms per block", flush=True)
        (options.output / "lora_blocks.json").write_text(json.dumps(result, indent=1) + "\n")
        (options.output / "lora_blocks.md").write_text(table(result))
        del gradients
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    print("\n" + table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
