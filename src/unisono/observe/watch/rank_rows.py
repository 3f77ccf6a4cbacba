"""The status of every rank as rows of a table, in the terminal and on the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unisono.formatting import format_duration, format_number
from unisono.observe.watch.ranks import Rank

MOST_ROWS = 64


@dataclass(frozen=True)
class RankRow:
    """The values of one rank as text; unknown values are empty."""

    rank: int
    phase: str
    step: str
    step_ms: str
    data_wait: str
    """Fraction of the step in which the rank waits for data."""
    comm_wait: str
    """Fraction of the step in which the rank waits for communication and for other ranks."""
    load: str
    load_fraction: float | None
    memory: str
    power: str
    device: str
    problem: str


COLUMNS = (
    ("rank", "rank"),
    ("phase", "phase"),
    ("step", "step"),
    ("step_ms", "ms per step"),
    ("data_wait", "waits for data"),
    ("comm_wait", "waits for ranks"),
    ("load", "load"),
    ("memory", "peak memory"),
    ("power", "power"),
    ("device", "device"),
)
"""Fields of a row and their headings, the most important first."""


def rank_rows(ranks: Sequence[Rank], most: int = MOST_ROWS) -> tuple[list[RankRow], int]:
    """Returns at most `most` rows in order of rank, preferring ranks with a problem, and the number of other ranks."""
    chosen = sorted(ranks, key=lambda rank: (not rank.problem, rank.rank))[:most]
    several_hosts = len({rank.host for rank in ranks}) > 1
    rows = [_row(rank, several_hosts) for rank in sorted(chosen, key=lambda rank: rank.rank)]
    return rows, len(ranks) - len(rows)


def used_columns(rows: Sequence[RankRow]) -> list[tuple[str, str]]:
    """Returns the columns in which any row has a text."""
    return [(name, head) for name, head in COLUMNS if any(str(getattr(row, name)) for row in rows)]


def _row(rank: Rank, several_hosts: bool) -> RankRow:
    numbers = rank.numbers
    gpu = numbers.get("gpu_util")
    cores = numbers.get("cpu_util")
    load = f"{gpu:.0%}" if gpu is not None else "" if cores is None else f"{cores:.0%} CPU"
    memory, total, watts = numbers.get("mem_gib"), numbers.get("mem_total_gib"), numbers.get("gpu_power_w")
    seconds = rank.silent_s if rank.is_silent else rank.stuck_s
    return RankRow(
        rank.rank,
        "ended" if rank.ended else rank.phase,
        format_number(rank.step),
        format_number(numbers["step_ms"], 3) if "step_ms" in numbers else "",
        _percent(rank.share("data_wait_ms")),
        _percent(rank.share("comm_ms")),
        load,
        gpu,
        "" if memory is None else f"{memory:.1f}{f' / {total:.0f}' if total else ''} GiB",
        "" if watts is None else f"{watts:.0f} W",
        f"{rank.host} {rank.device}".strip() if several_hosts else rank.device,
        f"{rank.problem} for {format_duration(seconds)}" if rank.problem else "",
    )


def _percent(fraction: float | None) -> str:
    return "" if fraction is None else f"{fraction:.0%}"
