"""Draws the preview of a run: a figure and a table that show how well the model learns unseen tasks in context."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.recipes.darkroom.recipe import Darkroom

_INK, _PAPER, _FAINT = "#1d2733", "#ffffff", "#8a94a0"
_COLOURS = {"unseen": "#c2410c", "validation": "#0e7490", "train": "#64748b"}
_DASHED, _DOTTED = (0, (6, 3)), (0, (1, 2))


def draw(recipe: Darkroom) -> Mapping[str, Any]:
    """Returns in_context.txt, and in_context.png if matplotlib is installed."""
    evaluation = best(recipe.evaluations, "eval/validation_of_optimum")
    files: dict[str, Any] = {"in_context.txt": table(recipe, evaluation)}
    if find_spec("matplotlib") is not None:
        files["in_context.png"] = _figure(recipe, evaluation)
    return files


def best(evaluations: list[dict[str, Any]], metric: str) -> dict[str, Any]:
    """Returns the best checkpoint's evaluation (in a tie, the first); ignores step 0, which has no checkpoint."""
    trained = [evaluation for evaluation in evaluations if evaluation["step"]] or evaluations
    return max(trained, key=lambda evaluation: evaluation.get(metric, -1.0))


def _groups(evaluation: Mapping[str, Any]) -> dict[str, str]:
    """Returns the groups of tasks that were played, with their colours."""
    return {name: colour for name, colour in _COLOURS.items() if f"eval/{name}_of_optimum" in evaluation}


def table(recipe: Darkroom, evaluation: Mapping[str, Any]) -> str:
    """Returns the table that `make demo` prints."""
    chance, optimum = recipe.chance("unseen"), recipe.optimum("unseen")
    rows = [("", "episode 1", "5", "10", "last 10", "of optimum", "solved")]

    def add_curve(name: str, curve: list[float], of_optimum: float | None, solved: str) -> None:
        last = sum(curve[-10:]) / len(curve[-10:])
        fraction = last / optimum if of_optimum is None else of_optimum
        first, fifth, tenth = (f"{curve[episode]:.2f}" if episode < len(curve) else "" for episode in (0, 4, 9))
        rows.append((name, first, fifth, tenth, f"{last:.2f}", f"{fraction:.1%}", solved))

    add_curve("source learner, unseen tasks", recipe.source_curve, None, "")
    for name in _groups(evaluation):
        curve, of_optimum = evaluation[f"eval/{name}_return_by_episode"], evaluation[f"eval/{name}_of_optimum"]
        add_curve(f"{name} tasks", curve, of_optimum, f"{evaluation[f'eval/{name}_solved']:.0%}")
    rows.append(("chance, unseen tasks", "", "", "", f"{chance:.2f}", f"{chance / optimum:.1%}", ""))
    rows.append(("optimum, unseen tasks", "", "", "", f"{optimum:.2f}", "100.0%", ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    title = f"Return per episode, frozen weights of step {evaluation['step']} (best on the validation tasks)"
    return "\n".join([title, "", lines[0], "-" * len(lines[0]), *lines[1:], ""])


def _figure(recipe: Darkroom, evaluation: Mapping[str, Any]) -> bytes:
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.6), dpi=150, facecolor=_PAPER)
    axes = figure.subplots()
    optimum, chance = recipe.optimum("unseen"), recipe.chance("unseen")
    episodes = len(evaluation["eval/unseen_return_by_episode"])
    for level, text, colour, style in (
        (optimum, f"optimum of the unseen tasks {optimum:.2f}", _COLOURS["unseen"], _DASHED),
        (chance, f"chance {chance:.2f}", _FAINT, _DOTTED),
    ):
        axes.axhline(level, color=colour, linewidth=1, linestyle=style)
        axes.annotate(text, (1, level), xytext=(4, 4), textcoords="offset points", ha="left", color=colour)
    # The groups' goals lie at different distances, so their optima differ.
    optima = {name: recipe.optimum(name) for name in _groups(evaluation)}
    for name, level in optima.items():
        if name != "unseen":
            axes.axhline(level, color=_COLOURS[name], linewidth=1, linestyle=_DASHED)
    source = recipe.source_curve[:episodes]
    label = f"source learner ({recipe.config.source}) on the unseen tasks"
    axes.plot(range(1, len(source) + 1), source, color=_FAINT, linewidth=1.4, linestyle=(0, (4, 2)), label=label)
    for name, colour in reversed(_groups(evaluation).items()):
        curve, fraction = evaluation[f"eval/{name}_return_by_episode"], evaluation[f"eval/{name}_of_optimum"]
        tasks = "training tasks" if name == "train" else f"{name} tasks"
        axes.plot(
            range(1, len(curve) + 1),
            curve,
            color=colour,
            linewidth=2.8 if name == "unseen" else 1.3,
            label=f"{tasks}: {fraction:.0%} of the optimum {optima[name]:.2f}",
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
    title = f"{evaluation['eval/unseen_of_optimum']:.0%} of the optimum on {len(recipe.split.unseen)} unseen tasks"
    axes.set_title(title, loc="left", color=_INK, fontweight="bold")
    axes.set_title(f"{room}, step {evaluation['step']:,}", loc="right", color=_FAINT, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    figure.legend(loc="lower center", ncols=2, frameon=False, reverse=True)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    out = BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()
