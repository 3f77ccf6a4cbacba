"""The network that scores clips: encoders for each clip's frames and sound, and a transformer over time."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Scorer(nn.Module):
    """Computes a logit for every clip of a window.

    Positions are relative, so a window may start anywhere in a video and have any length.
    """

    def __init__(
        self, inputs: Mapping[str, tuple[int, ...]], width: int, layers: int, heads: int, dropout: float
    ) -> None:
        """`inputs` are the shapes of one clip: frames [F, H, W, 3], mel [A, M], stats [D], features [D]."""
        super().__init__()
        kinds = {"frames": FrameEncoder, "mel": MelEncoder, "stats": VectorEncoder, "features": VectorEncoder}
        self.encoders = nn.ModuleDict({name: kinds[name](shape, width) for name, shape in inputs.items()})
        self.blocks = nn.ModuleList([Block(width, heads, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Maps inputs [windows, clips, ...] to logits [windows, clips]."""
        return self.score_encoded(self.encode(inputs))

    def encode(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Encodes each clip independently of the others: [windows, clips, width]."""
        encoded = [encoder(inputs[name]) for name, encoder in self.encoders.items()]
        return torch.stack(encoded).sum(0) / math.sqrt(len(encoded))

    def score_encoded(self, clips: Tensor) -> Tensor:
        """Computes logits [windows, clips] from encoded clips, which attend to each other within a window."""
        for block in self.blocks:
            clips = block(clips)
        logits: Tensor = self.head(self.norm(clips))
        return logits[..., 0]


class FrameEncoder(nn.Module):
    """Encodes frames by convolutions over time and space, which can detect motion and its direction."""

    def __init__(self, shape: tuple[int, ...], width: int) -> None:
        super().__init__()
        frames, frame_height, frame_width, colours = shape
        channels = [2 * colours, 16, 32, 64]
        strides = [(1, 2, 2), (2, 2, 2), (2, 2, 2)]
        self.layers = nn.ModuleList(
            nn.Conv3d(before, after, 3, stride=stride, padding=1)
            for before, after, stride in zip(channels, channels[1:], strides, strict=False)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(8, size) for size in channels[1:])
        left = [math.ceil(math.ceil(frames / 2) / 2), math.ceil(frame_height / 8), math.ceil(frame_width / 8)]
        self.out = nn.Linear(channels[-1] * math.prod(left), width)

    def forward(self, frames: Tensor) -> Tensor:
        """Maps uint8 frames [windows, clips, F, H, W, 3] to [windows, clips, width]."""
        windows, clips = frames.shape[:2]
        x = frames.flatten(0, 1).permute(0, 4, 1, 2, 3).to(self.out.weight.dtype) / 127.5 - 1
        # Adds frame differences as input channels, because they show motion without the still background.
        change = F.pad(x[:, :, 1:] - x[:, :, :-1], (0, 0, 0, 0, 1, 0))
        x = torch.cat([x, 4 * change], dim=1)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.gelu(norm(layer(x)))
        encoded: Tensor = self.out(x.flatten(1))
        return encoded.view(windows, clips, -1)


class MelEncoder(nn.Module):
    """Encodes a log-mel spectrogram by convolutions over time."""

    def __init__(self, shape: tuple[int, ...], width: int) -> None:
        super().__init__()
        steps, bands = shape
        self.first = nn.Conv1d(bands, 32, 5, stride=2, padding=2)
        self.second = nn.Conv1d(32, 32, 5, stride=2, padding=2)
        self.out = nn.Linear(32 * math.ceil(math.ceil(steps / 2) / 2), width)

    def forward(self, mel: Tensor) -> Tensor:
        """Maps [windows, clips, A, M] to [windows, clips, width]."""
        windows, clips = mel.shape[:2]
        x = mel.flatten(0, 1).transpose(1, 2).to(self.out.weight.dtype)
        encoded: Tensor = self.out(F.gelu(self.second(F.gelu(self.first(x)))).flatten(1))
        return encoded.view(windows, clips, -1)


class VectorEncoder(nn.Module):
    """Encodes a vector per clip: statistics, or the features of another model."""

    def __init__(self, shape: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(shape[0]), nn.Linear(shape[0], width)

    def forward(self, vectors: Tensor) -> Tensor:
        """Maps [windows, clips, D] to [windows, clips, width]."""
        encoded: Tensor = self.out(self.norm(vectors.to(self.out.weight.dtype)))
        return encoded


class Block(nn.Module):
    """A transformer block with a learned attention bias for each signed distance between two clips."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.distance = nn.Embedding(2 * _BUCKETS + 1, heads)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [windows, clips, width] to the same shape."""
        windows, clips = x.shape[:2]
        query, key, value = (
            part.view(windows, clips, self.heads, -1).transpose(1, 2)
            for part in self.to_qkv(self.norm_1(x)).chunk(3, -1)
        )
        position = torch.arange(clips, device=x.device)
        buckets = distance_buckets(position[None, :] - position[:, None])
        bias = self.distance(buckets).permute(2, 0, 1)[None].to(query.dtype)
        attended = F.scaled_dot_product_attention(query, key, value, bias)
        x = x + self._drop(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self._drop(self.narrow(F.gelu(self.widen(self.norm_2(x)))))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


_BUCKETS = 16  # number of distance buckets in each direction


def distance_buckets(distances: Tensor) -> Tensor:
    """Maps signed distances to buckets: one per short distance, then logarithmic ones; the last one is open-ended."""
    size, half = distances.abs(), _BUCKETS // 2
    far = half + (torch.log2(size.clamp(min=half) / half) * 2).long()
    bucket = torch.where(size < half, size, far).clamp(max=_BUCKETS)
    return _BUCKETS + torch.sign(distances) * bucket
