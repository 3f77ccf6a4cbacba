"""Exports the student as a pipeline for diffusers: the student's transformer and the teacher's other parts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.recipes.wan.export import write_pipeline
from unisono.recipes.wan.models.experts import HIGH, LOW, Experts
from unisono.recipes.wan.native_export import write_comfyui, write_native
from unisono.recipes.wan_distill.settings import HOW_TO_DRAW

if TYPE_CHECKING:
    from unisono.recipes.wan_distill.setup import Setup


def write_student(setup: Setup, model: Experts, folder: Path, file_format: str | None = None) -> str:
    """Writes the student to an empty folder, by default as a pipeline; returns a line that says how to use it."""
    if file_format == "native":
        return write_native(folder, dict(model.named_children()), None, setup.encoders.text_length)
    if file_format == "comfyui":
        return write_comfyui(folder, dict(model.named_children()), None)
    parts, prompt = setup.parts, setup.preview_prompts[0]
    others = {name: kind for name, kind in parts.components.items() if name not in (HIGH, LOW, "scheduler")}
    # Does not export the teacher's scheduler, which may be meant for two experts or for more steps.
    scheduler, _ = setup.student_scheduler()
    source = replace(parts, transformers={}, components=others, boundary_ratio=None)
    transformers = dict(model.named_children())
    boundary = setup.boundary if LOW in transformers else None
    trained = (transformers.get(HIGH), transformers.get(LOW))
    description = write_pipeline(folder, *trained, source=source, boundary_ratio=boundary)
    scheduler.save_pretrained(str(folder / "scheduler"))
    index = folder / "model_index.json"
    content = json.loads(index.read_text(encoding="utf-8"))
    content["scheduler"] = ["diffusers", type(scheduler).__name__]
    index.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    call = arguments_of(setup)
    # diffusers ignores this file. It tells users who have only the exported folder how to call the pipeline.
    (folder / HOW_TO_DRAW).write_text(json.dumps(call, indent=2) + "\n", encoding="utf-8")
    flags = ", ".join(f"{name}={value}" for name, value in call.items())
    return f"{description}; use it with WanPipeline.from_pretrained({str(folder)!r})({prompt!r}, {flags})"


def arguments_of(setup: Setup) -> dict[str, int | float]:
    """Returns the arguments with which to call the student's pipeline."""
    shape, factor = setup.shape, setup.encoders.geometry.spatial_factor
    return {
        "height": shape[2] * factor,
        "width": shape[3] * factor,
        "num_frames": setup.config.num_frames,
        "num_inference_steps": setup.student_scheduler()[1],
        "guidance_scale": 1.0,
        # The pipeline pads every prompt to this length, and the transformer attends to the padding.
        "max_sequence_length": setup.encoders.text_length,
    }
