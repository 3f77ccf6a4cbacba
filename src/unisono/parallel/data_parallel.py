"""Trains on several GPUs from one process (`torch.nn.DataParallel`).

It is meant for users of DataParallel; ddp is faster. Each micro-batch is split along its first dimension across the
GPUs, and the sums of the GPUs are added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from unisono.parallel.strategy import ForwardWrapper, Strategy


class DataParallel(Strategy):
    """Replicates the model to all GPUs of this process in every forward pass."""

    name = "dp"

    def _set_up(self, wrapper: ForwardWrapper, blocks: Sequence[nn.Module]) -> nn.Module:
        wrapper = wrapper.to(self.placement.device)
        self._replicated = nn.DataParallel(wrapper, device_ids=[device.index for device in self.placement.devices])
        return wrapper

    def train(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Runs call(model, *arguments) on each GPU with its part of the batch; returns the sums of its results."""
        gathered = self._replicated(_rows, call, *arguments)
        return {name: rows.sum(0) for name, rows in gathered.items()}

    def rows(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Runs call(model, *arguments) on each GPU with its part of the batch; returns the concatenated rows."""
        return self._replicated(call, *arguments)


def _rows(model: nn.Module, call: Callable[..., dict[str, Tensor]], *arguments: Any) -> dict[str, Tensor]:
    # DataParallel concatenates results along dimension 0, which a scalar does not have.
    return {name: value.unsqueeze(0) for name, value in call(model, *arguments).items()}
