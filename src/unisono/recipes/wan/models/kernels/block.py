"""A Wan block that computes what diffusers' does, in fewer and faster GPU operations.

A third of a compiled block's time was spent between its matrix products, mostly on sums over tokens in the backward
pass (of modulation, norm weights and biases). Only the class is swapped, so that weights keep their names.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from unisono.parallel.blocks.repeated import has_autograd_functions
from unisono.parallel.context import Tokens
from unisono.recipes.wan.models.context import LocalAngles, attend_to_all
from unisono.recipes.wan.models.kernels import fused

_KEYS, _QUERIES = 128, 512  # keys per program of attention's backward pass, and the fewest queries per piece
_BUSY = (0.65, 0.9)  # busy fraction of a GPU above which splitting gains nothing, and the one it must reach


def use_fast_blocks(transformer: nn.Module, *, is_estimate: bool = False) -> None:
    """Makes the blocks of a diffusers Wan transformer use our kernels when they are on a GPU.

    `is_estimate`: on the CPU too, where the memory of a run on a GPU is predicted.
    """
    if is_estimate or importlib.util.find_spec("triton") is not None:
        for block in transformer.blocks:  # type: ignore[union-attr]
            make_fast(block, ("cpu",) if is_estimate else ("cuda",))


def make_fast(block: nn.Module, devices: tuple[str, ...] = ("cuda",)) -> None:
    """Makes one block fast on these devices; elsewhere, and if it is of another kind, it computes as before."""
    if _is_known(block):
        block.__class__ = _fast(type(block), devices)  # type: ignore[arg-type]


def _is_known(block: Any) -> bool:
    """Whether this is a block without image input that has exactly the parts that `_forward` calls."""
    attentions = (block.attn1, block.attn2)
    norms = (block.norm2, *(norm for attention in attentions for norm in (attention.norm_q, attention.norm_k)))
    return (
        all(getattr(norm, "weight", None) is not None for norm in norms)
        and all(attention.norm_q.eps == attention.norm_k.eps for attention in attentions)
        # With dropout the bias would get another gradient.
        and all(getattr(attention.to_out[1], "p", 0) == 0 for attention in attentions)
        and all(attention.add_k_proj is None and not attention.fused_projections for attention in attentions)
        and all(getattr(attention.processor, "_parallel_config", None) is None for attention in attentions)
    )


@cache  # one class for all blocks of a kind: torch.compile's guards look at the class
def _fast(plain: type[nn.Module], devices: tuple[str, ...]) -> type[nn.Module]:
    def forward(self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, rotary_emb: Any) -> Any:
        # A modulation per token (temb of four dimensions) is not summed over tokens; float64 is for tests only.
        is_supported = temb.ndim == 3 and hidden_states.dtype != torch.float64 and hidden_states.device.type in devices
        compute = _forward if is_supported else plain.forward
        return compute(self, hidden_states, encoder_hidden_states, temb, rotary_emb)

    fast = type(plain.__name__, (plain,), {"forward": forward, "__module__": plain.__module__})
    has_autograd_functions(fast)
    return fast


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
    """The output, and the bias of the last layer if the consumer of the output computes the bias's gradient.

    `tokens`: how the tokens are divided between ranks that carry a sample together.
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
        split = _in_pieces(split, _pieces(attention.heads, other.shape[1], _multiprocessors()))
    query, key, value = split
    out = attend_to_all(query, key, value, attention.processor._attention_backend, tokens).reshape(parts[0].shape)
    last, dropout = attention.to_out
    out, bias = fused.linear(last, out.type_as(parts[0]))
    return dropout(out), bias


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _multiprocessors() -> int:
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def _pieces(heads: int, keys: int, multiprocessors: int) -> tuple[int, ...]:
    """The numbers of pieces that a sample's queries can be split into; none if the GPU is busy without that."""

    def busy(pieces: int) -> float:
        programs = pieces * heads * -(-keys // _KEYS)
        return programs / (multiprocessors * -(-programs // multiprocessors))

    if not multiprocessors or busy(1) > _BUSY[0]:
        return ()
    return tuple(pieces for pieces in range(2, 17) if busy(pieces) > _BUSY[1])


def _in_pieces(split: list[Tensor], numbers: tuple[int, ...]) -> list[Tensor]:
    """Splits the queries into several samples with the same keys and values.

    The backward pass of attention runs one program per sample, head and block of keys. Text has few keys, so that one
    video at a time keeps only a third of a GPU busy.
    """
    queries = split[0].shape[1]
    for pieces in numbers:
        # Compiled code guards on the remainder only: a video of another length does not recompile.
        if queries % pieces == 0 and queries >= pieces * _QUERIES:
            repeated = [part.repeat(pieces, 1, 1, 1) for part in split[1:]]
            return [split[0].reshape(pieces, -1, *split[0].shape[2:]), *repeated]
    return split
