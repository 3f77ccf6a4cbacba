"""Mistakes that only a look at the model shows, found before the first file is encoded, which may take hours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import ConfigError
from unisono.recipes.wan.checks import check_positions
from unisono.recipes.wan.data.cut import Cut
from unisono.recipes.wan.models.load import build_meta, describe
from unisono.recipes.wan.models.lora import TARGETS, open_lora, targeted
from unisono.recipes.wan.models.weights import check_fit

if TYPE_CHECKING:
    from unisono.recipes.wan_flow.recipe import WanFlow

_TI2V_CHANNELS = 48


def check_model(recipe: WanFlow) -> None:
    """Refuses settings, weights and a LoRA that do not go with the model."""
    config, geometry = recipe.config, recipe.companions.geometry
    if config.first_frame and not takes_first_frame(recipe):
        raise ConfigError(
            f"first_frame {config.first_frame}: this model has one time for all frames, and cannot be told that the "
            "first one is given; only TI2V models can (such as Wan2.2-TI2V-5B): leave it out"
        )
    Cut(1, config.height, config.width, config.max_pixels).check(geometry.multiple)
    if config.height:
        check_positions([geometry.shape(1, config.height, config.width)], recipe.transformer, geometry.space)
    if recipe.found is not None or recipe.is_lora:
        for name in recipe.trained:
            check_weights(recipe, name, build_meta(recipe.transformer))


def takes_first_frame(recipe: WanFlow) -> bool:
    """Whether each token of the model may have a time of its own (TI2V)."""
    if recipe.found is None and int(recipe.transformer["in_channels"]) == _TI2V_CHANNELS:
        return True
    parts = describe(recipe.config.parts_path, "parts_path") if recipe.config.parts_path else None
    return any(model is not None and model.expand_timesteps for model in (recipe.found, parts))


def check_weights(recipe: WanFlow, name: str, transformer: Any) -> None:
    """Refuses weights of another architecture, and a LoRA that does not fit; `transformer` may be on meta."""
    config = recipe.config
    if recipe.found is not None:
        check_fit(transformer, recipe.files[name])
    if config.lora_path:
        open_lora(transformer, Path(config.lora_path).expanduser(), config.lora_rank, name)
    elif config.lora_rank:
        targeted(transformer, lora_targets(config))


def lora_targets(config: Any) -> list[str]:
    """Ends of the names of the layers that get a LoRA."""
    return [target.strip() for target in config.lora_targets.split(",") if target.strip()] or list(TARGETS)
