"""The three models of distribution matching: the teacher, the student, and the score of the student's distribution.

With LoRAs, all three share one frozen transformer: the student and the score have one LoRA each, and the teacher is the
transformer without either LoRA. The user's own LoRA, if any, is part of all three. Without LoRAs, the student and the
score are whole copies of the teacher. Selecting a role only selects the active LoRAs; it never changes requires_grad.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unisono.parallel.materialize import Weights
from unisono.recipes.wan.models.adapters import ADAPTER, activate
from unisono.recipes.wan.models.experts import Experts
from unisono.recipes.wan_distill.models.teacher import Guidance, Teacher, guided_velocity

STUDENT, SCORE = "student", "score"
"""Names of the groups of weights, and of the parts of `StudentAndScore`."""
OF_TEACHER = "teacher"
"""The user's LoRA."""


class Roles(Protocol):
    """Selects one of the models. `model` is the trained module or a replica of it."""

    def student(self, model: Any) -> Experts:
        """Returns the student; valid until another role is selected."""

    def score(self, model: Any) -> Experts:
        """Returns the score of the student's distribution; valid until another role is selected."""

    def teacher(self, model: Any, noisy: Tensor, sigma: Tensor, text: Tensor, empty: Tensor) -> Tensor:
        """Returns the teacher's guided velocity."""


@dataclass(frozen=True)
class LoraRoles:
    """All three models are one transformer with different LoRAs."""

    guidance: Guidance
    has_own_lora: bool = False
    """Whether the user's own LoRA is part of the teacher."""

    def student(self, model: Experts) -> Experts:
        """Returns the transformer with the student's LoRA."""
        return self._with(model, [ADAPTER])

    def score(self, model: Experts) -> Experts:
        """Returns the transformer with the score's LoRA."""
        return self._with(model, [SCORE])

    @torch.no_grad()
    def teacher(self, model: Experts, noisy: Tensor, sigma: Tensor, text: Tensor, empty: Tensor) -> Tensor:
        """Returns the guided velocity of the transformer without either LoRA."""
        base = self._with(model, [])
        return guided_velocity(base, self.guidance, base.boundary, noisy, sigma, text, empty)

    def _with(self, model: Experts, adapters: list[str]) -> Experts:
        activate(model, [OF_TEACHER, *adapters] if self.has_own_lora else adapters)
        return model


class StudentAndScore(nn.Module):
    """The student and the score as whole models."""

    def __init__(self, student: Experts, score: Experts) -> None:
        super().__init__()
        self.student, self.score = student, score


@dataclass(frozen=True)
class WholeRoles:
    """The student, the score and the teacher are three whole models; the teacher is not trained."""

    frozen: Teacher

    def student(self, model: StudentAndScore) -> Experts:
        """Returns the student."""
        return model.student

    def score(self, model: StudentAndScore) -> Experts:
        """Returns the score of the student's distribution."""
        return model.score

    def teacher(self, model: Any, noisy: Tensor, sigma: Tensor, text: Tensor, empty: Tensor) -> Tensor:
        """Returns the teacher's guided velocity."""
        return self.frozen.velocity(noisy, sigma, text, empty)


class WeightsOfBoth:
    """The initial weights of `StudentAndScore`: two copies of the teacher's weights."""

    def __init__(self, teacher: Weights) -> None:
        self._teacher = teacher

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Reads only the rows `start` to `stop` of a weight."""
        return self._teacher.rows(name.partition(".")[2], start, stop)


def is_student(name: str) -> bool:
    """Whether a trainable weight belongs to the student."""
    return name.startswith(f"{STUDENT}.") or f".{ADAPTER}." in name


def is_score(name: str) -> bool:
    """Whether a trainable weight belongs to the score."""
    return name.startswith(f"{SCORE}.") or f".{SCORE}." in name
