"""Matrix products with a frozen, quantised weight, forward and backward.

The weight is decoded when it is needed, once in forward and once in backward, and discarded afterwards: autograd saves
only the codes, which exist anyway. A frozen weight needs no gradient, so the input of the layer is not saved either.

On GPUs with fp8 matrix units, fp8 weights are not decoded at all: the input's rows are quantised on the fly, each with
its own scale, and multiplied by the codes. Scales must not vary along the dimension that a product sums over. A weight
has one scale per row, so if the product sums over its rows, the scales are multiplied into the input first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from unisono.quantize.formats import FORMATS
from unisono.quantize.operations import quantised_rows

_MULTIPLE = 16  # fp8 products need matrix sizes that are multiples of this


def has_fp8_products(device: torch.device) -> bool:
    """Returns whether the device has fp8 matrix units: NVIDIA GPUs since Ada and Hopper."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def fits_fp8_products(num_rows: int, num_columns: int) -> bool:
    """Returns whether an fp8 product accepts a weight of this size."""
    return num_rows % _MULTIPLE == 0 and num_columns % _MULTIPLE == 0


class FrozenProduct(Function):
    """Computes x @ weight.T (`transposed`), or x @ weight, plus a bias; only x gets a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        codes: Tensor,
        scales: Tensor | None,
        bias: Tensor | None,
        format_name: str,
        num_columns: int,
        transposed: bool,
        fp8_products: bool,
    ) -> Tensor:
        """Returns the product in the dtype of x; `num_columns` is the number of columns of the weight."""
        ctx.save_for_backward(codes, scales)
        ctx.weight = (format_name, num_columns, transposed, fp8_products)
        return frozen_product(x, codes, scales, bias, *ctx.weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Returns the gradient of x."""
        codes, scales = ctx.saved_tensors
        format_name, num_columns, transposed, fp8_products = ctx.weight
        result = frozen_product(gradient, codes, scales, None, format_name, num_columns, not transposed, fp8_products)
        return result, None, None, None, None, None, None, None


def frozen_product(
    x: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    format_name: str,
    num_columns: int,
    transposed: bool,
    fp8_products: bool,
    quantised: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Returns x @ weight.T + bias (`transposed`), or x @ weight + bias, without a gradient; see FrozenProduct.

    `quantised`: the result of `quantised_rows` for x, if several products with transposed weights reuse it.
    """
    if fp8_products and scales is not None and x.dtype.itemsize == 2:
        return _fp8_product(x, codes, scales, bias, transposed, quantised)
    matrix = FORMATS[format_name].decode(codes, scales, num_columns, x.dtype)
    return F.linear(x, matrix if transposed else matrix.t(), bias)


def _fp8_product(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, transposed: bool, quantised: Any
) -> Tensor:
    # Make x contiguous: quantising keeps its layout, and the product needs a row-major first operand.
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    weight_scales = scales.view(torch.bfloat16).float().t()  # [1, rows of the weight]
    # The second operand must be column-major. Transposing the codes moves less memory than decoding them would.
    if transposed:
        columns = codes.t()
        values, row_scales = quantised or quantised_rows(rows)
    else:
        columns = codes.t().contiguous().t()
        values, row_scales = quantised_rows(rows, weight_scales)
        weight_scales = weight_scales.new_ones(1, codes.shape[1])
    result = torch._scaled_mm(
        values,
        columns.view(torch.float8_e4m3fn),
        scale_a=row_scales,
        scale_b=weight_scales,
        bias=None if bias is None else bias.to(torch.bfloat16),
        out_dtype=torch.bfloat16,  # the only output dtype that supports one scale per row
        use_fast_accum=True,
    )
    return result.to(x.dtype).view(*x.shape[:-1], result.shape[-1])
