"""Does `unisono train darkroom` learn, and how fast?

    python benchmarks/darkroom.py learning               # a GPU: seeds of the full configuration, then other choices
    python benchmarks/darkroom.py speed                  # a GPU: ms per step of unisono and of hand-written loops
    python benchmarks/darkroom.py speed --end_to_end     # a GPU: 50,000 steps, including everything else
    python benchmarks/darkroom.py demo                   # the CPU: what `make demo` trains, on two ranks, five seeds
    python benchmarks/darkroom.py choices                # the CPU: the demo with one setting changed, one seed
    python benchmarks/darkroom.py figure                 # redraws the figure of `learning`
    python benchmarks/darkroom.py learning --quick       # smoke test on any machine; the numbers mean nothing

Every run is a separate process, started as a user does; all numbers come from its metrics.jsonl. The model of a run is
always the one selected on the validation tasks. Flags after `--` go to all runs. Files are rewritten after each run;
failed runs and runs that have not started have a row that says so. With `--keep` only such rows run again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from machine import depends_on, machine, versions, without_folders

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"
FAST = ["--mixed_precision", "bf16", "--compile", "true", "--cuda_graph", "true"]
DEMO = ["--config", "examples/darkroom/demo.yaml", "--nproc", "2"]
VARIANTS = {
    "loss at the last position only": ["--loss_positions", "last"],
    "source: noise curriculum": ["--source", "noise"],
    "source: Q-learning": ["--source", "q_learning"],
    "source: PPO": ["--source", "ppo"],
    "compressed context": ["--use_compressed_context", "true"],
    "explorer with 2 % noise": ["--source_noise", "0.02"],
}
AS_IT_IS = "the unchanged demo"
LONGER = ["--total_source_timesteps", "100000", "--train_source_timesteps", "1000"]
CHOICES = {
    AS_IT_IS: [],
    **{name: flags for name, flags in VARIANTS.items() if name != "compressed context"},
    "compressed context": ["--use_compressed_context", "true", "--compress_interval", "60"],
    "source: noise curriculum, 1,000 steps each": ["--source", "noise", *LONGER],
    "source: Q-learning, 1,000 steps each": ["--source", "q_learning", *LONGER],
    "source: PPO, 1,000 steps each": ["--source", "ppo", *LONGER],
}
SIZES = ["--n_transit", "240", "--tf_n_embd", "64", "--tf_n_layer", "4", "--tf_n_head", "4", "--tf_n_inner", "256"]
SIZES += ["--batch_size", "512"]
ONLY_STEPS = ["--eval_every", "-1", "--preview_every", "-1", "--log_every", "50"]
LONG = ["--max_steps", "50000", "--eval_every", "10000", "--save_every", "10000"]
TINY = [
    "--n_transit",
    "60",
    "--compress_interval",
    "20",
    "--tf_n_embd",
    "16",
    "--tf_n_layer",
    "1",
    "--batch_size",
    "8",
    "--n_stream",
    "4",
]
TINY += ["--total_source_timesteps", "400", "--eval_episodes", "12", "--eval_repeats", "1"]
TINY_RUN = [*TINY, "--max_steps", "20", "--eval_every", "10", "--save_every", "10", "--log_every", "5"]
LEARNED = 0.9
EPISODES = (1, 5, 10, 20, 50, 100)
# Targets: fraction of the optimum on unseen tasks, the same for the worst task, seconds.
BARS = {"of_optimum": 0.95, "worst": 0.8, "seconds_to_learn": 30.0, "end_to_end_s": 300.0}
DEMO_BARS = {"of_optimum": 0.85, "training_s": 180.0, "wall_s": 300.0}
LAST_WORDS_S = 60.0

Row = dict[str, Any]


@dataclass
class Run:
    """A finished process and its output."""

    wall_s: float
    failed: str | None
    printed: str
    metrics: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)
    config: Row = field(default_factory=dict)

    @property
    def steps(self) -> list[Row]:
        return [row for row in self.metrics if "samples_per_s" in row]

    @property
    def evaluations(self) -> list[Row]:
        return [row for row in self.metrics if "eval/validation_of_optimum" in row]

    @property
    def chosen(self) -> Row | None:
        """The evaluation with the best validation return; the earliest in case of a tie."""
        return max(self.evaluations, key=lambda row: row["eval/validation_of_optimum"], default=None)

    def training_s(self, until: float = float("inf")) -> float:
        """Seconds of training from the first step up to `step`, including compilation, without evaluations."""
        rows = [{"samples": 0}, *(row for row in self.metrics if "loss" in row)]
        return sum(
            (row["samples"] - before["samples"]) / row["samples_per_s"]
            for before, row in pairwise(rows)
            if row["step"] <= until and "samples_per_s" in row
        )

    def step_ms(self, after: int = 0) -> float | None:
        """The median of the logged step times."""
        found = [row["step_ms"] for row in self.steps if row["step"] > after]
        return statistics.median(found) if found else None

    @property
    def beginning_s(self) -> float:
        """Extra time of the first logged steps: compilation, graph recording, warm-up."""
        usual = self.step_ms(self.steps[0]["step"]) if self.steps else None
        return max(0.0, self.training_s(self.steps[0]["step"]) - self.steps[0]["step"] * usual / 1e3) if usual else 0.0


def run(command: Sequence[str], folder: Path, patience_s: float) -> Run:
    """Runs a command until it ends; its run folder is `folder`."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), environment.get("PYTHONPATH")]))
    folder.parent.mkdir(parents=True, exist_ok=True)
    log, failed, start = folder.with_suffix(".log"), None, time.perf_counter()
    with log.open("wb") as file:
        process = subprocess.Popen(
            list(command), cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            failed = f"took more than {patience_s:.0f} s"
        finally:
            end(process)
    wall = time.perf_counter() - start
    printed = log.read_text(errors="replace")
    if process.returncode and not failed:
        last = next((line for line in reversed(printed.splitlines()) if line.strip()), "nothing was printed")
        failed = f"exit status {process.returncode}: {without_paths(last.strip())[:300]}"
    if failed:
        print(f"--- {failed}\n{printed[-4000:]}\n---", file=sys.stderr, flush=True)
    config = folder / "run.json"
    return Run(
        wall,
        failed,
        printed,
        lines_of(folder / "metrics.jsonl"),
        lines_of(folder / "events.jsonl"),
        json.loads(config.read_text())["config"] if config.exists() else {},
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """Stops a running process, with SIGTERM first, on which unisono stops its ranks too."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def lines_of(file: Path) -> list[Row]:
    """The records of a JSON Lines file; ignores an incomplete last line of a killed process."""
    found = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found


def without_paths(text: str) -> str:
    """The output of a process without paths of this machine."""
    return re.sub(r"(?<![\w.])/(?:[^\s/'\":]+/)+", "…/", text)


def darkroom(folder: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "unisono", "train", "darkroom", *flags, "--output_dir", str(folder)]


class Report:
    """The result of a part, as JSON and as a table, rewritten after every row."""

    def __init__(self, given: argparse.Namespace, name: str, table: Callable[[Row], list[str]]) -> None:
        self.folder, self.name, self._table = given.output, f"darkroom_{name}", table
        self.result: Row = {
            "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
            "command": shlex.join(["python", "benchmarks/darkroom.py", *without_folders(sys.argv[1:])]),
            "machine": machine(),
            "versions": versions(["unisono", "torch", "triton", "accelerate"]),
            "quick": given.quick,
            "rows": {},
        }
        self._earlier = self._read() if given.keep else {}

    def _read(self) -> dict[str, Row]:
        """The successful rows of an existing result from the same kind of machine."""
        file = self.folder / f"{self.name}.json"
        if not file.exists():
            return {}
        before = json.loads(file.read_text())
        if before["quick"] != self.result["quick"] or before["machine"]["gpus"] != self.result["machine"]["gpus"]:
            return {}
        rows = {name: row for name, row in before["rows"].items() if not row["failed"]}
        return {name: row | {"kept_from": row.get("kept_from", before["date"])} for name, row in rows.items()}

    def begin(self, empty: dict[str, Row], same: Sequence[str]) -> list[str]:
        """Starts with empty rows, keeps existing ones that agree in `same`, and returns the names of the others."""
        for name, row in empty.items():
            old = self._earlier.get(name, {})
            alike = bool(old) and all(old.get(key) == row[key] for key in same)
            self.result["rows"][name] = old if alike else row
        self.write()
        return [name for name, row in self.result["rows"].items() if row["failed"]]

    def write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{self.name}.json").write_text(json.dumps(self.result, indent=1) + "\n")
        (self.folder / f"{self.name}.md").write_text(self.text())

    def text(self) -> str:
        """The result as Markdown."""
        return "\n".join([*self._table(self.result), ""])

    def note(self, name: str, row: Row) -> None:
        self.result["rows"][name] = row
        self.write()
        said = row.get("failed") or "done"
        print(f"{time.strftime('%H:%M:%S')}  {name}: {said} ({row.get('wall_s', 0):.0f} s)", flush=True)

    def finish(self) -> int:
        """Prints the table; returns the exit status of the program."""
        self.write()
        print(self.text())
        print(f"wrote {self.folder / self.name}.json, .md")
        return 1 if any(row.get("failed") for row in self.result["rows"].values()) else 0


def header(result: Row, title: str, *told: str) -> list[str]:
    quick = ["", "**A smoke test with a tiny model and a few steps; the numbers mean nothing.**"]
    return [
        f"# {title}",
        *(quick if result["quick"] else []),
        "",
        *depends_on(result),
        *(f"- {line}" for line in [*told, *kept_rows(result)]),
        "",
    ]


def kept_rows(result: Row) -> list[str]:
    """Names the rows that were measured at an earlier date."""
    dates: dict[str, list[str]] = {}
    for name, row in result["rows"].items():
        if "kept_from" in row:
            dates.setdefault(row["kept_from"], []).append(name)
    return [f"Measured on {date}: {', '.join(names)}" for date, names in dates.items()]


# learning ----------------------------------------------------------------------------------------------------------


def learned(run: Run, flags: Sequence[str]) -> Row:
    """The results of a run and when it reached them."""
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
            {key.removeprefix("eval/"): value for key, value in found.items() if not key.endswith("by_episode")}
            | {"training_s": run.training_s(found["step"])}
            for found in run.evaluations
        ],
        **lines_to_compare_with(run.config),
    }


def when_learned(run: Run, group: str) -> Row | None:
    """Step and training seconds (without evaluations) at which tasks first reached 90 % of the optimum."""
    for found in run.evaluations:
        if found[f"eval/{group}_of_optimum"] >= LEARNED:
            return {"step": found["step"], "training_s": run.training_s(found["step"])}
    return None


def recipe_of(config: Row) -> Any:
    from unisono.recipes.darkroom.recipe import Darkroom

    known = {one.name for one in fields(Darkroom.Config)}
    return Darkroom(Darkroom.Config(**{name: value for name, value in config.items() if name in known}))


def name_of_unseen(config: Row, number: int) -> str:
    """Describes the goal of an unseen task."""
    task, size = recipe_of(config).split.unseen[number], config["grid_size"]
    return f"goal ({task // size}, {task % size})" if config["env"] == "darkroom" else f"task {task}"


def lines_to_compare_with(config: Row) -> Row:
    recipe = recipe_of(config)
    return {"optimum": recipe.optimum("unseen"), "chance": recipe.chance("unseen")}


def learning(given: argparse.Namespace, scratch: Path) -> int:
    report = Report(given, "learning", learning_table)
    base = TINY_RUN if given.quick else []
    speed = FAST if has_gpu() else ["--mixed_precision", "bf16"]
    seeds = {f"seed {seed}": ["--seed", str(seed)] for seed in range(given.seeds)}
    every = {name: [*base, *speed, *flags, *given.flags] for name, flags in (seeds | VARIANTS).items()}
    report.result |= {"at_once": given.at_once, "seeds": list(seeds), "flags": shlex.join([*base, *speed])}
    empty = {name: {"flags": shlex.join(flags), "failed": "not run"} for name, flags in every.items()}
    missing = report.begin(empty, same=["flags"])

    def train(name: str) -> Row:
        folder = scratch / re.sub(r"\W+", "_", name)
        return learned(run(darkroom(folder, *every[name]), folder, given.patience_s), every[name])

    for name in seeds:  # alone on the machine, because their times are reported
        if name in missing:
            report.note(name, train(name))
    with ThreadPoolExecutor(given.at_once) as pool:
        waiting = {pool.submit(train, name): name for name in VARIANTS if name in missing}
        for done in as_completed(waiting):
            report.note(waiting[done], done.result())
    drawn = figure(report.result, given.output)
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
    found = {name: row for name, row in rows.items() if "curve" in row}
    if not found:
        return []
    first = next(iter(found.values()))
    picked = [at for at in EPISODES if at <= max(len(row["curve"]) for row in found.values())]
    lines = ["## Return per in-context episode, unseen tasks", ""]
    lines += [f"Optimum {first['optimum']:.2f}, chance {first['chance']:.2f}.", ""]
    lines += [f"| run | {' | '.join(map(str, picked))} |", f"|---|{'---|' * len(picked)}"]
    for name, row in found.items():
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


def when(found: Row | None) -> str:
    return f"{found['training_s']:.1f} s (step {found['step']:,})" if found else "never"


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


def verdict_of(met: bool) -> str:
    return "met" if met else "**missed**"


# the figure --------------------------------------------------------------------------------------------------------

INK, FAINT, GRID = "#1d2733", "#8a94a0", "#e5e7eb"
OURS = "#c2410c"
COLOURS = dict(zip(VARIANTS, ("#0e7490", "#4d7c0f", "#7c3aed", "#475569", "#a16207", "#1d4ed8"), strict=True))


def figure(result: Row, folder: Path) -> str:
    """Draws the return per in-context episode; returns a message about the result."""
    found = {name: row for name, row in result["rows"].items() if not row["failed"]}
    if not found:
        return "no figure: no run finished"
    if find_spec("matplotlib") is None:
        return "no figure: matplotlib is not installed; run `python benchmarks/darkroom.py figure` elsewhere"
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib.figure import Figure

    first = next(iter(found.values()))
    most, chance, episodes = first["optimum"], first["chance"], max(len(row["curve"]) for row in found.values())
    drawing = Figure(figsize=(10.5, 5.8), dpi=150, facecolor="#ffffff")
    axes = drawing.subplots()
    marks = ((most, f"optimum {most:.2f}", INK, (0, (6, 3))), (chance, f"chance {chance:.2f}", FAINT, ":"))
    for level, name, colour, style in marks:
        axes.axhline(level, color=colour, linewidth=1, linestyle=style)
        at = {"xytext": (-4, 4), "textcoords": "offset points", "ha": "right"}
        axes.annotate(name, (episodes, level), color=colour, fontsize=9, **at)
    labels: list[tuple[float, str, str, bool]] = []
    for name, row in found.items():
        if name not in result["seeds"]:
            colour = COLOURS.get(name, FAINT)
            axes.plot(range(1, len(row["curve"]) + 1), row["curve"], color=colour, linewidth=1.3, alpha=0.9)
            labels.append((end_of(row["curve"]), f"{name}, {row['unseen_of_optimum']:.0%}", colour, False))
    curves = [found[name]["curve"] for name in result["seeds"] if name in found]
    if curves:
        across = list(zip(*curves, strict=False))
        numbers, mean = range(1, len(across) + 1), [statistics.mean(values) for values in across]
        axes.fill_between(numbers, *([pick(v) for v in across] for pick in (min, max)), color=OURS, alpha=0.15, lw=0)
        axes.plot(numbers, mean, color=OURS, linewidth=2.8)
        share = statistics.mean(found[name]["unseen_of_optimum"] for name in result["seeds"] if name in found)
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
    for wanted, *_ in sorted(labels):
        places.append(max(wanted, places[-1] + gap if places else gap / 2))
    ceiling = most * 1.06
    for at in reversed(range(len(places))):
        places[at] = min(places[at], ceiling)
        ceiling = places[at] - gap
    return places


def draw_again(given: argparse.Namespace, _: Path) -> int:
    file = given.output / "darkroom_learning.json"
    if not file.exists():
        raise SystemExit(f"figure: {file} does not exist; run `python benchmarks/darkroom.py learning` first")
    print(figure(json.loads(file.read_text()), given.output))
    return 0


# speed -------------------------------------------------------------------------------------------------------------


def speed_commands(given: argparse.Namespace) -> dict[str, tuple[str, Callable[[Path, Path], list[str]]]]:
    """Maps the name of each variant to its description and a function that returns its command."""
    quick, steps = given.quick, 40 if given.quick else given.steps
    small = ["--quick", "--bouts", "2", "--steps", "5", "--warm_up", "5"] if quick else []
    small = small or ["--bouts", str(max(1, (steps - 100) // 50)), "--steps", "50"]

    def by_hand(loop: str) -> Callable[[Path, Path], list[str]]:
        return lambda folder, histories: [sys.executable, str(HERE / "darkroom_known.py"), loop, *small]

    def unisono(*flags: str) -> Callable[[Path, Path], list[str]]:
        size = [*TINY, *ONLY_STEPS[:-1], "5"] if quick else [*SIZES, *ONLY_STEPS]
        size += ["--max_steps", str(steps), "--mixed_precision", "bf16"]
        return lambda folder, histories: darkroom(folder, *size, *flags, *given.flags, "--traj_dir", str(histories))

    compiles = ["--compile", "true"] if has_gpu() else []  # takes minutes on the CPU of a smoke test
    records = ["--cuda_graph", "true"]
    left_out = "" if has_gpu() else " (not without a GPU)"
    return {
        "reference model": ("hand-written loop, Accelerate, fp16, eager", by_hand("known")),
        "unisono's model": ("hand-written loop, bf16, eager", by_hand("plain")),
        "unisono": ("bf16, eager", unisono()),
        "unisono, compiled": (f"bf16, --compile{left_out}", unisono(*compiles)),
        "unisono, CUDA graph": (f"bf16, --cuda_graph{left_out}", unisono(*records)),
        "unisono, compiled, CUDA graph": (f"bf16, --compile --cuda_graph{left_out}", unisono(*compiles, *records)),
    }


def speed(given: argparse.Namespace, scratch: Path) -> int:
    if given.end_to_end:
        return end_to_end(given, scratch)
    report = Report(given, "speed", speed_table)
    commands = speed_commands(given)
    report.result |= {"rounds": given.rounds, "steps": 40 if given.quick else given.steps}
    empty = {name: {"what": what, "failed": "not run"} for name, (what, _) in commands.items()}
    names = report.begin({name: row | {"rounds_ms": []} for name, row in empty.items()}, same=["what"])
    for number in range(given.rounds if names else 0):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            folder = scratch / f"round{number}_{names.index(name)}"
            what, command = commands[name]
            done = run(command(folder, scratch / "histories"), folder, given.patience_s)
            before = report.result["rows"][name]
            report.note(name, timed(done, what, before["rounds_ms"], before.get("problem"), given.quick))
    return report.finish()


def timed(done: Run, what: str, rounds_ms: list[float], problem: str | None, quick: bool) -> Row:
    """Adds one round to the row of a variant."""
    ms, precision = None, "bf16"
    if done.failed is None and done.steps:
        ms = done.step_ms(after=10 if quick else 100)
    elif done.failed is None and done.printed.rstrip().endswith("}"):  # a hand-written loop
        told = json.loads(done.printed.splitlines()[-1])
        ms, precision = statistics.median(told["step_ms"]), told["precision"]
    problem = done.failed or (problem if ms else "no step time was logged")
    rounds_ms = [*rounds_ms, ms] if ms else rounds_ms
    row: Row = {"what": what, "precision": precision, "wall_s": done.wall_s, "rounds_ms": rounds_ms}
    row |= {"problem": problem, "failed": None if rounds_ms else problem}
    return row | {"step_ms": statistics.median(rounds_ms) if rounds_ms else None, "beginning_s": done.beginning_s}


def speed_table(result: Row) -> list[str]:
    told = [
        "Sizes: context of 240 transitions, width 64, 4 layers, 4 heads, batch 512; 236 GFLOP per step",
        f"Measured: {result['rounds']} rounds, interleaved; in each round one process per variant with "
        f"{result['steps']} steps, of which the first 100 do not count. A round's time is the median over every 50 "
        "steps; the table shows the median of the rounds.",
        "The reference model (nn.TransformerEncoder, post-norm, float mask, loss at the last token) is reimplemented "
        "in `darkroom_known.py`. Its data is on the GPU, unlike in the usual loop.",
    ]
    lines = header(result, "Darkroom: step time", *([] if result["quick"] else told))
    columns = ["variant", "", "ms per step", "rounds", "speed-up over the reference model", "time of 50,000 steps"]
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    known = result["rows"]["reference model"].get("step_ms")
    for name, row in result["rows"].items():
        ms = row.get("step_ms")
        if not ms:
            lines.append(f"| {name} | {row['what']} | FAILED: {row['failed'].replace('|', ' ')} | | | |")
            continue
        what = row["what"] if row["precision"] in row["what"] else f"{row['what']} ({row['precision']} here)"
        rounds = ", ".join(f"{one:.2f}" for one in row["rounds_ms"])
        rounds += f"; a round FAILED: {row['problem'].replace('|', ' ')}" if row["problem"] else ""
        factor = f"{known / ms:.2f}" if known else ""
        lines.append(f"| {name} | {what} | **{ms:.2f}** | {rounds} | {factor} | {ms * 50:.0f} s |")
    return lines


def end_to_end(given: argparse.Namespace, scratch: Path) -> int:
    report = Report(given, "end_to_end", end_to_end_table)
    flags = TINY_RUN if given.quick else LONG
    flags = [*flags, *(FAST if has_gpu() else ["--mixed_precision", "bf16"]), *given.flags]
    report.result["rows"]["end to end"] = {"flags": shlex.join(flags), "failed": "is not done"}
    report.write()
    done = run(darkroom(scratch / "run", *flags), scratch / "run", given.patience_s)
    saves = len({event["step"] for event in done.events if event["kind"] == "save"})
    report.note("end to end", learned(done, flags) | {"saves": saves, "last_step": last_step(done)})
    return report.finish()


def last_step(done: Run) -> int:
    return max((row["step"] for row in done.steps), default=0)


def end_to_end_table(result: Row) -> list[str]:
    row = result["rows"]["end to end"]
    lines = header(result, "Darkroom: 50,000 steps, end to end", f"Run: `unisono train darkroom {row['flags']}`")
    if row["failed"]:
        return [*lines, f"FAILED: {row['failed']}"]
    evaluations = row["evaluations"]
    lines += ["| | |", "|---|---|"]
    lines += [
        f"| **whole process** | **{row['wall_s']:.1f} s** |",
        f"| of which {row['last_step']:,} steps, with compilation | {row['training_s']:.1f} s |",
        f"| compilation and graph recording | {row['beginning_s']:.1f} s |",
        f"| rest: start, histories, {len(evaluations)} evaluations, {row['saves']} checkpoints, figure "
        f"| {row['wall_s'] - row['training_s']:.1f} s |",
        f"| step, median | {row['step_ms']:.2f} ms |",
        f"| unseen tasks, weights of step {row['step']:,} | {row['unseen_of_optimum']:.1%} of the optimum |",
    ]
    lines += ["", "| step | validation | unseen | training |", "|---|---|---|---|"]
    for found in evaluations:
        shown = f"{found['validation_of_optimum']:.1%} | {found['unseen_of_optimum']:.1%} | {found['training_s']:.1f} s"
        lines.append(f"| {found['step']:,} | {shown} |")
    if not result["quick"]:
        fast = row["wall_s"] <= BARS["end_to_end_s"]
        lines += ["", f"Target at most {BARS['end_to_end_s']:.0f} s: {verdict_of(fast)}."]
    return lines


# demo --------------------------------------------------------------------------------------------------------------


def demo(given: argparse.Namespace, scratch: Path) -> int:
    report = Report(given, "demo", demo_table)
    base = [*DEMO, *(TINY_RUN if given.quick else []), *given.flags]
    report.result["flags"] = shlex.join(base)
    for seed in range(given.seeds):
        report.result["rows"][f"seed {seed}"] = {"failed": "not run"}
    report.write()
    for seed in range(given.seeds):
        folder, flags = scratch / f"seed{seed}", [*base, "--seed", str(seed)]
        report.note(f"seed {seed}", learned(run(darkroom(folder, *flags), folder, given.patience_s), flags))
    return report.finish()


def choices(given: argparse.Namespace, scratch: Path) -> int:
    """The demo with one setting changed at a time, as evidence for the defaults."""
    report = Report(given, "choices", choices_table)
    small = TINY_RUN if given.quick else []
    report.result["flags"] = shlex.join([*DEMO, *small, *given.flags])
    every = {name: [*DEMO, "--seed", "0", *flags, *small, *given.flags] for name, flags in CHOICES.items()}
    empty = {name: {"flags": shlex.join(flags), "failed": "not run"} for name, flags in every.items()}
    for number, name in enumerate(report.begin(empty, same=["flags"])):
        folder = scratch / f"choice{number}"
        report.note(name, learned(run(darkroom(folder, *every[name]), folder, given.patience_s), every[name]))
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


# the program -------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[argparse.Namespace, Path], int]] = {
    "learning": learning,
    "speed": speed,
    "demo": demo,
    "choices": choices,
    "figure": draw_again,
}


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def arguments() -> argparse.Namespace:
    words, _, flags = (list(part) for part in split_at(sys.argv[1:], "--"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--output", type=Path, help="folder for JSON, table and figure (default benchmarks/results)")
    parser.add_argument("--seeds", type=int, help="number of seeds (default 3, demo 5)")
    parser.add_argument("--at_once", type=int, default=1, help="learning: configurations that share the GPU")
    parser.add_argument("--rounds", type=int, help="speed: rounds per variant (default 3)")
    parser.add_argument("--steps", type=int, default=1000, help="speed: steps per round; 100 are warm-up")
    parser.add_argument(
        "--end_to_end",
        action="store_true",
        help="speed: measure a whole run of 50,000 steps",
    )
    parser.add_argument("--patience_s", type=float, default=1800, help="time limit of a run in seconds")
    parser.add_argument("--keep", action="store_true", help="run only what --output lacks (not for demo)")
    parser.add_argument("--quick", action="store_true", help="smoke test, also on the CPU; cannot write to results/")
    given = parser.parse_args(words)
    given.flags = flags
    if given.quick and given.output and given.output.resolve() == RESULTS:
        parser.error("--quick does not write to benchmarks/results; name another --output, or none")
    if given.output is None:
        quick = given.quick and given.part != "figure"
        given.output = Path(tempfile.mkdtemp(prefix="darkroom-quick-")) if quick else RESULTS
    given.seeds = given.seeds or (1 if given.quick else 5 if given.part == "demo" else 3)
    given.rounds = given.rounds or (1 if given.quick else 3)
    if min(given.seeds, given.at_once, given.rounds) < 1 or given.steps < 200:
        parser.error("--seeds, --at_once and --rounds: at least 1; --steps: at least 200")
    return given


def split_at(words: Sequence[str], mark: str) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
    at = words.index(mark) if mark in words else len(words)
    return words[:at], words[at : at + 1], words[at + 1 :]


def main() -> int:
    given = arguments()
    if given.part in ("learning", "speed") and not given.quick and not has_gpu():
        raise SystemExit(f"{given.part}: torch finds no GPU; --quick runs on the CPU")
    sys.path.insert(0, str(ROOT / "src"))  # for the baselines, if unisono is not installed
    with tempfile.TemporaryDirectory(prefix="darkroom-") as scratch:
        return PARTS[given.part](given, Path(scratch))


if __name__ == "__main__":
    sys.exit(main())
