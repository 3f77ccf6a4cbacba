"""Which flags make a Wan model train on a card of 12 to 80 GB, and how fast is it then?

    python benchmarks/small_cards.py                  # any machine: what `--fit auto` chooses, and the predicted memory
    python benchmarks/small_cards.py --measure        # a GPU: also runs the most important rows within --budget_s
    python benchmarks/small_cards.py --measure --models 14B --cards 24,16,12 --shapes 480x832x17

A measured row is a run of `unisono train wan-flow` with the chosen flags and `--gpu_memory_gb`, which holds torch to
the card's memory. Its speed is that of the GPU it runs on, not of a card of that size. Weights are random and written
to a folder first; without --measure, rows that an earlier call measured with the same flags are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import struct
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import depends_on, machine, versions, without_folders
from wan_step import run

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"
sys.path.insert(0, str(ROOT / "src"))
GIB = 2**30
Row = dict[str, Any]
CARDS = (12, 16, 24, 32, 48, 80)
MODELS = {"1.3B": "1.3b", "TI2V-5B": "ti2v-5b", "14B": "14b"}
KINDS: dict[str, dict[str, Any]] = {"LoRA": {"lora_rank": 32}, "full": {}}
# name -> batch, frames, height, width
SHAPES = {
    "512x512x1, batch 16": (16, 1, 512, 512),
    "480x832x17": (1, 17, 480, 832),
    "480x832x49": (1, 49, 480, 832),
    "480x832x81": (1, 81, 480, 832),
}
QUICK_SHAPES = {"32x32x1": (2, 1, 32, 32)}
SMALL = {"num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32, "text_dim": 32, "freq_dim": 32}
FIRST = [
    *(("14B", "LoRA", "480x832x17", card) for card in (24, 16, 12)),
    ("1.3B", "full", "480x832x17", 16),
    *(("TI2V-5B", "full", "480x832x81", card) for card in (80, 48)),
]
"""The rows to measure first."""
STEPS, WARM_UP = 7, 4  # logged steps of a measured run; those that compile, or choose kernels
PACKAGES = ["torch", "triton", "diffusers"]


@dataclass(frozen=True)
class Case:
    """A model, what of it is trained, and the data."""

    model: str
    kind: str
    shape: str
    config: Path  # of the transformer
    size: tuple[int, int, int, int]

    @property
    def settings(self) -> Row:
        """The settings of its runs."""
        batch, frames, height, width = self.size
        data = {"num_frames": frames, "height": height, "width": width, "batch_size": batch, "ema_decay": 0.0}
        fixed = {"caption_dropout": 0.0, "guidance": 1.0, "strategy": "single"}
        return {**data, **fixed, **KINDS[self.kind]}


def transformer_config(model: str, quick: bool) -> Row:
    from unisono.recipes.wan.models.load import CONFIGS

    return {**CONFIGS[MODELS[model]], **(SMALL if quick else {})}


def predicted(case: Case, cards: list[int], fit: str) -> list[Row]:
    """The flags that --fit chooses for each card, and the memory that it predicts."""
    from unisono.engine.checks import check_run
    from unisono.engine.fit.choose import Card
    from unisono.engine.fit.without_gpu import fitter_for
    from unisono.engine.start.run import configure
    from unisono.planning.memory.estimate import card_memory
    from unisono.recipes.wan_flow.recipe import WanFlow

    resolved = configure(WanFlow, overrides={**case.settings, "model_config": str(case.config)})
    fitter = fitter_for(check_run(WanFlow, resolved), resolved)
    rows = []
    for card in cards:
        choice = fitter.choose(Card(card_memory(card), is_in_use=True), allows_lossy=fit == "auto")
        row: Row = {"model": case.model, "kind": case.kind, "shape": case.shape, "card": card, "fits": choice.fits}
        row |= {"flags": choice.command, "predicted": choice.estimate.total / GIB, "lossy": bool(choice.lossy)}
        rows.append(row)
        print(f"{card:4} GB  {case.model}, {case.kind}, {case.shape}: {shown_flags(row)}", flush=True)
    return rows


def shown_flags(row: Row) -> str:
    flags = f"`{row['flags']}`" if row["flags"] else "none"
    return f"{flags if row['fits'] else 'does not fit'}, {row['predicted']:.1f} GiB predicted"


def write_weights(folder: Path, config: Row) -> Path:
    """A transformer in diffusers' layout with random weights in bf16, written by several threads."""
    import torch

    from unisono.recipes.wan.models.load import build_meta

    file = folder / "diffusion_pytorch_model.safetensors"
    if file.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"_class_name": "WanTransformer3DModel", **config}))
    shapes = {name: tuple(weight.shape) for name, weight in build_meta(config).named_parameters()}
    header: Row = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    start, device = 8 + len(encoded), "cuda" if torch.cuda.is_available() else "cpu"
    draft = file.with_suffix(".new")
    with draft.open("wb") as opened:
        opened.write(struct.pack("<Q", len(encoded)) + encoded)
        opened.truncate(start + end)
        opened.flush()

        def write(name: str) -> None:
            shape = shapes[name]
            weight = torch.randn(shape, device=device) * 0.02 if len(shape) > 1 else torch.ones(shape, device=device)
            data = memoryview(weight.bfloat16().contiguous().view(-1).view(torch.uint8).cpu().numpy())
            position = start + header[name]["data_offsets"][0]
            while data:
                written = os.pwrite(opened.fileno(), data, position)
                data, position = data[written:], position + written

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(write, shapes))
    os.replace(draft, file)
    return folder


