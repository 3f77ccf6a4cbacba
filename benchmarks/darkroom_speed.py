"""Part `speed` of darkroom.py, which measures the step time of the recipe and of hand-written loops."""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from darkroom_learning import BARS, learned
from darkroom_runs import FAST, ROOT, TINY, TINY_RUN, Report, Row, Run, darkroom, has_gpu, header, run, verdict_of

SIZES = ["--n_transit", "240", "--tf_n_embd", "64", "--tf_n_layer", "4", "--tf_n_head", "4", "--tf_n_inner", "256"]
SIZES += ["--batch_size", "512"]
ONLY_STEPS = ["--eval_every", "-1", "--preview_every", "-1", "--log_every", "50"]
LONG = ["--max_steps", "50000", "--eval_every", "10000", "--save_every", "10000"]


def speed_commands(options: argparse.Namespace) -> dict[str, tuple[str, Callable[[Path, Path], list[str]]]]:
    """Maps the name of each variant to its description and a function that returns its command."""
    quick, steps = options.quick, 40 if options.quick else options.steps
    small = ["--quick", "--bouts", "2", "--steps", "5", "--warm_up", "5"] if quick else []
    small = small or ["--bouts", str(max(1, (steps - 100) // 50)), "--steps", "50"]

    def by_hand(loop: str) -> Callable[[Path, Path], list[str]]:
        return lambda folder, histories: [sys.executable, str(ROOT / "benchmarks/darkroom_reference.py"), loop, *small]

    def unisono(*flags: str) -> Callable[[Path, Path], list[str]]:
        size = [*TINY, *ONLY_STEPS[:-1], "5"] if quick else [*SIZES, *ONLY_STEPS]
        size += ["--max_steps", str(steps), "--mixed_precision", "bf16"]
        return lambda folder, histories: darkroom(folder, *size, *flags, *options.flags, "--traj_dir", str(histories))

    compiles = ["--compile", "true"] if has_gpu() else []  # takes minutes on the CPU of a smoke test
    records = ["--cuda_graph", "true"]
    left_out = "" if has_gpu() else " (not without a GPU)"
    return {
        "reference model": ("hand-written loop, Accelerate, fp16, eager", by_hand("reference")),
        "unisono's model": ("hand-written loop, bf16, eager", by_hand("plain")),
        "unisono": ("bf16, eager", unisono()),
        "unisono, compiled": (f"bf16, --compile{left_out}", unisono(*compiles)),
        "unisono, CUDA graph": (f"bf16, --cuda_graph{left_out}", unisono(*records)),
        "unisono, compiled, CUDA graph": (f"bf16, --compile --cuda_graph{left_out}", unisono(*compiles, *records)),
    }


def speed(options: argparse.Namespace, scratch: Path) -> int:
    if options.end_to_end:
        return end_to_end(options, scratch)
    report = Report(options, "speed", speed_table)
    commands = speed_commands(options)
    report.result |= {"rounds": options.rounds, "steps": 40 if options.quick else options.steps}
    empty = {name: {"what": what, "failed": "not run"} for name, (what, _) in commands.items()}
    names = report.begin({name: row | {"rounds_ms": []} for name, row in empty.items()}, same=["what"])
    for number in range(options.rounds if names else 0):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            folder = scratch / f"round{number}_{names.index(name)}"
            what, command = commands[name]
            done = run(command(folder, scratch / "histories"), folder, options.patience_s)
            before = report.result["rows"][name]
            report.note(name, timed(done, what, before["rounds_ms"], before.get("problem"), options.quick))
    return report.finish()


def timed(done: Run, what: str, rounds_ms: list[float], problem: str | None, quick: bool) -> Row:
    """Adds one round to the row of a variant."""
    ms, precision = None, "bf16"
    if done.failed is None and done.steps:
        ms = done.step_ms(after=10 if quick else 100)
    elif done.failed is None and done.printed.rstrip().endswith("}"):  # a hand-written loop
        printed = json.loads(done.printed.splitlines()[-1])
        ms, precision = statistics.median(printed["step_ms"]), printed["precision"]
    problem = done.failed or (problem if ms else "no step time was logged")
    rounds_ms = [*rounds_ms, ms] if ms else rounds_ms
    row: Row = {"what": what, "precision": precision, "wall_s": done.wall_s, "rounds_ms": rounds_ms}
    row |= {"problem": problem, "failed": None if rounds_ms else problem}
    return row | {"step_ms": statistics.median(rounds_ms) if rounds_ms else None, "beginning_s": done.beginning_s}


def speed_table(result: Row) -> list[str]:
    notes = [
        "Sizes: context of 240 transitions, width 64, 4 layers, 4 heads, batch 512; 236 GFLOP per step",
        f"Measured: {result['rounds']} rounds, interleaved; in each round one process per variant with "
        f"{result['steps']} steps, of which the first 100 do not count. A round's time is the median over every 50 "
        "steps; the table shows the median of the rounds.",
        "The reference model (nn.TransformerEncoder, post-norm, float mask, loss at the last token) is reimplemented "
        "in `darkroom_reference.py`. Its data is on the GPU, unlike in the usual loop.",
    ]
    lines = header(result, "Darkroom: step time", *([] if result["quick"] else notes))
    columns = ["variant", "", "ms per step", "rounds", "speed-up over the reference model", "time of 50,000 steps"]
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    reference_ms = result["rows"]["reference model"].get("step_ms")
    for name, row in result["rows"].items():
        ms = row.get("step_ms")
        if not ms:
            lines.append(f"| {name} | {row['what']} | FAILED: {row['failed'].replace('|', ' ')} | | | |")
            continue
        what = row["what"] if row["precision"] in row["what"] else f"{row['what']} ({row['precision']} here)"
        rounds = ", ".join(f"{one:.2f}" for one in row["rounds_ms"])
        rounds += f"; a round FAILED: {row['problem'].replace('|', ' ')}" if row["problem"] else ""
        factor = f"{reference_ms / ms:.2f}" if reference_ms else ""
        lines.append(f"| {name} | {what} | **{ms:.2f}** | {rounds} | {factor} | {ms * 50:.0f} s |")
    return lines


def end_to_end(options: argparse.Namespace, scratch: Path) -> int:
    report = Report(options, "end_to_end", end_to_end_table)
    flags = TINY_RUN if options.quick else LONG
    flags = [*flags, *(FAST if has_gpu() else ["--mixed_precision", "bf16"]), *options.flags]
    report.result["rows"]["end to end"] = {"flags": shlex.join(flags), "failed": "is not done"}
    report.write()
    done = run(darkroom(scratch / "run", *flags), scratch / "run", options.patience_s)
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
    for evaluation in evaluations:
        fractions = f"{evaluation['validation_of_optimum']:.1%} | {evaluation['unseen_of_optimum']:.1%}"
        lines.append(f"| {evaluation['step']:,} | {fractions} | {evaluation['training_s']:.1f} s |")
    if not result["quick"]:
        fast = row["wall_s"] <= BARS["end_to_end_s"]
        lines += ["", f"Target at most {BARS['end_to_end_s']:.0f} s: {verdict_of(fast)}."]
    return lines
