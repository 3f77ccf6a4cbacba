"""The objective regression: the student, possibly a smaller model, learns the guided teacher's velocities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from unisono.engine.recipe import Group, Loss, Work
from unisono.recipes.wan.models.experts import HIGH, Experts
from unisono.recipes.wan.models.load import build, build_meta
from unisono.recipes.wan.models.weights import open_weights
from unisono.recipes.wan_distill.data.datasets import OnlineDataset, RolloutDataset, stacked
from unisono.recipes.wan_distill.evaluation import velocity_metrics
from unisono.recipes.wan_distill.export import write_student
from unisono.recipes.wan_distill.loss import DistillationLoss, Weights
from unisono.recipes.wan_distill.models.pruned_weights import PrunedWeights
from unisono.recipes.wan_distill.models.random_weights import initialise_randomly
from unisono.recipes.wan_distill.models.student import num_weights
from unisono.recipes.wan_distill.models.teacher import Teacher, build_on_meta, dtype_of, float32_names
from unisono.recipes.wan_distill.preparation import load

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from unisono.data.noise import Noise
    from unisono.parallel import materialize
    from unisono.recipes.wan_distill.data.rollouts import Samples
    from unisono.recipes.wan_distill.recipe import WanDistill


class Regression:
    """The models, the data and the loss of a run with this objective."""

    def __init__(self, recipe: WanDistill) -> None:
        self._recipe, self.config, self.setup = recipe, recipe.config, recipe.setup
        self._teacher: Teacher | None = None
        self._samples: Samples | None = None

    def prepare(self, work: Work) -> None:
        """Does nothing, because this objective needs nothing besides the roll-outs."""

    def groups(self) -> Sequence[Group]:
        """Returns no groups, because all weights are trained together."""
        return ()

    def transformers(self, model: Any) -> list[nn.Module]:
        """Returns the transformers in the trained module."""
        return list(model.children())

    def refresh(self, step: int, work: Work) -> None:
        """With the setting online, generates new samples for the next steps."""
        assert self._teacher is not None
        rollouts = self.setup.rollouts("train", step // self._recipe.refresh_every)
        teacher, purpose = self._teacher, f"for the steps after {step}"
        if teacher.is_sharded:
            rollouts.fill_together(work, teacher, self.setup.text, purpose)
        else:
            rollouts.fill(work, lambda: teacher, self.setup.text, purpose)
        if not work.meet():
            self._samples = rollouts.open()

    # The models ----------------------------------------------------------------------------------------------------

    def model(self) -> Experts:
        """Builds the student; on the meta device if it starts from the teacher's weights."""
        if self.config.init == "fresh":
            transformer = build(self.setup.student.config)
            initialise_randomly(transformer, self.setup.seed)
        else:
            transformer = build_meta(self.setup.student.config)
        return Experts({HIGH: self._recipe.optimised(transformer)}, None)

    def weights(self) -> materialize.Weights | None:
        """Returns the subset of the teacher's weights that the pruning plan chose; None for random weights."""
        if self.config.init == "fresh":
            return None
        return PrunedWeights(lambda: (self.setup.source_weights, self.setup.pruning_plan()))

    def frozen(self) -> Mapping[str, nn.Module]:
        """Returns the teacher if the setting online is on."""
        if not self.config.online:
            return {}
        setup = self.setup
        if self.config.teacher_device_strategy == "balanced":
            dtype = dtype_of(self.config.teacher_dtype, setup.device)
            experts = build_on_meta(setup.teacher, dtype, is_sharded=True)
            self._teacher = Teacher(experts, setup.guidance, dtype, is_sharded=True)
        else:
            self._teacher = load_quietly(self._recipe)
        for transformer in self._teacher.experts.children():
            self._recipe.divided(transformer)
        return {} if self._teacher.places_itself else dict(self._teacher.experts.named_children())

    def sharded(self) -> Mapping[str, tuple[materialize.Weights, Sequence[str]]]:
        """Returns the teacher if teacher_device_strategy is balanced: its weights are then sharded."""
        if not (self.config.online and self.config.teacher_device_strategy == "balanced"):
            return {}
        in_float32 = float32_names(build_meta(self.setup.teacher_config))
        paths = self.setup.teacher.transformers.items()
        return {name: (open_weights(path), in_float32) for name, path in paths}

    # Training and evaluation ---------------------------------------------------------------------------------------

    def dataset(self) -> Any:
        """Returns the teacher's samples."""
        self._samples = self.setup.rollouts("train").open()
        kind = OnlineDataset if self._recipe.refresh_every else RolloutDataset
        return kind(self._samples, self.setup.text)

    def remarks(self) -> list[str]:
        """Returns notes about the student for the user."""
        setup = self.setup
        student, teacher = (num_weights(config) for config in (setup.student.config, setup.teacher_config))
        teacher *= len(setup.teacher.transformers)
        remarks = [f"the student has {student:,} weights, {student / teacher:.2f} of the teacher's {teacher:,}"]
        if self.config.init == "teacher":
            remarks.append(setup.pruning_plan().summary)
        return remarks

    @cached_property
    def _loss(self) -> DistillationLoss:
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
        over_ranks = self._recipe.context.sum
        return DistillationLoss(weights, setup.rollout_spec, self._teacher, empty, layers, over_ranks)

    def loss(self, model: Any, batch: Any, noise: Noise) -> Loss:
        """Returns the weighted sum of the losses: means over each sample's elements, summed over samples."""
        assert self._samples is not None
        data = batch["data"] if "data" in batch else stacked(self._samples, batch["number"])
        return self._loss.loss(model, batch, data, noise, self._recipe.compute_dtype(model, data))

    def student(self, model: Any) -> Experts:
        """Returns the student, to sample from."""
        student: Experts = model
        return student

    def metrics(self, student: Experts, batch: Mapping[str, Any], text: Tensor) -> dict[str, Any]:
        """Returns the error of the velocity, which is also the evaluation loss."""
        metrics = velocity_metrics(self.setup, student, batch, text)
        return {"loss": metrics["velocity_error"], **metrics}

    def metric_names(self) -> list[str]:
        """Returns the names of the scalar metrics."""
        return ["loss", "velocity_error"]

    def export(self, model: Any, folder: Path, file_format: str | None) -> str:
        """Writes the student, by default as a pipeline; returns a line that describes it."""
        return write_student(self.setup, model, folder, file_format)


def load_quietly(recipe: WanDistill) -> Teacher:
    """Loads the teacher for training, and adds its size and location to the recipe's remarks."""
    messages: list[str] = []
    setup = recipe.setup
    teacher = load(setup, Work(setup.folder, device=setup.device, _say=messages.append))
    recipe.remarks = [*recipe.remarks, *messages]
    return teacher
