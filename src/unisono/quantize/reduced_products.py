"""The three matrix products of a linear layer: output, gradient of the input, gradient of the weight.

Callers pass a `Products`, or None for products in the compute dtype. Backward quantises or prunes the weight again
instead of saving a copy. Compiled code may save the codes from forward, because that is cheaper; for `gathered`
weights, which fsdp frees after the forward pass, this is prevented. Operands are row-major, because fp8 products accept
nothing else.

| product | summed over | scales |
|---|---|---|
| x @ weight.T | inputs | one per token, one per output |
| gradient @ weight | outputs | one per token; the weight's scales are multiplied into the gradient first |
| gradient.T @ x | tokens | not quantised, unless `weight_gradient` is set |

A product that sums over tokens cannot have a scale per token. With `weight_gradient`, fp8 multiplies the scales of x
into the gradient, which then gets a single scale; int8 uses a scale per input and per output. These scales depend on
all tokens of a micro-batch, so the result depends on how a batch is divided into micro-batches.

With `sparse`, the weight is pruned each time it is used, so that each step keeps its currently largest elements. Pruned
elements get a gradient too, as if they had not been pruned (a straight-through estimator), so they can grow back.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from unisono.quantize.operands import multiply, quantised_rows, scales_for, transposed
from unisono.quantize.sparse import pruned, sparse_linear


class Products(NamedTuple):
    """Specifies how a layer computes its matrix products."""

    format_name: str = ""  # format of quantised operands: fp8 or int8; empty: not quantised
    weight_gradient: bool = False  # also quantises the operands of the weight's gradient
    fp8_units: bool = False  # whether the device multiplies fp8 matrices
    sparse: bool = False  # prunes the weight to 2:4
    sparse_units: bool = False  # whether the device multiplies 2:4 sparse matrices
    gathered: bool = False  # the full weight exists only while it is used

    @property
    def saves_codes(self) -> bool:
        """Whether the input's codes are saved for backward instead of the input."""
        return self.weight_gradient and self.format_name == "fp8"


def linear(products: Products | None, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """Returns x @ weight.T + bias, and the tensors that `gradients` needs; x, weight and bias have the same dtype."""
    if products is None:
        return F.linear(x, weight, bias), [x, weight]
    if products.sparse:
        return sparse_linear(x, pruned(weight), bias, sparse_units=products.sparse_units), [x, weight]
    codes, scales = quantised_rows(_rows(x).contiguous(), products.format_name)
    weight_codes, weight_scales = quantised_rows(weight.contiguous(), products.format_name)
    y = multiply(codes, scales, weight_codes, weight_scales.t(), x.dtype, bias, fp8_units=products.fp8_units)
    return y.view(*x.shape[:-1], len(weight)), [codes, scales, weight] if products.saves_codes else [x, weight]


def gradients(
    products: Products | None, saved: list[Tensor], dy: Tensor, *, of_input: bool = True, of_weight: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients of x and of the weight (None if not needed), from the tensors that `linear` returned."""
    *inputs, weight = saved
    rows, dx, dweight = _rows(dy), None, None
    if of_input:
        dx = _input_gradient(products, rows, weight).view(*dy.shape[:-1], weight.shape[1])
    if of_weight:
        dweight = _weight_gradient(products, rows, inputs)
    return dx, dweight


def _input_gradient(products: Products | None, rows: Tensor, weight: Tensor) -> Tensor:
    if products is None:
        return rows @ weight
    if products.gathered:  # makes the weight depend on the gradient, so compiled code cannot save codes from forward
        weight = weight + 0 * rows[:1, :1].sum()
    if products.sparse:
        return rows @ pruned(weight)
    weight_codes, weight_scales = quantised_rows(weight, products.format_name)
    codes, scales = quantised_rows((rows * weight_scales.t()).contiguous(), products.format_name)
    ones = weight_scales.new_ones(1, weight.shape[1])
    return multiply(codes, scales, transposed(weight_codes), ones, rows.dtype, fp8_units=products.fp8_units)


def _weight_gradient(products: Products | None, rows: Tensor, inputs: list[Tensor]) -> Tensor:
    if products is None or not products.weight_gradient:
        return rows.t() @ _rows(inputs[0])
    if products.format_name == "int8":
        (x,) = inputs
        codes, scales = quantised_rows(rows.t(), "int8")
        x_codes, x_scales = quantised_rows(_rows(x).t(), "int8")
        return multiply(transposed(codes.t()), scales, transposed(x_codes.t()), x_scales.t(), rows.dtype)
    x_codes, x_scales = inputs
    # One power-of-two scale for all tokens, from the largest product of a token's gradient and its scale of x.
    scale = scales_for((rows.abs().amax(dim=-1, keepdim=True) * x_scales).amax(), "fp8")
    codes = (rows * (x_scales / scale)).to(torch.float8_e4m3fn)
    a_scales = scale.expand(rows.shape[1], 1).contiguous()
    ones = x_scales.new_ones(1, x_codes.shape[1])
    operands = (transposed(codes), a_scales, transposed(x_codes), ones)
    return multiply(*operands, rows.dtype, fp8_units=products.fp8_units, fast=False)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
