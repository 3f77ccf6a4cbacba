"""Exports a few-step student with its scheduler: as a LoRA for the teacher, or as a whole pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.recipes.wan.models.experts import HIGH, LOW, Experts
from unisono.recipes.wan.models.lora import lora_state, save_lora
from unisono.recipes.wan_distill.export import arguments_of, write_student
from unisono.recipes.wan_distill.settings import HOW_TO_DRAW

if TYPE_CHECKING:
    from unisono.recipes.wan_distill.setup import Setup


def write_few_step_student(
    setup: Setup, student: Experts, folder: Path, file_format: str | None, *, is_lora: bool
) -> str:
    """Writes the student to a folder; returns a line that describes it and says how to use it."""
    if not is_lora:
        return write_student(setup, student, folder, file_format)
    states = {name: lora_state(transformer) for name, transformer in student.named_children()}
    description = save_lora(folder, states.get(HIGH), states.get(LOW), file_format)
    scheduler, steps = setup.student_scheduler()
    scheduler.save_pretrained(str(folder / "scheduler"))
    arguments = arguments_of(setup)
    (folder / HOW_TO_DRAW).write_text(json.dumps(arguments, indent=2) + "\n", encoding="utf-8")
    call = ", ".join(f"{name}={value}" for name, value in arguments.items())
    own = f", after your own LoRA ({setup.lora})" if setup.lora else ""
    return (
        f"{description}{own}; set pipeline.scheduler = {type(scheduler).__name__}.from_pretrained("
        f"{str(folder / 'scheduler')!r}) and call it with {call}; in ComfyUI use {steps} steps of the sampler euler "
        f"with the scheduler simple, shift {setup.config.shift:g} and cfg 1"
    )
