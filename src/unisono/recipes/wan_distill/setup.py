"""What is distilled: teacher, student, prompts and sizes; all that follows from the settings, found out when needed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import ConfigError
from unisono.recipes.wan.checks import check_positions
from unisono.recipes.wan_distill.settings import TINY_STUDENT

if TYPE_CHECKING:  # `unisono train wan-distill --help` need not wait for torch
    from torch import Tensor

    from unisono.recipes.wan.data.cache import Cache
    from unisono.recipes.wan.models.companions import Companions
    from unisono.recipes.wan.models.load import WanFolder
    from unisono.recipes.wan.models.weights import Weights
    from unisono.recipes.wan_distill.drawing import Drawing
    from unisono.recipes.wan_distill.inherit import Inheritance
    from unisono.recipes.wan_distill.measure import Took
    from unisono.recipes.wan_distill.prompts import Prompts
    from unisono.recipes.wan_distill.rollouts import Rollouts
    from unisono.recipes.wan_distill.student import Student
    from unisono.recipes.wan_distill.teacher import Guidance


class Setup:
    """The settings of a run, and what they mean."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.device, self.seed, self.folder, self.processes = "cpu", 0, Path(), 1
        """Where the teacher computes, the run's seed, where what it draws is kept, and how many draw; known when a run
        begins."""

    @property
    def is_tiny(self) -> bool:
        """Whether the teacher is the small one that comes along."""
        return str(self.config.teacher_path).lower() == "tiny"

    @cached_property
    def teacher(self) -> WanFolder:
        """What teacher_path is."""
        from unisono.recipes.wan.models.load import describe
        from unisono.recipes.wan_distill.tiny_teacher import folder_of

        return describe(folder_of() / "pipeline" if self.is_tiny else self.config.teacher_path, "teacher_path")

    @cached_property
    def teacher_config(self) -> Mapping[str, Any]:
        """The configuration of the teacher's transformers, which are alike."""
        from unisono.recipes.wan.models.load import transformer_config

        return transformer_config(self.teacher, part=next(iter(self.teacher.transformers)))

    @cached_property
    def fingerprint(self) -> str:
        """A name for what the teacher computes."""
        from unisono.recipes.common.fingerprint import of_model

        return of_model(self.teacher.transformers.values(), str(self.teacher.boundary_ratio))

    @cached_property
    def guidance(self) -> Guidance:
        """The teacher's."""
        from unisono.recipes.wan_distill.teacher import Guidance

        high, low = self.config.guidance, self.config.guidance_2
        return Guidance(high, high if low is None else low)

    @cached_property
    def companions(self) -> Companions:
        """VAE and text encoder."""
        import torch

        from unisono.recipes.wan.models.companions import FromFolder

        if self.parts.kind != "pipeline":
            raise ConfigError(
                f"{self.parts.path} has a transformer, but no VAE, text encoder and tokenizer in diffusers' layout; "
                "give --parts_path FOLDER, a Wan model in that layout, for these"
            )
        companions = FromFolder(self.parts, self.teacher_config)
        if self.is_tiny:
            companions.text_dtype = torch.float32
        return companions

    @cached_property
    def parts(self) -> WanFolder:
        """The model whose other parts are used."""
        from unisono.recipes.wan.models.load import describe

        return describe(self.config.parts_path, "parts_path") if self.config.parts_path else self.teacher

    @cached_property
    def student(self) -> Student:
        """What the student is."""
        from unisono.recipes.wan_distill.student import student_of

        if self.is_tiny and self.config.student_config is None:
            return replace(student_of(None, self.teacher_config, 1), config={**self.teacher_config, **TINY_STUDENT})
        return student_of(self.config.student_config, self.teacher_config, self.companions.geometry.space)

    @cached_property
    def prompts(self) -> Prompts:
        """What is drawn."""
        from unisono.recipes.wan_distill.prompts import prompts_of

        return prompts_of(self.config.data_path, self.config.eval_data_path, self.config.num_eval)

    def check(self) -> None:
        """Mistakes that can be told before anything is computed."""
        from unisono.recipes.wan.models.weights import open_weights
        from unisono.recipes.wan_distill.inherit import check_plan
        from unisono.recipes.wan_distill.student import whole_config

        _ = self.prompts, self.preview_prompts, self.student, self.shape
        self.companions.check_files()
        for place in self.teacher.transformers.values():
            open_weights(place)
        if self.config.init == "teacher":
            check_plan(whole_config(self.teacher_config), whole_config(self.student.config), self.config.layers)
        if self.config.feature_weight:
            if len(self.teacher.transformers) > 1:
                raise ConfigError(
                    "feature_weight: a teacher of two experts has no one layer to compare with; leave it out"
                )
            ours, theirs = (
                config["num_attention_heads"] * config["attention_head_dim"]
                for config in (self.student.config, self.teacher_config)
            )
            if ours != theirs:
                raise ConfigError(
                    f"feature_weight compares layers of the same width; the student has {ours}, the teacher {theirs}"
                )

    @cached_property
    def preview_prompts(self) -> list[str]:
        """What previews show."""
        from unisono.recipes.wan.looking import prompts_in

        asked = prompts_in(self.config.sample_prompts, "sample_prompts")
        there = self.prompts.held_out or self.prompts.train
        number = min(self.config.num_previews, len(there))
        return asked or [there[place * len(there) // number] for place in range(number)]

    @cached_property
    def shape(self) -> tuple[int, int, int, int]:
        """Of a latent: channels, frames, height, width."""
        geometry, side = self.companions.geometry, self.student.pixels or 512
        height, width = self.config.height or side, self.config.width or side
        for name, value in (("height", height), ("width", width)):
            if value % geometry.multiple:
                below = max(geometry.multiple, value // geometry.multiple * geometry.multiple)
                raise ConfigError(
                    f"{name} {value}: this model draws multiples of {geometry.multiple} pixels; use {below} or "
                    f"{below + geometry.multiple}"
                )
        frames = 1 + (self.config.num_frames - 1) // geometry.time
        shape = geometry.channels, frames, height // geometry.space, width // geometry.space
        for config in (self.teacher_config, self.student.config):
            check_positions([shape], config, geometry.space)
        return shape

    # Text ----------------------------------------------------------------------------------------------------------

    @cached_property
    def text_tokens(self) -> int:
        """Tokens that a prompt is cut to."""
        return min(self.companions.text_length, self.student.text_tokens or self.companions.text_length)

    @cached_property
    def texts(self) -> Cache:
        """The rows of all prompts."""
        from unisono.recipes.wan.data.cache import Cache, CacheSettings
        from unisono.recipes.wan.data.cut import Cut

        companions = self.companions
        told = CacheSettings(
            vae="none",
            text=companions.fingerprints()[1],
            geometry=companions.geometry,
            text_width=companions.text_width,
            text_length=self.text_tokens,
            cut=Cut(1),
            text_dtype=companions.text_dtype,
        )
        prompts = [*self.prompts.train, *self.prompts.held_out, *self.preview_prompts, self.config.negative_prompt]
        return Cache(self.folder, [], told, list(dict.fromkeys(prompts)))

    def rows(self, prompt: str) -> Tensor:
        """[text length, width] what a transformer gets for a prompt."""
        from unisono.recipes.wan.models.text import pad

        return pad(self.texts.text(prompt), self.companions.text_length)

    # What the teacher draws ----------------------------------------------------------------------------------------

    @cached_property
    def drawing(self) -> Drawing:
        """How the teacher draws what is learned from."""
        from unisono.recipes.common.fingerprint import together
        from unisono.recipes.wan.objective import NoiseLevels
        from unisono.recipes.wan_distill.drawing import Drawing
        from unisono.recipes.wan_distill.teacher import type_of

        config = self.config
        computes_in = str(type_of(config.teacher_dtype, self.device)).removeprefix("torch.")
        drawing = Drawing(
            teacher=together(self.fingerprint, self.companions.fingerprints()[1]),
            how=self.how,
            seed=self.seed,
            shape=self.shape,
            sampler=config.teacher_sampler,
            steps=config.teacher_steps,
            shift=config.shift,
            guidance=(self.guidance.high, self.guidance.low),
            negative=config.negative_prompt,
            text_tokens=self.text_tokens,
            dtype="float8" if config.teacher_dtype == "float8" else computes_in,
            block=config.rollout_batch,
            spread=NoiseLevels(config.sigma_sampling, shift=config.shift),
        )
        pairs = config.pairs if config.velocity_weight and not config.online else 0
        return replace(drawing, pairs=pairs, points=self._points(drawing.sigmas))

    @cached_property
    def how(self) -> str:
        """What the teacher computes by, as far as it decides the last bits of a sample."""
        from unisono.recipes.wan_distill.teacher import is_offloaded

        config, kind = self.config, self.device.partition(":")[0]
        away = is_offloaded(self.teacher, config.teacher_dtype, config.teacher_device_strategy, self.device)
        compiled = kind == "cuda" and config.compile_teacher and not away and config.teacher_dtype != "float8"
        return f"{kind}, compiled" if compiled else kind

    def _points(self, sigmas: Sequence[float]) -> tuple[int, ...]:
        """Which steps of the sampler are kept: evenly spaced, or the few that the student takes."""
        config = self.config
        if config.few_step_weight:  # their levels are some of the teacher's: checks.py sees to it
            return tuple(range(0, config.teacher_steps, config.teacher_steps // config.few_steps))
        number = min(config.trajectory_points, len(sigmas)) if config.trajectory_weight else 0
        return tuple(place * len(sigmas) // number for place in range(number))

    def rollouts(self, split: str, stage: int = 0) -> Rollouts:
        """Those to learn from in a stage of the run (train), to evaluate with (eval), or to look at (preview)."""
        from unisono.recipes.wan_distill.rollouts import Rollouts

        folder, config = self.folder / "rollouts", self.config
        if split == "train":
            shared_out = stage > 0 and config.teacher_device_strategy == "balanced"  # which is not compiled
            drawing = replace(self.drawing, how=self.device.partition(":")[0]) if shared_out else self.drawing
            return Rollouts(folder, drawing, self.prompts.train, config.rollouts, stage * config.rollouts)
        plain = replace(self.drawing, pairs=0, points=())
        if split == "preview":
            return Rollouts(folder, plain, self.preview_prompts, 1)
        levels = replace(plain, pairs=config.eval_levels, fixed=True)
        return Rollouts(folder, levels, self.prompts.held_out, config.eval_rollouts)

    def student_scheduler(self) -> tuple[Any, int]:
        """What the student draws with, and in how many steps."""
        from unisono.recipes.wan_distill.drawing import scheduler_of

        config = self.config
        sampler, steps = config.teacher_sampler, config.teacher_steps
        if config.few_step_weight:
            sampler, steps = "euler", config.few_steps
        return scheduler_of(sampler, config.shift, steps), steps

    @property
    def times_file(self) -> Path:
        """Where it is kept how long the teacher took for a sample; another machine, or more company, has another."""
        import torch

        from unisono.recipes.common.fingerprint import together

        name = torch.cuda.get_device_name(self.device) if self.device.startswith("cuda") else "cpu"
        told = together("median", self.rollouts("train").key, name, torch.get_num_threads(), self.processes)
        return self.folder / f"seconds_{told[:16]}.json"

    # What the student inherits -------------------------------------------------------------------------------------

    @property
    def giver(self) -> Weights:
        """The transformer whose weights the student begins with: of two experts the one that knows details."""
        from unisono.recipes.wan.models.experts import HIGH, LOW
        from unisono.recipes.wan.models.weights import open_weights

        return open_weights(self.teacher.transformers.get(LOW) or self.teacher.transformers[HIGH])

    @property
    def inheritance_file(self) -> Path:
        """Where it is kept what the student takes."""
        from unisono.recipes.common.fingerprint import together

        parts: list[Any] = [self.fingerprint, self.student.config, self.config.layers, self.student.factor, self.seed]
        if self.config.layers == "importance":  # measured on what previews show
            parts.append(self.rollouts("preview").key)
        told = together(*parts)
        return self.folder / f"inheritance_{told[:16]}.json"

    def inheritance(self) -> Inheritance:
        """What the student takes."""
        from unisono.recipes.wan_distill.inherit import Inheritance

        return Inheritance(**json.loads(self.inheritance_file.read_text()))

    def is_planned(self) -> bool:
        """Whether it is known what the student takes; a damaged file counts as none."""
        from unisono.recipes.wan_distill.inherit import is_whole

        try:
            return is_whole(self.inheritance(), self.teacher_config, self.student.config)
        except (OSError, ValueError, TypeError, AttributeError, KeyError, IndexError, RecursionError):
            return False

    def teacher_took(self) -> Took | None:
        """How long the teacher took for a sample, where that was measured."""
        from unisono.recipes.wan_distill.measure import Took

        try:
            told = json.loads(self.times_file.read_text())
            seconds, blocks = told["seconds_per_sample"], told["blocks"]
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None
        fits = isinstance(seconds, float) and 0 < seconds < math.inf and isinstance(blocks, int)
        return Took(seconds, blocks) if fits else None
