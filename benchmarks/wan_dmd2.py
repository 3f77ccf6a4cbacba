"""Measures how well the tiny Wan samples in few steps without guidance, after training with the objective dmd2.

    python benchmarks/wan_dmd2.py tiny             # two CPU ranks: three seeds of 4 steps, one of 2 steps, baselines
    python benchmarks/wan_dmd2.py tiny --quick     # smoke test with a few steps; the numbers mean nothing

Every run is a plain `unisono train`. The tiny teacher is trained before, or taken from $UNISONO_CACHE. Beside the
students stand the guided teacher with 24 steps, the same weights with few steps and no guidance (untrained), and a
student of the teacher's size trained by regression on the ends of the teacher's trajectories (--few_step_weight). All
generate samples of the held-out prompts from the same noise.

- colour and shape: fraction of the samples that show both, by a classifier trained only on synthetic images
- diversity: spread of place and size of the shape within a prompt, relative to the teacher's spread; above 1 is more
  than the guided teacher has
- distance: Fréchet distance between the classifier's features of these samples and of the teacher's
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import depends_on
from parts import ROOT, Parts, Row, unisono, verdict

sys.path.insert(0, str(ROOT / "src"))
PARTS = Parts("wan_dmd2", ["torch", "diffusers", "peft"])

TEACHER = "teacher, 24 steps with guidance"
REGRESSION = "regression, 4 steps"
STUDENTS = {
    "dmd2, 4 steps, seed 0": ["--objective", "dmd2", "--seed", "0"],
    REGRESSION: ["--few_step_weight", "1"],
    "dmd2, 4 steps, seed 1": ["--objective", "dmd2", "--seed", "1"],
    "dmd2, 4 steps, seed 2": ["--objective", "dmd2", "--seed", "2"],
    "dmd2, 2 steps, seed 0": ["--objective", "dmd2", "--seed", "0", "--few_steps", "2"],
}
QUICK = ["--max_steps", "6", "--eval_rollouts", "1", "--rollout_batch", "24", "--num_previews", "2", "--log_every", "2"]
SAMPLES, QUICK_SAMPLES, AT_ONCE = 16, 2, 96
BARS = {"points": 0.02, "diversity": 0.8, "minutes": 15.0}


def images(setup: Any, generate: Callable[[Any, Any], Any], number: int) -> Any:
    """`number` images of each held-out prompt, from the same noise for every model."""
    import torch

    vae, spec, decoded = setup.encoders.vae(), setup.rollout_spec, []
    items = [(prompt, each) for each in range(number) for prompt in setup.prompts.held_out]
    for start in range(0, len(items), AT_ONCE):
        some = items[start : start + AT_ONCE]
        noise = torch.stack([spec.initial_noise(*item) for item in some])
        text = torch.stack([setup.text(prompt) for prompt, _ in some])
        with torch.no_grad():
            decoded.append(vae.decode(generate(noise, text).float())[:, :, 0])
    return torch.cat(decoded)


def measured(setup: Any, pictures: Any, reference: Any) -> Row:
    """Colour and shape, diversity and distance of images."""
    import torch

    from unisono.recipes.wan.tiny.classifier import recognised
    from unisono.recipes.wan.tiny.measures import diversity, feature_distance
    from unisono.recipes.wan_distill.data.prompts import labels

    prompts = setup.prompts.held_out
    colours, shapes = torch.tensor(labels(prompts)).repeat(len(pictures) // len(prompts), 1).unbind(1)
    correct = recognised(pictures[:, :, None], colours, shapes)
    captions = torch.arange(len(prompts)).repeat(len(pictures) // len(prompts))
    return {
        "colour": correct["colour"].float().mean().item(),
        "shape": correct["shape"].float().mean().item(),
        "both": (correct["colour"] & correct["shape"]).float().mean().item(),
        "diversity": diversity(pictures, reference, colours, captions),
        "distance": feature_distance(pictures, reference),
    }


def trained(words: list[str], folder: Path, options: argparse.Namespace) -> Row:
    """Trains a student by a command; the time of the process and of its children."""
    started, used = time.monotonic(), _cpu_s()
    failed = unisono([*words, "--output_dir", str(folder)], options.patience_s)
    seconds = {"wall_s": time.monotonic() - started, "cpu_s": _cpu_s() - used}
    return {"failed": failed, "command": shlex.join(["unisono", *words]), **seconds}


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def tiny(options: argparse.Namespace, place: Path) -> Row:
    os.environ.setdefault("UNISONO_CACHE", str(place / "teacher"))
    if options.quick:
        os.environ["UNISONO_TINY_TEACHER_STEPS"] = "4"
    from unisono.engine.export import load_trained
    from unisono.engine.recipe import Work
    from unisono.recipes.wan.sample import sample
    from unisono.recipes.wan_distill.data.rollout_spec import scheduler_of
    from unisono.recipes.wan_distill.evaluation import generate
    from unisono.recipes.wan_distill.models.tiny_teacher import make
    from unisono.recipes.wan_distill.preparation import load
    from unisono.recipes.wan_distill.recipe import WanDistill
    from unisono.recipes.wan_distill.settings import TINY, TINY_DMD2, Config

    result = PARTS.begin("tiny", options)
    rows, number = result["rows"], QUICK_SAMPLES if options.quick else SAMPLES
    own = TINY | TINY_DMD2
    of_recipe = {name: value for name, value in own.items() if hasattr(Config, name)}
    recipe = WanDistill(Config(teacher_path="tiny", objective="dmd2", **of_recipe))
    setup, work = recipe.setup, Work(place / "work")
    setup.folder = place / "texts"
    make(work)
    setup.text_cache.fill(work, setup.encoders.text_encoder, setup.encoders.vae)
    teacher, empty = load(setup, work), setup.text("")
    guided, few = recipe.setup.guidance, recipe.config.few_steps

    def by_teacher(steps: int, guidance: Any) -> Callable[[Any, Any], Any]:
        return lambda noise, text: sample(
            teacher.experts,
            noise,
            (text, empty.expand_as(text)),
            scheduler_of("euler", recipe.config.shift, steps),
            steps=steps,
            guidance=guidance,
        )

    steps = recipe.config.teacher_steps
    reference = images(setup, by_teacher(steps, guided), number)
    rows[TEACHER] = {"failed": "", **measured(setup, reference, reference)}
    for each in (few, few // 2):
        pictures = images(setup, by_teacher(each, 1.0), number)
        rows[f"untrained, {each} steps"] = {"failed": "", **measured(setup, pictures, reference)}
    PARTS.write(result, options)

    quick = QUICK if options.quick else []
    base = ["train", "wan-distill", "--teacher_path", "tiny", "--nproc", "2", *quick]
    student = place / "student.json"
    student.write_text(json.dumps({"num_layers": setup.teacher_config["num_layers"]}))
    for index, (name, flags) in enumerate(STUDENTS.items()):
        folder = place / str(index)
        if name == REGRESSION:
            flags = [*flags, "--student_config", str(student), "--max_steps", str(own["max_steps"])]
            flags += ["--rollouts", "1", "--pairs", "1", "--max_steps", "6"] if options.quick else []
        rows[name] = trained([*base, *flags], folder, options)
        rows[name]["command"] = rows[name]["command"].replace(str(student), "STUDENT")
        if not rows[name]["failed"]:
            of_run, model, _ = load_trained(folder)
            pictures = images(setup, _sampling(of_run, model, generate), number)
            rows[name] |= measured(setup, pictures, reference)
        PARTS.write(result, options)
        print(time.strftime("%H:%M:%S"), name, rows[name]["failed"] or "done", flush=True)
    return result


def _sampling(recipe: Any, model: Any, generate: Any) -> Callable[[Any, Any], Any]:
    student = recipe.objective.student(model)
    return lambda noise, text: generate(recipe.setup, student, noise, text)


def tiny_table(result: Row) -> list[str]:
    rows = result["rows"]
    lines = ["# wan-distill --objective dmd2: few-step students of the tiny teacher", "", *depends_on(result)]
    lines += [
        f"- 24 held-out prompts, {SAMPLES} samples each, all from the same noise; students sample without guidance. "
        "Regression trains a student of the teacher's size with `--few_step_weight 1` for as many steps.",
        "- Diversity: spread of place and size within a prompt, relative to the teacher's. Distance: Fréchet distance "
        "of a classifier's features to the teacher's samples.",
        "- CPU time is that of all processes of the run; wall time depends on what else the machine did.",
        "",
        "| | colour and shape | colour | shape | diversity | distance | wall time | CPU time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        if row["failed"]:
            lines.append(f"| {name} | FAILED: {row['failed'].replace('|', ' ')} | | | | | | |")
            continue
        cells = [f"{row[key]:.1%}" for key in ("both", "colour", "shape")]
        cells += [f"{row['diversity']:.2f}", f"{row['distance']:.1f}"]
        cells += [f"{row[key] / 60:.1f} min" if key in row else "" for key in ("wall_s", "cpu_s")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    measured_rows = [row for name, row in rows.items() if name.startswith("dmd2, 4 steps")]
    if result["quick"] or len(rows) < len(STUDENTS) + 3 or any(row["failed"] for row in rows.values()):
        return lines
    behind = max(rows[TEACHER]["both"] - row["both"] for row in measured_rows)
    least, minutes = (f([row[key] for row in measured_rows]) for f, key in ((min, "diversity"), (max, "wall_s")))
    cpu = max(row["cpu_s"] for row in measured_rows) / 60
    checks = {
        f"4 steps at most {BARS['points'] * 100:.0f} points behind the teacher in colour and shape (worst seed "
        f"{behind * 100:.1f})": behind <= BARS["points"],
        f"diversity at least {BARS['diversity']} (worst seed {least:.2f})": least >= BARS["diversity"],
        f"each run in at most {BARS['minutes']:.0f} minutes on 2 cores (slowest {minutes / 60:.1f} minutes, "
        f"{cpu:.1f} minutes of CPU time)": minutes / 60 <= BARS["minutes"],
    }
    return [*lines, "", "Targets:", "", *(f"- {what}: {verdict(ok)}" for what, ok in checks.items())]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--patience_s", type=float, default=3600)
    return PARTS.main(parser, {"tiny": (tiny, tiny_table)})


if __name__ == "__main__":
    sys.exit(main())
