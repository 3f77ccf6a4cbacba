"""The objective dmd2: the student learns to sample, in a few steps, from the guided teacher's distribution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unisono.engine.recipe import Group, Loss
from unisono.recipes.common.lora_base import LoraBase
from unisono.recipes.wan.models.adapters import ADAPTER, activate
from unisono.recipes.wan.models.experts import Experts
from unisono.recipes.wan.models.load import build_meta
from unisono.recipes.wan.models.lora import add_lora, load_lora
from unisono.recipes.wan.models.weights import ExpertWeights, open_weights
from unisono.recipes.wan_distill.data.datasets import PromptDataset
from unisono.recipes.wan_distill.dmd2.export import write_few_step_student
from unisono.recipes.wan_distill.dmd2.few_steps import FewSteps
from unisono.recipes.wan_distill.dmd2.loss import MatchingLoss
from unisono.recipes.wan_distill.dmd2.roles import (
    OF_TEACHER,
    SCORE,
    STUDENT,
    LoraRoles,
    Roles,
    StudentAndScore,
    WeightsOfBoth,
    WholeRoles,
    is_score,
    is_student,
)
from unisono.recipes.wan_distill.regression import load_quietly
from unisono.recipes.wan_flow.model_checks import lora_targets

if TYPE_CHECKING:
    from torch import Tensor, nn

    from unisono.data.noise import Noise
    from unisono.engine.recipe import Work
    from unisono.parallel.materialize import Weights
    from unisono.recipes.wan_distill.models.teacher import Teacher
    from unisono.recipes.wan_distill.recipe import WanDistill


class Dmd2:
    """The models, the data and the losses of a run with this objective."""

    def __init__(self, recipe: WanDistill) -> None:
        self._recipe, self.config, self.setup = recipe, recipe.config, recipe.setup
        self._teacher: Teacher | None = None
        self._base_to_record: LoraBase | None = None  # None once the first step has recorded the base weights

    def groups(self) -> Sequence[Group]:
        """Returns two groups: the score, trained for several steps to follow the student, and the student, for one."""
        config = self.config
        return [
            Group(SCORE, is_score, config.score_steps, learning_rate=config.score_learning_rate, ema_decay=0.0),
            Group(STUDENT, is_student),
        ]

    def refresh(self, step: int, work: Work) -> None:
        """Never called, because the student generates its own samples."""

    # The models ----------------------------------------------------------------------------------------------------

    @property
    def _is_lora(self) -> bool:
        return bool(self.config.lora_rank)

    @property
    def _base(self) -> LoraBase | None:
        if not self._is_lora or self._recipe.prepared is None:
            return None
        return LoraBase(self._recipe.prepared, self.setup.teacher.transformers.values(), self._recipe.base_precision)

    def prepare(self, work: Work) -> None:
        """Checks that a resumed run has the base weights that its LoRAs were trained with."""
        self._recipe.prepared = work.folder
        if self._base is not None:
            self._base.check(f"teacher_path {self.config.teacher_path}")
            self._base_to_record = self._base.for_one_process(work)

    def model(self) -> Experts | StudentAndScore:
        """Builds the teacher's transformers with two LoRAs, or two copies of the transformers, on the meta device."""
        if not self._is_lora:
            return StudentAndScore(self._experts(), self._experts())
        model = self._experts()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_student(name) or is_score(name))
        activate(model, self._student_adapters)
        return model

    def transformers(self, model: Any) -> list[nn.Module]:
        """Returns the transformers in the trained module."""
        experts = model.children() if isinstance(model, StudentAndScore) else [model]
        return [transformer for each in experts for transformer in each.children()]

    @property
    def _student_adapters(self) -> list[str]:
        return [OF_TEACHER, ADAPTER] if self.config.lora_path else [ADAPTER]

    def _experts(self) -> Experts:
        setup = self.setup
        transformers = {name: build_meta(setup.teacher_config) for name in setup.teacher.transformers}
        for name, transformer in transformers.items():
            if self._is_lora:
                self._add_loras(name, transformer)
            self._recipe.optimised(transformer)
        return Experts(transformers, setup.boundary)

    def _add_loras(self, name: str, transformer: nn.Module) -> None:
        config = self.config
        if config.lora_path:
            load_lora(transformer, Path(config.lora_path).expanduser(), part=name, adapter=OF_TEACHER)
        for adapter in (ADAPTER, SCORE):
            add_lora(transformer, config.lora_rank, config.lora_alpha, lora_targets(config), adapter=adapter)

    def weights(self) -> Weights:
        """Returns the teacher's weights, read from their files row by row."""
        if self._base is not None:
            self._base.check(f"teacher_path {self.config.teacher_path}")  # a run may be exported long after prepare()
        files = {name: open_weights(path) for name, path in self.setup.teacher.transformers.items()}
        return ExpertWeights(files) if self._is_lora else WeightsOfBoth(ExpertWeights(files))

    def frozen(self) -> Mapping[str, nn.Module]:
        """Returns the teacher; nothing with LoRAs, because the teacher is then part of the model."""
        if self._is_lora:
            return {}
        self._teacher = load_quietly(self._recipe)
        for transformer in self._teacher.experts.children():
            self._recipe.divided(transformer)
        return {} if self._teacher.places_itself else dict(self._teacher.experts.named_children())

    def sharded(self) -> Mapping[str, tuple[Weights, Sequence[str]]]:
        """Returns nothing: dmd2 does not support a sharded teacher."""
        return {}

    # Training and evaluation ---------------------------------------------------------------------------------------

    def dataset(self) -> PromptDataset:
        """Returns only the prompts, because the student generates its own samples."""
        return PromptDataset(self.setup.prompts.train, self.setup.text)

    def remarks(self) -> list[str]:
        """Returns notes about the student for the user."""
        config = self.config
        kind = f"a LoRA of rank {config.lora_rank}" if self._is_lora else "all weights"
        return [
            f"the student ({kind}) samples in {config.few_steps} steps without guidance; each of its training steps "
            f"follows {config.score_steps} of the score of its own samples"
        ]

    @cached_property
    def _roles(self) -> Roles:
        if self._is_lora:
            return LoraRoles(self.setup.guidance, has_own_lora=bool(self.config.lora_path))
        assert self._teacher is not None
        return WholeRoles(self._teacher)

    @cached_property
    def _loss(self) -> MatchingLoss:
        setup = self.setup
        steps = FewSteps.of(*setup.student_scheduler())
        levels = setup.rollout_spec.spread
        return MatchingLoss(self._roles, steps, setup.shape, levels, setup.text(self.config.negative_prompt))

    def loss(self, model: Any, batch: Any, noise: Noise) -> Loss:
        """Returns the loss of the group that this step trains."""
        if self._base_to_record is not None and not self._recipe.is_estimate:
            self._base_to_record.record()
            self._base_to_record = None
        losses, text = self._loss, batch["text"]
        of_group = losses.of_score if self._recipe.group == SCORE else losses.of_student
        step = losses.steps.exit_at(self.setup.seed, self._recipe.clock.step)
        # The latents will have torch's default dtype, like this empty tensor. The text embeddings are cast to match,
        # because they may be stored in lower precision (text_dtype).
        dtype = self._recipe.compute_dtype(model, torch.empty(0, device=text.device))
        return of_group(model, text.to(dtype), noise, step)

    def student(self, model: Any) -> Experts:
        """Returns the student, to sample from."""
        if isinstance(model, StudentAndScore):
            return model.student
        activate(model, self._student_adapters)
        return model  # type: ignore[no-any-return]

    def metrics(self, student: Experts, batch: Mapping[str, Any], text: Tensor) -> dict[str, Any]:
        """Returns no metrics, because only those of generated samples apply to this objective."""
        return {}

    def metric_names(self) -> list[str]:
        """Returns no names, because this objective has no metrics of its own."""
        return []

    def export(self, model: Any, folder: Path, file_format: str | None) -> str:
        """Writes the student's LoRA, or a folder for `WanPipeline.from_pretrained`; returns a description."""
        return write_few_step_student(self.setup, self.student(model), folder, file_format, is_lora=self._is_lora)
