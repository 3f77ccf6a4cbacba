"""One device, one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from unisono.parallel.strategy import Stage, Strategy


class Single(Strategy):
    """The model as it is, on one device."""

    name = "single"

    def _set_up(self, stage: Stage, blocks: Sequence[nn.Module]) -> nn.Module:
        return stage.to(self.place.device)

    def keep_gradients(self) -> None:
        """See Strategy."""
        self._keeps_gradients = True
        for _, parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)

    @property
    def gradients_stay(self) -> bool:
        """Where they were asked to."""
        return self._keeps_gradients
