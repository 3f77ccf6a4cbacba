"""The table of a benchmark, for the terminal and as Markdown, and the sentences below it."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.benching.result import Bench, Overhead, Row
from unisono.benching.spread import Spread
from unisono.formatting import format_number, format_rate


def table_of(bench: Bench) -> tuple[list[str], list[list[str]]]:
    """Returns the headings and the cells of the table; leaves out columns without any number."""
    columns = {
        "ranks": [str(row.ranks) for row in bench.rows],
        "batch": [_batch(row) for row in bench.rows],
        "ms/step": [_spread(row.step_ms) for row in bench.rows],
        "samples/s": [format_rate(row.samples_per_s.median) for row in bench.rows],
        "tokens/s": [_rate(row.tokens_per_s) for row in bench.rows],
        "items/s": [_rate(row.items_per_s) for row in bench.rows],
        "efficiency": [_efficiency(row.efficiency) for row in bench.rows],
        "MFU": ["" if row.mfu is None else f"{row.mfu:.1%}" for row in bench.rows],
        "comm.": [f"{row.comm_share:.1%}" if row.ranks > 1 else "" for row in bench.rows],
        "data wait": [f"{row.data_wait_share:.1%}" for row in bench.rows],
        "GiB": [f"{row.memory_gib:.2f}" for row in bench.rows],
        "by hand, ms": ["" if row.overhead is None else _spread(row.overhead.hand_step_ms) for row in bench.rows],
        "overhead": ["" if row.overhead is None else _overhead(row.overhead) for row in bench.rows],
    }
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    return list(shown), [list(cells) for cells in zip(*shown.values(), strict=True)]


def title_of(bench: Bench) -> str:
    """Returns the title of the table."""
    row = bench.rows[0]
    device = f"CPU, {row.threads} thread{'s' * (row.threads > 1)} per rank" if row.device == "CPU" else row.device
    return f"{bench.recipe} on {device}: {bench.scaling} scaling, {row.precision}"


def notes_of(bench: Bench) -> list[str]:
    """Returns notes that help to interpret the numbers: how noisy they are, and what is missing and why."""
    rounds, steps = bench.conditions["rounds"], bench.conditions["steps"]
    notes = [
        f"ms/step: median [quartiles] of {rounds} rounds of {steps} steps."
        + (" Efficiency: throughput per rank relative to the first row." if len(bench.rows) > 1 else "")
    ]
    measured = [row.overhead for row in bench.rows if row.overhead is not None]
    if measured:
        confidence = min(each.ratio.confidence for each in measured)
        most = max(each.loss_difference for each in measured)
        notes.append(
            f"overhead: unisono's step time over that of a hand-written PyTorch loop in the same processes, which "
            f"takes turns with it; median and {confidence:.0%} interval. {_noise(bench.rows)} The losses of both "
            f"loops agree within {most:.0e} in the first {measured[0].compared_steps} steps."
        )
    for reason in dict.fromkeys(row.why_no_overhead for row in bench.rows if row.why_no_overhead):
        notes.append(f"no overhead: {reason}.")
    for reason in dict.fromkeys(row.why_no_mfu for row in bench.rows if row.why_no_mfu):
        notes.append(f"no MFU: {reason}.")
    if any(row.items_per_s is not None for row in bench.rows):
        notes.append("items/s: items that the loss counts, for instance tokens or pixels.")
    crowded = [row for row in bench.rows if row.device == "CPU" and row.ranks * row.threads > _cores(bench)]
    if crowded:
        notes.append(f"{crowded[0].ranks} ranks share {_cores(bench)} cores, so their efficiency is not meaningful.")
    load, cores = bench.conditions["machine"]["load_average"], bench.conditions["machine"]["cores"]
    if load > 0.5:
        notes.append(f"The load average was {load:.1f} on {cores} cores before the start: other programs add noise.")
    return notes


def markdown_of(bench: Bench) -> str:
    """Returns the content of bench.md."""
    machine, versions = bench.conditions["machine"], bench.conditions["versions"]
    heads, rows = table_of(bench)
    return "\n".join(
        [
            f"# {title_of(bench)}",
            "",
            f"- Machine: {', '.join([*machine['gpus'], machine['processor']])}, {machine['cores']} cores, "
            f"{machine['memory_gib']} GiB; load {machine['load_average']} before the start",
            f"- Versions: {', '.join(f'{name} {number}' for name, number in versions.items())}",
            f"- Date: {bench.conditions['date']}",
            f"- Command: `{bench.command}`",
            "",
            f"| {' | '.join(heads)} |",
            f"|{'---:|' * len(heads)}",
            *(f"| {' | '.join(row)} |" for row in rows),
            "",
            *(f"{note}\n" for note in notes_of(bench)),
        ]
    )


def _cores(bench: Bench) -> int:
    return int(bench.conditions["machine"]["cores"])


def _noise(rows: Sequence[Row]) -> str:
    unclear = [row.ranks for row in rows if row.overhead is not None and row.overhead.is_noise]
    if not unclear:
        return "No interval contains 0 %: the difference is larger than the noise."
    return f"With {' and '.join(map(str, unclear))} ranks the interval contains 0 %: no difference was measured."


def _batch(row: Row) -> str:
    parts = f" = {row.ranks} × {row.num_micro_batches} × {row.micro_batch}" if row.num_micro_batches > 1 else ""
    return f"{row.global_batch:,}{parts}"


def _spread(spread: Spread) -> str:
    return f"{format_number(spread.median, 3)} [{format_number(spread.low, 3)}–{format_number(spread.high, 3)}]"


def _rate(rate: float | None) -> str:
    return "" if rate is None else format_rate(rate)


def _efficiency(efficiency: Spread | None) -> str:
    return "" if efficiency is None else f"{efficiency.median:.0%} [{efficiency.low:.0%}–{efficiency.high:.0%}]"


def _overhead(overhead: Overhead) -> str:
    low, high = (100 * (each - 1) for each in (overhead.ratio.low, overhead.ratio.high))
    return f"{overhead.percent:+.1f} % [{low:+.1f}, {high:+.1f}]"
