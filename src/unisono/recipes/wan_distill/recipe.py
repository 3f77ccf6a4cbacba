"""The recipe `wan-distill`: prompts in, a smaller Wan that draws what a large one would have drawn out.

The teacher draws from the prompts once (`rollouts.py`) and is let go of, or stays (`online`). The student
(`student.py`) begins with a part of its weights (`inherit.py`) and learns to say what the guided teacher says
(`losses.py`), so that it draws without guidance. What it draws is shown beside the teacher's (`previews.py`), and
written as diffusers loads it (`export.py`). `setup.py` knows what all settings mean.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from unisono.engine.recipe import Loss, Work
from unisono.errors import ConfigError
from unisono.recipes.wan.base import WanRecipe
from unisono.recipes.wan_distill import settings
from unisono.recipes.wan_distill.checks import check_config
from unisono.recipes.wan_distill.setup import Setup

if TYPE_CHECKING:  # `unisono train wan-distill --help` need not wait for torch
    import torch
    from torch import Tensor, nn

    from unisono.data.noise import Noise
    from unisono.parallel.materialize import Weights
    from unisono.recipes.wan_distill.learning import Learning
    from unisono.recipes.wan_distill.measure import Took
    from unisono.recipes.wan_distill.rollouts import Samples
    from unisono.recipes.wan_distill.teacher import Teacher


class WanDistill(WanRecipe):
    """A small Wan from a big one, from prompts alone."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "batch_size": 2,
        "learning_rate": 1e-4,
        "warmup_steps": 100,
        "ema_decay": 0.999,
        "mixed_precision": "bf16",
        "compile": True,
        "num_workers": 4,
        "eval_every": 500,
        "save_every": 500,
        "preview_every": 500,
    }
    aliases: ClassVar[Mapping[str, str]] = settings.ALIASES
    fixed: ClassVar[Sequence[str]] = (
        *("teacher_path", "parts_path", "student_config", "init", "layers", "height", "width", "num_frames"),
        *("guidance", "guidance_2", "shift", "negative_prompt", "teacher_sampler"),
    )
    Config = settings.Config

    @classmethod
    def presets(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """What suits the tiny teacher on a CPU; and a loss that looks into blocks needs them uncompiled."""
        found: dict[str, Any] = {"compile": False} if values["feature_weight"] else {}
        if str(values["teacher_path"]).lower() == "tiny":
            by_epochs = values["num_epochs"] is not None  # then the number of steps is the user's choice
            found |= {name: value for name, value in settings.TINY.items() if not (by_epochs and name == "max_steps")}
        return found

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        check_config(config)
        self.setup = Setup(config)
        self.refresh_every = config.refresh_every if config.online else 0
        self.teacher_took: Took | None = None
        self.student_took: Took | None = None
        """How long each takes for a sample, as many at once; where that was measured."""
        self._is_timed = False
        self._teacher: Teacher | None = None
        self._samples: Samples | None = None

    def check_settings(self, settings: Any) -> None:
        """The teacher stays on one device, and what it says is not part of a recorded step."""
        if self.config.online and settings.parallel.strategy == "dp":
            raise ConfigError("online: with --strategy dp the teacher is on one GPU only; use ddp or fsdp")
        if self.config.online and settings.precision.cuda_graph:
            raise ConfigError("online: a step that asks the teacher cannot be recorded; leave out --cuda_graph")

    # Before training: what the teacher draws -----------------------------------------------------------------------

    def prepare(self, work: Work) -> None:
        """Encodes the prompts, lets the teacher draw, and plans what the student inherits."""
        from unisono.recipes.wan_distill.preparation import prepare

        setup = self.setup
        setup.device, setup.seed, setup.processes = work.device, work.seed, len(work.gather(None))
        setup.folder = Path(self.config.cache_dir).expanduser() if self.config.cache_dir else work.folder
        prepare(setup, self.kernel, work)

    def refresh(self, step: int, work: Work) -> None:
        """online: new samples for the next steps."""
        assert self._teacher is not None
        rollouts = self.setup.rollouts("train", step // self.refresh_every)
        teacher, what = self._teacher, f"for the steps after {step}"
        if teacher.is_shared_out:
            rollouts.fill_together(work, teacher, self.setup.rows, what)
        else:
            rollouts.fill(work, lambda: teacher, self.setup.rows, what)
        if not work.meet():
            self._samples = rollouts.open()

    # The student, and the teacher beside it ------------------------------------------------------------------------

    def model(self) -> nn.Module:
        """The student; on meta, if it begins with weights of the teacher's."""
        from unisono.recipes.wan.models.attention import use
        from unisono.recipes.wan.models.block import use_fast_blocks
        from unisono.recipes.wan.models.experts import HIGH, Experts
        from unisono.recipes.wan.models.islands import keep_time_embedding_exact
        from unisono.recipes.wan.models.load import build, build_meta
        from unisono.recipes.wan_distill.fresh import begin_fresh

        if self.config.init == "fresh":
            transformer = build(self.setup.student.config)
            begin_fresh(transformer, self.setup.seed)
        else:
            transformer = build_meta(self.setup.student.config)
        keep_time_embedding_exact(transformer)
        use(self.kernel.name, transformer)
        use_fast_blocks(transformer)
        return Experts({HIGH: transformer}, None)

    def weights(self, model: nn.Module) -> Weights | None:
        """A part of the teacher's, as `prepare` has planned it."""
        return None if self.config.init == "fresh" else Inherited(self.setup)

    def frozen(self) -> Mapping[str, nn.Module]:
        """The teacher, where it stays."""
        from unisono.recipes.wan_distill.preparation import load
        from unisono.recipes.wan_distill.teacher import Teacher, describe_on_meta, type_of

        if not self.config.online:
            return {}
        setup = self.setup
        if self.config.teacher_device_strategy == "balanced":
            dtype = type_of(self.config.teacher_dtype, setup.device)
            experts = describe_on_meta(setup.teacher, dtype, is_shared_out=True)
            self._teacher = Teacher(experts, setup.guidance, dtype, is_shared_out=True)
        else:
            told: list[str] = []
            self._teacher = load(setup, Work(setup.folder, device=setup.device, _say=told.append))
            self.remarks = [*self.remarks, *told]
        return {} if self._teacher.places_itself else dict(self._teacher.experts.named_children())

    def sharded(self) -> Mapping[str, tuple[Weights, Sequence[str]]]:
        """The teacher, with teacher_device_strategy balanced."""
        from unisono.recipes.wan.models.initial import FromFile
        from unisono.recipes.wan.models.load import build_meta
        from unisono.recipes.wan.models.weights import open_weights
        from unisono.recipes.wan_distill.teacher import whole_weights

        if not (self.config.online and self.config.teacher_device_strategy == "balanced"):
            return {}
        whole = whole_weights(build_meta(self.setup.teacher_config))
        places = self.setup.teacher.transformers.items()
        return {name: (FromFile(open_weights(place)), whole) for name, place in places}

    # Training ------------------------------------------------------------------------------------------------------

    def dataset(self, split: str) -> Any:
        """What the teacher has drawn."""
        from unisono.recipes.wan_distill.data import HeldOut, Kept, Numbers

        setup = self.setup
        self._find_out()
        if split == "eval":
            if not setup.prompts.held_out:
                return None
            return HeldOut(setup.rollouts("eval").open(), setup.rows, judged=setup.is_tiny)
        self._samples = setup.rollouts("train").open()
        return (Numbers if self.refresh_every else Kept)(self._samples, setup.rows)

    def _find_out(self) -> None:
        """How long the teacher took, and what the user should know of the student."""
        from unisono.recipes.wan_distill.student import num_weights

        setup = self.setup
        self.teacher_took = setup.teacher_took()
        ours, theirs = (num_weights(config) for config in (setup.student.config, setup.teacher_config))
        theirs *= len(setup.teacher.transformers)
        told = [f"the student has {ours:,} weights, {ours / theirs:.2f} of the teacher's {theirs:,}"]
        if self.config.init == "teacher":
            told.append(setup.inheritance().told)
        self.remarks = [*told, *setup.student.remarks, *setup.prompts.remarks]

    @cached_property
    def _learning(self) -> Learning:
        from unisono.recipes.wan_distill.learning import Learning, Weights

        config, setup = self.config, self.setup
        weights = Weights(
            velocity=config.velocity_weight,
            flow=config.flow_weight,
            trajectory=config.trajectory_weight,
            few_step=config.few_step_weight,
            feature=config.feature_weight,
        )
        layers = setup.inheritance().layers if config.feature_weight else ()
        empty = setup.rows(config.negative_prompt) if config.online else None
        return Learning(weights, setup.drawing, self._teacher, empty, layers)

    def loss(self, model: nn.Module, batch: Any, noise: Noise) -> Loss:
        """The weighted losses: of each sample the mean over its elements, summed over samples."""
        from unisono.recipes.wan_distill.data import stacked

        assert self._samples is not None
        data = batch["data"] if "data" in batch else stacked(self._samples, batch["number"])
        return self._learning.loss(model, batch, data, noise, self.settled(model, data))  # type: ignore[arg-type]

    def before_evaluation(self, model: nn.Module) -> None:
        """Measures how long the student draws: once, since learning makes it neither faster nor slower."""
        from unisono.recipes.wan_distill.measure import time_student

        if not self._is_timed:
            self._is_timed = True
            self.student_took = time_student(self, model)  # type: ignore[arg-type]

    def evaluate(self, model: nn.Module, batch: Any, noise: Noise) -> Mapping[str, Any]:
        """How near the student is to its teacher, and how much faster."""
        from unisono.recipes.wan_distill.measure import held_out

        return held_out(self, model, batch, self.settled(model, batch["data"]))  # type: ignore[arg-type]

    def settled(self, model: nn.Module, data: Tensor) -> torch.dtype:
        """The type that the student computes in; its kernel can."""
        from unisono.recipes.wan.models.islands import compute_type

        dtype = compute_type(data)
        self.kernel.settle(model, data.device.type, dtype)
        return dtype

    def preview(self, model: nn.Module, step: int) -> Mapping[str, Any] | None:
        """What teacher and student draw from the same prompts and noise, side by side."""
        from unisono.recipes.wan_distill.previews import side_by_side

        return side_by_side(self, model)  # type: ignore[arg-type]

    def export(self, model: nn.Module, folder: Path) -> None:
        """A folder for `WanPipeline.from_pretrained`."""
        from unisono.recipes.wan_distill.export import write_student

        print(f"unisono: {write_student(self.setup, model, folder)}", file=sys.stderr)  # type: ignore[arg-type]


class Inherited:
    """The student's first weights; what it takes is looked up when it is asked for, which a checkpoint never does."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """The rows of a weight."""
        return self._weights.rows(name, start, stop)

    @cached_property
    def _weights(self) -> Weights:
        from unisono.recipes.wan.models.experts import HIGH
        from unisono.recipes.wan_distill.inherit import FromTeacher

        return FromTeacher({HIGH: self._setup.giver}, {HIGH: self._setup.inheritance()})
