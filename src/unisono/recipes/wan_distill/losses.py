"""What a student can learn from a teacher: each loss is one function of one sample's mean.

T is the teacher with its guidance folded in, Tʷ = u + w (c − u) of its answers with and without the prompt; S is the
student, which is asked once and later draws without guidance. x̂₀ is what the teacher has drawn from a prompt, and
x_σ = (1 − σ) x̂₀ + σ ε hides it under new noise ε. All give [batch] means over the elements of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.recipes.wan.objective import data_from, velocity


def velocity_matching(said: Tensor, teacher: Tensor) -> Tensor:
    """‖S(x_σ) − Tʷ(x_σ)‖²: the student says what the guided teacher says, at the same point."""
    return _mean_square(said - teacher)


def flow_matching(said: Tensor, data: Tensor, noise: Tensor) -> Tensor:
    """‖S(x_σ) − (ε − x̂₀)‖²: plain training on the teacher's samples; the teacher itself is not asked."""
    return _mean_square(said - velocity(data, noise))


def trajectory_matching(said: Tensor, teacher: Tensor) -> Tensor:
    """‖S(x_i) − v_i‖²: as velocity_matching, at the points x_i that the teacher went through while it drew x̂₀."""
    return _mean_square(said - teacher)


def few_step_regression(point: Tensor, said: Tensor, sigma: Tensor, data: Tensor) -> Tensor:
    """½ ‖(x_i − σ_i S(x_i)) − x̂₀‖²: from points of the teacher's path straight to its end, for few large steps."""
    return _mean_square(data_from(point, said, sigma) - data) / 2


def feature_matching(student: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """Mean over layers l of ‖h_S^l − h_T^m(l)‖² / ‖h_T^m(l)‖²: a kept layer gives what it gave in the teacher."""
    layers = [
        (ours.float() - theirs.float()).square().flatten(1).sum(1) / theirs.float().square().flatten(1).sum(1)
        for ours, theirs in zip(student, teacher, strict=True)
    ]
    return torch.stack(layers).mean(0)


def _mean_square(difference: Tensor) -> Tensor:
    return difference.square().flatten(1).mean(1)
