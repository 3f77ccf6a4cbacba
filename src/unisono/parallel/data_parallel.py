"""Several GPUs from one process (`torch.nn.DataParallel`).

Kept because people know it; ddp is faster. Each micro-batch is cut along its first dimension over the GPUs, each GPU
gives its own sums, and the sums are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from unisono.parallel.strategy import ForwardWrapper, Strategy


class DataParallel(Strategy):
    """Replicas on all GPUs of this process, made anew in every forward pass."""

    name = "dp"

    def _set_up(self, wrapper: ForwardWrapper, blocks: Sequence[nn.Module]) -> nn.Module:
        wrapper = wrapper.to(self.placement.device)
        self._replicated = nn.DataParallel(wrapper, device_ids=[device.index for device in self.placement.devices])
        return wrapper

    def train(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """call(model, *arguments) on each GPU with its part of the batch; a mapping of sums, added up."""
        gathered = self._replicated(_rows, call, *arguments)
        return {name: rows.sum(0) for name, rows in gathered.items()}

    def rows(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """call(model, *arguments) on each GPU with its part of the batch; their rows one after the other."""
        return self._replicated(call, *arguments)


def _rows(model: nn.Module, call: Callable[..., dict[str, Tensor]], *arguments: Any) -> dict[str, Tensor]:
    # DataParallel joins results along dimension 0, which a sum does not have.
    return {name: value.unsqueeze(0) for name, value in call(model, *arguments).items()}
