"""Derives from the transformer's config which frames of a video a model is given.

Wan 2.1 I2V       36 channels, CLIP embedding of the first frame
Wan 2.1 FLF2V     36 channels, CLIP embeddings of the first and the last frame, with positions
Wan 2.2 I2V-A14B  36 channels; given the first frame, or the first and the last
TI2V-5B           only the latent's own channels; the first latent frame may be noise-free
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unisono.errors import ConfigError
from unisono.recipes.wan.settings import GivenFramesName

MASK_CHANNELS = 4
"""Number of mask channels: one for each video frame that a latent frame represents."""


@dataclass(frozen=True)
class ConditionKind:
    """The frames that a model is given, and the inputs through which its transformer gets them."""

    frames: GivenFramesName = "none"
    has_channels: bool = False
    """Whether the transformer has input channels for a mask and for the latent of the given frames."""
    has_embedding: bool = False
    """Whether the transformer attends to CLIP embeddings of the given frames."""

    @property
    def num_frames(self) -> int:
        """The number of given frames."""
        return {"none": 0, "first": 1, "first_last": 2}[self.frames]


def has_condition_channels(transformer: Mapping[str, Any]) -> bool:
    """Whether a transformer takes an image-to-video model's channels: noisy latent, mask and given frames' latent."""
    inputs, outputs = channels_of(transformer)
    return inputs == 2 * outputs + MASK_CHANNELS


def channels_of(transformer: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the numbers of input and output channels; the output has the same channels as the VAE's latents."""
    inputs = int(transformer.get("in_channels") or 16)
    return inputs, int(transformer.get("out_channels") or inputs)


def kind_of(
    transformer: Mapping[str, Any], requested: GivenFramesName | None = None, *, has_token_times: bool = False
) -> ConditionKind:
    """Returns the model's kind of condition; `requested` is the setting condition, None for the model's default.

    `has_token_times`: whether the model takes one timestep per token (TI2V).
    """
    has_channels, has_embedding = has_condition_channels(transformer), bool(transformer.get("image_dim"))
    possible: tuple[GivenFramesName, ...]
    if has_channels and has_embedding:
        possible = ("first_last",) if transformer.get("pos_embed_seq_len") else ("first",)
    elif has_channels:
        possible = ("first", "first_last")
    else:
        possible = ("none", "first") if has_token_times else ("none",)
    chosen = possible[0] if requested is None else requested
    if chosen not in possible:
        others = " or ".join(possible)
        raise ConfigError(f"condition {chosen}: this model supports only {others}; use --condition {possible[0]}")
    return ConditionKind(chosen, has_channels, has_embedding)
