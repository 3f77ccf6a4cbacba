"""One device, one process."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from unisono.parallel.strategy import Stage, Strategy


class Single(Strategy):
    """The model as it is, on one device."""

    name = "single"

    def _set_up(self, stage: Stage, blocks: Sequence[nn.Module]) -> nn.Module:
        return stage.to(self.place.device)
