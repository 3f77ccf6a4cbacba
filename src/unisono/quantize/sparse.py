"""Semi-structured sparsity (2:4): each group of four consecutive elements of a weight's row keeps its two largest.

Sparse matrix units skip the other elements, which at most doubles the rate, but only in products that sum over these
groups. Only the layer's output does: the input's gradient sums over outputs, and the weight's gradient over tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_GROUP, _KEPT = 4, 2
_MULTIPLE = 8  # sparse products need a multiple of this many tokens


def has_sparse_products(device: torch.device) -> bool:
    """Returns whether the device multiplies 2:4 sparse matrices: NVIDIA GPUs since Ampere, with cuSPARSELt."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.backends.cusparselt.is_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def pruned(weight: Tensor) -> Tensor:
    """Sets the two smallest of every four elements of a row to zero; of equal elements, the first are kept."""
    groups = weight.reshape(*weight.shape[:-1], -1, _GROUP)
    sizes = groups.abs()
    this, other = sizes.unsqueeze(-1), sizes.unsqueeze(-2)
    number = torch.arange(_GROUP, device=weight.device)
    is_before = (other > this) | ((other == this) & (number < number[:, None]))
    return torch.where(is_before.sum(-1) < _KEPT, groups, 0).flatten(-2)


def sparse_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, sparse_units: bool) -> Tensor:
    """Returns x @ weight.T + bias for a pruned weight; `sparse_units`: the device has sparse matrix units."""
    if not sparse_units or x.dtype.itemsize != 2:
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    padded = F.pad(rows, (0, 0, 0, -len(rows) % _MULTIPLE)).contiguous()
    y: Tensor = torch.ops.unisono_sparse.linear(padded, weight.contiguous())
    y = y[: len(rows)].view(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias


# Wraps cuSPARSELt in a custom operation, because the compiler cannot infer the shapes of cuSPARSELt's operations.
@torch.library.custom_op("unisono_sparse::linear", mutates_args=())
def _linear(rows: Tensor, weight: Tensor) -> Tensor:
    return torch._cslt_sparse_mm(torch._cslt_compress(weight), rows.t(), transpose_result=True)


@_linear.register_fake
def _(rows: Tensor, weight: Tensor) -> Tensor:
    return rows.new_empty(len(rows), len(weight))
