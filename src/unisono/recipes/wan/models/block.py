"""A Wan block that computes what diffusers' does, in fewer and faster steps on a GPU.

A third of a compiled block's time went into what lies between its matrix products, most of it into sums over tokens in
the backward pass (of modulation, norm weights and biases). The class is swapped, so that weights keep their names.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from unisono.parallel.blocks import has_autograd_functions
from unisono.recipes.wan.models import fused
from unisono.recipes.wan.models.attention import attend

_KEYS, _QUERIES = 128, 512  # of a program of attention's backward pass; and fewer are not worth a piece
_BUSY = (0.65, 0.9)  # part of a GPU: with more there is nothing to gain, and with so much it is worth it


def use_fast_blocks(transformer: nn.Module) -> None:
    """Lets the blocks of a diffusers Wan transformer compute by our kernels when they are on a GPU."""
    if importlib.util.find_spec("triton") is not None:
        for block in transformer.blocks:  # type: ignore[union-attr]
            make_fast(block)


def make_fast(block: nn.Module, devices: tuple[str, ...] = ("cuda",)) -> None:
    """Makes one block fast on such devices; elsewhere, and if it is of another kind, it stays as it is."""
    if _is_known(block):
        block.__class__ = _fast(type(block), devices)  # type: ignore[arg-type]


def _is_known(block: Any) -> bool:
    """Whether this is a block without image input, whose parts are all those that `_forward` calls."""
    attentions = (block.attn1, block.attn2)
    norms = (block.norm2, *(norm for attention in attentions for norm in (attention.norm_q, attention.norm_k)))
    return (
        all(getattr(norm, "weight", None) is not None for norm in norms)
        and all(attention.norm_q.eps == attention.norm_k.eps for attention in attentions)
        and all(
            getattr(attention.to_out[1], "p", 0) == 0 for attention in attentions
        )  # or its bias would get another gradient
        and all(attention.add_k_proj is None and not attention.fused_projections for attention in attentions)
        and all(getattr(attention.processor, "_parallel_config", None) is None for attention in attentions)
    )


@cache  # one class for all blocks of a kind: torch.compile's guards look at the class
def _fast(plain: type[nn.Module], devices: tuple[str, ...]) -> type[nn.Module]:
    def forward(self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, rotary_emb: Any) -> Any:
        # A modulation for each token (temb of four dimensions) is not summed over tokens; 64 bit is not for speed.
        known = temb.ndim == 3 and hidden_states.dtype != torch.float64 and hidden_states.device.type in devices
        compute = _forward if known else plain.forward
        return compute(self, hidden_states, encoder_hidden_states, temb, rotary_emb)

    fast = type(plain.__name__, (plain,), {"forward": forward, "__module__": plain.__module__})
    has_autograd_functions(fast)
    return fast


def _forward(block: Any, x: Tensor, text: Tensor, time: Tensor, angles: Any) -> Tensor:
    shift, scale, gate, late_shift, late_scale, late_gate = (block.scale_shift_table + time.float()).unbind(1)
    x, seen = fused.normed(x, 1 + scale, shift, block.norm1.eps)
    said = _attention(block.attn1, seen, seen, tuple(part.flatten(0, -2) for part in angles))
    weight, bias = (part.float().expand(len(gate), -1) for part in (block.norm2.weight, block.norm2.bias))
    x, seen = fused.added_and_normed(x, said[0], gate, weight, bias, block.norm2.eps, said[1])
    said = _attention(block.attn2, seen, text, None)
    x, seen = fused.added_and_normed(x, said[0], None, 1 + late_scale, late_shift, block.norm3.eps, said[1])
    widen, dropout, narrow = block.ffn.net
    said = fused.linear(narrow, dropout(fused.linear_gelu(widen.proj, seen)))
    return fused.gated(x, said[0], late_gate, said[1])


def _attention(attention: Any, x: Tensor, other: Tensor, angles: Any) -> tuple[Tensor, Tensor | None]:
    """What it says; and the bias of its last layer, if who uses that gives the bias its gradient."""
    head = attention.inner_dim // attention.heads
    layers, norms = [attention.to_q, attention.to_k, attention.to_v], [attention.norm_q, attention.norm_k]
    if other is x:
        parts = fused.turned(layers, x, norms, angles, head)
    else:
        parts = fused.turned(layers[:1], x, norms[:1], angles, head)
        parts += fused.turned(layers[1:], other, norms[1:], angles, head)
    split = [part.view(*part.shape[:2], attention.heads, head) for part in parts]
    if other is not x and len(x) == 1:
        split = _in_pieces(split, _pieces(attention.heads, other.shape[1], _multiprocessors()))
    query, key, value = split
    said = attend(query, key, value, attention.processor._attention_backend).reshape(parts[0].shape)
    last, dropout = attention.to_out
    said, bias = fused.linear(last, said.type_as(parts[0]))
    return dropout(said), bias


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _multiprocessors() -> int:
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def _pieces(heads: int, keys: int, multiprocessors: int) -> tuple[int, ...]:
    """Into how many pieces a sample's queries are cut; none, if all the GPU is busy without that."""

    def busy(pieces: int) -> float:
        programs = pieces * heads * -(-keys // _KEYS)
        return programs / (multiprocessors * -(-programs // multiprocessors))

    if not multiprocessors or busy(1) > _BUSY[0]:
        return ()
    return tuple(pieces for pieces in range(2, 17) if busy(pieces) > _BUSY[1])


def _in_pieces(split: list[Tensor], numbers: tuple[int, ...]) -> list[Tensor]:
    """Queries as several samples with the same keys and values.

    The backward pass of attention has a program for each sample, head and few keys. Text has few keys, and with one
    film at a time that is a third of a GPU.
    """
    queries = split[0].shape[1]
    for pieces in numbers:
        # A remainder is all that compiled code asks of the length: a film of another length is not compiled anew.
        if queries % pieces == 0 and queries >= pieces * _QUERIES:
            repeated = [part.repeat(pieces, 1, 1, 1) for part in split[1:]]
            return [split[0].reshape(pieces, -1, *split[0].shape[2:]), *repeated]
    return split
