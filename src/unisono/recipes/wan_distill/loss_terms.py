"""The losses that compare a student with its teacher, one function each.

Tʷ is the guided teacher: Tʷ = u + w (c − u), where u is its velocity without and c its velocity with the prompt. S is
the student, which computes a single velocity and later samples without guidance. x̂₀ is a sample from the teacher, and
x_σ = (1 − σ) x̂₀ + σ ε adds new noise ε to it. Each function returns the mean over the elements of each sample, [batch].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unisono.recipes.wan.objective import data_from, velocity


def velocity_matching(student: Tensor, teacher: Tensor) -> Tensor:
    """‖S(x_σ) − Tʷ(x_σ)‖²: the student reproduces the guided teacher's velocity at the same point."""
    return _mean_square(student - teacher)


def flow_matching(student: Tensor, data: Tensor, noise: Tensor) -> Tensor:
    """‖S(x_σ) − (ε − x̂₀)‖²: plain flow matching on the teacher's samples; does not need the teacher in memory."""
    return _mean_square(student - velocity(data, noise))


def trajectory_matching(student: Tensor, teacher: Tensor) -> Tensor:
    """‖S(x_i) − v_i‖²: like velocity_matching, at points x_i of the teacher's sampling trajectory."""
    return _mean_square(student - teacher)


def few_step_regression(point: Tensor, student: Tensor, sigma: Tensor, data: Tensor) -> Tensor:
    """½ ‖(x_i − σ_i S(x_i)) − x̂₀‖²: the student predicts the trajectory's end from its points, for few large steps."""
    return _mean_square(data_from(point, student, sigma) - data) / 2


def feature_matching(
    student: Sequence[Tensor], teacher: Sequence[Tensor], over_ranks: Callable[[Tensor], Tensor] = lambda sums: sums
) -> Tensor:
    """Mean over layers l of ‖h_S^l − h_T^m(l)‖² / ‖h_T^m(l)‖²: compares hidden states of matching layers.

    If ranks share a sample, `over_ranks` adds up the ranks' sums over their own tokens.
    """
    differences, sizes = [], []
    for ours, theirs in zip(student, teacher, strict=True):
        differences.append((ours.float() - theirs.float()).square().flatten(1).sum(1))
        sizes.append(theirs.float().square().flatten(1).sum(1))
    return (over_ranks(torch.stack(differences)) / over_ranks(torch.stack(sizes))).mean(0)


def _mean_square(difference: Tensor) -> Tensor:
    return difference.square().flatten(1).mean(1)
