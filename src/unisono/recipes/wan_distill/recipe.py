"""The recipe `wan-distill`: trains a smaller or faster Wan model to generate what a large model generates.

With the objective regression (`regression.py`), the teacher generates samples from the prompts once
(`data/rollouts.py`) and is then freed, or stays in memory (`online`). The student (`models/student.py`) starts from a
subset of the teacher's weights (`models/pruning.py`) and learns the velocity of the guided teacher (`loss.py`), so that
it needs no guidance. With the objective dmd2 (`dmd2/`), a student of the teacher's size learns to sample in a few
steps. `previews.py` shows teacher and student side by side, and `export.py` writes a pipeline that diffusers loads.
`setup.py` derives all of this from the settings.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from unisono.engine.recipe import Group, Loss, Work
from unisono.errors import ConfigError
from unisono.recipes.wan.recipe import WanRecipe
from unisono.recipes.wan.settings import DEFAULTS
from unisono.recipes.wan_distill import settings
from unisono.recipes.wan_distill.checks import check_config

if TYPE_CHECKING:  # keeps `unisono train wan-distill --help` from importing torch
    from torch import nn

    from unisono.data.noise import Noise
    from unisono.parallel.materialize import Weights
    from unisono.recipes.wan_distill.dmd2.objective import Dmd2
    from unisono.recipes.wan_distill.evaluation import SampleTime
    from unisono.recipes.wan_distill.regression import Regression
    from unisono.recipes.wan_distill.setup import Setup


class WanDistill(WanRecipe):
    """Distils a Wan model into a smaller or faster model, from prompts alone."""

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
        *("objective", "student_config", "init", "layers"),
        *("lora_rank", "lora_alpha", "lora_targets", "lora_path", "score_steps"),
    )
    Config = settings.Config
    has_frozen_weights = True  # the weights of the teacher

    @classmethod
    def presets(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns defaults for the objective and the tiny teacher; a loss on hidden states disables compiling."""
        defaults: dict[str, Any] = {"compile": False} if values["feature_weight"] else {}
        is_dmd2 = values["objective"] == "dmd2"
        if is_dmd2:
            defaults |= settings.DMD2 if values["lora_rank"] else settings.DMD2_WHOLE
        if str(values["teacher_path"]).lower() == "tiny":
            by_epochs = values["num_epochs"] is not None  # the user has chosen the length of the run in epochs
            tiny = settings.TINY | (settings.TINY_DMD2 if is_dmd2 else {})
            defaults |= {name: value for name, value in tiny.items() if not (by_epochs and name == "max_steps")}
        return defaults

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        check_config(config)
        self.refresh_every = config.refresh_every if config.online else 0
        self.teacher_time: SampleTime | None = None
        self.student_time: SampleTime | None = None
        """Time per sample of each model, in batches of equal size; None until measured."""
        self._is_timed = False

    @cached_property
    def setup(self) -> Setup:
        """The models, prompts and roll-outs of the run."""
        from unisono.recipes.wan_distill.setup import Setup

        return Setup(self.config, self.base_precision)

    @cached_property
    def objective(self) -> Regression | Dmd2:
        """The objective of the run, with its models, data and losses."""
        if self.config.objective == "dmd2":
            from unisono.recipes.wan_distill.dmd2.objective import Dmd2

            return Dmd2(self)
        from unisono.recipes.wan_distill.regression import Regression

        return Regression(self)

    def check_settings(self, settings: Any) -> None:
        """Rejects two storage formats for the teacher, and online or dmd2 with strategies that do not support them."""
        super().check_settings(settings)
        if self.config.teacher_dtype == "float8" and settings.precision.base_precision != "auto":
            raise ConfigError(
                f"teacher_dtype float8 and base_precision {settings.precision.base_precision} both set how the teacher "
                "is stored; remove one of them"
            )
        if self.config.online and settings.parallel.strategy == "dp":
            raise ConfigError("online: --strategy dp has the teacher on one GPU only; use ddp or fsdp")
        if self.config.online and settings.precision.cuda_graph:
            raise ConfigError("online: a step that queries the teacher cannot be recorded; remove --cuda_graph")
        if self.config.objective == "dmd2" and settings.parallel.strategy == "dp":
            raise ConfigError("objective dmd2: --strategy dp copies the model in every step; use ddp or fsdp")

    def metric_names(self) -> Collection[str]:
        """Returns the names of the evaluation metrics."""
        from unisono.recipes.wan_distill.data.prompts import labels

        held_out = self.setup.prompts.held_out
        if not held_out:
            return ()
        recognised = ("colour", "shape") if self.setup.is_tiny and None not in labels(held_out) else ()
        names = (f"{who}{what}" for who in ("", "teacher_") for what in recognised)
        return (*self.objective.metric_names(), "latent_error", "seconds_per_sample", *names)

    # Before training: the teacher's roll-outs ----------------------------------------------------------------------

    def prepare(self, work: Work) -> None:
        """Encodes the prompts, generates the roll-outs, and plans the student's initial weights."""
        from unisono.recipes.wan_distill.preparation import prepare

        setup = self.setup
        setup.device, setup.seed, setup.num_ranks = work.device, work.seed, len(work.gather(None))
        setup.folder = Path(self.config.cache_dir).expanduser() if self.config.cache_dir else work.folder
        prepare(setup, self.kernel, work)
        self.objective.prepare(work)

    def refresh(self, step: int, work: Work) -> None:
        """With the setting online, generates new samples for the next steps."""
        self.objective.refresh(step, work)

    # The models ----------------------------------------------------------------------------------------------------

    def groups(self) -> Sequence[Group]:
        """Returns the groups of weights: the score and the student with the objective dmd2, otherwise none."""
        return self.objective.groups()

    def model(self) -> nn.Module:
        """Returns the student; with the objective dmd2, the student and the score."""
        return self.objective.model()

    def weights(self, model: nn.Module) -> Weights | None:
        """Returns the initial weights, from the teacher's files; None for random weights."""
        return self.objective.weights()

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The transformer blocks."""
        return [block for transformer in self.objective.transformers(model) for block in transformer.blocks]  # type: ignore[union-attr]

    def frozen(self) -> Mapping[str, nn.Module]:
        """Returns the teacher if training steps query it and it is not part of the model."""
        return self.objective.frozen()

    def sharded(self) -> Mapping[str, tuple[Weights, Sequence[str]]]:
        """Returns the teacher if teacher_device_strategy is balanced: its weights are then sharded."""
        return self.objective.sharded()

    # Training ------------------------------------------------------------------------------------------------------

    def dataset(self, split: str) -> Any:
        """Returns the teacher's samples; to train with the objective dmd2, the prompts."""
        from unisono.recipes.wan.checks import check_tokens
        from unisono.recipes.wan_distill.data.datasets import EvalDataset

        setup = self.setup
        check_tokens([setup.shape], setup.student.config["patch_size"], self.context_size)
        self.teacher_time = setup.teacher_time()
        self.remarks = [*self.objective.remarks(), *setup.student.remarks, *setup.prompts.remarks]
        if split == "eval":
            if not setup.prompts.held_out:
                return None
            return EvalDataset(setup.rollouts("eval").open(), setup.text, has_labels=setup.is_tiny)
        return self.objective.dataset()

    def loss(self, model: nn.Module, batch: Any, noise: Noise) -> Loss:
        """Returns the objective's loss: the mean over each sample's elements, summed over samples."""
        return self.objective.loss(model, batch, noise)

    def before_evaluation(self, model: nn.Module) -> None:
        """Measures the student's time per sample, on the first call only, because training does not change it."""
        from unisono.recipes.wan_distill.evaluation import time_student

        if not self._is_timed:
            self._is_timed = True
            self.student_time = time_student(self, model)  # type: ignore[arg-type]

    def evaluate(self, model: nn.Module, batch: Any, noise: Noise) -> Mapping[str, Any]:
        """Measures the distance between student and teacher, and the student's speed-up."""
        from unisono.recipes.wan_distill.evaluation import held_out_metrics

        return held_out_metrics(self, model, batch, self.compute_dtype(model, batch["data"]))  # type: ignore[arg-type]

    def preview(self, model: nn.Module, step: int) -> Mapping[str, Any] | None:
        """Generates samples from teacher and student, side by side, for the same prompts and noise."""
        from unisono.recipes.wan_distill.previews import previews

        return previews(self, model)  # type: ignore[arg-type]

    def export(self, model: nn.Module, folder: Path) -> None:
        """Writes a folder for `WanPipeline.from_pretrained`, or LoRA files for `load_lora_weights`."""
        print(f"unisono: {self.objective.export(model, folder, self.export_format)}", file=sys.stderr)
