"""Semi-structured sparsity (2:4): of every four consecutive inputs of a weight's row, the two largest are kept.

Sparse matrix units skip the others: at most twice the rate, but only in products that sum over these groups of four.
That is the layer's output. The gradient of the input sums over outputs, and the weight's gradient over tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_GROUP, _KEPT = 4, 2
_MULTIPLE = 8  # tokens of a sparse product


def has_sparse_products(device: torch.device) -> bool:
    """Whether the device multiplies 2:4 sparse matrices: GPUs since Ampere, with cuSPARSELt."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.backends.cusparselt.is_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def pruned(weight: Tensor) -> Tensor:
    """The weight with zeros for the two smallest of every four numbers in a row; of equal ones, the first are kept."""
    groups = weight.reshape(*weight.shape[:-1], -1, _GROUP)
    sizes = groups.abs()
    this, other = sizes.unsqueeze(-1), sizes.unsqueeze(-2)
    number = torch.arange(_GROUP, device=weight.device)
    is_before = (other > this) | ((other == this) & (number < number[:, None]))
    return torch.where(is_before.sum(-1) < _KEPT, groups, 0).flatten(-2)


def sparse_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, sparse_units: bool) -> Tensor:
    """x @ weight.T + bias for a pruned weight; `sparse_units`: the device multiplies such matrices faster."""
    if not sparse_units or x.dtype.itemsize != 2:
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    padded = F.pad(rows, (0, 0, 0, -len(rows) % _MULTIPLE)).contiguous()
    y: Tensor = torch.ops.unisono_sparse.linear(padded, weight.contiguous())
    y = y[: len(rows)].view(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias


# An operation of its own, because the compiler does not know the shapes of cuSPARSELt's.
@torch.library.custom_op("unisono_sparse::linear", mutates_args=())
def _linear(rows: Tensor, weight: Tensor) -> Tensor:
    return torch._cslt_sparse_mm(torch._cslt_compress(weight), rows.t(), transpose_result=True)


@_linear.register_fake
def _(rows: Tensor, weight: Tensor) -> Tensor:
    return rows.new_empty(len(rows), len(weight))
