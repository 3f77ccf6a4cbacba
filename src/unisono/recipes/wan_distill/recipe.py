"""The recipe `wan-distill`: trains a smaller Wan to generate what a large one generates from the same prompts.

The teacher generates samples from the prompts once (`data/rollouts.py`) and is then freed, or stays in memory
(`online`). The student (`models/student.py`) starts from a subset of the teacher's weights (`models/pruning.py`) and
learns the velocity of the guided teacher (`loss.py`), so that it needs no guidance. `previews.py` shows both side by
side, and `export.py` writes a pipeline that diffusers loads. `setup.py` derives all of this from the settings.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from unisono.engine.recipe import Loss, Work
from unisono.errors import ConfigError
from unisono.recipes.wan.recipe import WanRecipe
from unisono.recipes.wan.settings import DEFAULTS
from unisono.recipes.wan_distill import settings
from unisono.recipes.wan_distill.checks import check_config

if TYPE_CHECKING:  # `unisono train wan-distill --help` need not wait for torch
    from torch import nn

    from unisono.data.noise import Noise
    from unisono.parallel.materialize import Weights
    from unisono.recipes.wan_distill.data.rollouts import Samples
    from unisono.recipes.wan_distill.evaluation import SampleTime
    from unisono.recipes.wan_distill.loss import DistillationLoss
    from unisono.recipes.wan_distill.models.teacher import Teacher
    from unisono.recipes.wan_distill.setup import Setup


class WanDistill(WanRecipe):
    """Distils a Wan model into a smaller one, from prompts alone."""

    defaults: ClassVar[Mapping[str, Any]] = DEFAULTS | {"batch_size": 2, "learning_rate": 1e-4, "ema_decay": 0.999}
    aliases: ClassVar[Mapping[str, str]] = settings.ALIASES
    fixed: ClassVar[Sequence[str]] = (
        # The split of the prompts, and the number of samples per prompt:
        *("data_path", "eval_data_path", "num_eval", "rollouts", "eval_rollouts", "refresh_every"),
        # The teacher's samples, and the noise levels at which its velocity is stored:
        *("teacher_path", "parts_path", "height", "width", "num_frames", "teacher_sampler", "teacher_steps"),
        *("text_dtype", "teacher_dtype", "guidance", "guidance_2", "negative_prompt", "shift", "sigma_sampling"),
        *("rollout_batch", "pairs", "eval_levels", "trajectory_points", "few_steps", "online"),
        # The student:
        *("student_config", "init", "layers"),
    )
    Config = settings.Config
    has_frozen_weights = True  # those of the teacher

    @classmethod
    def presets(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Defaults for the tiny teacher on a CPU; a loss on hidden states needs uncompiled blocks."""
        defaults: dict[str, Any] = {"compile": False} if values["feature_weight"] else {}
        if str(values["teacher_path"]).lower() == "tiny":
            by_epochs = values["num_epochs"] is not None  # the user has set the length of the run
            tiny = settings.TINY.items()
            defaults |= {name: value for name, value in tiny if not (by_epochs and name == "max_steps")}
        return defaults

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        check_config(config)
        self.refresh_every = config.refresh_every if config.online else 0
        self.teacher_time: SampleTime | None = None
        self.student_time: SampleTime | None = None
        """Time per sample of each model, in batches of the same size; None until measured."""
        self._is_timed = False
        self._teacher: Teacher | None = None
        self._samples: Samples | None = None

    @cached_property
    def setup(self) -> Setup:
        """The models, prompts and roll-outs of the run."""
        from unisono.recipes.wan_distill.setup import Setup

        return Setup(self.config, self.base_precision)

    def check_settings(self, settings: Any) -> None:
        """Rejects two storage formats for the teacher, and online with dp (one teacher for all GPUs) or cuda_graph."""
        super().check_settings(settings)
        if self.config.teacher_dtype == "float8" and settings.precision.base_precision != "auto":
            raise ConfigError(
                f"teacher_dtype float8 and base_precision {settings.precision.base_precision} both say how the teacher "
                "is stored; remove one of them"
            )
        if self.config.online and settings.parallel.strategy == "dp":
            raise ConfigError("online: --strategy dp has the teacher on one GPU only; use ddp or fsdp")
        if self.config.online and settings.precision.cuda_graph:
            raise ConfigError("online: a step that queries the teacher cannot be recorded; remove --cuda_graph")

    def metric_names(self) -> Collection[str]:
        """The distance between student and teacher; for the tiny teacher also the accuracy of generated samples."""
        from unisono.recipes.wan_distill.data.prompts import labels

        held_out = self.setup.prompts.held_out
        if not held_out:
            return ()
        recognised = ("colour", "shape") if self.setup.is_tiny and None not in labels(held_out) else ()
        names = (f"{who}{what}" for who in ("", "teacher_") for what in recognised)
        return ("loss", "velocity_error", "latent_error", "seconds_per_sample", *names)

    # Before training: the teacher's roll-outs ----------------------------------------------------------------------

    def prepare(self, work: Work) -> None:
        """Encodes the prompts, generates the roll-outs, and plans the student's initial weights."""
        from unisono.recipes.wan_distill.preparation import prepare

        setup = self.setup
        setup.device, setup.seed, setup.num_ranks = work.device, work.seed, len(work.gather(None))
        setup.folder = Path(self.config.cache_dir).expanduser() if self.config.cache_dir else work.folder
        prepare(setup, self.kernel, work)

    def refresh(self, step: int, work: Work) -> None:
        """With the setting online, generates new samples for the next steps."""
        assert self._teacher is not None
        rollouts = self.setup.rollouts("train", step // self.refresh_every)
        teacher, purpose = self._teacher, f"for the steps after {step}"
        if teacher.is_sharded:
            rollouts.fill_together(work, teacher, self.setup.text, purpose)
        else:
            rollouts.fill(work, lambda: teacher, self.setup.text, purpose)
        if not work.meet():
            self._samples = rollouts.open()

    # The models ----------------------------------------------------------------------------------------------------

    def model(self) -> nn.Module:
        """The student; on the meta device when it starts from the teacher's weights."""
        from unisono.recipes.wan.models.experts import HIGH, Experts
        from unisono.recipes.wan.models.load import build, build_meta
        from unisono.recipes.wan_distill.models.random_weights import initialise_randomly

        if self.config.init == "fresh":
            transformer = build(self.setup.student.config)
            initialise_randomly(transformer, self.setup.seed)
        else:
            transformer = build_meta(self.setup.student.config)
        return Experts({HIGH: self.optimised(transformer)}, None)

    def weights(self, model: nn.Module) -> Weights | None:
        """The subset of the teacher's weights that `prepare` planned; None for random weights."""
        from unisono.recipes.wan_distill.models.pruned_weights import PrunedWeights

        if self.config.init == "fresh":
            return None
        return PrunedWeights(lambda: (self.setup.source_weights, self.setup.pruning_plan()))

    def frozen(self) -> Mapping[str, nn.Module]:
        """With the setting online, the teacher."""
        from unisono.recipes.wan_distill.models.teacher import Teacher, build_on_meta, dtype_of
        from unisono.recipes.wan_distill.preparation import load

        if not self.config.online:
            return {}
        setup = self.setup
        if self.config.teacher_device_strategy == "balanced":
            dtype = dtype_of(self.config.teacher_dtype, setup.device)
            experts = build_on_meta(setup.teacher, dtype, is_sharded=True)
            self._teacher = Teacher(experts, setup.guidance, dtype, is_sharded=True)
        else:
            messages: list[str] = []
            self._teacher = load(setup, Work(setup.folder, device=setup.device, _say=messages.append))
            self.remarks = [*self.remarks, *messages]
        for transformer in self._teacher.experts.children():
            self.divided(transformer)
        return {} if self._teacher.places_itself else dict(self._teacher.experts.named_children())

    def sharded(self) -> Mapping[str, tuple[Weights, Sequence[str]]]:
        """With teacher_device_strategy balanced, the teacher, whose weights are sharded."""
        from unisono.recipes.wan.models.load import build_meta
        from unisono.recipes.wan.models.weights import open_weights
        from unisono.recipes.wan_distill.models.teacher import float32_names

        if not (self.config.online and self.config.teacher_device_strategy == "balanced"):
            return {}
        in_float32 = float32_names(build_meta(self.setup.teacher_config))
        paths = self.setup.teacher.transformers.items()
        return {name: (open_weights(path), in_float32) for name, path in paths}

    # Training ------------------------------------------------------------------------------------------------------

    def dataset(self, split: str) -> Any:
        """The teacher's samples."""
        from unisono.recipes.wan.checks import check_tokens
        from unisono.recipes.wan_distill.data.datasets import EvalDataset, OnlineDataset, RolloutDataset

        setup = self.setup
        check_tokens([setup.shape], setup.student.config["patch_size"], self.context_size)
        self.teacher_time = setup.teacher_time()
        self.remarks = self._remarks()
        if split == "eval":
            if not setup.prompts.held_out:
                return None
            return EvalDataset(setup.rollouts("eval").open(), setup.text, has_labels=setup.is_tiny)
        self._samples = setup.rollouts("train").open()
        return (OnlineDataset if self.refresh_every else RolloutDataset)(self._samples, setup.text)

    def _remarks(self) -> list[str]:
        from unisono.recipes.wan_distill.models.student import num_weights

        setup = self.setup
        student, teacher = (num_weights(config) for config in (setup.student.config, setup.teacher_config))
        teacher *= len(setup.teacher.transformers)
        remarks = [f"the student has {student:,} weights, {student / teacher:.2f} of the teacher's {teacher:,}"]
        if self.config.init == "teacher":
            remarks.append(setup.pruning_plan().summary)
        return [*remarks, *setup.student.remarks, *setup.prompts.remarks]

    @cached_property
    def _distillation_loss(self) -> DistillationLoss:
        from unisono.recipes.wan_distill.loss import DistillationLoss, Weights

        config, setup = self.config, self.setup
        weights = Weights(
            velocity=config.velocity_weight,
            flow=config.flow_weight,
            trajectory=config.trajectory_weight,
            few_step=config.few_step_weight,
            feature=config.feature_weight,
        )
        layers = setup.pruning_plan().layers if config.feature_weight else ()
        empty = setup.text(config.negative_prompt) if config.online else None
        return DistillationLoss(weights, setup.rollout_spec, self._teacher, empty, layers, self.context.sum)

    def loss(self, model: nn.Module, batch: Any, noise: Noise) -> Loss:
        """The weighted sum of the losses: the mean over each sample's elements, summed over samples."""
        from unisono.recipes.wan_distill.data.datasets import stacked

        assert self._samples is not None
        data = batch["data"] if "data" in batch else stacked(self._samples, batch["number"])
        return self._distillation_loss.loss(model, batch, data, noise, self.compute_dtype(model, data))  # type: ignore[arg-type]

    def before_evaluation(self, model: nn.Module) -> None:
        """Measures the student's time per sample, only once because training does not change it."""
        from unisono.recipes.wan_distill.evaluation import time_student

        if not self._is_timed:
            self._is_timed = True
            self.student_time = time_student(self, model)  # type: ignore[arg-type]

    def evaluate(self, model: nn.Module, batch: Any, noise: Noise) -> Mapping[str, Any]:
        """The distance between student and teacher, and the student's speed-up."""
        from unisono.recipes.wan_distill.evaluation import held_out_metrics

        return held_out_metrics(self, model, batch, self.compute_dtype(model, batch["data"]))  # type: ignore[arg-type]

    def preview(self, model: nn.Module, step: int) -> Mapping[str, Any] | None:
        """Samples of teacher and student from the same prompts and noise, side by side."""
        from unisono.recipes.wan_distill.previews import previews

        return previews(self, model)  # type: ignore[arg-type]

    def export(self, model: nn.Module, folder: Path) -> None:
        """Writes a folder for `WanPipeline.from_pretrained`."""
        from unisono.recipes.wan_distill.export import write_student

        description = write_student(self.setup, model, folder, self.export_format)  # type: ignore[arg-type]
        print(f"unisono: {description}", file=sys.stderr)
