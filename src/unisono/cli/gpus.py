"""`unisono gpus`: lists the GPUs of this machine, how busy they are, and which ones `--gpus auto` would use."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict

from unisono.cli.arguments import Parser
from unisono.devices import GB, Gpu, choose, locked_gpus, read_gpus, visible_gpus
from unisono.errors import EXIT_DONE


def main(argv: list[str]) -> int:
    """Runs the command: prints the GPUs that this process may use."""
    parser = Parser("gpus", "List the GPUs of this machine, how busy they are, and which ones --gpus auto would use.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse(argv)

    gpus = visible_gpus()
    locked = locked_gpus(gpus)
    auto = {gpu.uuid for gpu in choose("auto", gpus, locked=locked).gpus}
    if options.json:
        records = [{**asdict(gpu), "locked": gpu.uuid in locked, "auto": gpu.uuid in auto} for gpu in gpus]
        print(json.dumps(records, indent=2))
    elif gpus:
        _print_table(gpus, locked, auto)
    else:
        print(_why_none(os.environ, read_gpus()))
    return EXIT_DONE


def _why_none(environ: Mapping[str, str], hidden: Sequence[Gpu]) -> str:
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    if hidden:
        return f"No GPU is visible: CUDA_VISIBLE_DEVICES={mask!r} hides all {len(hidden)}; unset it to see them."
    return (
        "No NVIDIA GPU found: training runs on the CPU. If this machine has one, check that `nvidia-smi` works (driver "
        "installed; in a container: started with --gpus all), then run `unisono doctor`."
    )


def _print_table(gpus: Sequence[Gpu], locked: Collection[str], auto: Collection[str]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("auto", "id", "name", "free / total", "load", "processes", "links")
    for gpu in gpus:
        processes = [f"{p.pid} {os.path.basename(p.name)} {p.bytes / GB:.1f} GB" for p in gpu.processes]
        if gpu.uuid in locked:
            processes.append("locked by a unisono run")
        table.add_row(
            "✓" if gpu.uuid in auto else "",
            str(gpu.index),
            escape(gpu.name),
            f"{gpu.free_bytes / GB:.1f} / {gpu.total_bytes / GB:.1f} GB" if gpu.total_bytes else "unknown",
            "unknown" if gpu.utilization is None else f"{gpu.utilization} %",
            escape("\n".join(processes)) or "none",
            ", ".join(gpu.links) or "unknown",
        )
    console = Console()
    console.print(table)
    console.print("✓: --gpus auto would use it.", highlight=False)
