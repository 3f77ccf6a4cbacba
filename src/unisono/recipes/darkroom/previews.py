"""The figure of a run: does it learn in its context, on tasks that it has never seen?"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.recipes.darkroom.recipe import Darkroom

_INK, _PAPER, _FAINT = "#1d2733", "#ffffff", "#8a94a0"
_COLOURS = {"unseen": "#c2410c", "validation": "#0e7490", "train": "#64748b"}


def draw(recipe: Darkroom) -> Mapping[str, Any]:
    """in_context.png, and the same in numbers."""
    evaluations = recipe.evaluations
    chosen = best(evaluations, "eval/validation_of_optimum")
    found: dict[str, Any] = {"in_context.txt": table(recipe, chosen)}
    if find_spec("matplotlib") is not None:  # it comes with unisono[darkroom]; a run does not fail for a picture
        found["in_context.png"] = _figure(recipe, chosen)
    return found


def best(evaluations: list[dict[str, Any]], metric: str) -> dict[str, Any]:
    """The evaluation of the best checkpoint, the first of equal ones; step 0 (`eval_first`) has no checkpoint."""
    trained = [evaluation for evaluation in evaluations if evaluation["step"]] or evaluations
    return max(trained, key=lambda evaluation: evaluation.get(metric, -1.0))


def _groups(chosen: Mapping[str, Any]) -> dict[str, str]:
    """The groups of tasks that were played, and their colours."""
    return {name: colour for name, colour in _COLOURS.items() if f"eval/{name}_of_optimum" in chosen}


def table(recipe: Darkroom, chosen: Mapping[str, Any]) -> str:
    """The short table that `make demo` ends with."""
    rows: list[tuple[str, ...]] = [("", "episode 1", "5", "10", "last 10", "of optimum", "solved")]
    lines = {
        "source learner": recipe.source_curve,
        **{name: chosen[f"eval/{name}_return_by_episode"] for name in _groups(chosen)},
    }
    for name, curve in lines.items():
        picked = [f"{curve[episode]:.2f}" if episode < len(curve) else "" for episode in (0, 4, 9)]
        last = sum(curve[-10:]) / len(curve[-10:])
        share, solved = chosen.get(f"eval/{name}_of_optimum"), chosen.get(f"eval/{name}_solved")
        if name == "source learner":
            share = last / recipe.optimum("unseen")
        rows.append(
            (
                f"{name} tasks" if name in _COLOURS else "source learner, unseen tasks",
                *picked,
                f"{last:.2f}",
                f"{share:.1%}" if share is not None else "",
                f"{solved:.0%}" if solved is not None else "",
            )
        )
    chance, most = recipe.chance("unseen"), recipe.optimum("unseen")
    rows.append(("chance, unseen tasks", "", "", "", f"{chance:.2f}", f"{chance / most:.1%}", ""))
    rows.append(("optimum, unseen tasks", "", "", "", f"{most:.2f}", "100.0%", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    text = [
        "  ".join(
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    what = f"Return per episode, frozen weights of step {chosen['step']} (chosen by the validation tasks)"
    return "\n".join([what, "", text[0], "-" * len(text[0]), *text[1:], ""])


def _figure(recipe: Darkroom, chosen: Mapping[str, Any]) -> bytes:
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.6), dpi=150, facecolor=_PAPER)
    axes = figure.subplots()
    most, chance = recipe.optimum("unseen"), recipe.chance("unseen")
    episodes = len(chosen["eval/unseen_return_by_episode"])
    for level, text, colour, style in (
        (most, f"optimum of the unseen tasks {most:.2f}", _COLOURS["unseen"], (0, (6, 3))),
        (chance, f"chance {chance:.2f}", _FAINT, (0, (1, 2))),
    ):
        axes.axhline(level, color=colour, linewidth=1, linestyle=style)
        axes.annotate(text, (1, level), xytext=(4, 4), textcoords="offset points", ha="left", color=colour)
    optima = {name: recipe.optimum(name) for name in _groups(chosen)}
    for name, level in optima.items():  # goals lie nearer or farther: each group has an optimum of its own
        if name != "unseen":
            axes.axhline(level, color=_COLOURS[name], linewidth=1, linestyle=(0, (6, 3)))
    source = recipe.source_curve[:episodes]
    axes.plot(
        range(1, len(source) + 1),
        source,
        color=_FAINT,
        linewidth=1.4,
        linestyle=(0, (4, 2)),
        label=f"source learner ({recipe.config.source}) on the unseen tasks",
    )
    for name, colour in reversed(_groups(chosen).items()):
        curve, share = chosen[f"eval/{name}_return_by_episode"], chosen[f"eval/{name}_of_optimum"]
        what = {"train": "training tasks", "validation": "validation tasks", "unseen": "unseen tasks"}[name]
        axes.plot(
            range(1, len(curve) + 1),
            curve,
            color=colour,
            linewidth=2.8 if name == "unseen" else 1.3,
            label=f"{what}: {share:.0%} of the optimum {optima[name]:.2f}",
        )
    axes.set_xscale("log")
    ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500) if tick <= episodes]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(1, max(2, episodes))
    axes.set_ylim(0, max(optima.values()) * 1.12)
    axes.set_xlabel("episode in context (weights frozen)")
    axes.set_ylabel("return")
    room = f"{recipe.config.env.replace('_', ' ')} {recipe.config.grid_size} × {recipe.config.grid_size}"
    share, number = chosen["eval/unseen_of_optimum"], len(recipe.split.unseen)
    axes.set_title(
        f"{share:.0%} of the optimum on {number} tasks it has never seen", loc="left", color=_INK, fontweight="bold"
    )
    axes.set_title(f"{room}, step {chosen['step']:,}", loc="right", color=_FAINT, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    figure.legend(loc="lower center", ncols=2, frameon=False, reverse=True)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    out = BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()
