"""Trains on one device in one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from unisono.parallel.strategy import ForwardWrapper, Strategy


class Single(Strategy):
    """Uses the unwrapped model on one device."""

    name = "single"

    def _set_up(self, wrapper: ForwardWrapper, blocks: Sequence[nn.Module]) -> nn.Module:
        self._fixes_gradients = self._all_placed = False
        self._placed: set[nn.Parameter] = set()  # parameters whose gradients have their own memory
        return wrapper.to(self.placement.device)

    def fix_gradient_addresses(self) -> bool:
        """Keeps the gradients of weights that the loss uses. Other weights get none, so the optimizer skips them."""
        self._fixes_gradients = True
        return True

    @property
    def has_fixed_gradients(self) -> bool:
        """True once a whole step has produced no gradient at a new address."""
        return self._all_placed

    def clear_gradients(self) -> None:
        """Frees the gradients, or zeroes them."""
        if not self._fixes_gradients:
            super().clear_gradients()
            return
        used = [parameter for parameter in self._all_parameters if parameter.grad is not None]
        new = [parameter for parameter in used if parameter not in self._placed]
        for parameter in new:  # autograd may give two weights gradients that share memory (views of a sum)
            parameter.grad = torch.zeros_like(parameter)
        self._placed.update(new)
        self._all_placed = bool(used) and not new
        if used:
            torch._foreach_zero_([parameter.grad for parameter in used if parameter.grad is not None])