def write_data(folder: Path, case: Case, config: Row) -> Path:
    import torch
    from safetensors.torch import save_file

    batch, frames, height, width = case.size
    space = 16 if config["in_channels"] == 48 else 8
    latent = (config["in_channels"], 1 + (frames - 1) // 4, height // space, width // space)
    if not folder.exists():
        folder.mkdir(parents=True)
        for number in range(batch):
            save_file({"latent": torch.randn(latent)}, folder / f"{number:03d}.latent.safetensors")
            text = torch.randn(64, config["text_dim"]).bfloat16()
            save_file({"embeddings": text}, folder / f"{number:03d}.safetensors")
    return folder


def measured(case: Case, row: Row, scratch: Path, config: Row, patience: float) -> Row:
    """Runs the row's flags with torch held to the card's memory."""
    import torch

    weights = write_weights(scratch / f"weights-{case.model}", config)
    data = write_data(scratch / f"data-{case.shape}-{config['in_channels']}".replace(", ", "-"), case, config)
    folder = Path(tempfile.mkdtemp(dir=scratch)) / "run"
    words = [sys.executable, "-m", "unisono", "train", "wan-flow", "--model_path", str(weights)]
    words += ["--dataset_path", str(data), "--output_dir", str(folder)]
    for name, value in case.settings.items():
        words += [f"--{name}", str(value)]
    words += shlex.split(row["flags"])
    if torch.cuda.is_available():
        words += ["--gpu_memory_gb", str(row["card"])]
    words += ["--max_steps", str(STEPS + 1), "--log_every", "1", "--save_every", "0", "--eval_every", "-1"]
    words += ["--preview_every", "-1", "--tensorboard", "false", "--num_workers", "0", "--warmup_steps", "0"]
    words += ["--max_restarts", "0"]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    began = time.monotonic()
    code, _, err = run(words, environ, scratch, folder / "metrics.jsonl", STEPS, patience)
    wall = {"wall_s": round(time.monotonic() - began, 1)}
    if code or "took more than" in err:
        return {"failed": (err.strip().splitlines() or ["no output"])[-1][:300], **wall}
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in steps if "step_ms" in line]
    events = (folder / "events.jsonl").read_text().splitlines()
    if any(json.loads(line)["kind"] == "oom" for line in events):
        return {"failed": "ran out of memory with the chosen micro-batch", **wall}
    seconds = statistics.median(line["step_ms"] for line in steps[WARM_UP:]) / 1000
    return {"gib": max(line.get("mem_gib") or 0.0 for line in steps), "s_per_step": seconds, "failed": "", **wall}


def key(row: Row) -> tuple[Any, ...]:
    return row["model"], row["kind"], row["shape"], row["card"]


