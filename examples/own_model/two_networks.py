"""Two networks trained against each other (a GAN): a generator creates points, and a critic detects them.

unisono train examples/own_model/two_networks.py:Duel --nproc 2          two CPU ranks; --gpus all uses your GPUs
unisono verify examples/own_model/two_networks.py:Duel --ranks 1,2,3     checks that 1, 2 and 3 ranks train the same

The real points lie on two interleaved half circles. The evaluation metric `outside` is the fraction of generated points
that are far from both half circles; the files in `previews/` show the generated points.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset

from unisono import Group, Loss, Recipe


def network(inputs: int, hidden: int, outputs: int) -> nn.Module:
    """Builds a network with two hidden layers."""
    layers = [nn.Linear(inputs, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, hidden), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Linear(hidden, outputs))


class Networks(nn.Module):
    """Both networks in one module. The groups refer to its two parts by name."""

    def __init__(self, hidden: int, random: int) -> None:
        super().__init__()
        self.generator = network(random, hidden, 2)
        self.critic = network(2, hidden, 1)


def half_circles(angle: Tensor, moon: Tensor) -> Tensor:
    """Returns points on the first or the second half circle (moon 0 or 1), for angles from 0 to pi."""
    angle = angle + torch.pi * moon
    return torch.stack([angle.cos() + moon, angle.sin() + moon / 2], dim=1)


class Duel(Recipe):
    """Learns to generate points on two half circles."""

    defaults = {"batch_size": 128, "max_steps": 6000, "num_workers": 0, "beta1": 0.5, "beta2": 0.9, "grad_clip": 0.0}

    @dataclass
    class Config:
        num_points: int = 4096
        """Number of real points."""
        spread: float = 0.05
        """Standard deviation of the real points around their half circle."""
        hidden: int = 96
        """Width of the hidden layers of both networks."""
        random: int = 4
        """Number of random numbers that the generator turns into a point."""
        critic_steps: int = 2
        """Number of critic steps before each generator step."""
        smoothness: float = 0.1
        """Weight of the penalty on the critic's slope at real points. Without this penalty, training oscillates."""

    fixed = ("num_points", "spread", "hidden", "random", "critic_steps")

    def groups(self) -> list[Group]:
        # Trained in this order, repeatedly. Unset options have the values of the run's settings.
        return [
            Group("critic", weights="critic.", steps=self.config.critic_steps, learning_rate=1e-3),
            Group("generator", weights="generator.", learning_rate=5e-4, lr_schedule="linear", ema_decay=0.99),
        ]

    def model(self) -> nn.Module:
        return Networks(self.config.hidden, self.config.random)

    def dataset(self, split: str) -> TensorDataset:
        draw = torch.Generator().manual_seed(1 if split == "train" else 2)
        num = self.config.num_points if split == "train" else 1024
        real = half_circles(torch.pi * torch.rand(num, generator=draw), torch.arange(num) % 2)
        return TensorDataset(real + self.config.spread * torch.randn(num, 2, generator=draw))

    def loss(self, model: Networks, batch: list[Tensor], noise) -> Loss:
        [real] = batch
        fake = model.generator(noise.normal(self.config.random, dtype=real.dtype))
        if self.group == "generator":  # only its weights get gradients, which flow through the critic
            return Loss(softplus(-model.critic(fake)).sum(), len(real))
        of_real, of_fake = model.critic(real), model.critic(fake.detach())
        # The slope from a small random shift: sharded weights (fsdp) do not allow gradients of gradients.
        slope = (model.critic(real + 0.02 * noise.normal(2, dtype=real.dtype)) - of_real) / 0.02
        total = softplus(-of_real).sum() + softplus(of_fake).sum() + self.config.smoothness * slope.square().sum()
        right = (of_real > 0).sum() + (of_fake < 0).sum()
        return Loss(total, len(real), {"right": (right, 2 * len(real))})

    def evaluate(self, model: Networks, batch: list[Tensor], noise) -> dict:
        [real] = batch
        fake = model.generator(noise.normal(self.config.random, dtype=real.dtype))
        where = torch.linspace(0, torch.pi, 64, device=real.device, dtype=real.dtype)
        points = torch.cat([half_circles(where, torch.full_like(where, moon)) for moon in (0, 1)])
        distance = torch.cdist(fake, points).min(dim=1)
        upper = (distance.indices < len(where)).sum()  # points whose nearest half circle is the first one
        return {"outside": ((distance.values > 0.25).sum(), len(real)), "upper": (upper, len(real))}

    def preview(self, model: Networks, step: int) -> dict[str, str]:
        weight = next(model.generator.parameters())
        draw = torch.Generator().manual_seed(0)
        x, y = model.generator(torch.randn(1500, self.config.random, generator=draw).to(weight)).cpu().T
        page = [["."] * 72 for _ in range(20)]
        for column, row in zip((18 * (x + 1.5)).tolist(), (8 * (1.5 - y)).tolist(), strict=True):
            if 0 <= column < 72 and 0 <= row < 20:
                page[int(row)][int(column)] = "#"
        return {"points.txt": "\n".join(map("".join, page)) + "\n"}
