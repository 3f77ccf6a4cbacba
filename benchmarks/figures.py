"""Writes the README's figures from benchmarks/results/*.json, so that no number is typed by hand.

python benchmarks/figures.py
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
RESULTS = HERE / "results"


def overhead_rows(device: str) -> list[str]:
    result = json.loads((RESULTS / f"overhead_{device}.json").read_text())
    machine = ", ".join(result["machine"]["gpus"]) or f"{result['machine']['cores']} CPU cores"
    rows = []
    for case in result["cases"]:
        if "variants" not in case:
            continue
        found = case["variants"]
        hand = found["hand"]
        shown = []
        for name in ("unisono", "accelerate", "fabric", "hand again"):
            row = found.get(name, {})
            fastest = row.get("fastest_ms", 0) / hand["fastest_ms"]
            shown.append(f"{row['ratio']:.3f} ({fastest:.3f})" if "ratio" in row else "–")
        memory = f"{found['unisono']['peak_mib'] / hand['peak_mib']:.3f}"
        rows.append(f"| {machine}, {case['case']} | {hand['step_ms']:.0f} ms | {' | '.join(shown)} | {memory} |")
    return rows


def costs() -> str:
    """What unisono costs beside a loop written by hand."""
    lines = [
        "Step time beside a loop written by hand, everything taking turns in one run: median ratio, and in brackets",
        "the ratio of the fastest rounds. *By hand again* is the same program twice: how far to trust the others.",
        "",
        "| | by hand | unisono | Accelerate | Fabric | by hand again | peak memory, unisono / by hand |",
        "|---|---|---|---|---|---|---|",
        *overhead_rows("cuda"),
        *overhead_rows("cpu"),
        "",
        "Machines, versions and commands: [benchmarks/results](benchmarks/results). On one H200 every strategy trains,",
        "resumes to the bit and verifies in bf16 and fp16 (by its losses): [cuda.md](benchmarks/results/cuda.md).",
        "",
    ]
    return "\n".join(lines)


def survived(results: Path = RESULTS) -> str:
    """What was measured about faults, one line per benchmark; a benchmark without results is left out."""
    lines = []
    for name, in_words in MEASURED.items():
        file = results / f"{name}.json"
        if file.exists():
            lines.append(f"- {in_words(json.loads(file.read_text()))} ([{name}.md](benchmarks/results/{name}.md)).")
    return "\n".join([*lines, ""]) if lines else ""


def faults(result: dict[str, Any]) -> str:
    rows = result["rows"]
    total, lost = _faults(rows), sum(not row["ok"] for row in rows)
    exact = [row for row in rows if row["tolerance"] == 0]
    rounded = [row for row in rows if row["tolerance"] > 0]
    recoveries = [seconds for row in rows for seconds in row["recoveries"]]
    text = f"**{total} faults on purpose, {'no run' if not lost else f'{lost} of {len(rows)} rows'} lost.** "
    text += f"{_faults(exact)} of them must leave weights, optimizer state, average and losses as in a run that "
    text += f"nothing happened to, to the bit: {_difference(exact)}. {_faults(rounded)} (out of memory, another number "
    text += f"of ranks) to rounding: {_difference(rounded)}"
    if recoveries:
        text += f". From the kill of a rank to the first new step: {statistics.median(recoveries):.1f} s"
    return text


def _faults(rows: list[dict[str, Any]]) -> int:
    return sum(row["faults"] for row in rows)


def _difference(rows: list[dict[str, Any]]) -> str:
    largest = max((row["difference"] for row in rows), default=0.0)
    return f"largest difference {largest:.0e}" if largest else "no difference"


def memory(result: dict[str, Any]) -> str:
    cases = [row for row in result["cases"] if "difference" in row]
    good = sum(row["ok"] for row in result["cases"])
    in_place = sum(row["in_place"] for row in cases)
    restarts = sum(row["restarts"] for row in cases)
    worst = max((row["difference"] for row in cases if row["precision"] == "no"), default=0.0)
    text = f"**Real out-of-memory** on {', '.join(result['machine']['gpus'])}: {good} of {len(result['cases'])} cases "
    text += f"as they should be, {in_place} in place, {restarts} by a restart; losses within {worst:.0e} "
    return text + "(relative, float32) of a run that had the small micro-batch from the start"


def save_stall(result: dict[str, Any]) -> str:
    medians = result["medians"]
    where = ", ".join(result["machine"]["gpus"]) or "the CPU"
    text = (
        f"**A checkpoint** of {result['parameters'] / 1e9:.2g} billion parameters ({result['bytes'] / 1e9:.0f} GB) on "
    )
    text += f"{where} holds up training for {medians['stall_s']:.2f} s, {100 * result['stall_share']:.1f} % of the "
    return text + f"{medians['synchronous_s']:.1f} s that saving on the spot takes"


def guard(result: dict[str, Any]) -> str:
    gpus = result["machine"]["gpus"] if result["settings"]["device"] == "cuda" else []
    where = ", ".join(gpus) or f"{result['machine']['cores']} CPU cores"
    shown = []
    for case in result["cases"]:
        ratios = {name: row["ratio"] for name, row in case.get("variants", {}).items() if "ratio" in row}
        if {"unisono", "never guarded", "always guarded"} <= ratios.keys():
            told = f"{case['case']}: {ratios['unisono']:.3f} once the guard is down, {ratios['never guarded']:.3f} "
            shown.append(told + f"without any, {ratios['always guarded']:.3f} while it is up")
    begin = f"**The guard against running out of memory**, step time beside plain DDP by hand on {where}"
    return f"{begin}: {'; '.join(shown)}"


MEASURED: dict[str, Callable[[dict[str, Any]], str]] = {
    "faults": faults,
    "memory": memory,
    "save_stall": save_stall,
    "guard_cpu": guard,
    "guard_cuda": guard,
}
BLOCKS: dict[str, Callable[[], str]] = {"figures": costs, "faults": survived}


def with_figures(text: str) -> str:
    """The README with its figures as they were measured."""
    for name, written in BLOCKS.items():
        start, end = f"<!-- {name}: written by benchmarks/figures.py -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(start)
        text = before + start + written() + end + rest.split(end)[1]
    return text


if __name__ == "__main__":
    README.write_text(with_figures(README.read_text()))
