"""Parts `learning`, `demo` and `choices` of darkroom.py, which measure how well unseen tasks are learned in context."""

from __future__ import annotations

import argparse
import re
import shlex
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import fields
from pathlib import Path
from typing import Any

from darkroom_figure import figure
from darkroom_runs import FAST, TINY_RUN, Report, Row, Run, darkroom, has_gpu, header, run, verdict_of

DEMO = ["--config", "examples/darkroom/demo.yaml", "--nproc", "2"]
VARIANTS = {
    "loss at the last position only": ["--loss_positions", "last"],
    "source: noise curriculum": ["--source", "noise"],
    "source: Q-learning": ["--source", "q_learning"],
    "source: PPO": ["--source", "ppo"],
    "compressed context": ["--use_compressed_context", "true"],
    "explorer with 2 % noise": ["--source_noise", "0.02"],
}
UNCHANGED = "the unchanged demo"
LONGER = ["--total_source_timesteps", "100000", "--train_source_timesteps", "1000"]
CHOICES = {
    UNCHANGED: [],
    **{name: flags for name, flags in VARIANTS.items() if name != "compressed context"},
    "compressed context": ["--use_compressed_context", "true", "--compress_interval", "60"],
    "source: noise curriculum, 1,000 steps each": ["--source", "noise", *LONGER],
    "source: Q-learning, 1,000 steps each": ["--source", "q_learning", *LONGER],
    "source: PPO, 1,000 steps each": ["--source", "ppo", *LONGER],
}
LEARNED = 0.9
EPISODES = (1, 5, 10, 20, 50, 100)
# Targets: fraction of the optimum on unseen tasks, the same for the worst task, seconds.
BARS = {"of_optimum": 0.95, "worst": 0.8, "seconds_to_learn": 30.0, "end_to_end_s": 300.0}
DEMO_BARS = {"of_optimum": 0.85, "training_s": 180.0, "wall_s": 300.0}


def learned(run: Run, flags: Sequence[str]) -> Row:
    """The results of a run, and the training time that it took to reach them."""
    chosen = run.chosen
    failed = run.failed or (None if chosen else "metrics.jsonl has no evaluation")
    row: Row = {"flags": shlex.join(flags), "failed": failed, "wall_s": run.wall_s}
    row |= {"training_s": run.training_s(), "beginning_s": run.beginning_s, "step_ms": run.step_ms()}
    if chosen is None:
        return row
    by_task = chosen["eval/unseen_of_optimum_by_task"]
    worst = min(range(len(by_task)), key=by_task.__getitem__)
    return row | {
        "step": chosen["step"],
        "validation_of_optimum": chosen["eval/validation_of_optimum"],
        "unseen_of_optimum": chosen["eval/unseen_of_optimum"],
        "unseen_return": chosen["eval/unseen_return"],
        "unseen_solved": chosen["eval/unseen_solved"],
        "worst_of_optimum": by_task[worst],
        "worst_task": name_of_unseen(run.config, worst),
        "learned": {group: when_learned(run, group) for group in ("validation", "unseen")},
        "curve": chosen["eval/unseen_return_by_episode"],
        "evaluations": [
            {key.removeprefix("eval/"): value for key, value in evaluation.items() if not key.endswith("by_episode")}
            | {"training_s": run.training_s(evaluation["step"])}
            for evaluation in run.evaluations
        ],
        **lines_to_compare_with(run.config),
    }


def when_learned(run: Run, group: str) -> Row | None:
    """Step and training seconds (without evaluations) at which tasks first reached 90 % of the optimum."""
    for evaluation in run.evaluations:
        if evaluation[f"eval/{group}_of_optimum"] >= LEARNED:
            return {"step": evaluation["step"], "training_s": run.training_s(evaluation["step"])}
    return None


def recipe_of(config: Row) -> Any:
    from unisono.recipes.darkroom.recipe import Darkroom

    names = {field.name for field in fields(Darkroom.Config)}
    return Darkroom(Darkroom.Config(**{name: value for name, value in config.items() if name in names}))


def name_of_unseen(config: Row, number: int) -> str:
    """Describes the goal of an unseen task."""
    task, size = recipe_of(config).split.unseen[number], config["grid_size"]
    return f"goal ({task // size}, {task % size})" if config["env"] == "darkroom" else f"task {task}"


def lines_to_compare_with(config: Row) -> Row:
    recipe = recipe_of(config)
    return {"optimum": recipe.optimum("unseen"), "chance": recipe.chance("unseen")}


