"""Exports trained weights: a pipeline for diffusers, or LoRA files for diffusers and ComfyUI."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from unisono.recipes.wan.export import other_parts, write_pipeline
from unisono.recipes.wan.models.encoders import TinyEncoders
from unisono.recipes.wan.models.experts import HIGH, LOW
from unisono.recipes.wan.models.load import boundary_for, describe
from unisono.recipes.wan.models.lora import lora_state, save_lora
from unisono.recipes.wan.native_export import write_comfyui, write_native
from unisono.recipes.wan_flow.setup import Setup


def write_model(
    setup: Setup, transformers: Mapping[str, nn.Module], folder: Path, file_format: str | None = None
) -> str:
    """Writes the trained transformers, keyed by diffusers' names, and returns a line that describes the result."""
    if setup.is_lora:
        states = {name: lora_state(transformer) for name, transformer in transformers.items()}
        return save_lora(folder, states.get(HIGH), states.get(LOW), file_format)
    config, encoders, source = setup.config, setup.encoders, setup.pretrained
    if config.parts_path:
        parts = describe(config.parts_path, "parts_path")
        source = other_parts(parts, list(transformers), config.expert, boundary_for(setup.transformer))
    if file_format == "native":
        return write_native(folder, transformers, source, encoders.text_length)
    if file_format == "comfyui":
        return write_comfyui(folder, transformers, source)
    return write_pipeline(
        folder,
        transformers.get(HIGH),
        transformers.get(LOW),
        source=encoders.parts() if isinstance(encoders, TinyEncoders) else source,
        boundary_ratio=setup.boundary if len(transformers) > 1 or setup.pretrained is not None else None,
        has_given_frames=setup.condition.has_channels,
    )
