"""Wan's attention, as the library computes it but with fewer and larger pieces of work.

One matrix product makes queries, keys and values (three small ones leave a GPU half idle), positions are turned by
a form that compiles into one pass, and the kernel that computes attention is the one that was fastest when it was
measured. The weights stay where they are and keep their names.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_TIMED = ("cudnn", "flash", "efficient")
_TRIES = 5


class FusedAttention:
    """Takes the place of diffusers' `WanAttnProcessor`; the same function of the same weights."""

    def __init__(self, kernel: str = "auto") -> None:
        self.kernel = kernel

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """What `WanAttention.forward` calls; shapes are [batch, tokens, width]."""
        if encoder_hidden_states is None:
            query, key, value = projected(hidden_states, attn.to_q, attn.to_k, attn.to_v)
        else:
            query = attn.to_q(hidden_states)
            key, value = projected(encoder_hidden_states, attn.to_k, attn.to_v)
        query, key = attn.norm_q(query), attn.norm_k(key)
        query, key, value = (part.unflatten(2, (attn.heads, -1)) for part in (query, key, value))
        if rotary_emb is not None:
            query, key = turned(query, *rotary_emb), turned(key, *rotary_emb)
        # The norm's weights are 32 bit, and so would be what it returns; attention in 16 bit needs all three alike.
        query, key = query.type_as(value), key.type_as(value)
        out = attention(query, key, value, self.kernel)
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3)))  # type: ignore[no-any-return]


def projected(hidden: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """The results of several linear layers on the same input, by one matrix product where they are plain layers."""
    if not all(type(layer) is nn.Linear for layer in layers):  # a LoRA's layers compute more than a product
        return tuple(layer(hidden) for layer in layers)
    weight = torch.cat([layer.weight for layer in layers])  # type: ignore[misc]
    bias = torch.cat([layer.bias for layer in layers])  # type: ignore[misc]
    return torch.split(F.linear(hidden, weight, bias), [len(layer.bias) for layer in layers], dim=-1)  # type: ignore[arg-type]


def turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of [batch, tokens, heads, width]: pairs of neighbouring channels are turned."""
    first, second = heads.view(*heads.shape[:-1], -1, 2).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    pairs = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return pairs.flatten(-2).type_as(heads)


def attention(query: Tensor, key: Tensor, value: Tensor, kernel: str) -> Tensor:
    """Attention of [batch, tokens, heads, width]; `auto` leaves the choice of the kernel to torch."""
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    if kernel == "auto" or not query.is_cuda:
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    with sdpa_kernel(KERNELS[kernel]):
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2)


def fastest(heads: int, head_width: int, tokens: int, batch: int, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Milliseconds of attention forwards and backwards by each kernel that can compute it; `auto` is torch's choice."""
    inside = [torch.randn(batch, tokens, heads, head_width, device=device, dtype=dtype) for _ in range(3)]
    for tensor in inside:
        tensor.requires_grad_()
    found = {}
    for kernel in ("auto", *_TIMED):
        try:
            found[kernel] = _milliseconds(inside, kernel)
        except RuntimeError:  # not made for this GPU, type or size
            continue
    return found


def _milliseconds(inside: list[Tensor], kernel: str) -> float:
    times: list[float] = []
    for _ in range(_TRIES + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        out = attention(inside[0], inside[1], inside[2], kernel)
        torch.autograd.grad(out, inside, torch.ones_like(out))
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times[1:])[_TRIES // 2]
