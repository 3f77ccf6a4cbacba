"""Divides the tokens of a Wan transformer between the ranks that share a sample (`parallel/context.py`).

Every rank turns all patches into tokens and, before the first block, keeps only its own tokens. After the last layer,
the ranks gather the velocity. In between, only self-attention needs the tokens of other ranks: norms, feed-forward
layers and cross-attention to the text treat each token separately. All of this happens in hooks on diffusers' modules,
so the weights keep their names.

The division of the tokens is passed to the blocks together with the rotary angles, because a block that is recomputed
in the backward pass gets the same arguments again.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor

from unisono.parallel.context import Context, Tokens
from unisono.recipes.wan.checks import num_tokens
from unisono.recipes.wan.models.kernels.attention import attend


class LocalAngles(NamedTuple):
    """The rotary embedding of this rank's tokens, and how all tokens are divided between the ranks."""

    cosine: Tensor
    sine: Tensor
    tokens: Tokens


def divide_tokens(transformer: Any, context: Context) -> None:
    """Makes a diffusers Wan transformer compute each sample together with the other ranks of `context`.

    Inside `context.apart()`, each rank still computes whole samples.
    """
    transformer.register_forward_pre_hook(_Timesteps(context), with_kwargs=True)
    transformer.rope.register_forward_hook(_Angles(context))
    transformer.blocks[0].register_forward_pre_hook(_split_states)
    transformer.proj_out.register_forward_hook(_Velocity(transformer))
    for block in transformer.blocks:
        backend = block.attn1.processor._attention_backend
        block.attn1.processor = DividedAttention()  # type: ignore[no-untyped-call]
        block.attn1.processor._attention_backend = backend


class _Timesteps:
    """Hook before the transformer: divides the tokens between the ranks, and splits per-token timesteps."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def __call__(self, transformer: Any, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        noisy, times, *others = inputs
        transformer._unisono_tokens = tokens = self._context.tokens(
            num_tokens(noisy.shape, transformer.config.patch_size)
        )
        return (noisy, tokens.split(times, 1) if times.ndim == 2 else times, *others), keywords


class _Angles:
    """Hook after the rotary embedding: selects the angles of this rank's tokens."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def __call__(self, rope: Any, inputs: Any, angles: tuple[Tensor, Tensor]) -> tuple[Any, ...]:
        if self._context.size == 1:
            return angles
        tokens = self._context.tokens(angles[0].shape[1])
        return LocalAngles(tokens.split(angles[0], 1), tokens.split(angles[1], 1), tokens)


def _split_states(block: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Hook before the first block: selects the hidden states of this rank's tokens."""
    states, *others = inputs
    angles = others[-1]
    return (angles.tokens.split(states, 1) if isinstance(angles, LocalAngles) else states, *others)


class _Velocity:
    """Hook after the last layer: gathers the velocity of all tokens."""

    def __init__(self, transformer: Any) -> None:
        self._transformer = transformer

    def __call__(self, layer: Any, inputs: Any, velocity: Tensor) -> Tensor:
        tokens: Tokens = self._transformer._unisono_tokens
        return tokens.gather(velocity, 1)


class DividedAttention(WanAttnProcessor):
    """diffusers' self-attention, extended so that this rank's tokens attend to the tokens of all ranks."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Any = None,
    ) -> Tensor:
        """Computes the attention's output for this rank's tokens."""
        if not isinstance(rotary_emb, LocalAngles):
            return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
        query, key = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states))
        split = [part.unflatten(2, (attn.heads, -1)) for part in (query, key, attn.to_v(hidden_states))]
        query, key = (_rotated(part, rotary_emb) for part in split[:2])
        attended = attend_to_all(query, key, split[2], self._attention_backend, rotary_emb.tokens)
        last, dropout = attn.to_out
        return dropout(last(attended.flatten(2, 3).type_as(query)))  # type: ignore[no-any-return]


def attend_to_all(query: Tensor, key: Tensor, value: Tensor, backend: Any, tokens: Tokens | None) -> Any:
    """Lets this rank's tokens attend to all tokens, with the run's kernel; `tokens` is None for undivided samples."""
    if tokens is None:
        return attend(query, key, value, backend)
    return tokens.attention(query, key, value, attend=partial(attend, backend=backend))


def _rotated(states: Tensor, angles: LocalAngles) -> Tensor:
    """Applies the rotary embedding to [batch, tokens, heads, width], as diffusers does."""
    cosine, sine = angles.cosine[..., 0::2], angles.sine[..., 1::2]
    first, second = states.view(*states.shape[:-1], -1, 2).unbind(-1)
    rotated = torch.stack([first * cosine - second * sine, first * sine + second * cosine], -1)
    return rotated.flatten(-2).type_as(states)