def learning(options: argparse.Namespace, scratch: Path) -> int:
    report = Report(options, "learning", learning_table)
    base = TINY_RUN if options.quick else []
    speed = FAST if has_gpu() else ["--mixed_precision", "bf16"]
    seeds = {f"seed {seed}": ["--seed", str(seed)] for seed in range(options.seeds)}
    every = {name: [*base, *speed, *flags, *options.flags] for name, flags in (seeds | VARIANTS).items()}
    report.result |= {"at_once": options.at_once, "seeds": list(seeds), "flags": shlex.join([*base, *speed])}
    empty = {name: {"flags": shlex.join(flags), "failed": "not run"} for name, flags in every.items()}
    missing = report.begin(empty, same=["flags"])

    def train(name: str) -> Row:
        folder = scratch / re.sub(r"\W+", "_", name)
        return learned(run(darkroom(folder, *every[name]), folder, options.patience_s), every[name])

    for name in seeds:  # these run alone on the machine, because their times are reported
        if name in missing:
            report.note(name, train(name))
    with ThreadPoolExecutor(options.at_once) as pool:
        waiting = {pool.submit(train, name): name for name in VARIANTS if name in missing}
        for done in as_completed(waiting):
            report.note(waiting[done], done.result())
    drawn = figure(report.result, options.output)
    status = report.finish()
    print(drawn)
    return status


def learning_table(result: Row) -> list[str]:
    rows = result["rows"]
    seeds, others = ({name: rows[name] for name in rows if (name in result["seeds"]) is mine} for mine in (True, False))
    lines = header(
        result,
        "Darkroom: learning",
        f"Runs: `unisono train darkroom {result['flags']}`, one process each. The seeds ran one at a time; "
        f"the other configurations (seed 0) ran {result['at_once']} at a time, so their times are not shown.",
        "The weights are those of the step with the best validation return; neither validation nor unseen tasks are "
        "trained on. The fraction of the optimum is a mean over the unseen tasks in the last 10 in-context episodes; "
        "a task counts as solved from 80 % of its own optimum.",
        "Training time starts at the first step and includes compilation but not evaluations; its resolution is the "
        "interval between two evaluations.",
    )
    lines += ["## The full configuration", "", *shares(seeds, seconds=True), ""]
    whole = [row for row in seeds.values() if not row["failed"]]
    if whole and not result["quick"]:
        lines += [*verdict(whole, len(seeds)), ""]
    lines += ["## Other configurations, one seed each", "", *shares(others, seconds=False), ""]
    return [*lines, *curves(rows)]


def curves(rows: dict[str, Row]) -> list[str]:
    """The in-context learning curve of each run."""
    with_curve = {name: row for name, row in rows.items() if "curve" in row}
    if not with_curve:
        return []
    first = next(iter(with_curve.values()))
    picked = [at for at in EPISODES if at <= max(len(row["curve"]) for row in with_curve.values())]
    lines = ["## Return per in-context episode, unseen tasks", ""]
    lines += [f"Optimum {first['optimum']:.2f}, chance {first['chance']:.2f}.", ""]
    lines += [f"| run | {' | '.join(map(str, picked))} |", f"|---|{'---|' * len(picked)}"]
    for name, row in with_curve.items():
        cells = [f"{row['curve'][at - 1]:.2f}" if at <= len(row["curve"]) else "" for at in picked]
        lines.append(f"| {name}{', FAILED later' if row['failed'] else ''} | {' | '.join(cells)} |")
    return lines


