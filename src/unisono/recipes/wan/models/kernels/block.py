"""A Wan block that computes the same as diffusers' block, in fewer and faster GPU operations.

When measured, a compiled block of diffusers spent a third of its time outside of matrix products, mostly on sums over
tokens in the backward pass (for modulation, norm weights and biases). Only the block's class is replaced, so the
weights keep their names.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from unisono.parallel.blocks.repeated import has_autograd_functions, recomputing
from unisono.parallel.context import Tokens
from unisono.quantize.reduced_layers import products_of
from unisono.recipes.wan.models.context import DividedAttention, LocalAngles, attend_to_all
from unisono.recipes.wan.models.kernels import fused, selective
from unisono.recipes.wan.models.kernels.attention import kernel_name
from unisono.recipes.wan.models.kernels.pieces import in_pieces, multiprocessors, possible_pieces


def use_fast_blocks(transformer: nn.Module, *, is_estimate: bool = False) -> None:
    """Makes the blocks of a diffusers Wan transformer use our kernels when they are on a GPU.

    `is_estimate`: use the kernels on the CPU too, to predict the memory of a GPU run.
    """
    if is_estimate or importlib.util.find_spec("triton") is not None:
        for block in transformer.blocks:  # type: ignore[union-attr]
            make_fast(block, ("cpu",) if is_estimate else ("cuda",))


def make_fast(block: nn.Module, devices: tuple[str, ...] = ("cuda",)) -> None:
    """Makes one block use the fast forward pass on these devices; leaves blocks of unsupported kinds unchanged."""
    if _is_known(block):
        block.__class__ = _fast(type(block), devices)  # type: ignore[arg-type]


def _is_known(block: Any) -> bool:
    """Whether a block has no image input and exactly the parts that `_forward` calls."""
    attentions = (block.attn1, block.attn2)
    norms = (block.norm2, *(norm for attention in attentions for norm in (attention.norm_q, attention.norm_k)))
    return (
        all(getattr(norm, "weight", None) is not None for norm in norms)
        and all(attention.norm_q.eps == attention.norm_k.eps for attention in attentions)
        # With dropout after the layer, the gradient of the layer's bias would not be the sum that the kernels compute.
        and all(getattr(attention.to_out[1], "p", 0) == 0 for attention in attentions)
        and all(attention.add_k_proj is None and not attention.fused_projections for attention in attentions)
        and all(getattr(attention.processor, "_parallel_config", None) is None for attention in attentions)
    )


@cache  # one class for all blocks of a kind, because torch.compile recompiles for each class
def _fast(plain: type[nn.Module], devices: tuple[str, ...]) -> type[nn.Module]:
    def forward(self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, rotary_emb: Any) -> Any:
        compute = _forward if _is_supported(hidden_states, temb, devices) else plain.forward
        return compute(self, hidden_states, encoder_hidden_states, temb, rotary_emb)

    fast = type(plain.__name__, (plain,), {"forward": forward, "__module__": plain.__module__})

    def selective_form(block: nn.Module, *, products: bool = False) -> type[nn.Module] | str:
        return _why_not_selective(block, fast) or _selective(plain, devices, products)  # type: ignore[arg-type]

    has_autograd_functions(fast, selective_form)
    return fast


@cache
def _selective(plain: type[nn.Module], devices: tuple[str, ...], products: bool) -> type[nn.Module]:
    """Returns a block class that recomputes cheap results itself; where it is not fast, torch's checkpointing does."""
    elsewhere: Any = recomputing(plain, selective=True)

    def forward(self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, rotary_emb: Any) -> Any:
        if not _is_supported(hidden_states, temb, devices):
            return elsewhere.forward(self, hidden_states, encoder_hidden_states, temb, rotary_emb)
        inputs = (hidden_states, encoder_hidden_states, temb, rotary_emb)
        if not torch.is_grad_enabled():
            return _forward(self, *inputs)
        return selective.forward(self, *inputs, products=products)

    attributes = {"forward": forward, "_unisono_plain": plain, "__module__": plain.__module__}
    return type(plain.__name__, (plain,), attributes)


