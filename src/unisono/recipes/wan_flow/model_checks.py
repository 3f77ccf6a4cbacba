"""Checks that need the model's configuration or weights; they run before encoding, which may take hours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unisono.errors import ConfigError
from unisono.recipes.wan.checks import check_positions
from unisono.recipes.wan.data.crop import Crop
from unisono.recipes.wan.models.load import build_meta
from unisono.recipes.wan.models.lora import IMAGE_TARGETS, TARGETS, open_lora, targeted
from unisono.recipes.wan.models.weights import check_fit
from unisono.recipes.wan_flow.setup import Setup


def check_model(setup: Setup) -> None:
    """Raises ConfigError if settings, weights or a LoRA do not fit the model."""
    config, geometry = setup.config, setup.encoders.geometry
    check_given_frames(setup)
    if config.first_frame and not setup.has_token_times:
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


def check_given_frames(setup: Setup) -> None:
    """Raises ConfigError if the model does not support the condition, or if no frames are left to generate."""
    config, kind = setup.config, setup.condition
    if not kind.has_channels:
        if config.condition == "none" and config.first_frame:
            raise ConfigError(f"condition none and first_frame {config.first_frame} contradict each other; remove one")
        return
    if config.first_frame:
        raise ConfigError(
            f"first_frame {config.first_frame}: this image-to-video model is always given its first frame; remove "
            "first_frame, which is for TI2V models"
        )
    if config.num_frames == 1:
        raise ConfigError(
            "num_frames 1: an image-to-video model is given the first frame, so nothing would be left to generate; use "
            "5, 9, 13, …"
        )


def check_weights(setup: Setup, name: str, transformer: Any) -> None:
    """Raises ConfigError if the weights or the LoRA do not fit the transformer."""
    config = setup.config
    if setup.pretrained is not None:
        check_fit(transformer, setup.weight_files[name])
    if config.lora_path:
        kind = open_lora(transformer, Path(config.lora_path).expanduser(), config.lora_rank, name).kind
        if kind != config.adapter:
            raise ConfigError(f"lora_path {config.lora_path} is a {kind}; continue it with --adapter {kind}")
    elif config.lora_rank:
        targeted(transformer, lora_targets(config, transformer))


def lora_targets(config: Any, transformer: Any = None) -> list[str]:
    """Returns the name endings of the layers that get a LoRA: the user's, or all projections in the blocks.

    If `transformer` has projections of image embeddings, the default includes these projections.
    """
    chosen = [target.strip() for target in config.lora_targets.split(",") if target.strip()]
    has_image = transformer is not None and transformer.config.added_kv_proj_dim
    return chosen or [*TARGETS, *(IMAGE_TARGETS if has_image else ())]
