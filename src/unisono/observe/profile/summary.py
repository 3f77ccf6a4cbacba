"""Combines the tables of a profile into its summary, and formats the summary as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unisono.formatting import format_bytes, format_count, format_number, shorten
from unisono.observe.profile.files import steps_text
from unisono.observe.profile.tables import attribution_notes, kernel_rows, operator_rows
from unisono.observe.profile.trace import Trace
from unisono.observe.profile.waits import DEVICE, HOST, waits

VERSION = 1
SHOWN = 15  # rows of each table in the text


def rank_summary(trace: Trace, rank: int, comm_ms: float | None) -> dict[str, Any]:
    """Returns what every rank contributes to the summary: its step and what it waits for."""
    return {"rank": rank, **waits(trace, comm_ms)}


def summary(
    trace: Trace,
    ranks: Sequence[Mapping[str, Any]],
    *,
    world: int,
    device: str,
    unprofiled_step_ms: float | None,
    memory: Mapping[str, Any] | None,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns the summary of a profile; its tables of operators and kernels describe the rank of `trace`."""
    numbers = sorted({number for number, _ in trace.steps})
    return {
        "version": VERSION,
        "first_step": numbers[0] if numbers else None,
        "last_step": numbers[-1] if numbers else None,
        "num_steps": len(numbers),
        "world": world,
        "device": device,
        "unprofiled_step_ms": unprofiled_step_ms,
        "notes": [*notes, *attribution_notes(trace)],
        "ranks": list(ranks),
        "operators": operator_rows(trace, len(numbers)),
        "kernels": kernel_rows(trace, len(numbers)),
        "memory": {name: memory[name] for name in ("peak_bytes", "peak_ms", "blocks")} if memory else None,
    }


def as_text(content: Mapping[str, Any]) -> str:
    """Returns the summary as a text with tables."""
    steps = steps_text(content["first_step"], content["last_step"])
    lines = [f"Profile of {steps} on {format_count(content['world'], 'rank')}, {content['device']}", ""]
    lines += [f"note: {note}" for note in content["notes"]]
    if content["notes"]:
        lines.append("")
    for key, names, title in (
        ("device_ms", DEVICE, "Where the step waits, on the device (ms per step)"),
        ("host_ms", HOST, "Where the step waits, on the host (ms per step)"),
    ):
        rows = wait_rows(content["ranks"], key, names)
        if rows:
            lines += [title, *_table(["rank", "step", *names], rows), ""]
    if content["kernels"]:
        lines += ["Kernels with the most time on the device (rank 0, ms per step)"]
        lines += [*_table(["kernel", "kind", "calls", "device ms", "share"], kernel_cells(content, SHOWN)), ""]
    lines += ["Operators with the most own time (rank 0, ms per step)"]
    lines += [*_table(operator_heads(content), operator_cells(content, SHOWN)), ""]
    if content["memory"]:
        lines += [f"Memory: peak {format_bytes(content['memory']['peak_bytes'])}; largest blocks at the peak"]
        lines += [*_table(["bytes", "operator", "phase", "step"], block_cells(content["memory"], SHOWN)), ""]
    return "\n".join(lines)


def wait_rows(ranks: Sequence[Mapping[str, Any]], key: str, names: Sequence[str]) -> list[list[str]]:
    """Returns a row per rank: its step time and the parts of it."""
    return [
        [str(rank["rank"]), _ms(rank["step_ms"]), *(_ms(rank[key].get(name, 0.0)) for name in names)]
        for rank in ranks
        if rank[key]
    ]


def operator_heads(content: Mapping[str, Any]) -> list[str]:
    """Returns the column headings of the table of operators; without a device, it has no device columns."""
    on_device = ["own device ms", "share"] if content["kernels"] else []
    return ["operator", "calls", *on_device, "own CPU ms", "share"]


def operator_cells(content: Mapping[str, Any], most: int) -> list[list[str]]:
    """Returns the rows of the table of operators as text."""
    rows = []
    for row in content["operators"][:most]:
        on_device = [_ms(row["self_device_ms"]), f"{row['device_share']:.1%}"] if content["kernels"] else []
        name, calls = shorten(row["name"], 70), f"{row['calls']:,}"
        rows.append([name, calls, *on_device, _ms(row["self_cpu_ms"]), f"{row['cpu_share']:.1%}"])
    return rows


def kernel_cells(content: Mapping[str, Any], most: int) -> list[list[str]]:
    """Returns the rows of the table of kernels as text."""
    return [
        [
            shorten(row["name"], 70),
            row["kind"],
            f"{row['calls']:,}",
            _ms(row["device_ms"]),
            f"{row['device_share']:.1%}",
        ]
        for row in content["kernels"][:most]
    ]


def block_cells(memory: Mapping[str, Any], most: int) -> list[list[str]]:
    """Returns the rows of the table of the largest blocks at the peak as text."""
    return [
        [format_bytes(row["bytes"]), row["operator"] or "–", row["phase"] or "–", str(row["step"] or "–")]
        for row in memory["blocks"][:most]
    ]


def _ms(value: float) -> str:
    return format_number(value, 3)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]

    def line(cells: Sequence[str]) -> str:
        first, *others = (
            cell.ljust(width) if not place else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join([first, *others]).rstrip()

    return [line(heads), "  ".join("-" * width for width in widths), *map(line, rows)]
