"""Draws the figure of part `learning` of darkroom.py: the return per in-context episode of every run."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from darkroom_runs import Row

INK, FAINT, GRID = "#1d2733", "#8a94a0", "#e5e7eb"
OURS = "#c2410c"
COLOURS = ("#0e7490", "#4d7c0f", "#7c3aed", "#475569", "#a16207", "#1d4ed8")  # colours of the other configurations


def figure(result: Row, folder: Path) -> str:
    """Draws the return per in-context episode; returns a message about the result."""
    runs = {name: row for name, row in result["rows"].items() if not row["failed"]}
    if not runs:
        return "no figure: no run finished"
    if find_spec("matplotlib") is None:
        return "no figure: matplotlib is not installed; run `python benchmarks/darkroom.py figure` elsewhere"
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib.figure import Figure

    first = next(iter(runs.values()))
    most, chance, episodes = first["optimum"], first["chance"], max(len(row["curve"]) for row in runs.values())
    drawing = Figure(figsize=(10.5, 5.8), dpi=150, facecolor="#ffffff")
    axes = drawing.subplots()
    levels = ((most, f"optimum {most:.2f}", INK, (0, (6, 3))), (chance, f"chance {chance:.2f}", FAINT, ":"))
    for level, name, colour, style in levels:
        axes.axhline(level, color=colour, linewidth=1, linestyle=style)
        at = {"xytext": (-4, 4), "textcoords": "offset points", "ha": "right"}
        axes.annotate(name, (episodes, level), color=colour, fontsize=9, **at)
    labels: list[tuple[float, str, str, bool]] = []
    others = [name for name in result["rows"] if name not in result["seeds"]]
    colours = dict(zip(others, COLOURS, strict=False))
    for name, row in runs.items():
        if name not in result["seeds"]:
            colour = colours[name]
            axes.plot(range(1, len(row["curve"]) + 1), row["curve"], color=colour, linewidth=1.3, alpha=0.9)
            labels.append((end_of(row["curve"]), f"{name}, {row['unseen_of_optimum']:.0%}", colour, False))
    curves = [runs[name]["curve"] for name in result["seeds"] if name in runs]
    if curves:
        across = list(zip(*curves, strict=False))
        numbers, mean = range(1, len(across) + 1), [statistics.mean(values) for values in across]
        axes.fill_between(numbers, *([pick(v) for v in across] for pick in (min, max)), color=OURS, alpha=0.15, lw=0)
        axes.plot(numbers, mean, color=OURS, linewidth=2.8)
        share = statistics.mean(runs[name]["unseen_of_optimum"] for name in result["seeds"] if name in runs)
        seeds = f"{len(curves)} seed{'s' if len(curves) > 1 else ''}"
        labels.append((end_of(mean), f"full configuration ({seeds}), {share:.0%}", OURS, True))
    for place, (_, text, colour, bold) in zip(spread(labels, most), sorted(labels), strict=True):
        axes.annotate(
            text,
            (1.015, place),
            xycoords=("axes fraction", "data"),
            color=colour,
            fontsize=9.5,
            va="center",
            fontweight="bold" if bold else "normal",
            annotation_clip=False,
        )
    axes.set_xscale("log")
    ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500) if tick <= episodes]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(1, episodes)
    axes.set_ylim(0, most * 1.1)
    axes.set_yticks(range(0, int(most) + 1, 5))
    axes.set_xlabel("in-context episode, weights frozen", color=INK)
    axes.set_ylabel("return per episode, mean over the unseen tasks", color=INK)
    trial = " — a smoke test, nothing is learned" if result["quick"] else ""
    axes.set_title(
        f"Darkroom, 9 × 9: in-context learning of unseen goals{trial}",
        loc="left",
        color=INK,
        fontweight="bold",
        pad=12,
    )
    axes.text(
        1.015, 1.0, "fraction of the optimum,\nlast 10 episodes", transform=axes.transAxes, color=FAINT, fontsize=8.5
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    drawing.subplots_adjust(left=0.065, right=0.7, top=0.89, bottom=0.1)
    file = folder / "darkroom_learning.png"
    folder.mkdir(parents=True, exist_ok=True)
    drawing.savefig(file, format="png")
    return f"wrote {file}"


def end_of(curve: Sequence[float]) -> float:
    return statistics.mean(curve[-10:])


def spread(labels: Sequence[tuple[float, str, str, bool]], most: float) -> list[float]:
    """Heights of the labels in ascending order, close to the ends of their curves without overlap."""
    gap, places = most * 0.055, []
    for height, *_ in sorted(labels):
        places.append(max(height, places[-1] + gap if places else gap / 2))
    ceiling = most * 1.06
    for at in reversed(range(len(places))):
        places[at] = min(places[at], ceiling)
        ceiling = places[at] - gap
    return places


def draw_again(options: argparse.Namespace, _: Path) -> int:
    file = options.output / "darkroom_learning.json"
    if not file.exists():
        raise SystemExit(f"figure: {file} does not exist; run `python benchmarks/darkroom.py learning` first")
    print(figure(json.loads(file.read_text()), options.output))
    return 0
