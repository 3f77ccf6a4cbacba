"""Measures how well a small Wan learns from a large one, and how fast the large one generates roll-outs.

    python benchmarks/wan_distill.py learning            # two CPU ranks: the tiny teacher, four students, n = 432
    python benchmarks/wan_distill.py speed               # a GPU: roll-out of the 1.3B architecture, training
    python benchmarks/wan_distill.py learning --quick    # smoke test with a few steps; the numbers mean nothing

learning: every run is a plain `unisono train`, including teacher and classifier. Students generate samples of held-out
prompts without guidance. A classifier that was trained only on synthetic images must recognise the colour and the shape
of the prompt in them. The distance between the student's velocities and those of the guided teacher is measured too.

speed: all models have random weights. The teacher generates images of 512 x 512 pixels with the recipe (batched,
compiled) and with diffusers' pipeline (one call per prompt), in one process. Then a student of 122 M weights is trained
on cached samples, and with the teacher online.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from machine import depends_on
from parts import ROOT, Parts, Row, unisono, verdict

sys.path.insert(0, str(ROOT / "src"))
PARTS = Parts("wan_distill", ["torch", "diffusers", "transformers"])

DISTILLED = "student, velocity matching (the default)"
REAL = "student, flow matching on real samples"
UNTRAINED = "student, untrained (zero output layer)"
STUDENTS = {
    DISTILLED: [],
    "student, velocity matching, random initialisation": ["--init", "fresh"],
    "student, flow matching on the teacher's samples": ["--velocity_weight", "0", "--flow_weight", "1"],
}
QUICK = ["--max_steps", "4", "--rollouts", "1", "--eval_rollouts", "1", "--teacher_steps", "3", "--pairs", "2"]
QUICK += ["--rollout_batch", "24", "--num_previews", "2", "--log_every", "2"]
BARS = {"points": 0.10, "times_below": 5.0, "minutes": 20.0, "weights": 0.25, "colour": 0.9, "shape": 0.8}
SPEED_BAR = 2.0


# learning ------------------------------------------------------------------------------------------------------------


def learned(folder: Path) -> Row:
    """Metrics of the last evaluation of a run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "eval/velocity_error" in line][-1]
    steps = [line for line in lines if "step_ms" in line]
    row = {name.removeprefix("eval/"): value for name, value in last.items()}
    return row | {"training_s": statistics.mean(line["step_ms"] for line in steps) * last["step"] / 1000}


def measured(recipe: Any, model: Any, batch_size: int = 96) -> Row:
    """Runs the evaluation of `learned` on an untrained model, or on a model that another recipe trained."""
    import torch
    from torch.utils.data import default_collate

    from unisono.recipes.wan_distill.evaluation import held_out_metrics

    data = recipe.dataset("eval")
    sums: dict[str, Any] = {}
    with torch.no_grad():
        for start in range(0, len(data), batch_size):
            items = [data[number] for number in range(start, min(len(data), start + batch_size))]
            metrics = held_out_metrics(recipe, model.eval(), default_collate(items), torch.float32)
            for name, (total, count) in metrics.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = (before[0] + torch.as_tensor(total), before[1] + torch.as_tensor(count))
    return {name: (total / count).tolist() for name, (total, count) in sums.items()}


def real_samples(folder: Path, number: int) -> Path:
    """Writes the built-in synthetic images to files, as a user's data set."""
    from PIL import Image

    from unisono.recipes.wan.tiny.shapes import Shapes

    folder.mkdir()
    shapes = Shapes(number)
    for place in range(number):
        item = shapes[place]
        pixels = ((item["frames"][:, 0].permute(1, 2, 0) + 1) * 127.5).round().byte()
        Image.fromarray(pixels.numpy()).save(folder / f"{place:05d}.png")
        (folder / f"{place:05d}.txt").write_text(item["caption"])
    return folder


