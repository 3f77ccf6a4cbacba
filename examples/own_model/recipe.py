"""A complete recipe: a classifier of two interleaved half circles.

unisono train examples/own_model/recipe.py:TwoMoons --nproc 2       two CPU ranks; --gpus all uses your GPUs
unisono verify examples/own_model/recipe.py:TwoMoons --ranks 1,2    checks that 1 and 2 ranks train the same
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from unisono import Loss, Recipe


class TwoMoons(Recipe):
    """Classifies points by the half circle they belong to."""

    defaults = {"batch_size": 64, "learning_rate": 5e-3, "num_epochs": 10, "num_workers": 0}

    @dataclass
    class Config:
        num_points: int = 4096
        """Number of training points. Evaluation uses a quarter as many, which are not used for training."""
        spread: float = 0.15
        """Standard deviation of the points around their half circle."""
        hidden: int = 64
        """Width of the two hidden layers."""

    def model(self) -> nn.Module:
        width = self.config.hidden
        return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))

    def dataset(self, split: str) -> TensorDataset:
        train = split == "train"
        num_points = self.config.num_points if train else self.config.num_points // 4
        draw = torch.Generator().manual_seed(1 if train else 2)
        moon = torch.arange(num_points) % 2
        angle = torch.pi * (torch.rand(num_points, generator=draw) + moon)
        center = torch.stack([angle.cos() + moon, angle.sin() + moon / 2], dim=1)
        return TensorDataset(center + self.config.spread * torch.randn(num_points, 2, generator=draw), moon)

    def loss(self, model: nn.Module, batch: list[Tensor], noise: object) -> Loss:
        points, moon = batch
        scores = model(points)
        correct = (scores.argmax(dim=1) == moon).sum()
        # A sum and a count, never a mean, so that any number of ranks trains the same.
        return Loss(cross_entropy(scores, moon, reduction="sum"), count=len(moon), metrics={"correct": correct})

    def preview(self, model: nn.Module, step: int) -> dict[str, str]:
        rows, columns = torch.linspace(1.5, -1, 20), torch.linspace(-1.5, 2.5, 72)
        weight = next(model.parameters())
        points = torch.cartesian_prod(rows, columns).flip(1).to(weight.device, weight.dtype)
        moon = model(points).argmax(dim=1).view(20, 72)
        return {"boundary.txt": "\n".join("".join(".#"[m] for m in row) for row in moon.tolist()) + "\n"}