def shares(rows: dict[str, Row], *, seconds: bool) -> list[str]:
    columns = [
        "run",
        "selected step",
        "validation",
        "unseen / optimum",
        "return",
        "worst unseen task",
        "solved",
    ]
    if seconds:
        columns += ["validation ≥ 90 % after", "unseen ≥ 90 % after", "of which compilation", "ms per step", "process"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, row in rows.items():
        cells = [name]
        if row["failed"]:
            cells.append(f"FAILED: {row['failed']}".replace("|", "\\|"))
        else:
            cells += [f"{row['step']:,}", f"{row['validation_of_optimum']:.1%}", f"**{row['unseen_of_optimum']:.1%}**"]
            cells += [f"{row['unseen_return']:.2f}", f"{row['worst_of_optimum']:.1%} ({row['worst_task']})"]
            cells += [f"{row['unseen_solved']:.0%}"]
            if seconds:
                cells += [when(row["learned"][group]) for group in ("validation", "unseen")]
                ms = row["step_ms"]
                cells += [f"{row['beginning_s']:.1f} s", f"{ms:.2f}" if ms else "", f"{row['wall_s']:.0f} s"]
        lines.append(f"| {' | '.join([*cells, *[''] * (len(columns) - len(cells))])} |")
    return lines


def when(moment: Row | None) -> str:
    return f"{moment['training_s']:.1f} s (step {moment['step']:,})" if moment else "never"


def verdict(rows: Sequence[Row], number: int) -> list[str]:
    """The targets, and whether every seed meets them."""
    share, worst = min(row["unseen_of_optimum"] for row in rows), min(row["worst_of_optimum"] for row in rows)
    mean = statistics.mean(row["unseen_of_optimum"] for row in rows)
    seconds = [row["learned"]["unseen"]["training_s"] if row["learned"]["unseen"] else float("inf") for row in rows]
    slowest = f"in the slowest seed after {max(seconds):.1f} s of training, including compilation"
    slowest = "never in one seed" if max(seconds) == float("inf") else slowest
    missing = [f"- **{number - len(rows)} of {number} seeds failed**; the figures below exclude them."]
    return [
        *(missing if len(rows) < number else []),
        f"- Unseen tasks at {mean:.1%} of the optimum on average, {share:.1%} in the worst seed; "
        f"target at least {BARS['of_optimum']:.0%}: {verdict_of(share >= BARS['of_optimum'])}.",
        f"- The worst unseen task of any seed reaches {worst:.1%} of its own optimum; "
        f"target at least {BARS['worst']:.0%}: {verdict_of(worst >= BARS['worst'])}.",
        f"- {LEARNED:.0%} on unseen tasks: {slowest}; "
        f"target at most {BARS['seconds_to_learn']:.0f} s: {verdict_of(max(seconds) <= BARS['seconds_to_learn'])}.",
    ]


def demo(options: argparse.Namespace, scratch: Path) -> int:
    report = Report(options, "demo", demo_table)
    base = [*DEMO, *(TINY_RUN if options.quick else []), *options.flags]
    report.result["flags"] = shlex.join(base)
    for seed in range(options.seeds):
        report.result["rows"][f"seed {seed}"] = {"failed": "not run"}
    report.write()
    for seed in range(options.seeds):
        folder, flags = scratch / f"seed{seed}", [*base, "--seed", str(seed)]
        report.note(f"seed {seed}", learned(run(darkroom(folder, *flags), folder, options.patience_s), flags))
    return report.finish()


def demo_table(result: Row) -> list[str]:
    lines = header(
        result,
        "Darkroom: the demo",
        f"Runs: `unisono train darkroom {result['flags']} --seed S`, one at a time",
        "*Process* is the whole process: histories, training, evaluations, figure. The weights are selected on the "
        "validation tasks; the fraction of the optimum is that of the last 10 in-context episodes.",
    )
    columns = [
        "seed",
        "process",
        "training",
        "selected step",
        "validation",
        "unseen / optimum",
        "worst unseen task",
    ]
    columns += ["solved", "episode 1", "5", "10", "20"]
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, row in result["rows"].items():
        cells = [name]
        if row["failed"]:
            cells.append(f"FAILED: {row['failed']}".replace("|", "\\|"))
        else:
            cells += [f"{row['wall_s']:.0f} s", f"{row['training_s']:.0f} s", f"{row['step']:,}"]
            cells += [f"{row['validation_of_optimum']:.1%}", f"**{row['unseen_of_optimum']:.1%}**"]
            cells += [f"{row['worst_of_optimum']:.1%} ({row['worst_task']})", f"{row['unseen_solved']:.0%}"]
            curve = row["curve"]
            cells += [f"{curve[at - 1]:.2f}" if at <= len(curve) else "" for at in (1, 5, 10, 20)]
        lines.append(f"| {' | '.join([*cells, *[''] * (len(columns) - len(cells))])} |")
    whole = [row for row in result["rows"].values() if not row["failed"]]
    if whole and not result["quick"]:
        share = min(row["unseen_of_optimum"] for row in whole)
        training, wall = (max(row[key] for row in whole) for key in ("training_s", "wall_s"))
        failed = len(result["rows"]) - len(whole)
        lines += [
            "",
            *([f"**{failed} seeds failed**; the figures below exclude them.", ""] if failed else []),
            f"Targets for every seed: unseen tasks at {DEMO_BARS['of_optimum']:.0%} of the optimum or more "
            f"({share:.1%} in the worst: {verdict_of(share >= DEMO_BARS['of_optimum'])}), training in at most "
            f"{DEMO_BARS['training_s']:.0f} s ({training:.0f} s in the slowest: "
            f"{verdict_of(training <= DEMO_BARS['training_s'])}), everything in at most {DEMO_BARS['wall_s']:.0f} s "
            f"({wall:.0f} s in the slowest: {verdict_of(wall <= DEMO_BARS['wall_s'])}).",
        ]
    return lines


def choices(options: argparse.Namespace, scratch: Path) -> int:
    """The demo with one setting changed at a time, as evidence for the defaults."""
    report = Report(options, "choices", choices_table)
    small = TINY_RUN if options.quick else []
    report.result["flags"] = shlex.join([*DEMO, *small, *options.flags])
    every = {name: [*DEMO, "--seed", "0", *flags, *small, *options.flags] for name, flags in CHOICES.items()}
    empty = {name: {"flags": shlex.join(flags), "failed": "not run"} for name, flags in every.items()}
    for number, name in enumerate(report.begin(empty, same=["flags"])):
        folder = scratch / f"choice{number}"
        report.note(name, learned(run(darkroom(folder, *every[name]), folder, options.patience_s), every[name]))
    return report.finish()


def choices_table(result: Row) -> list[str]:
    lines = header(
        result,
        "Darkroom: the demo with one setting changed",
        f"Runs: `unisono train darkroom {result['flags']} --seed 0` plus the change that the row names, one at a "
        "time, all with the same number of training steps. A source learner of the demo takes 400 steps, 20 episodes.",
        "The weights are selected on the validation tasks; the fraction of the optimum is that of the last 10 of 40 "
        "in-context episodes on unseen tasks, and a task counts as solved from 80 % of its own optimum.",
    )
    lines += [*shares(result["rows"], seconds=False), ""]
    return [*lines, *curves(result["rows"])]