def learning(options: argparse.Namespace, place: Path) -> Row:
    os.environ["UNISONO_CACHE"] = str(place / "teacher")  # the teacher is trained here, so that its time counts
    if options.quick:
        os.environ["UNISONO_TINY_TEACHER_STEPS"] = "4"
    from unisono.engine.export import load_trained
    from unisono.recipes.wan.models.load import build
    from unisono.recipes.wan_distill.models.random_weights import initialise_randomly
    from unisono.recipes.wan_distill.models.student import num_weights

    result, began = PARTS.begin("learning", options), time.monotonic()
    rows = result["rows"] = {name: {"failed": "not run"} for name in ("teacher", *STUDENTS, REAL, UNTRAINED)}
    quick = QUICK if options.quick else []
    for number, (name, flags) in enumerate(STUDENTS.items()):
        folder, started = place / str(number), time.monotonic()
        words = ["train", "wan-distill", "--teacher_path", "tiny", "--nproc", "2", *flags, *quick]
        command = shlex.join(["unisono", *words])
        failed = unisono([*words, "--cache_dir", str(place / "drawn"), "--output_dir", str(folder)], options.patience_s)
        rows[name] = {"failed": failed, "command": command, "wall_s": time.monotonic() - started}
        if not failed:
            rows[name] |= learned(folder)
        PARTS.write(result, options)
        print(time.strftime("%H:%M:%S"), name, rows[name]["failed"] or "done", flush=True)
    if rows[DISTILLED]["failed"]:
        return result
    recipe, trained, _ = load_trained(place / "0")
    setup = recipe.setup  # type: ignore[attr-defined]
    setup.folder = place / "drawn"
    ours, theirs = num_weights(setup.student.config), num_weights(setup.teacher_config)
    result |= {"student_weights": ours, "teacher_weights": theirs, "samples": len(recipe.dataset("eval"))}
    best = rows[DISTILLED]
    rows["teacher"] = {"failed": "", "colour": best["teacher_colour"], "shape": best["teacher_shape"], "wall_s": 0.0}
    untrained = build(setup.student.config)
    initialise_randomly(untrained, 0)
    trained.transformer = untrained
    rows[UNTRAINED] = {"failed": "", "wall_s": 0.0, **measured(recipe, trained)}
    PARTS.write(result, options)
    started, student = time.monotonic(), place / "student.json"
    student.write_text(json.dumps(setup.student.config))
    steps = "4" if options.quick else str(best["step"])
    words = ["train", "wan-flow", "--model_config", str(student), "--parts_path", str(setup.teacher.path)]
    words += ["--dataset_path", str(real_samples(place / "real", 48 if options.quick else 2400)), "--nproc", "2"]
    words += ["--num_frames", "1", "--mixed_precision", "no", "--no_compile", "--num_workers", "0", "--shift", "1"]
    words += ["--batch_size", "32", "--max_steps", steps, "--learning_rate", "4e-3", "--lr_schedule", "cosine"]
    words += ["--warmup_steps", "50", "--ema_decay", "0.99", "--eval_every", "-1", "--preview_every", "-1"]
    failed = unisono([*words, "--output_dir", str(place / "flow")], options.patience_s)
    command = "unisono train wan-flow --model_config STUDENT --parts_path TEACHER, 2,400 synthetic images as files"
    rows[REAL] = {"failed": failed, "command": command, "wall_s": time.monotonic() - started}
    if not failed:
        rows[REAL] |= measured(recipe, load_trained(place / "flow")[1])
    result["minutes"] = (time.monotonic() - began) / 60
    return result


