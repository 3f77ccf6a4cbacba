"""Checks that need the model's configuration or weights. They run before encoding, which may take hours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unisono.errors import ConfigError
from unisono.recipes.wan.checks import check_positions
from unisono.recipes.wan.data.crop import Crop
from unisono.recipes.wan.models.load import build_meta, describe
from unisono.recipes.wan.models.lora import TARGETS, open_lora, targeted
from unisono.recipes.wan.models.weights import check_fit
from unisono.recipes.wan_flow.setup import Setup

_TI2V_CHANNELS = 48


def check_model(setup: Setup) -> None:
    """Raises ConfigError for settings, weights or a LoRA that do not fit the model."""
    config, geometry = setup.config, setup.encoders.geometry
    if config.first_frame and not takes_first_frame(setup):
        raise ConfigError(
            f"first_frame {config.first_frame}: this model has one timestep for all frames, so the first frame cannot "
            "be a condition; only TI2V models support it (such as Wan2.2-TI2V-5B): remove first_frame"
        )
    Crop(1, config.height, config.width, config.max_pixels).check(geometry.multiple)
    if config.height:
        check_positions([geometry.shape(1, config.height, config.width)], setup.transformer, geometry.spatial_factor)
    if setup.pretrained is not None or setup.is_lora:
        for name in setup.trained:
            check_weights(setup, name, build_meta(setup.transformer))


def takes_first_frame(setup: Setup) -> bool:
    """Whether the model takes a timestep per token (TI2V), so that the first frame can be noise-free."""
    if setup.pretrained is None and int(setup.transformer["in_channels"]) == _TI2V_CHANNELS:
        return True
    parts = describe(setup.config.parts_path, "parts_path") if setup.config.parts_path else None
    return any(model is not None and model.expand_timesteps for model in (setup.pretrained, parts))


def check_weights(setup: Setup, name: str, transformer: Any) -> None:
    """Raises ConfigError for weights of another architecture, or for a LoRA that does not fit the transformer."""
    config = setup.config
    if setup.pretrained is not None:
        check_fit(transformer, setup.weight_files[name])
    if config.lora_path:
        kind = open_lora(transformer, Path(config.lora_path).expanduser(), config.lora_rank, name).kind
        if kind != config.adapter:
            raise ConfigError(f"lora_path {config.lora_path} is a {kind}; continue it with --adapter {kind}")
    elif config.lora_rank:
        targeted(transformer, lora_targets(config))


def lora_targets(config: Any) -> list[str]:
    """Name endings of the layers that get a LoRA."""
    return [target.strip() for target in config.lora_targets.split(",") if target.strip()] or list(TARGETS)
