"""Derives the models, prompts and roll-outs of a run from the settings."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.quantize.products import has_fp8_products
from unisono.recipes.common.fingerprint import combined
from unisono.recipes.wan.data.cache import Cache, CacheSettings
from unisono.recipes.wan.data.crop import Crop
from unisono.recipes.wan.models.text import pad
from unisono.recipes.wan.objective import NoiseLevels
from unisono.recipes.wan.previews import prompts_in
from unisono.recipes.wan_distill.data.prompts import Prompts, prompts_of
from unisono.recipes.wan_distill.data.rollout_spec import RolloutSpec, scheduler_of
from unisono.recipes.wan_distill.data.rollouts import Rollouts
from unisono.recipes.wan_distill.evaluation import SampleTime
from unisono.recipes.wan_distill.models.pair import ModelPair
from unisono.recipes.wan_distill.models.pruning import PruningPlan, is_valid
from unisono.recipes.wan_distill.models.teacher import dtype_of, is_offloaded

_DAMAGED = (OSError, ValueError, TypeError, AttributeError, KeyError, IndexError, RecursionError)


class Setup(ModelPair):
    """The models, prompts and roll-outs of a run; each property is computed on first use."""

    def __init__(self, config: Any, base_precision: str = "auto") -> None:
        """`base_precision` is the value of that setting, which applies to the teacher's weights."""
        super().__init__(config)
        self.base_precision = base_precision
        # prepare() sets these: the teacher's device, the run's seed, the roll-outs' folder, and the number of ranks.
        self.device, self.seed, self.folder, self.num_ranks = "cpu", 0, Path(), 1

    # Prompts -------------------------------------------------------------------------------------------------------

    @cached_property
    def prompts(self) -> Prompts:
        """The training prompts and the held-out prompts."""
        return prompts_of(self.config.data_path, self.config.eval_data_path, self.config.num_eval)

    @cached_property
    def preview_prompts(self) -> list[str]:
        """The prompts for previews: the user's, or some of the dataset's prompts."""
        candidates = self.prompts.held_out or self.prompts.train
        number = min(self.config.num_previews, len(candidates))
        evenly_spaced = [candidates[index * len(candidates) // number] for index in range(number)]
        return prompts_in(self.config.sample_prompts, "sample_prompts") or evenly_spaced

    @cached_property
    def text_cache(self) -> Cache:
        """The text embeddings of all prompts."""
        encoders = self.encoders
        settings = CacheSettings(
            vae="none",
            text=encoders.fingerprints()[1],
            geometry=encoders.geometry,
            text_width=encoders.text_width,
            text_length=self.text_tokens,
            crop=Crop(1),
            text_dtype=encoders.text_dtype,
        )
        prompts = [*self.prompts.train, *self.prompts.held_out, *self.preview_prompts, self.config.negative_prompt]
        return Cache(self.folder, [], settings, list(dict.fromkeys(prompts)))

    def text(self, prompt: str) -> Tensor:
        """Returns the text embedding of a prompt, [text length, width]."""
        return pad(self.text_cache.text(prompt), self.encoders.text_length)

    # Roll-outs: the teacher's samples -------------------------------------------------------------------------------

    @cached_property
    def rollout_spec(self) -> RolloutSpec:
        """The specification of the teacher's training samples."""
        config = self.config
        compute_dtype = str(dtype_of(config.teacher_dtype, self.device)).removeprefix("torch.")
        spec = RolloutSpec(
            teacher=combined(self.fingerprint, self.encoders.fingerprints()[1], *self._quantised),
            how=self.backend,
            seed=self.seed,
            shape=self.shape,
            sampler=config.teacher_sampler,
            steps=config.teacher_steps,
            shift=config.shift,
            guidance=self.guidance,
            negative=config.negative_prompt,
            text_tokens=self.text_tokens,
            dtype="float8" if config.teacher_dtype == "float8" else compute_dtype,
            block=config.rollout_batch,
            spread=NoiseLevels(config.sigma_sampling, shift=config.shift),
        )
        is_stored = config.velocity_weight and not config.online and config.objective == "regression"
        pairs = config.pairs if is_stored else 0
        return replace(spec, pairs=pairs, points=self._points(spec.sigmas))

    @property
    def _quantised(self) -> list[str]:
        """Parts of the teacher's fingerprint that describe its quantisation; fp8 products quantise activations too."""
        if self.base_precision == "auto":
            return []
        has_products = self.base_precision == "fp8" and has_fp8_products(torch.device(self.device))
        return [f"{self.base_precision} products" if has_products else self.base_precision]

    @cached_property
    def backend(self) -> str:
        """The kind of device, and whether the teacher is compiled; both affect the rounding of a sample."""
        config, kind = self.config, self.device.partition(":")[0]
        strategy = config.teacher_device_strategy
        offloaded = is_offloaded(self.teacher, config.teacher_dtype, strategy, self.device, self.base_precision)
        compiled = kind == "cuda" and config.compile_teacher and not offloaded and config.teacher_dtype != "float8"
        return f"{kind}, compiled" if compiled else kind

    def _points(self, sigmas: Sequence[float]) -> tuple[int, ...]:
        """Returns the sampler steps to store: evenly spaced steps, or the few steps that the student takes."""
        config = self.config
        if config.objective == "dmd2":
            return ()
        if config.few_step_weight:  # checks.py guarantees that teacher_steps is a multiple of few_steps
            return tuple(range(0, config.teacher_steps, config.teacher_steps // config.few_steps))
        number = min(config.trajectory_points, len(sigmas)) if config.trajectory_weight else 0
        return tuple(index * len(sigmas) // number for index in range(number))

    def rollouts(self, split: str, refresh: int = 0) -> Rollouts:
        """Returns the roll-outs of a split (train, eval, preview); each refresh has new training roll-outs."""
        folder, config = self.folder / "rollouts", self.config
        if split == "train":
            sharded = refresh > 0 and config.teacher_device_strategy == "balanced"  # a sharded teacher is not compiled
            spec = replace(self.rollout_spec, how=self.device.partition(":")[0]) if sharded else self.rollout_spec
            return Rollouts(folder, spec, self.prompts.train, config.rollouts, refresh * config.rollouts)
        samples_only = replace(self.rollout_spec, pairs=0, points=())
        if split == "preview":
            return Rollouts(folder, samples_only, self.preview_prompts, 1)
        levels = config.eval_levels if config.objective == "regression" else 0
        with_levels = replace(samples_only, pairs=levels, fixed=True)
        return Rollouts(folder, with_levels, self.prompts.held_out, config.eval_rollouts)

    @property
    def splits(self) -> Sequence[str]:
        """The splits for which the teacher generates samples; the first one is used to measure the teacher's time."""
        held_out = ["eval"] if self.prompts.held_out else []
        return [*held_out, "preview"] if self.config.objective == "dmd2" else ["train", *held_out, "preview"]

    @property
    def times_file(self) -> Path:
        """The file with the teacher's seconds per sample, separate for each kind of machine and number of ranks."""
        name = torch.cuda.get_device_name(self.device) if self.device.startswith("cuda") else "cpu"
        key = combined("median", self.rollouts(self.splits[0]).key, name, torch.get_num_threads(), self.num_ranks)
        return self.folder / f"seconds_{key[:16]}.json"

    def teacher_time(self) -> SampleTime | None:
        """Returns the teacher's time per sample; None if it was not measured."""
        try:
            measured = json.loads(self.times_file.read_text())
            seconds, blocks = measured["seconds_per_sample"], measured["blocks"]
        except _DAMAGED:
            return None
        is_valid = isinstance(seconds, float) and 0 < seconds < math.inf and isinstance(blocks, int)
        return SampleTime(seconds, blocks) if is_valid else None

    # The student's initial weights and its sampler -------------------------------------------------------------------

    @property
    def pruning_plan_file(self) -> Path:
        """The file that stores the pruning plan."""
        parts: list[Any] = [self.fingerprint, self.student.config, self.config.layers, self.student.factor, self.seed]
        if self.config.layers == "importance":  # the plan depends on the preview samples, on which it is measured
            parts.append(self.rollouts("preview").key)
        return self.folder / f"inheritance_{combined(*parts)[:16]}.json"

    def pruning_plan(self) -> PruningPlan:
        """Reads the plan that says which of the teacher's weights the student starts from."""
        return PruningPlan(**json.loads(self.pruning_plan_file.read_text()))

    def has_pruning_plan(self) -> bool:
        """Whether the plan's file exists and is valid; a damaged file is treated like a missing one."""
        try:
            return is_valid(self.pruning_plan(), self.teacher_config, self.student.config)
        except _DAMAGED:
            return False

    def student_scheduler(self) -> tuple[Any, int]:
        """Returns the student's scheduler and its number of steps."""
        config = self.config
        sampler, steps = config.teacher_sampler, config.teacher_steps
        if config.few_step_weight or config.objective == "dmd2":
            sampler, steps = "euler", config.few_steps
        return scheduler_of(sampler, config.shift, steps), steps