def learning_table(result: Row) -> list[str]:
    rows = result["rows"]
    lines = ["# wan-distill: students of the tiny teacher", "", *depends_on(result)]
    if "samples" in result:
        share = result["student_weights"] / result["teacher_weights"]
        lines += [
            f"- Student: {result['student_weights']:,} weights, half the width, {share:.2f} of the teacher's "
            f"{result['teacher_weights']:,}; all students are trained for the same number of steps",
            f"- {result['samples']} samples from 24 held-out prompts; the teacher samples with guidance 2, students "
            "without. The velocity error is the mean squared distance to the guided teacher.",
        ]
    lines += [
        "",
        "| | colour | shape | velocity error | latent error | training | process |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        if row["failed"]:
            lines.append(f"| {name} | FAILED: {row['failed'].replace('|', ' ')} | | | | | |")
            continue
        cells = [f"{row[key]:.1%}" for key in ("colour", "shape")]
        cells += [f"{row[key]:.3f}" if key in row else "" for key in ("velocity_error", "latent_error")]
        cells += [f"{row[key]:.0f} s" if row.get(key) else "" for key in ("training_s", "wall_s")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    if result["quick"] or any(row["failed"] for row in rows.values()):
        return lines
    best, teacher, none = rows[DISTILLED], rows["teacher"], rows[UNTRAINED]
    behind = {name: teacher[name] - best[name] for name in ("colour", "shape")}
    below = none["velocity_error"] / best["velocity_error"]
    share = result["student_weights"] / result["teacher_weights"]
    checks = {
        f"teacher at least {BARS['colour']:.0%} and {BARS['shape']:.0%}": all(teacher[n] >= BARS[n] for n in behind),
        f"student at most {BARS['points'] * 100:.0f} points behind the teacher (colour {behind['colour'] * 100:.1f}, "
        "shape "
        f"{behind['shape'] * 100:.1f})": max(behind.values()) <= BARS["points"],
        f"velocity error at least {BARS['times_below']:.0f} times below an untrained student's ({below:.1f} times)": (
            below >= BARS["times_below"]
        ),
        f"at most {BARS['weights']:.2f} of the weights ({share:.2f})": share <= BARS["weights"],
        f"everything in at most {BARS['minutes']:.0f} minutes ({result['minutes']:.1f})": (
            result["minutes"] <= BARS["minutes"]
        ),
    }
    return [*lines, "", "Targets:", "", *(f"- {what}: {verdict(ok)}" for what, ok in checks.items())]


# speed ---------------------------------------------------------------------------------------------------------------


def write_teacher(folder: Path, quick: bool) -> None:
    """Writes a pipeline with the transformer of the 1.3B model and a small text encoder of the right width."""
    import torch
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
    from transformers import T5TokenizerFast, UMT5Config, UMT5EncoderModel

    from unisono.recipes.wan.models.load import CONFIGS

    config = dict(CONFIGS["1.3b"])
    if quick:
        config |= {"num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32, "num_layers": 2, "text_dim": 32}
    pieces = ["<pad>", "</s>", "<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz0123456789"]
    tokenizer = T5TokenizerFast(vocab=[(piece, -1.0) for piece in pieces], extra_ids=0, model_max_length=512)
    text = UMT5Config(vocab_size=len(pieces), d_model=config["text_dim"], d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.manual_seed(0)
        transformer = WanTransformer3DModel(**config).to(torch.bfloat16)
    vae = AutoencoderKLWan(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    WanPipeline(tokenizer, UMT5EncoderModel(text).eval(), vae, scheduler, transformer).save_pretrained(folder)


def speed(options: argparse.Namespace, place: Path) -> Row:
    import torch

    from unisono.engine.recipe import Work
    from unisono.recipes.wan_distill.preparation import load
    from unisono.recipes.wan_distill.recipe import WanDistill
    from unisono.recipes.wan_distill.settings import Config

    result, device = PARTS.begin("speed", options), "cuda" if torch.cuda.is_available() else "cpu"
    side, batch, steps = (32, 2, 2) if options.quick else (512, 16, 30)
    write_teacher(place / "teacher", options.quick)
    prompts = place / "prompts.txt"
    prompts.write_text("\n".join(f"prompt {number}" for number in range(2 * batch)))
    settings = {"teacher_path": str(place / "teacher"), "data_path": str(prompts), "height": side, "width": side}
    settings |= {"rollout_batch": batch, "rollouts": 1, "num_previews": 1, "cache_dir": str(place / "drawn")}
    print(time.strftime("%H:%M:%S"), "wrote the teacher", flush=True)

    # The teacher alone: batches through the recipe, single calls of the pipeline.
    recipe = WanDistill(Config(**settings, teacher_steps=steps, pairs=1, init="fresh"))
    setup = recipe.setup
    setup.folder, setup.device = place / "alone", device
    work = Work(place / "alone", device=device)
    setup.text_cache.fill(work, setup.encoders.text_encoder, setup.encoders.vae)
    teacher = load(setup, work).to(device)
    from dataclasses import replace

    rollouts = setup.rollouts("train")
    rollouts.spec = replace(rollouts.spec, pairs=0)
    ours = []
    for number in (0, 1, 1, 1):  # the first batch compiles
        ours.append(rollouts._draw(number, teacher, setup.text, work)[1] / batch)
    result["rows"]["unisono"] = {"seconds": ours[1:], "batch": batch, "compiling_s": ours[0] * batch}
    print(time.strftime("%H:%M:%S"), "unisono:", ours, flush=True)
    del teacher
    result["rows"]["pipeline"] = {"seconds": by_pipeline(place / "teacher", setup, side, steps, device), "batch": 1}
    print(time.strftime("%H:%M:%S"), "pipeline:", result["rows"]["pipeline"], flush=True)
    PARTS.write(result, options)

    # A student is trained on cached samples, and with the teacher online.
    student = place / "student.json"
    sizes = {"num_attention_heads": 6, "attention_head_dim": 128, "ffn_dim": 3072, "num_layers": 12}
    student.write_text(json.dumps({"num_layers": 1} if options.quick else sizes))
    settings |= {"student_config": str(student), "teacher_steps": 2, "pairs": 2, "batch_size": batch, "max_steps": 30}
    settings |= {"log_every": 5, "eval_every": -1, "preview_every": -1, "save_every": 0, "tensorboard": False}
    settings |= {"num_workers": 4, "warmup_steps": 0}
    if options.quick:
        settings |= {"compile": False, "mixed_precision": "no", "num_workers": 0}
    for name, more in (("from the cache", {}), ("with the teacher online", {"online": True})):
        folder = place / name.replace(" ", "_")
        flags = [f"--{key}={value}" for key, value in {**settings, **more}.items()]
        failed = unisono(["train", "wan-distill", *flags, "--output_dir", str(folder)], options.patience_s)
        if failed:
            result["rows"][name] = {"failed": failed}
            continue
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        ms = [line["step_ms"] for line in lines if "step_ms" in line][2:]  # the first steps compile
        peak = max((line.get("peak_gib", 0.0) for line in lines), default=0.0)
        result["rows"][name] = {"step_ms": statistics.median(ms), "batch": batch, "peak_gib": peak}
        print(time.strftime("%H:%M:%S"), name, result["rows"][name], flush=True)
        PARTS.write(result, options)
    return result


def by_pipeline(folder: Path, setup: Any, side: int, steps: int, device: str) -> list[float]:
    """Seconds per image of diffusers' own pipeline, which is called for one prompt at a time, as scripts do."""
    import torch
    from diffusers import WanPipeline

    pipeline = WanPipeline.from_pretrained(folder, torch_dtype=torch.bfloat16).to(device)
    pipeline.set_progress_bar_config(disable=True)
    took = []
    for number in range(4):
        rows = {"prompt_embeds": setup.text(f"prompt {number}"), "negative_prompt_embeds": setup.text("")}
        began = time.perf_counter()
        pipeline(
            **{name: value[None].to(device, torch.bfloat16) for name, value in rows.items()},
            **{"height": side, "width": side, "num_frames": 1, "num_inference_steps": steps, "guidance_scale": 5.0},
            output_type="latent",
        ).frames.cpu()
        took.append(time.perf_counter() - began)
    return took[1:]  # the first call chooses kernels


def speed_table(result: Row) -> list[str]:
    rows = result["rows"]
    lines = ["# wan-distill: speed of the roll-out and of training", "", *depends_on(result)]
    lines += ["- The real 1.3B architecture, random weights, 512 × 512 pixels, 30 steps with guidance, bfloat16", ""]
    if "pipeline" not in rows:
        return lines
    seconds = {name: statistics.median(rows[name]["seconds"]) for name in ("pipeline", "unisono")}
    ratio = seconds["pipeline"] / seconds["unisono"]
    lines += [
        "| roll-out of the teacher | batch | seconds per image | images per s | speed-up |",
        "|---|---|---|---|---|",
    ]
    names = {"pipeline": "`WanPipeline`, one call per prompt", "unisono": "`unisono train wan-distill`"}
    for name, shown in names.items():
        times = "1.00" if name == "pipeline" else f"**{ratio:.2f} ×**"
        lines.append(f"| {shown} | {rows[name]['batch']} | {seconds[name]:.3f} | {1 / seconds[name]:.2f} | {times} |")
    if not result["quick"]:
        lines += ["", f"Target at least {SPEED_BAR:.0f} ×: {verdict(ratio >= SPEED_BAR)}."]
    learn = {name: row for name, row in rows.items() if "step_ms" in row}
    lines += [
        "",
        "| training of a student of 122 M weights | batch | ms per step | samples per s | speed-up |",
        "|---|---|---|---|---|",
    ]
    slow = max((row["step_ms"] for row in learn.values()), default=1.0)
    for name, row in learn.items():
        each = row["batch"] * 1000 / row["step_ms"]
        lines.append(f"| {name} | {row['batch']} | {row['step_ms']:.0f} | {each:.0f} | {slow / row['step_ms']:.2f} × |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--patience_s", type=float, default=1800)
    return PARTS.main(parser, {"learning": (learning, learning_table), "speed": (speed, speed_table)})


if __name__ == "__main__":
    sys.exit(main())