def _is_supported(x: Tensor, time: Tensor, devices: tuple[str, ...]) -> bool:
    # Per-token modulation (`time` with four dimensions) needs no sums over tokens; only tests use float64.
    return time.ndim == 3 and x.dtype != torch.float64 and x.device.type in devices


def _why_not_selective(block: Any, fast: type[nn.Module]) -> str:
    """Returns the reason why a block cannot recompute parts of itself; empty if it can."""
    attentions: tuple[Any, ...] = (block.attn1, block.attn2)
    layers = [layer for part in attentions for layer in (part.to_q, part.to_k, part.to_v, part.to_out[0])]
    widen, dropout, narrow = block.ffn.net
    if type(block) is not fast:
        return "waits in host memory"
    if not all(map(fused._is_plain, [*layers, widen.proj, narrow])):
        return "has frozen weights or adapters"
    if any(products_of(layer) is not None for layer in [*layers, widen.proj, narrow]):
        return "multiplies in 8 bits"
    if isinstance(attentions[0].processor, DividedAttention):
        return "divides its tokens between ranks"
    if any(kernel_name(part.processor._attention_backend) is None for part in attentions):
        return "uses an attention kernel that is not torch's"
    return "has dropout in its feed-forward layers" if getattr(dropout, "p", 0) else ""


def _forward(block: Any, x: Tensor, text: Tensor, time: Tensor, angles: Any) -> Tensor:
    shift, scale, gate, late_shift, late_scale, late_gate = (block.scale_shift_table + time.float()).unbind(1)
    x, y = fused.normed(x, 1 + scale, shift, block.norm1.eps)
    tokens = angles.tokens if isinstance(angles, LocalAngles) else None
    out, bias_of_out = _attention(block.attn1, y, y, tuple(part.flatten(0, -2) for part in angles[:2]), tokens)
    weight, bias = (part.float().expand(len(gate), -1) for part in (block.norm2.weight, block.norm2.bias))
    x, y = fused.added_and_normed(x, out, gate, weight, bias, block.norm2.eps, bias_of_out)
    out, bias_of_out = _attention(block.attn2, y, text, None)
    x, y = fused.added_and_normed(x, out, None, 1 + late_scale, late_shift, block.norm3.eps, bias_of_out)
    widen, dropout, narrow = block.ffn.net
    out, bias_of_out = fused.linear(narrow, dropout(fused.linear_gelu(widen.proj, y)))
    return fused.gated(x, out, late_gate, bias_of_out)


def _attention(
    attention: Any, x: Tensor, other: Tensor, angles: Any, tokens: Tokens | None = None
) -> tuple[Tensor, Tensor | None]:
    """Returns the output, and the last layer's bias if the consumer of the output must compute the bias's gradient.

    `tokens`: the division of the tokens between ranks that share a sample.
    """
    head = attention.inner_dim // attention.heads
    layers, norms = [attention.to_q, attention.to_k, attention.to_v], [attention.norm_q, attention.norm_k]
    if other is x:
        parts = fused.rotated(layers, x, norms, angles, head)
    else:
        parts = fused.rotated(layers[:1], x, norms[:1], angles, head)
        parts += fused.rotated(layers[1:], other, norms[1:], angles, head)
    split = [part.view(*part.shape[:2], attention.heads, head) for part in parts]
    if other is not x and len(x) == 1:
        split = in_pieces(split, possible_pieces(attention.heads, other.shape[1], multiprocessors()))
    query, key, value = split
    out = attend_to_all(query, key, value, attention.processor._attention_backend, tokens).reshape(parts[0].shape)
    last, dropout = attention.to_out
    out, bias = fused.linear(last, out.type_as(parts[0]))
    return dropout(out), bias
