"""Measures memory and time of a contrastive loss whose comparisons are divided among the ranks.

    python benchmarks/contrast.py --output benchmarks/results

Trains a linear embedding with the loss of seo's bi-encoder, in both directions, on 1, 2 and 4 CPU ranks over gloo. In
the variant `couple` every rank compares all rows with all rows; in `couple_rows` each rank compares its share of the
rows with all rows, a micro-batch at a time. A dispatch mode records the largest tensor that any operation of the loss
and its backward pass returns. All runs must have the same losses.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from machine import machine, versions
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from unisono import Loss, Recipe
from unisono.engine.step import coupled
from unisono.recipes.seo.tasks.bi_encoder import contrastive

WIDTH = 64
STEPS = 4
TOLERANCE = 1e-10


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes, self.shape = 0, ()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.numel() * each.element_size() > self.num_bytes:
                self.num_bytes, self.shape = each.numel() * each.element_size(), tuple(each.shape)
        return result


class Texts(Dataset[dict[str, Any]]):
    """Random pairs of vectors that share a part."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        shared, mine, other = torch.randn(3, WIDTH, generator=generator)
        return {"query": shared + mine, "page": shared + other, "number": index}


class Whole(Recipe):
    """A recipe in which every rank compares all rows with all rows."""

    @dataclass
    class Config:
        record: str = ""
        """Folder for each rank's measurements."""

    def model(self) -> nn.Module:
        measure(self.config.record)
        return nn.Linear(WIDTH, WIDTH)

    def dataset(self, split: str) -> Texts | None:
        return Texts() if split == "train" else None

    def embed(self, model: nn.Module, batch: dict[str, Tensor], noise: Any) -> Mapping[str, Tensor]:
        rows = {name: normalize(model(batch[name]), dim=-1) for name in ("query", "page")}
        number = batch["number"]
        return rows | {"query_keys": number, "page_keys": number, "numbers": number, "relevant": number[:, None]}

    def couple(self, rows: Mapping[str, Tensor]) -> Loss:
        return contrastive(rows, 20.0, both_ways=True)


class ByRows(Whole):
    """A recipe in which each rank compares only its share of the rows with all rows."""

    def couple_rows(self, rows: Mapping[str, Tensor], start: int, stop: int) -> Loss:
        return contrastive(rows, 20.0, both_ways=True, anchors=slice(start, stop))


def measure(folder: str) -> None:
    """Makes every step record the largest tensor of its comparison, and the time that the comparison takes."""
    largest = LargestTensor()
    seconds: list[float] = []
    for name in ("compare_all", "compare_anchors"):
        function = getattr(coupled, name)

        def timed(*args: Any, _function: Any = function, **kwargs: Any) -> Any:
            began = time.perf_counter()
            with largest:
                result = _function(*args, **kwargs)
            seconds.append(time.perf_counter() - began)
            measurement = {"bytes": largest.num_bytes, "shape": largest.shape, "ms": statistics.median(seconds) * 1e3}
            Path(folder, f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(measurement))
            return result

        setattr(coupled, name, timed)


def case(kind: str, ranks: int, micro_batches: int, batch: int, root: Path) -> dict[str, Any]:
    """Trains a few steps and reads the measurements of the ranks."""
    folder = root / f"{kind}{ranks}x{micro_batches}"
    folder.mkdir()
    flags = {
        "output_dir": folder / "run",
        "record": folder,
        "nproc": ranks,
        "strategy": "ddp" if ranks > 1 else "single",
        "global_batch_size": batch,
        "batch_size": -(-batch // (ranks * micro_batches)),
        "max_steps": STEPS,
        "dtype": "float64",
        "log_every": 1,
        "tensorboard": "false",
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    recipe = f"{Path(__file__).resolve()}:{kind}"
    ended = subprocess.run([sys.executable, "-m", "unisono", "train", recipe, *words], capture_output=True, text=True)
    if ended.returncode != 0:
        raise SystemExit(f"{kind} on {ranks} ranks failed:\n{ended.stderr[-3000:]}")
    by_rank = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    largest = max(by_rank, key=lambda each: each["bytes"])
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {
        "kind": kind,
        "ranks": ranks,
        "micro_batches": micro_batches,
        "shape": largest["shape"],
        "mib": largest["bytes"] / 2**20,
        "ms": statistics.median(each["ms"] for each in by_rank),
        "losses": [line["loss"] for line in lines],
    }


def report(results: dict[str, Any]) -> str:
    batch, rows = results["batch"], results["cases"]
    whole = rows[0]
    lines = ["# Contrastive losses", "", f"`{results['command']}`, {results['when']}", ""]
    lines += [f"{results['machine']['processor']}, {results['machine']['cores']} cores, {results['versions']}", ""]
    lines += [
        f"A loss that compares {batch} queries with {batch} pages, in both directions, in float64. *Largest tensor*"
    ]
    lines += ["is the largest one that an operation of the loss or its backward pass returns on any rank.", ""]
    lines += [
        "| method | ranks | micro-batches per rank | largest tensor | MiB | relative | ms per step | loss differs by |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for row in rows:
        method = "`couple`" if row["kind"] == "Whole" else "`couple_rows`"
        lines.append(
            f"| {method} | {row['ranks']} | {row['micro_batches']} | {' × '.join(map(str, row['shape']))} "
            f"| {row['mib']:.0f} | {row['mib'] / whole['mib']:.4f} | {row['ms']:.0f} | {row['difference']:.0e} |"
        )
    lines += ["", "The ranks share the cores of one machine, so the times show the work of all ranks together, not the"]
    lines += ["speed-up of several machines.", ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=2048, help="number of samples in the global batch")
    options = parser.parse_args()
    cases = [("Whole", 1, 1), ("Whole", 2, 1), ("Whole", 4, 1)]
    cases += [("ByRows", ranks, parts) for parts in (1, 4) for ranks in (1, 2, 4)]
    with tempfile.TemporaryDirectory() as root:
        rows = [case(*each, options.batch, Path(root)) for each in cases]
    for row in rows:
        row["difference"] = max(abs(a - b) for a, b in zip(row["losses"], rows[0]["losses"], strict=True))
    results = {
        "command": "python benchmarks/contrast.py --output benchmarks/results",
        "when": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(["torch"]),
        "batch": options.batch,
        "cases": rows,
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "contrast.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.output / "contrast.md").write_text(report(results))
    print(report(results))
    expected = all(
        row["mib"] == options.batch**2 * 8 / 2**20 / row["ranks"] / row["micro_batches"]
        for row in rows
        if row["kind"] == "ByRows"
    )
    return 0 if expected and all(row["difference"] < TOLERANCE for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
