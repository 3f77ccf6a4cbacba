"""Context parallel: several ranks share one sample, and each computes a part of its tokens.

Groups of `size` consecutive ranks form a context group. All ranks of a group read the same samples and draw the same
noise. Everything that treats tokens one by one (linear layers, norms, patches) runs on a rank's own tokens; only
attention needs the others. A model divides its tokens once per forward pass and passes the division on to its blocks:

    tokens = context.tokens(x.shape[1])
    x = tokens.split(x, dim=1)                  # this rank's tokens
    ...
    out = tokens.attention(query, key, value)   # [batch, tokens, heads, width]: every token sees all tokens
    ...
    x = tokens.gather(x, dim=1)                 # all tokens again, where the model or the loss needs them

There are two algorithms for attention. If the number of heads is divisible by the group's size, an all-to-all gives
each rank all tokens of some heads, and a second one returns the rank's own tokens (Ulysses, arXiv:2309.14509).
Otherwise each rank gathers all keys and values and attends with its own queries; in the backward pass it gathers them
again, so that it need not store them. Parts may differ by one token, so any number of tokens works.

Gradients: every operation here has the true derivative of the sum of all ranks' results with respect to this rank's
input. So the gradients of a weight, summed over all ranks, are the gradients of the sum of all ranks' losses, whatever
part of the model is replicated. Every rank of a group computes the loss of the whole sample, and the engine divides it
by the size of the group, so that a sample counts once.

diffusers' context parallel is not used: of its two kinds of attention, one rejects tokens or heads that do not divide
evenly, and the other has no backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from unisono.cluster.process_group import COLLECTIVE_TIMEOUT
from unisono.errors import ConfigError

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of queries, keys and values [batch, tokens, heads, width] in which every query sees every key."""

_TOKENS, _HEADS = 1, 2  # dimensions of queries, keys and values

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


class Context:
    """The ranks that share a sample; by default this rank alone."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._is_apart = False

    @property
    def size(self) -> int:
        """The number of ranks that share a sample now; 1 while each rank computes on its own."""
        return 1 if self._group is None or self._is_apart else self._group.size()

    @property
    def rank(self) -> int:
        """The number of this rank within its group."""
        return 0 if self._group is None or self._is_apart else self._group.rank()

    def tokens(self, number: int) -> Tokens:
        """Divides a sample's tokens between the ranks of the group, in order and in nearly equal parts."""
        if number < self.size:
            raise ConfigError(
                f"context_parallel {self.size}: a sample has only {number} token{'s' * (number != 1)} to divide; use "
                f"a context_parallel of at most {max(1, number)}, or larger samples"
            )
        return Tokens(number, self.size, self.rank, None if self.size == 1 else self._group)

    def sum(self, tensor: Tensor) -> Tensor:
        """Returns the sum of the tensors of all ranks of the group, on each of them."""
        if self.size == 1:
            return tensor
        return _Summed.apply(tensor, self._group)  # type: ignore[no-any-return, no-untyped-call]

    def exchanges_heads(self, heads: int) -> bool:
        """Whether attention with this number of heads exchanges heads; otherwise it gathers keys and values."""
        return heads % self.size == 0

    @contextmanager
    def apart(self) -> Iterator[None]:
        """A context in which each rank computes whole samples on its own, for work that is divided by samples."""
        before, self._is_apart = self._is_apart, True
        try:
            yield
        finally:
            self._is_apart = before


def make_context(rank: int, world: int, size: int) -> Context:
    """Returns the context of this rank; all ranks of the world must call it."""
    if size == 1:
        return Context()
    own: dist.ProcessGroup | None = None
    for first in range(0, world, size):  # every rank must create every group, even a group that it is not in
        group = dist.new_group(list(range(first, first + size)), timeout=COLLECTIVE_TIMEOUT)
        if first <= rank < first + size:
            own = group
    return Context(own)


