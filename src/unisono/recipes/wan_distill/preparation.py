"""Prepares training: encodes the prompts, generates the teacher's roll-outs and plans the student's initial weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

import torch

from unisono.engine.recipe import Work
from unisono.errors import ConfigError
from unisono.recipes.common.cache_files import write_cache_file
from unisono.recipes.common.model_files import read_json
from unisono.recipes.wan.data.cache_fill import loaded_on_demand
from unisono.recipes.wan.models.experts import HIGH, LOW
from unisono.recipes.wan.models.kernels.attention import Kernel
from unisono.recipes.wan_distill.data.prompts import unknown_to_tiny
from unisono.recipes.wan_distill.data.rollouts import points_of_all_levels
from unisono.recipes.wan_distill.model_checks import check_models
from unisono.recipes.wan_distill.models.pruning import measured_importance, plan
from unisono.recipes.wan_distill.models.teacher import Teacher, load_teacher
from unisono.recipes.wan_distill.models.tiny_teacher import make
from unisono.recipes.wan_distill.setup import Setup

_PURPOSES = {"train": "for training", "eval": "for evaluation", "preview": "for previews"}


def prepare(setup: Setup, kernel: Kernel, work: Work) -> None:
    """Does this rank's share of the work; if the run is asked to stop, returns early and continues the next time."""
    if setup.is_tiny:
        if warning := unknown_to_tiny([*setup.prompts.train, *setup.prompts.held_out]):
            work.message(warning)
        make(work)  # runs on every machine, because each may have its own cache
    if work.meet():
        return
    check_models(setup)
    _check_same_student(setup, work)
    setup.text_cache.fill(work, setup.encoders.text_encoder, setup.encoders.vae)
    if work.meet():
        return
    if num_long := setup.text_cache.num_truncated():
        work.message(f"{num_long:,} prompts have {setup.text_tokens} tokens or more; the rest is truncated")
    kernel.measure(work, setup.student.config, setup.encoders.geometry.tokens(setup.shape))
    with loaded_on_demand(lambda: load(setup, work), work.device) as teacher:
        for split in setup.splits:
            seconds = setup.rollouts(split).fill(work, teacher, setup.text, _PURPOSES[split])
            if split == setup.splits[0]:
                _store_time(setup, seconds[1:], work)  # excludes the first block, which includes compilation or warm-up
        if work.meet():  # waits for all ranks, because importance is measured on samples from all of them
            return
        if setup.config.init == "teacher" and setup.config.objective == "regression":
            for file in work.share([setup.pruning_plan_file]):
                _plan_pruning(file, setup, teacher)
    if setup.backend.endswith("compiled"):
        # Otherwise, the teacher's compiled code would keep memory allocated, and torch would compile the student for
        # dynamic sizes wherever its sizes differ from the teacher's.
        torch._dynamo.reset()


def load(setup: Setup, work: Work) -> Teacher:
    """Loads the teacher, and reports the size and location of its weights."""
    config = setup.config
    teacher, description = load_teacher(
        setup.teacher,
        setup.guidance,
        config.teacher_dtype,
        config.teacher_device_strategy,
        work.device,
        compiled=config.compile_teacher,
        base_precision=setup.base_precision,
        lora=setup.lora,
    )
    work.message(description)
    return teacher


def _check_same_student(setup: Setup, work: Work) -> None:
    """Raises ConfigError if student_config has changed since the run started."""
    file, student = work.folder / "student.json", json.loads(json.dumps(replace(setup.student, remarks=()).__dict__))
    if file.exists() and read_json(file, dict) != student:
        raise ConfigError(
            f"student_config {setup.config.student_config}: differs from the student that this run started with "
            f"({file}); restore it, or start a new run"
        )
    for mine in work.share([file]):
        write_cache_file(mine, json.dumps(student).encode())


def _store_time(setup: Setup, seconds: list[float], work: Work) -> None:
    """Stores the median time per sample, because a mean would include delays by other programs."""
    for file in work.share([setup.times_file]) if seconds else ():
        write_cache_file(file, json.dumps({"seconds_per_sample": median(seconds), "blocks": len(seconds)}).encode())


def _plan_pruning(file: Path, setup: Setup, teacher: Callable[[], Teacher]) -> None:
    if setup.has_pruning_plan():
        return
    layers, sizes = setup.config.layers, (setup.teacher_config, setup.student.config)
    importance = _importance(setup, teacher()) if layers == "importance" else None
    pruning = plan(setup.source_weights, *sizes, layers, importance, setup.student.factor, setup.seed)
    write_cache_file(file, json.dumps(asdict(pruning)).encode())


def _importance(setup: Setup, teacher: Teacher) -> list[float]:
    """Measures how much each of the teacher's blocks changes its input, over all noise levels."""
    noisy, times, text = points_of_all_levels(setup.rollouts("preview").open(), setup.text)
    experts, device = dict(teacher.experts.named_children()), setup.device
    return measured_importance(
        experts.get(LOW) or experts[HIGH],
        noisy.to(device, teacher.dtype),
        times.to(device),
        text.to(device, teacher.dtype),
    )