def table(result: Row) -> list[str]:
    lines = ["# Small cards", "", *depends_on(result)]
    lines += [
        f"- Flags: what `--fit {result['fit']}` chooses for wan-flow with these settings: `--ema_decay 0`, bf16, "
        "compiled; LoRA: rank 32 on all projections; full: all weights. One expert of A14B takes as much as 14B",
        "- GiB: the peak of torch's allocated memory. Numbers in *italics* are predicted, without a GPU; the others "
        "are measured with torch held to the card's memory (`--gpu_memory_gb`)",
        "- s/step: on the GPU above, one optimizer step; a card of that size computes more slowly",
        "- fp8, nf4 and adamw8bit change the result beyond rounding; `--fit exact` avoids them",
        "",
        "| model | trained | shape | card | flags | GiB | s/step |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        gib, seconds = f"*{row['predicted']:.1f}*", ""
        if row.get("gib") is not None:
            gib, seconds = f"{row['gib']:.1f} (predicted {row['predicted']:.1f})", f"{row['s_per_step']:.2f}"
        elif row.get("failed"):
            seconds = f"FAILED: {row['failed']}".replace("|", " ")
        flags = (f"`{row['flags']}`" if row["flags"] else "none") if row["fits"] else "does not fit"
        cells = [row["model"], row["kind"], row["shape"], f"{row['card']} GB", flags, gib, seconds]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def cases_of(options: argparse.Namespace, scratch: Path) -> list[Case]:
    shapes = QUICK_SHAPES if options.quick else SHAPES
    chosen = options.shapes.split("/") if options.shapes else list(shapes)
    models = options.models.split("/") if options.models else list(MODELS)
    cases = []
    for model in models:
        config = scratch / f"{model}.json"
        config.write_text(json.dumps(transformer_config(model, options.quick)))
        cases += [Case(model, kind, shape, config, shapes[shape]) for kind in KINDS for shape in chosen]
    return cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--fit", choices=["auto", "exact"], default="auto")
    parser.add_argument("--models", default="", help="separated by / (default all)")
    parser.add_argument("--shapes", default="", help="separated by / (default all)")
    parser.add_argument("--cards", default="", help="GB, separated by commas (default all)")
    parser.add_argument("--measure", action="store_true", help="run rows on this GPU, the most important ones first")
    parser.add_argument("--budget_s", type=float, default=600, help="start no run after this many seconds")
    parser.add_argument("--patience_s", type=float, default=120, help="seconds that one run may take")
    parser.add_argument("--scratch", type=Path, help="folder for weights, to be kept (default: a temporary one)")
    parser.add_argument("--quick", action="store_true", help="smoke test; cannot write to results/")
    options = parser.parse_args()
    if options.quick and options.output.resolve() == RESULTS:
        parser.error("--quick needs --output, another folder than benchmarks/results")
    began = time.monotonic()
    options.output.mkdir(parents=True, exist_ok=True)
    file = options.output / "small_cards.json"
    before: Row = json.loads(file.read_text()) if file.exists() else {"rows": []}
    rows = {key(row): row for row in before["rows"]}
    was_measured = any(row.get("gib") for row in before["rows"])
    result: Row = {
        "command": shlex.join(["python", "benchmarks/small_cards.py", *without_folders(sys.argv[1:])]),
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "fit": options.fit,
        "machine": machine(),
        "versions": versions(PACKAGES),
    }

    if was_measured and not options.measure:  # new predictions do not change where the others were measured
        result |= {name: before[name] for name in ("command", "date", "machine", "versions")}

    def write() -> None:
        order = [*MODELS], [*KINDS], [*QUICK_SHAPES, *SHAPES]
        places = [{name: place for place, name in enumerate(names)} for names in order]

        def place(row: Row) -> tuple[int, ...]:
            return (*(at[row[name]] for at, name in zip(places, ("model", "kind", "shape"), strict=True)), row["card"])

        result["rows"] = sorted(rows.values(), key=place)
        file.write_text(json.dumps(result, indent=1) + "\n")
        file.with_suffix(".md").write_text("\n".join(table(result)) + "\n")

    cards = [int(card) for card in options.cards.split(",")] if options.cards else list(CARDS)
    with tempfile.TemporaryDirectory() as place:
        scratch = options.scratch or Path(place)
        scratch.mkdir(parents=True, exist_ok=True)
        cases = {}
        for case in cases_of(options, scratch):
            for row in predicted(case, cards, options.fit):
                cases[key(row)] = case
                earlier = rows.get(key(row), {})
                kept = ("gib", "s_per_step", "failed", "wall_s", "measured")
                if earlier.get("flags") == row["flags"] and not options.measure:
                    row |= {name: earlier[name] for name in kept if name in earlier}
                rows[key(row)] = row
            write()
        order = sorted(cases, key=lambda each: FIRST.index(each) if each in FIRST else len(FIRST))
        for name in order if options.measure else ():
            row = rows[name]
            if not row["fits"] or time.monotonic() - began > options.budget_s:
                continue
            config = json.loads(cases[name].config.read_text())
            row |= measured(cases[name], row, scratch, config, options.patience_s)
            row["measured"] = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
            outcome = row["failed"] or f"{row['gib']:.1f} GiB, {row['s_per_step']:.2f} s/step"
            print(f"{time.monotonic() - began:4.0f} s  {name}: {outcome} ({row['wall_s']:.0f} s)", flush=True)
            write()
    print("\n".join(table(result)))
    return int(any(row.get("failed") for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
