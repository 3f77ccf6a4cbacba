"""What was trained, as others load it: a pipeline for diffusers, or LoRAs for it and for ComfyUI."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from unisono.recipes.wan.models.companions import Tiny
from unisono.recipes.wan.models.experts import HIGH, LOW
from unisono.recipes.wan.models.load import describe
from unisono.recipes.wan.models.lora import lora_state, save_lora
from unisono.recipes.wan.models.pipeline import other_parts, write_pipeline

if TYPE_CHECKING:
    from unisono.recipes.wan_flow.recipe import WanFlow


def write(recipe: WanFlow, transformers: Mapping[str, nn.Module], folder: Path) -> str:
    """Writes the transformers that were trained, by diffusers' names; returns what it wrote."""
    if recipe.is_lora:
        states = {name: lora_state(transformer) for name, transformer in transformers.items()}
        return save_lora(folder, states.get(HIGH), states.get(LOW))
    config, companions, source = recipe.config, recipe.companions, recipe.found
    if config.parts_path:
        source = other_parts(describe(config.parts_path, "parts_path"), list(transformers), config.expert)
    return write_pipeline(
        folder,
        transformers.get(HIGH),
        transformers.get(LOW),
        source=companions.parts() if isinstance(companions, Tiny) else source,
        boundary_ratio=recipe.boundary if len(transformers) > 1 or recipe.found is not None else None,
    )
