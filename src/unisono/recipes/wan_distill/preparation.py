"""Before training: prompts become rows, the teacher draws and is let go of, the student's beginning is planned."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

import torch

from unisono.engine.recipe import Work
from unisono.errors import ConfigError
from unisono.recipes.common.model_files import read_json
from unisono.recipes.common.whole_files import write_whole
from unisono.recipes.wan.data.filling import borrowed
from unisono.recipes.wan.models.attention import Kernel
from unisono.recipes.wan.models.experts import HIGH, LOW
from unisono.recipes.wan_distill.inherit import measured_importance, plan
from unisono.recipes.wan_distill.prompts import unknown_to_tiny
from unisono.recipes.wan_distill.rollouts import points_of_all_levels
from unisono.recipes.wan_distill.setup import Setup
from unisono.recipes.wan_distill.teacher import Teacher, load_teacher
from unisono.recipes.wan_distill.tiny_teacher import make

_SPLITS = {"train": "to learn from", "eval": "to evaluate with", "preview": "to show"}


def prepare(setup: Setup, kernel: Kernel, work: Work) -> None:
    """All of it, this process's share; comes back early when somebody asks to stop, and goes on the next time."""
    if setup.is_tiny:
        if strange := unknown_to_tiny([*setup.prompts.train, *setup.prompts.held_out]):
            work.message(strange)
        make(work)  # on every machine, which may have a cache of its own
    if work.meet():
        return
    setup.check()
    _keep_student(setup, work)
    setup.texts.fill(work, setup.companions.text_encoder, setup.companions.vae)
    if work.meet():
        return
    if long := setup.texts.num_reaching(setup.text_tokens):
        work.message(f"{long:,} prompts have {setup.text_tokens} tokens or more; what is beyond is cut off")
    kernel.measure(work, setup.student.config, setup.companions.geometry.tokens(setup.shape))
    with borrowed(lambda: load(setup, work), work.device) as teacher:
        for split, what in _SPLITS.items():
            if split == "eval" and not setup.prompts.held_out:
                continue
            took = setup.rollouts(split).fill(work, teacher, setup.rows, what)
            if split == "train":
                _note_time(setup, took[1:], work)  # the first one compiles, or wakes the device
        if work.meet():  # importance is measured on what others have drawn
            return
        if setup.config.init == "teacher":
            for file in work.share([setup.inheritance_file]):
                _plan_inheritance(file, setup, teacher)
    if setup.how.endswith("compiled"):
        # What was compiled for it would hold memory, and make its sizes part of the student's compilation.
        torch._dynamo.reset()


def load(setup: Setup, work: Work) -> Teacher:
    """The teacher; says how much memory it takes, and where."""
    config = setup.config
    teacher, told = load_teacher(
        setup.teacher,
        setup.guidance,
        config.teacher_dtype,
        config.teacher_device_strategy,
        work.device,
        compiled=config.compile_teacher,
    )
    work.message(told)
    return teacher


def _keep_student(setup: Setup, work: Work) -> None:
    """Refuses to go on with another student than the one that the run began with."""
    file, student = work.folder / "student.json", json.loads(json.dumps(replace(setup.student, remarks=()).__dict__))
    if file.exists() and read_json(file, dict) != student:
        raise ConfigError(
            f"student_config {setup.config.student_config}: it is another student than the one this run began with "
            f"({file}); put it back as it was, or begin a new run"
        )
    for mine in work.share([file]):
        write_whole(mine, json.dumps(student).encode())


def _note_time(setup: Setup, took: list[float], work: Work) -> None:
    """Keeps how long a sample takes in most blocks: a mean would also count what else the machine did meanwhile."""
    for file in work.share([setup.times_file]) if took else ():
        write_whole(file, json.dumps({"seconds_per_sample": median(took), "blocks": len(took)}).encode())


def _plan_inheritance(file: Path, setup: Setup, teacher: Callable[[], Teacher]) -> None:
    if setup.is_planned():
        return
    layers, sizes = setup.config.layers, (setup.teacher_config, setup.student.config)
    importance = _importance(setup, teacher()) if layers == "importance" else None
    inheritance = plan(setup.giver, *sizes, layers, importance, setup.student.factor, setup.seed)
    write_whole(file, json.dumps(asdict(inheritance)).encode())


def _importance(setup: Setup, teacher: Teacher) -> list[float]:
    """How much each of the teacher's blocks does to samples at all noise levels."""
    noisy, times, text = points_of_all_levels(setup.rollouts("preview").open(), setup.rows)
    experts, device = dict(teacher.experts.named_children()), setup.device
    return measured_importance(
        experts.get(LOW) or experts[HIGH],
        noisy.to(device, teacher.dtype),
        times.to(device),
        text.to(device, teacher.dtype),
    )
