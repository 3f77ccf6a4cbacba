"""Counts the floating-point operations and bytes of a training step, as a basis for predicting its time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

_NO_KERNEL = {
    "_unsafe_view",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "lift_fresh",
}
_PRODUCTS = {torch.float8_e4m3fn: "fp8", torch.int8: "fp8", torch.bfloat16: "bf16", torch.float16: "bf16"}
"""Maps dtypes to the rate at which a GPU multiplies them; all other dtypes run at the rate of float32 (or tf32)."""


@dataclass
class Work:
    """The work of all kernels of a step."""

    products: Counter[str] = field(default_factory=Counter)
    """Floating-point operations of matrix products and convolutions, by rate: fp8, bf16, fp32."""
    attention: float = 0.0
    """Floating-point operations of fused attention."""
    product_bytes: float = 0.0
    """Bytes that matrix products and attention read and write."""
    other_bytes: float = 0.0
    """Bytes that all other kernels read and write if no operations are fused."""
    attended_bytes: float = 0.0
    """Bytes of queries, keys, values and results of fused attention, which context parallelism exchanges."""
    launches: float = 0.0
    """Number of kernel launches."""

    def __add__(self, other: Work) -> Work:
        return Work(
            self.products + other.products,
            *(getattr(self, name) + getattr(other, name) for name in _NUMBERS),
        )

    def __mul__(self, factor: float) -> Work:
        products = Counter({rate: factor * flops for rate, flops in self.products.items()})
        return Work(products, *(factor * getattr(self, name) for name in _NUMBERS))

    def minus(self, other: Work) -> Work:
        """Returns the difference between this work and another; negative differences count as 0."""
        products = Counter({rate: max(flops - other.products[rate], 0) for rate, flops in self.products.items()})
        return Work(products, *(max(getattr(self, name) - getattr(other, name), 0) for name in _NUMBERS))

    @property
    def flops(self) -> float:
        """Floating-point operations of matrix products and attention."""
        return float(sum(self.products.values()) + self.attention)

    def add(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Adds the work of an ATen operation."""
        packet = getattr(function, "_overloadpacket", None)
        name = getattr(packet, "__name__", "")
        if getattr(function, "is_view", False) or name in _NO_KERNEL:
            return
        tensors = [each for each in tree_iter((args, kwargs, result)) if isinstance(each, Tensor)]
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        self.launches += 1
        if name == "_int_mm":
            self.products["fp8"] += 2 * args[0].shape[0] * args[0].shape[1] * args[1].shape[1]
            self.product_bytes += num_bytes
        elif packet in flop_registry:
            flops = flop_registry[packet](*args, **(kwargs or {}), out_val=result)
            self.product_bytes += num_bytes
            if "attention" in name:
                self.attention += flops
                self.attended_bytes += num_bytes
            else:
                self.products[_PRODUCTS.get(tensors[0].dtype, "fp32")] += flops
        else:
            self.other_bytes += num_bytes


_NUMBERS = ("attention", "product_bytes", "other_bytes", "attended_bytes", "launches")