@dataclass(frozen=True)
class Tokens:
    """The division of a sample's tokens between the ranks of a context group."""

    number: int
    """The number of tokens of the whole sample."""
    size: int
    rank: int
    _group: Any  # a ProcessGroup; None for a rank alone

    @property
    def sizes(self) -> list[int]:
        """The number of tokens of each rank."""
        return [self.number // self.size + (rank < self.number % self.size) for rank in range(self.size)]

    @property
    def start(self) -> int:
        """The position of this rank's first token."""
        return sum(self.sizes[: self.rank])

    def split(self, tensor: Tensor, dim: int) -> Tensor:
        """Returns this rank's part of a tensor that all ranks of the group have, with all tokens along `dim`."""
        if self.size == 1:
            return tensor
        if tensor.shape[dim] != self.number:
            raise ValueError(f"expected {self.number} tokens along dimension {dim}, got {tuple(tensor.shape)}")
        # Return a copy, because a view would keep all tokens in memory until the model's backward pass.
        return tensor.narrow(dim, self.start, self.sizes[self.rank]).clone(memory_format=torch.contiguous_format)

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Returns all tokens, on every rank of the group, from each rank's part along `dim`."""
        if self.size == 1:
            return tensor
        if tensor.shape[dim] != self.sizes[self.rank]:
            part = self.sizes[self.rank]
            raise ValueError(f"expected {part} of {self.number} tokens along dimension {dim}, got {tensor.shape[dim]}")
        return _Gathered.apply(tensor, dim % tensor.dim(), self.sizes, self._group)  # type: ignore[no-any-return, no-untyped-call]

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False, attend: Attend | None = None
    ) -> Tensor:
        """Computes attention of this rank's queries to all tokens; all inputs are [batch, tokens, heads, width].

        Keys and values may have fewer heads than queries. `attend` replaces PyTorch's attention, without `causal`.
        """
        if causal and attend is not None:
            raise ValueError("attention: `attend` computes attention to all tokens; remove `causal`")
        if self.size == 1:
            return attend(query, key, value) if attend is not None else _attention(query, key, value, causal)
        heads = query.shape[_HEADS], key.shape[_HEADS]
        if all(number % self.size == 0 for number in heads):
            return self._by_heads(query, key, value, attend or partial(_attention, causal=causal))  # type: ignore[no-any-return]
        return self._by_keys(query, key, value, causal, attend)  # type: ignore[no-any-return]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _by_heads(self, query: Tensor, key: Tensor, value: Tensor, attend: Attend) -> Tensor:
        """Exchanges tokens for heads: this rank attends with all tokens of its heads."""
        if query.shape == key.shape:  # exchanges all three in one message
            attended = attend(*self._to_heads(torch.stack([query, key, value])).unbind())
        else:
            attended = attend(*(self._to_heads(part[None])[0] for part in (query, key, value)))
        heads = [attended.shape[_HEADS]] * self.size
        return _exchange(attended, _TOKENS, self.sizes, _HEADS, heads, self._group)

    def _to_heads(self, stacked: Tensor) -> Tensor:
        """Turns [parts, batch, some tokens, all heads, width] into [parts, batch, all tokens, some heads, width]."""
        heads = [stacked.shape[1 + _HEADS] // self.size] * self.size
        return _exchange(stacked, 1 + _HEADS, heads, 1 + _TOKENS, self.sizes, self._group)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _by_keys(self, query: Tensor, key: Tensor, value: Tensor, causal: bool, attend: Attend | None) -> Tensor:
        """Gathers keys and values; the backward pass gathers them again, so no rank stores other ranks' keys."""

        def compute(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            key, value = self.gather(torch.stack([key, value]), 1 + _TOKENS).unbind()
            if attend is not None:
                return attend(query, key, value)
            if causal:
                # Use keys only up to the last one that a query of this rank sees, so that the mask aligns at its end.
                last = self.start + query.shape[_TOKENS]
                key, value = key[:, :last], value[:, :last]
            return _attention(query, key, value, causal)

        if not torch.is_grad_enabled():
            return compute(query, key, value)
        return checkpoint(compute, query, key, value, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]


def _attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Computes PyTorch's attention; if causal, the last query sees the last key."""
    queries, keys = query.shape[_TOKENS], key.shape[_TOKENS]
    mask: Any = causal_lower_right(queries, keys) if causal and queries != keys else None
    heads_first = [part.transpose(_TOKENS, _HEADS) for part in (query, key, value)]
    attended = F.scaled_dot_product_attention(
        heads_first[0],
        heads_first[1],
        heads_first[2],
        attn_mask=mask,
        is_causal=causal and mask is None,
        enable_gqa=query.shape[_HEADS] != key.shape[_HEADS],
    )
    return attended.transpose(_TOKENS, _HEADS)


def _exchange(tensor: Tensor, split: int, split_sizes: list[int], cat: int, cat_sizes: list[int], group: Any) -> Tensor:
    """Sends the pieces along `split` to the ranks of the group and concatenates the received ones along `cat`."""
    return _Exchanged.apply(tensor, split, split_sizes, cat, cat_sizes, group)  # type: ignore[no-any-return, no-untyped-call]


class _Exchanged(torch.autograd.Function):
    """An all-to-all; its derivative is the all-to-all in the opposite direction."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, split: int, split_sizes: list[int], cat: int, cat_sizes: list[int], group: Any
    ) -> Tensor:
        ctx.back = cat, cat_sizes, split, split_sizes, group
        return _all_to_all(tensor, split, split_sizes, cat, cat_sizes, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _all_to_all(gradients[0], *ctx.back), None, None, None, None, None


class _Gathered(torch.autograd.Function):
    """An all-gather; its derivative sends each rank the gradients of its part, and sums them in rank order."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, sizes: list[int], group: Any) -> Tensor:
        ctx.dim, ctx.sizes, ctx.group = dim, sizes, group
        longest = max(sizes)
        part = tensor.movedim(dim, 0)
        if len(part) < longest:  # pads the part, because all ranks must send equal amounts
            part = torch.cat([part, part.new_zeros(longest - len(part), *part.shape[1:])])
        gathered = part.new_empty(len(sizes) * longest, *part.shape[1:])
        _all_gather(gathered, part.contiguous(), group=group)
        if min(sizes) < longest:
            parts = torch.split(gathered, longest)
            gathered = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
        return gathered.movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        own = [ctx.sizes[ctx.group.rank()]] * len(ctx.sizes)
        received = _all_to_all(gradients[0].unsqueeze(0), ctx.dim + 1, ctx.sizes, 0, [1] * len(own), ctx.group)
        return received.sum(0), None, None, None


class _Summed(torch.autograd.Function):
    """An all-reduce; each rank's input adds to the results of all ranks, so its derivative is an all-reduce too."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        summed = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        summed = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


def _all_to_all(
    tensor: Tensor, split: int, split_sizes: list[int], cat: int, cat_sizes: list[int], group: Any
) -> Tensor:
    """Sends piece i along `split` to rank i, and concatenates the received pieces, of `cat_sizes`, along `cat`."""
    pieces = torch.split(tensor, split_sizes, split)
    sent = torch.cat([piece.reshape(-1) for piece in pieces])
    own = pieces[group.rank()].shape
    shapes = [(*own[:cat], size, *own[cat + 1 :]) for size in cat_sizes]
    counts = [torch.Size(shape).numel() for shape in shapes]
    received = sent.new_empty(sum(counts))
    dist.all_to_all_single(received, sent, counts, [piece.numel() for piece in pieces], group=group)
    parts = torch.split(received, counts)
    return torch.cat([part.view(shape) for part, shape in zip(parts, shapes, strict=True)], cat)
