"""Derives a run's model and objective from the settings: initial weights, transformers to train, noise levels."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from unisono.errors import ConfigError
from unisono.recipes.wan.condition.kind import ConditionKind, kind_of
from unisono.recipes.wan.models.encoders import Encoders, FolderEncoders, TinyEncoders, no_encoders
from unisono.recipes.wan.models.experts import HIGH, LOW, levels_of, parts_to_train
from unisono.recipes.wan.models.load import (
    BOUNDARIES,
    TEXT_LENGTH,
    WanFolder,
    boundary_for,
    describe,
    transformer_config,
)
from unisono.recipes.wan.models.unsupported import refuse_channels
from unisono.recipes.wan.models.weights import Weights, open_weights
from unisono.recipes.wan.objective import NoiseLevels
from unisono.recipes.wan.settings import TINY_NAMES
from unisono.recipes.wan_flow.loss import FlowLoss

_TI2V_CHANNELS = 48


class Setup:
    """The model and the objective of a run, derived from the settings; each property is computed on first use."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def is_lora(self) -> bool:
        """Whether the run trains a LoRA instead of all weights."""
        return bool(self.config.lora_rank or self.config.lora_path)

    @property
    def model_name(self) -> str:
        """The value of model_config in lower case; empty if model_path is given."""
        return (self.config.model_config or "").lower()

    @cached_property
    def pretrained(self) -> WanFolder | None:
        """The model at model_path; None if the run trains from scratch."""
        if not self.config.model_path:
            return None
        folder = describe(self.config.model_path)
        if self.config.expert == "low" and list(folder.transformers) == [HIGH] and not _is_whole_model(folder):
            # A file with a single expert does not say which expert it is, so the setting expert decides.
            return replace(folder, transformers={LOW: folder.transformers[HIGH]})
        return folder

    @cached_property
    def trained(self) -> list[str]:
        """Diffusers' names of the transformers that the run trains."""
        available: Collection[str] = (HIGH, LOW) if self.model_name in BOUNDARIES else (HIGH,)
        if self.pretrained is not None:
            available = self.pretrained.transformers
        is_whole = self.pretrained is None or _is_whole_model(self.pretrained)
        if self.config.expert != "both" and len(available) == 1 and is_whole:
            raise ConfigError(
                f"expert {self.config.expert}: this model has one transformer for all noise levels; remove expert"
            )
        return parts_to_train(available, self.config.expert)

    @cached_property
    def boundary(self) -> float | None:
        """The noise level that divides the high-noise and the low-noise expert; None for a single transformer."""
        if self.pretrained is not None:
            return self.pretrained.boundary_ratio if len(self.pretrained.transformers) > 1 else None
        return BOUNDARIES.get(self.model_name)

    @cached_property
    def transformer(self) -> dict[str, Any]:
        """The configuration of the transformer, which two experts share."""
        config = transformer_config(self.pretrained, self.config.model_config, part=self.trained[0])
        refuse_channels(config, f"model_path {self.config.model_path}" if self.pretrained else "model_config")
        return config

    @cached_property
    def weight_files(self) -> dict[str, Weights]:
        """The pretrained weights of each transformer."""
        assert self.pretrained is not None
        return {name: open_weights(self.pretrained.transformers[name]) for name in self.trained}

    @cached_property
    def encoders(self) -> Encoders:
        """The VAE and the text encoder."""
        parts = describe(self.config.parts_path, "parts_path") if self.config.parts_path else self.pretrained
        encoders: Encoders
        if parts is not None and parts.kind == "pipeline":
            encoders = FolderEncoders(parts, self.transformer)
        elif self.model_name in TINY_NAMES:
            encoders = TinyEncoders(self.transformer)
        else:
            encoders = no_encoders(self.transformer, parts.text_length if parts else TEXT_LENGTH)
        if self.config.text_dtype == "float32":
            encoders.text_dtype = torch.float32
        return encoders

    @cached_property
    def flow(self) -> FlowLoss:
        """The training objective."""
        config, by_size = self.config, self.config.shift == "auto"
        shift = 1.0 if by_size else float(config.shift)
        levels = NoiseLevels(config.sigma_sampling, config.logit_mean, config.logit_std, config.mode_scale, shift)
        parts, boundary = self.trained, self.boundary
        if boundary is None and config.expert != "both":  # the user's file contains only one of two experts
            parts, boundary = parts_to_train((HIGH, LOW), config.expert), boundary_for(self.transformer)
        low, high = levels_of(parts, boundary)
        factor = self.encoders.geometry.spatial_factor
        first_frame = config.first_frame
        if config.condition == "first" and not self.condition.has_channels:
            first_frame = first_frame or 1.0
        return FlowLoss(
            *(levels, low, high, by_size, factor, config.caption_dropout, first_frame, config.unmasked_weight)
        )

    @cached_property
    def condition(self) -> ConditionKind:
        """The frames of a video that the model is given."""
        return kind_of(self.transformer, self.config.condition, has_token_times=self.has_token_times)

    @property
    def has_token_times(self) -> bool:
        """Whether the model takes one timestep per token (TI2V), so the first frame can be noise-free."""
        if self.pretrained is None and int(self.transformer["in_channels"]) == _TI2V_CHANNELS:
            return True
        parts = describe(self.config.parts_path, "parts_path") if self.config.parts_path else None
        return any(model is not None and model.expand_timesteps for model in (self.pretrained, parts))


def _is_whole_model(folder: WanFolder) -> bool:
    """Whether a folder holds a whole model, not just one of two experts."""
    return folder.kind == "pipeline" or folder.expand_timesteps
