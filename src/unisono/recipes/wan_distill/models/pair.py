"""The teacher and the student of a run, as the settings describe them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from unisono.errors import ConfigError
from unisono.recipes.common.fingerprint import of_model
from unisono.recipes.wan.checks import check_positions
from unisono.recipes.wan.models.encoders import Encoders, FolderEncoders
from unisono.recipes.wan.models.experts import HIGH, LOW
from unisono.recipes.wan.models.load import WanFolder, describe, transformer_config
from unisono.recipes.wan.models.unsupported import refuse_given_frames
from unisono.recipes.wan.models.weights import Weights, open_weights
from unisono.recipes.wan_distill.models.student import Student, complete_config, student_of
from unisono.recipes.wan_distill.models.teacher import Guidance
from unisono.recipes.wan_distill.models.tiny_teacher import folder_of
from unisono.recipes.wan_distill.settings import TINY_STUDENT

_DEFAULT_SIDE = 512  # pixels


class ModelPair:
    """The teacher and the student, derived from the settings; each property is computed on first use."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def is_tiny(self) -> bool:
        """Whether the teacher is the built-in tiny model."""
        return str(self.config.teacher_path).lower() == "tiny"

    @cached_property
    def teacher(self) -> WanFolder:
        """The model at teacher_path."""
        return describe(folder_of() / "pipeline" if self.is_tiny else self.config.teacher_path, "teacher_path")

    @cached_property
    def teacher_config(self) -> Mapping[str, Any]:
        """The configuration of the teacher's transformer, which two experts share."""
        config = transformer_config(self.teacher, part=next(iter(self.teacher.transformers)))
        refuse_given_frames(config, f"teacher_path {self.config.teacher_path}")
        return config

    @property
    def boundary(self) -> float | None:
        """The noise level that divides the teacher's experts; None for a single transformer."""
        return self.teacher.boundary_ratio if len(self.teacher.transformers) > 1 else None

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the teacher's weights and configuration."""
        files = [*self.teacher.transformers.values(), *([self.lora] if self.lora else [])]
        return of_model(files, str(self.teacher.boundary_ratio))

    @property
    def lora(self) -> Path | None:
        """The LoRA that is part of the teacher."""
        return Path(self.config.lora_path).expanduser() if self.config.lora_path else None

    @cached_property
    def guidance(self) -> Guidance:
        """The teacher's guidance scales."""
        high, low = self.config.guidance, self.config.guidance_2
        return Guidance(high, high if low is None else low)

    @property
    def source_weights(self) -> Weights:
        """The weights from which the student's are taken: the teacher's, or those of its low-noise expert."""
        return open_weights(self.teacher.transformers.get(LOW) or self.teacher.transformers[HIGH])

    @cached_property
    def parts(self) -> WanFolder:
        """The model to take the VAE, text encoder and tokenizer from."""
        return describe(self.config.parts_path, "parts_path") if self.config.parts_path else self.teacher

    @cached_property
    def encoders(self) -> Encoders:
        """The VAE and the text encoder."""
        if self.parts.kind != "pipeline":
            raise ConfigError(
                f"{self.parts.path} has a transformer, but no VAE, text encoder and tokenizer in diffusers' layout; "
                "pass --parts_path FOLDER, a Wan model in that layout"
            )
        encoders = FolderEncoders(self.parts, self.teacher_config)
        if self.is_tiny or self.config.text_dtype == "float32":
            encoders.text_dtype = torch.float32
        return encoders

    @cached_property
    def student(self) -> Student:
        """The student's configuration; with the objective dmd2, it equals the teacher's."""
        if self.config.objective == "dmd2":
            return Student(complete_config(self.teacher_config))
        if self.is_tiny and self.config.student_config is None:
            return replace(student_of(None, self.teacher_config, 1), config={**self.teacher_config, **TINY_STUDENT})
        return student_of(self.config.student_config, self.teacher_config, self.encoders.geometry.spatial_factor)

    @cached_property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of a sample's latent: channels, frames, height, width."""
        geometry, side = self.encoders.geometry, self.student.pixels or _DEFAULT_SIDE
        height, width = self.config.height or side, self.config.width or side
        shape = geometry.shape(self.config.num_frames, height, width)
        for config in (self.teacher_config, self.student.config):
            check_positions([shape], config, geometry.spatial_factor)
        return shape

    @cached_property
    def text_tokens(self) -> int:
        """Number of tokens to which prompts are truncated."""
        return min(self.encoders.text_length, self.student.text_tokens or self.encoders.text_length)
