"""`unisono plan RECIPE --gpus 8xH100-80GB`: predicts memory, time and cost of a run on GPUs you need not have."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.cli.arguments import TrainingParser
from unisono.engine.start.registry import load_recipe
from unisono.engine.start.run import configure
from unisono.errors import EXIT_DIFFERENCE, EXIT_DONE, ConfigError
from unisono.formatting import format_bytes, format_duration, format_number, format_rate
from unisono.planning.speed.gpus import parse_cluster

if TYPE_CHECKING:
    from unisono.engine.plan.plan import Plan, Row

_DESCRIPTION = """Predict memory, speed and cost of a run under each strategy, and recommend one.

Needs no GPU: one run of the model on tensors without data shows the memory and the operations of a step. The times are
computed from the speed of the GPUs and of the links between them (docs/plan.md lists the assumptions, and the errors
of past predictions).
Every setting of `unisono train` is also a flag here; settings that you pass are not varied.

Exit codes: 0 something fits, 1 nothing fits, 2 user error."""


def _parser() -> TrainingParser:
    parser = TrainingParser("plan", "RECIPE --gpus 8xH100-80GB [--nodes 2] [settings]", _DESCRIPTION)
    parser.add_argument(
        "--gpus", default="", metavar="NxGPU", help="GPUs of each machine, for instance 8xH100-80GB, 2xRTX4090"
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="number of machines (default: 1)")
    parser.add_argument(
        "--network_gbit", type=float, metavar="X",
        help="network of each machine in Gbit/s (default: 400 per GPU for machines with NVLink, otherwise 100)",
    )  # fmt: skip
    parser.add_argument(
        "--price", type=float, metavar="X", help="price of one GPU for one hour, to show the cost of the run"
    )
    parser.add_argument(
        "--all", action="store_true", help="show every combination instead of the best one per strategy"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all combinations to a JSON file")
    return parser


def main(argv: list[str]) -> int:
    """Runs the command; returns 1 if nothing fits."""
    parser = _parser()
    recipe_name, config, flags, options = parser.parse_training(argv)
    if options.help:
        parser.print_help()
        return EXIT_DONE
    if not options.gpus:
        raise ConfigError("plan: --gpus is missing; name the GPUs of a machine, for instance --gpus 8xH100-80GB")
    if options.price is not None and options.price < 0:
        raise ConfigError(f"price {options.price:g}: expected 0 or more")
    if options.json is not None and options.json.exists():
        raise ConfigError(f"{options.json} already exists; choose another file for --json")
    cluster = parse_cluster(options.gpus, options.nodes, options.network_gbit)
    kind = load_recipe(recipe_name)
    resolved = configure(kind, file=config, flags=flags)
    from unisono.engine.checks import check_run
    from unisono.engine.plan.plan import Planner
    from unisono.planning.memory.trace import CannotTrace

    recipe = check_run(kind, resolved)
    try:
        plan = Planner(recipe, resolved, cluster).plan()
    except CannotTrace as error:
        raise ConfigError(f"the memory of this model cannot be predicted: {error}") from error
    steps = resolved.values["max_steps"]
    own = [recipe_name, *(word for file in config for word in ("--config", str(file))), *flags]
    _print(plan, own, steps=steps, price=options.price, everything=options.all)
    if options.json is not None:
        rows = [_as_json(row) for row in plan.rows]
        options.json.write_text(json.dumps({"cluster": str(cluster), "rows": rows}, indent=1) + "\n")
    return EXIT_DONE if plan.recommended is not None else EXIT_DIFFERENCE


def command_of(plan: Plan, row: Row, own: list[str]) -> str:
    """Returns the command line that trains with the settings of a row; `own` is the user's recipe and flags."""
    settings = [word for name, value in row.changes.items() for word in (f"--{name}", str(value).lower())]
    cluster = plan.cluster
    devices = ["--gpus", str(cluster.gpus_per_node)]
    if cluster.nodes > 1:
        devices += ["--nnodes", str(cluster.nodes), "--node_rank", "RANK", "--rdzv_endpoint", "HOST:PORT"]
    return shlex.join(["unisono", "train", *own, *devices, *settings])


def _print(plan: Plan, own: list[str], *, steps: int | None, price: float | None, everything: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from unisono.engine.plan.plan import fastest_by_mesh

    best = plan.recommended
    length = f"{steps:,} steps" if steps else "1,000 steps"
    table = Table(
        title=f"{plan.rows[0].samples_per_step:,} samples per step on {plan.cluster} (predicted)", title_justify="left"
    )
    for name in ("strategy", "settings"):
        table.add_column(name, overflow="fold")
    for name in (
        "micro-batch",
        "GiB per GPU",
        "s/step",
        "samples/s",
        "use",
        "bottleneck",
        length,
        *(["cost"] if price else []),
    ):
        table.add_column(name, justify="left" if name == "bottleneck" else "right")
    for row in fastest_by_mesh(plan, everything=everything):
        seconds = (steps or 1000) * row.time.total
        cells = [row.title, row.description, f"{row.micro_batch} × {row.num_micro_batches}"]
        cells.append(f"{row.memory.total / 2**30:.1f}" if row.fits else f"{row.memory.total / 2**30:.1f}, too much")
        if row.fits:
            cells += [
                format_number(row.time.total, 3),
                format_rate(row.samples_per_s),
                f"{100 * row.utilization:.0f} %",
            ]
            cells += [row.time.bottleneck, format_duration(seconds)]
            if price:
                cells.append(f"{seconds / 3600 * plan.cluster.ranks * price:,.2f}")
        else:
            cells += [""] * (5 + bool(price))
        table.add_row(*(escape(cell) for cell in cells), style="bold" if row is best else None)
    width = None if sys.stdout.isatty() else 150
    console = Console(width=width, highlight=False)
    console.print(table)
    console.print(
        "use: the model's operations as a fraction of the rate that the GPUs sustain in matrix products of the run's "
        "precision."
    )
    if best is None:
        least = min(row.memory.total for row in plan.rows)
        console.print(
            f"Nothing fits into {plan.cluster.memory_gb:g} GiB per GPU: at least {format_bytes(least)} are needed. Use "
            "more or larger GPUs, smaller samples, or --optimizer adamw8bit."
        )
        return
    if best.is_lossy:
        console.print("The run fits only with 8-bit frozen weights, which change the result beyond rounding.")
    console.print("\nRecommended:")
    print(f"  {command_of(plan, best, own)}")


def _as_json(row: Row) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "strategy": row.title,
        "settings": dict(row.flags),
        "micro_batch": row.micro_batch,
        "num_micro_batches": row.num_micro_batches,
        "memory_bytes": row.memory.total,
        "memory": asdict(row.memory),
        "fits": row.fits,
        "seconds_per_step": row.time.total,
        "seconds": asdict(row.time),
        "bottleneck": row.time.bottleneck,
        "samples_per_s": row.samples_per_s,
        "utilization": row.utilization,
        "lossy": row.is_lossy,
    }
