"""The result of a benchmark: one row per rank count, with the spread of the measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unisono.benching.spread import MedianInterval, Spread

COMPARED = 10
"""Number of initial steps whose losses must agree; in later steps, rounding errors accumulate."""
TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "bf16": 3e-2}
"""Largest difference between losses that counts as rounding, relative to the largest of the compared losses."""


@dataclass(frozen=True)
class Overhead:
    """unisono's step time as a multiple of the hand-written loop's, and the evidence that both do the same work."""

    ratio: MedianInterval
    hand_step_ms: Spread
    compared_steps: int
    loss_difference: float
    """Largest relative difference between the losses of the compared steps."""
    tolerance: float

    @property
    def percent(self) -> float:
        """The overhead in per cent of the hand-written loop's step time."""
        return 100 * (self.ratio.median - 1)

    @property
    def is_noise(self) -> bool:
        """Whether the interval of the ratio contains 1, so that no difference was measured."""
        return self.ratio.low <= 1 <= self.ratio.high


@dataclass(frozen=True)
class Row:
    """The measurements of one case."""

    ranks: int
    device: str
    strategy: str
    threads: int
    """Number of CPU threads of torch per rank."""
    precision: str
    global_batch: int
    micro_batch: int
    num_micro_batches: int
    step_ms: Spread
    """Mean step times of the rounds: median and quartiles."""
    samples_per_s: Spread
    tokens_per_s: float | None
    items_per_s: float | None
    """Items per second that the loss counts, such as tokens; None if it counts samples."""
    efficiency: Spread | None
    """Throughput per rank, relative to the case with the fewest ranks; None for that case."""
    mfu: float | None
    why_no_mfu: str
    comm_share: float
    """Fraction of a step in which a rank waits for other ranks and computes nothing."""
    data_wait_share: float
    memory_gib: float
    """Peak memory of the rank that needs the most: of its tensors on a GPU, or of its process on the CPU."""
    overhead: Overhead | None
    why_no_overhead: str
    rounds_ms: Sequence[float]
    hand_rounds_ms: Sequence[float]


@dataclass(frozen=True)
class Bench:
    """A complete benchmark."""

    recipe: str
    scaling: str
    command: str
    rows: Sequence[Row]
    folder: Path
    """The folder that contains bench.json, bench.md and bench.svg."""
    conditions: Mapping[str, Any]
    """Date, machine, versions, load and the options of the measurement."""

    def to_json(self) -> dict[str, Any]:
        """Returns the content of bench.json."""
        return {
            "kind": "bench",
            "recipe": self.recipe,
            "command": self.command,
            "scaling": self.scaling,
            **self.conditions,
            "rows": [asdict(row) for row in self.rows],
        }


def make_rows(measured: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Returns the rows of all cases, beginning with the fewest ranks."""
    rows: list[Row] = []
    for each in measured:
        rows.append(_row(each, rows[0] if rows else None))
    return rows


def _row(measured: Mapping[str, Any], first: Row | None) -> Row:
    batch, phases, ranks = measured["global_batch"], measured["phases"], measured["ranks"]
    seconds, by_hand = measured["seconds"]["unisono"], measured["seconds"]["hand"]
    step = Spread.of([1e3 * each for each in seconds])
    rate = Spread(*(1e3 * batch / ms for ms in (step.median, step.high, step.low)))
    items, tokens = measured["items_per_step"], measured["tokens_per_sample"]
    efficiency = None
    if first is not None:
        base, grown = first.samples_per_s, ranks / first.ranks
        low, high = rate.low / base.high / grown, rate.high / base.low / grown
        efficiency = Spread(rate.median / base.median / grown, low, high)
    mfu = phases.get("mfu")
    overhead, why_no_overhead = _overhead(measured, seconds, by_hand)
    whole = phases["step_ms"]
    return Row(
        ranks=ranks,
        device=measured["device"],
        strategy=measured["strategy"],
        threads=measured["threads"],
        precision=measured["precision"],
        global_batch=batch,
        micro_batch=measured["micro_batch"],
        num_micro_batches=measured["num_micro_batches"],
        step_ms=step,
        samples_per_s=rate,
        tokens_per_s=None if tokens is None else tokens * rate.median,
        items_per_s=None if items == batch else items / batch * rate.median,
        efficiency=efficiency,
        mfu=mfu,
        why_no_mfu="" if mfu is not None else _why_no_mfu(measured),
        comm_share=phases.get("comm_ms", 0.0) / whole,
        data_wait_share=phases["data_wait_ms"] / whole,
        memory_gib=max(measured["memory_gib"]),
        overhead=overhead,
        why_no_overhead=why_no_overhead,
        rounds_ms=[1e3 * each for each in seconds],
        hand_rounds_ms=[1e3 * each for each in by_hand],
    )


def _why_no_mfu(measured: Mapping[str, Any]) -> str:
    if measured["has_peak_rate"]:
        return "the operations of this model cannot be counted; define Recipe.flops()"
    return f"no peak rate of {measured['device']} is known; pass --peak_tflops"


def _overhead(
    measured: Mapping[str, Any], seconds: Sequence[float], by_hand: Sequence[float]
) -> tuple[Overhead | None, str]:
    if measured["hand_losses"] is None:
        return None, measured["why_no_hand"]
    losses, others = measured["losses"][:COMPARED], measured["hand_losses"][:COMPARED]
    difference, tolerance = loss_difference(losses, others), TOLERANCES[measured["precision"]]
    if not difference <= tolerance:
        return None, f"the losses of the hand-written loop differ by {difference:.1e}, so it does other work"
    ratios = [mine / other for mine, other in zip(seconds, by_hand, strict=True)]
    by_hand_ms = Spread.of([1e3 * each for each in by_hand])
    return Overhead(MedianInterval.of(ratios), by_hand_ms, len(losses), difference, tolerance), ""


def loss_difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """Returns the largest difference between two series of losses, relative to the largest loss; inf if not finite."""
    if len(losses) != len(others) or not all(map(math.isfinite, [*losses, *others])):
        return math.inf
    largest = max(map(abs, losses), default=0.0)
    differences = [abs(mine - other) for mine, other in zip(losses, others, strict=True)]
    return max(differences, default=0.0) / largest if largest else max(differences, default=0.0)
