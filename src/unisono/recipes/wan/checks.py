"""Validates the settings that both Wan recipes share."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from unisono.config.values import shown
from unisono.errors import ConfigError


def check_frames(num_frames: int) -> None:
    """Raises ConfigError if Wan's VAE cannot encode this number of frames."""
    if num_frames < 1 or num_frames % 4 != 1:
        below = max(1, (num_frames - 1) // 4 * 4 + 1)
        raise ConfigError(f"num_frames: expected 1, 5, 9, …, got {num_frames}; use {below} or {below + 4}")


def check_size(height: int, width: int, multiple: int) -> None:
    """Raises ConfigError if height or width is not a multiple of `multiple` pixels."""
    for name, side in (("height", height), ("width", width)):
        if side < 1 or side % multiple:
            below = max(0, side // multiple * multiple)
            nearest = " or ".join(str(size) for size in (below, below + multiple) if size)
            raise ConfigError(f"{name} {side}: this model needs a multiple of {multiple}; use {nearest}")


def check_prompts(config: Any, name: str) -> None:
    """Raises ConfigError if a prompt is not valid Unicode or if the prompt file is missing."""
    prompts = getattr(config, name)
    if "\0" in prompts or not is_unicode(prompts):
        raise ConfigError(f"{name}: {shown(prompts)} is not valid Unicode")
    if prompts.endswith(".txt") and not os.path.isfile(os.path.expanduser(prompts)):
        raise ConfigError(f"{name} {shown(prompts)}: no such file; expected a text file with one caption per line")


def check_positions(shapes: Iterable[tuple[int, ...]], transformer: Mapping[str, Any], spatial_factor: int) -> None:
    """Raises ConfigError if a latent has more positions along an axis than the transformer's rotary embedding.

    `spatial_factor` is the side length, in pixels, of one latent position.
    """
    most, patch = int(transformer.get("rope_max_seq_len") or 1024), transformer["patch_size"]
    for shape in shapes:
        if any(side // size > most for side, size in zip(shape[1:], patch, strict=True)):
            height, width, pixels = (side * spatial_factor for side in (shape[2], shape[3], patch[1]))
            raise ConfigError(
                f"a sample of {shape[1]} latent frames, {height} × {width} pixels, is too large for this model's "
                f"rotary embedding ({most} positions along each side, of {pixels} pixels each); use a smaller "
                "max_pixels, or a smaller height and width"
            )


def num_tokens(shape: Sequence[int], patch: Sequence[int]) -> int:
    """Returns the number of tokens of a latent; its shape must end in frames, height and width."""
    return math.prod(side // size for side, size in zip(shape[-3:], patch, strict=True))


def check_tokens(shapes: Iterable[tuple[int, ...]], patch: Sequence[int], context_size: int) -> None:
    """Raises ConfigError if a latent has fewer tokens than there are ranks to divide them between."""
    for shape in shapes:
        number = num_tokens(shape, patch)
        if number < context_size:
            raise ConfigError(
                f"context_parallel {context_size}: a sample has only {number} token{'s' * (number != 1)}; use a "
                f"context_parallel of at most {number}, or larger samples"
            )


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded as UTF-8. Lone surrogates (from JSON or undecodable file names) cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
