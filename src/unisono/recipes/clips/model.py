"""The network that scores clips: what each clip shows and sounds like, and what lies around it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Scorer(nn.Module):
    """A logit for every clip of a window: an encoder for each kind of input, and a transformer over time.

    Positions are relative, so a window may begin anywhere and be of any length.
    """

    def __init__(
        self, inputs: Mapping[str, tuple[int, ...]], width: int, layers: int, heads: int, dropout: float
    ) -> None:
        """`inputs` are the shapes of one clip: frames [F, H, W, 3], mel [A, M], stats [D], features [D]."""
        super().__init__()
        kinds = {"frames": Frames, "mel": Sound, "stats": Numbers, "features": Numbers}
        self.encoders = nn.ModuleDict({name: kinds[name](shape, width) for name, shape in inputs.items()})
        self.blocks = nn.ModuleList([Block(width, heads, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """[windows, clips] logits of [windows, clips, ...] inputs."""
        return self.judge(self.encode(inputs))

    def encode(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """[windows, clips, width] what each clip is by itself."""
        encoded = [encoder(inputs[name]) for name, encoder in self.encoders.items()]
        return torch.stack(encoded).sum(0) / math.sqrt(len(encoded))

    def judge(self, clips: Tensor) -> Tensor:
        """[windows, clips] logits of clips that are seen together."""
        for block in self.blocks:
            clips = block(clips)
        said: Tensor = self.head(self.norm(clips))
        return said[..., 0]


class Frames(nn.Module):
    """What a clip shows: convolutions over time and place, which see motion and its direction."""

    def __init__(self, shape: tuple[int, ...], width: int) -> None:
        super().__init__()
        frames, height, side, colours = shape
        sizes = [2 * colours, 16, 32, 64]
        strides = [(1, 2, 2), (2, 2, 2), (2, 2, 2)]
        self.layers = nn.ModuleList(
            nn.Conv3d(before, after, 3, stride=stride, padding=1)
            for before, after, stride in zip(sizes, sizes[1:], strides, strict=False)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(8, size) for size in sizes[1:])
        left = [math.ceil(math.ceil(frames / 2) / 2), math.ceil(height / 8), math.ceil(side / 8)]
        self.out = nn.Linear(sizes[-1] * math.prod(left), width)

    def forward(self, frames: Tensor) -> Tensor:
        """[windows, clips, width] of uint8 [windows, clips, F, H, W, 3]."""
        windows, clips = frames.shape[:2]
        x = frames.flatten(0, 1).permute(0, 4, 1, 2, 3).to(self.out.weight.dtype) / 127.5 - 1
        # What changes from frame to frame is a channel of its own: a still background says nothing about motion.
        change = F.pad(x[:, :, 1:] - x[:, :, :-1], (0, 0, 0, 0, 1, 0))
        x = torch.cat([x, 4 * change], dim=1)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.gelu(norm(layer(x)))
        said: Tensor = self.out(x.flatten(1))
        return said.view(windows, clips, -1)


class Sound(nn.Module):
    """What a clip sounds like: convolutions over the steps of its log-mel spectrum."""

    def __init__(self, shape: tuple[int, ...], width: int) -> None:
        super().__init__()
        steps, bands = shape
        self.first, self.second = (
            nn.Conv1d(bands, 32, 5, stride=2, padding=2),
            nn.Conv1d(32, 32, 5, stride=2, padding=2),
        )
        self.out = nn.Linear(32 * math.ceil(math.ceil(steps / 2) / 2), width)

    def forward(self, mel: Tensor) -> Tensor:
        """[windows, clips, width] of [windows, clips, A, M]."""
        windows, clips = mel.shape[:2]
        x = mel.flatten(0, 1).transpose(1, 2).to(self.out.weight.dtype)
        said: Tensor = self.out(F.gelu(self.second(F.gelu(self.first(x)))).flatten(1))
        return said.view(windows, clips, -1)


class Numbers(nn.Module):
    """Numbers that were computed before: statistics, or the features of another model."""

    def __init__(self, shape: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(shape[0]), nn.Linear(shape[0], width)

    def forward(self, numbers: Tensor) -> Tensor:
        """[windows, clips, width] of [windows, clips, D]."""
        said: Tensor = self.out(self.norm(numbers.to(self.out.weight.dtype)))
        return said


class Block(nn.Module):
    """A transformer block whose attention knows how far clips are apart, and in which direction."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.distance = nn.Embedding(2 * _FARTHEST + 1, heads)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[windows, clips, width]."""
        windows, clips = x.shape[:2]
        query, key, value = (
            part.view(windows, clips, self.heads, -1).transpose(1, 2)
            for part in self.to_qkv(self.norm_1(x)).chunk(3, -1)
        )
        place = torch.arange(clips, device=x.device)
        apart = _buckets(place[None, :] - place[:, None])
        bias = self.distance(apart).permute(2, 0, 1)[None].to(query.dtype)
        seen = F.scaled_dot_product_attention(query, key, value, bias)
        x = x + self._dropped(self.out(seen.transpose(1, 2).flatten(2)))
        return x + self._dropped(self.narrow(F.gelu(self.widen(self.norm_2(x)))))

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


_FARTHEST = 16  # buckets of distance on either side


def _buckets(apart: Tensor) -> Tensor:
    """Distances as numbers of buckets: near ones exactly, far ones by their logarithm, so that any length has one."""
    size, half = apart.abs(), _FARTHEST // 2
    far = half + (torch.log2(size.clamp(min=half) / half) * 2).long()
    bucket = torch.where(size < half, size, far).clamp(max=_FARTHEST)
    return _FARTHEST + torch.sign(apart) * bucket
