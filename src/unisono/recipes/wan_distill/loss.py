"""The distillation loss of a micro-batch: compares the student with stored roll-outs or with an online teacher."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from unisono.engine.recipe import Loss
from unisono.recipes.wan.models.experts import Experts
from unisono.recipes.wan.objective import noised
from unisono.recipes.wan_distill import loss_terms as losses
from unisono.recipes.wan_distill.data.rollout_spec import RolloutSpec
from unisono.recipes.wan_distill.models.teacher import Teacher

if TYPE_CHECKING:
    from unisono.data.noise import Noise


@dataclass(frozen=True)
class Weights:
    """The weight of each loss; a loss with weight 0 is not computed."""

    velocity: float
    flow: float
    trajectory: float
    few_step: float
    feature: float


@dataclass
class DistillationLoss:
    """The weighted sum of the losses that the settings choose."""

    weights: Weights
    spec: RolloutSpec
    """The specification with which the teacher generated the samples."""
    teacher: Teacher | None = None
    """The teacher, with the setting online; otherwise None."""
    empty: Tensor | None = None
    """The embedding of the negative prompt, [text length, width], with the setting online."""
    layers: Sequence[int] = ()
    """For each of the student's layers, the teacher's layer that the feature loss compares it with."""
    over_ranks: Callable[[Tensor], Tensor] = lambda sums: sums
    """If ranks share a sample, adds up the ranks' sums over their own tokens."""
    _recorders: dict[int, OutputRecorder] = field(default_factory=dict)

    def loss(self, model: Experts, batch: Mapping[str, Any], data: Tensor, noise: Noise, dtype: torch.dtype) -> Loss:
        """Returns the weighted sum of the losses, summed over samples."""
        text = batch["text"].to(dtype)
        terms: dict[str, Tensor] = {}
        if self.weights.velocity or self.weights.flow or self.weights.feature:
            terms |= self._at_new_noise(model, batch, data, text, noise)
        if self.weights.trajectory or self.weights.few_step:
            terms |= self._on_trajectory(model, batch, data, text)
        weights = vars(self.weights)
        total = torch.stack([weights[name] * each for name, each in terms.items() if name in weights]).sum(0)
        metrics = {f"{name}_loss" if name in weights else name: each.detach().sum() for name, each in terms.items()}
        return Loss(total.sum(), len(data), metrics)

    def _at_new_noise(
        self, model: Experts, batch: Mapping[str, Any], data: Tensor, text: Tensor, noise: Noise
    ) -> dict[str, Tensor]:
        if "velocity" in batch:
            sigma, target = batch["sigma"], batch["velocity"].to(data.dtype)
            draws = self.spec.noise(batch["position"]).to(data.dtype)
        else:
            sigma = self.spec.spread.quantile(noise.uniform(1, dtype=torch.float64)[:, 0]).to(data.dtype)
            draws, target = noise.normal(*data.shape[1:], dtype=data.dtype), None
        noisy, teacher_states = noised(data, draws, sigma), None
        if self.teacher is not None and (self.weights.velocity or self.weights.feature):
            assert self.empty is not None
            if self.empty.device != text.device or self.empty.dtype != text.dtype:
                self.empty = self.empty.to(text)  # copied once: a copy in every step would stall the GPU
            empty = self.empty.expand_as(text)
            teacher_states = self._recording(self.teacher.experts, self.layers) if self.weights.feature else None
            target = self.teacher.velocity(noisy, sigma, text, empty)
        student_states = self._recording(model, range(len(self.layers))) if self.weights.feature else None
        predicted = model(noisy, sigma, text).to(data.dtype)  # the loss is computed in float32
        terms = {}
        if self.weights.velocity:
            assert target is not None
            terms["velocity"] = losses.velocity_matching(predicted, target)
            terms["velocity_cosine"] = nn.functional.cosine_similarity(predicted.detach().flatten(1), target.flatten(1))
        if self.weights.flow:
            terms["flow"] = losses.flow_matching(predicted, data, draws)
        if student_states is not None and teacher_states is not None:
            # The guided teacher computes a batch with and without the prompt at once; the first half has the prompt.
            with_prompt = [layer[: len(data)] for layer in teacher_states.stop()]
            terms["feature"] = losses.feature_matching(student_states.stop(), with_prompt, self.over_ranks)
        return terms

    def _on_trajectory(self, model: Experts, batch: Mapping[str, Any], data: Tensor, text: Tensor) -> dict[str, Tensor]:
        point, sigma = batch["point"].to(data.dtype), batch["point_sigma"]
        predicted, terms = model(point, sigma, text).to(data.dtype), {}
        if self.weights.trajectory:
            terms["trajectory"] = losses.trajectory_matching(predicted, batch["point_velocity"].to(data.dtype))
        if self.weights.few_step:
            terms["few_step"] = losses.few_step_regression(point, predicted, sigma, data)
        return terms

    def _recording(self, model: Experts, layers: Sequence[int]) -> OutputRecorder:
        if id(model) not in self._recorders:
            blocks = list(next(iter(model.children())).blocks)  # type: ignore[arg-type]
            self._recorders[id(model)] = OutputRecorder([blocks[layer] for layer in layers])
        return self._recorders[id(model)].start()


class OutputRecorder:
    """Records the outputs of some blocks in this thread's next forward pass."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._local = threading.local()
        for number, block in enumerate(blocks):
            block.register_forward_hook(lambda module, inputs, output, number=number: self._record(number, output))

    def start(self) -> OutputRecorder:
        """Starts recording; returns itself."""
        self._local.outputs = {}
        return self

    def _record(self, number: int, output: Tensor) -> None:
        if getattr(self._local, "outputs", None) is not None:
            self._local.outputs[number] = output

    def stop(self) -> list[Tensor]:
        """Stops recording; returns the outputs in the order of the blocks."""
        outputs = self._local.outputs
        self._local.outputs = None
        return [outputs[number] for number in sorted(outputs)]
