"""torch's AdamW with unisono's own kernel for float32 weights on a GPU.

torch's fused kernel writes gradients back when it divides them by the loss scale. unisono's kernel only reads them, so
it needs 7 memory accesses per weight instead of 8. State, options and checkpoints are those of torch.optim.AdamW.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

CHUNK = 32768  # number of weights per Triton program
_ALIGNED = 16  # number of bytes that a GPU loads at once


def adamw_for(weight: nn.Parameter) -> type[torch.optim.AdamW]:
    """Returns the optimizer class for weights like this one: unisono's if its kernel works, otherwise torch's."""
    return AdamW if weight.device.type == "cuda" and kernel_works(weight.device) else torch.optim.AdamW


@cache
def kernel_works(device: torch.device) -> bool:
    """Returns whether the kernel gives the same results as torch's on this device, tested with a few weights.

    The kernel cannot be used without Triton, or if Triton finds no C compiler.
    """
    if importlib.util.find_spec("triton") is None:
        return False
    weights = [nn.Parameter(torch.linspace(-1, 1, 5000, dtype=torch.float32, device=device)) for _ in range(2)]
    try:
        for kind, weight in zip((AdamW, torch.optim.AdamW), weights, strict=True):
            _try_out(kind([weight], lr=1e-2, weight_decay=0.1, fused=True), weight)
    except Exception:  # the compiler, the driver or Triton itself may raise anything
        return False
    return torch.allclose(weights[0], weights[1], rtol=1e-5, atol=1e-7)


def _try_out(optimizer: Any, weight: nn.Parameter) -> None:
    for skips in (0.0, 1.0, 0.0):
        weight.grad = 2 * weight.detach().cos()
        optimizer.grad_scale = torch.full((), 2.0, device=weight.device)
        optimizer.found_inf = torch.full((), skips, device=weight.device)
        optimizer.step()


class AdamW(torch.optim.AdamW):
    """AdamW that skips steps and scales gradients on the device, in one pass over weights, gradients and state."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        super().__init__(params, **{**options, "fused": True})
        self._tables: dict[int, _Table] = {}  # number of the parameter group -> table

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Updates all weights that have a gradient."""
        groups = [_Group(self, group) for group in self.param_groups] if closure is None else []
        if not groups or not all(group.is_supported for group in groups):
            return super().step(closure)
        for number, group in enumerate(groups):
            if group.weights:
                table = self._tables.get(number)
                if table is None or table.sizes != group.sizes:
                    table = self._tables[number] = _Table(group.sizes, group.weights[0].device)
                self._launch(group, table)
        return None

    def _launch(self, group: _Group, table: _Table) -> None:
        from unisono.optim.adamw_kernel import adamw

        if self.found_inf is None:
            torch._foreach_add_(group.steps, 1)
        else:
            torch._foreach_add_(group.steps, 1 - self.found_inf)
        addresses = group.addresses()
        is_aligned = all(address % _ALIGNED == 0 for row in addresses[:4] for address in row) and all(
            4 * size % _ALIGNED == 0 for size in group.sizes
        )
        options = group.options
        beta1, beta2 = options["betas"]
        rate = options["lr"]
        adamw(
            table.filled(addresses),
            table.of_tensors,
            table.owners,
            rate if isinstance(rate, Tensor) else None,
            0.0 if isinstance(rate, Tensor) else rate,
            options["weight_decay"],
            (1 - beta1, 1 - beta2, math.log(beta1) if beta1 else -math.inf, math.log(beta2) if beta2 else -math.inf),
            options["eps"],
            self.grad_scale,
            self.found_inf,
            is_aligned=is_aligned,
        )


class _Group:
    """The tensors of a parameter group that have a gradient, as this rank stores them."""

    def __init__(self, optimizer: AdamW, group: dict[str, Any]) -> None:
        lists: list[list[Tensor]] = [[] for _ in range(6)]
        optimizer._init_group(group, *lists)  # type: ignore[no-untyped-call]  # creates missing state
        weights, gradients, first, second, _, steps = ([_local(tensor) for tensor in tensors] for tensors in lists)
        filled = [number for number, weight in enumerate(weights) if weight.numel()]  # a rank may have no rows
        self.options, self.steps = group, steps
        self._counters = [steps[number] for number in filled]
        self.weights = [weights[number] for number in filled]
        self._all = [
            self.weights,
            [gradients[number].contiguous() for number in filled],
            [first[number] for number in filled],
            [second[number] for number in filled],
        ]
        self.sizes = [weight.numel() for weight in self.weights]

    @property
    def is_supported(self) -> bool:
        """Whether the kernel supports this group's options and the kind of its weights and gradients."""
        plain = not any(self.options[name] for name in ("amsgrad", "maximize", "differentiable"))
        weights, gradients = self._all[:2]
        return (
            plain
            and all(weight.is_cuda and weight.dtype == torch.float32 and weight.is_contiguous() for weight in weights)
            and all(gradient.dtype == torch.float32 for gradient in gradients)
        )

    def addresses(self) -> list[list[int]]:
        """Returns the memory addresses of weights, gradients, both moments and step counters."""
        return [[tensor.data_ptr() for tensor in tensors] for tensors in (*self._all, self._counters)]


class _Table:
    """The addresses of a group's tensors, stored on the device, so that one kernel can update all of them."""

    def __init__(self, sizes: list[int], device: torch.device) -> None:
        self.sizes = sizes
        chunks = [-(-size // CHUNK) for size in sizes]
        firsts = [0, *accumulate(chunks)][:-1]
        self.of_tensors = torch.tensor([sizes, firsts], dtype=torch.int64, device=device)
        owners = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(torch.tensor(chunks))
        self.owners = owners.to(device)
        self._rows: list[list[int]] = []
        self._is_recorded = False
        self._addresses = torch.empty(5, len(sizes), dtype=torch.int64, device=device)
        # A recorded CUDA graph copies from this tensor in every replay. A recording cannot allocate memory.
        self._recorded = torch.empty(5, len(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")

    def filled(self, rows: list[list[int]]) -> Tensor:
        """Returns the addresses on the device; updates them if a tensor has moved, as new gradients sometimes do."""
        if self._addresses.is_cuda and torch.cuda.is_current_stream_capturing():
            self._is_recorded = True
            self._addresses.copy_(self._recorded.copy_(torch.tensor(rows)), non_blocking=True)
        elif rows != self._rows or self._is_recorded:  # a replay may have written its own addresses
            self._rows = rows
            host = torch.tensor(rows)
            self._addresses.copy_(host.pin_memory() if self._addresses.is_cuda else host, non_blocking=True)
        return self._addresses


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
