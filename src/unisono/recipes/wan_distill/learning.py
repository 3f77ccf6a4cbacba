"""The loss of a micro-batch: what is kept of the teacher, or the teacher itself, against what the student says."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from unisono.engine.recipe import Loss
from unisono.recipes.wan.models.experts import Experts
from unisono.recipes.wan.objective import noised
from unisono.recipes.wan_distill import losses
from unisono.recipes.wan_distill.drawing import Drawing
from unisono.recipes.wan_distill.teacher import Teacher

if TYPE_CHECKING:
    from unisono.data.noise import Noise


@dataclass(frozen=True)
class Weights:
    """How much each loss counts; those of weight 0 are not computed."""

    velocity: float
    flow: float
    trajectory: float
    few_step: float
    feature: float


@dataclass
class Learning:
    """How a student learns."""

    weights: Weights
    drawing: Drawing
    """How the teacher has drawn what is learned from."""
    teacher: Teacher | None = None
    """Where it stays and is asked anew."""
    empty: Tensor | None = None
    """[text length, width] what it gets for the negative prompt."""
    layers: Sequence[int] = ()
    """feature: which layer of the teacher each of the student's is compared with."""
    _taps: dict[int, Tap] = field(default_factory=dict)

    def loss(self, model: Experts, batch: Mapping[str, Any], data: Tensor, noise: Noise, dtype: torch.dtype) -> Loss:
        """The weighted sum of the losses, summed over samples."""
        text = batch["text"].to(dtype)
        found: dict[str, Tensor] = {}
        if self.weights.velocity or self.weights.flow or self.weights.feature:
            found |= self._at_new_noise(model, batch, data, text, noise)
        if self.weights.trajectory or self.weights.few_step:
            found |= self._on_the_path(model, batch, data, text)
        weights = vars(self.weights)
        total = torch.stack([weights[name] * each for name, each in found.items() if name in weights]).sum(0)
        metrics = {f"{name}_loss" if name in weights else name: each.detach().sum() for name, each in found.items()}
        return Loss(total.sum(), len(data), metrics)

    def _at_new_noise(
        self, model: Experts, batch: Mapping[str, Any], data: Tensor, text: Tensor, noise: Noise
    ) -> dict[str, Tensor]:
        if "velocity" in batch:
            sigma, target = batch["sigma"], batch["velocity"].to(data.dtype)
            draws = self.drawing.noise(batch["position"]).to(data.dtype)
        else:
            sigma = self.drawing.spread.quantile(noise.uniform(1, dtype=torch.float64)[:, 0]).to(data.dtype)
            draws, target = noise.normal(*data.shape[1:], dtype=data.dtype), None
        noisy, theirs = noised(data, draws, sigma), None
        if self.teacher is not None and (self.weights.velocity or self.weights.feature):
            assert self.empty is not None
            if self.empty.device != text.device or self.empty.dtype != text.dtype:
                self.empty = self.empty.to(text)  # once: a copy in every step would make it wait
            empty = self.empty.expand_as(text)
            theirs = self._tap(self.teacher.experts, self.layers) if self.weights.feature else None
            target = self.teacher.velocity(noisy, sigma, text, empty)
        own = self._tap(model, range(len(self.layers))) if self.weights.feature else None
        said = model(noisy, sigma, text).to(data.dtype)  # 32 bit from here on
        found = {}
        if self.weights.velocity:
            assert target is not None
            found["velocity"] = losses.velocity_matching(said, target)
            found["velocity_cosine"] = torch.nn.functional.cosine_similarity(
                said.detach().flatten(1), target.flatten(1)
            )
        if self.weights.flow:
            found["flow"] = losses.flow_matching(said, data, draws)
        if own is not None and theirs is not None:
            # Of the teacher's two halves the first has the prompt.
            with_prompt = [layer[: len(data)] for layer in theirs.taken()]
            found["feature"] = losses.feature_matching(own.taken(), with_prompt)
        return found

    def _on_the_path(self, model: Experts, batch: Mapping[str, Any], data: Tensor, text: Tensor) -> dict[str, Tensor]:
        point, sigma = batch["point"].to(data.dtype), batch["point_sigma"]
        said, found = model(point, sigma, text).to(data.dtype), {}
        if self.weights.trajectory:
            found["trajectory"] = losses.trajectory_matching(said, batch["point_velocity"].to(data.dtype))
        if self.weights.few_step:
            found["few_step"] = losses.few_step_regression(point, said, sigma, data)
        return found

    def _tap(self, model: Experts, layers: Sequence[int]) -> Tap:
        if id(model) not in self._taps:
            blocks = list(next(iter(model.children())).blocks)  # type: ignore[arg-type]
            self._taps[id(model)] = Tap([blocks[layer] for layer in layers])
        return self._taps[id(model)].opened()


class Tap:
    """Keeps what some blocks give in the next forward pass of this thread."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._here = threading.local()
        for place, block in enumerate(blocks):
            block.register_forward_hook(lambda module, given, gave, place=place: self._keep(place, gave))

    def opened(self) -> Tap:
        """Itself, ready for a forward pass."""
        self._here.kept = {}
        return self

    def _keep(self, place: int, gave: Tensor) -> None:
        if getattr(self._here, "kept", None) is not None:
            self._here.kept[place] = gave

    def taken(self) -> list[Tensor]:
        """What they gave, in order."""
        kept = self._here.kept
        self._here.kept = None
        return [kept[place] for place in sorted(kept)]
