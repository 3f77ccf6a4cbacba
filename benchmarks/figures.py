"""Writes the README's figures from benchmarks/results/*.json, so that no number is typed by hand.

python benchmarks/figures.py
"""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
START, END = "<!-- figures: written by benchmarks/figures.py -->\n", "<!-- end of figures -->"


def overhead_rows(device: str) -> list[str]:
    result = json.loads((HERE / "results" / f"overhead_{device}.json").read_text())
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


def figures() -> str:
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


def with_figures(text: str) -> str:
    before, rest = text.split(START)
    return before + START + figures() + END + rest.split(END)[1]


if __name__ == "__main__":
    README.write_text(with_figures(README.read_text()))
