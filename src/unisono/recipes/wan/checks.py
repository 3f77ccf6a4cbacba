"""Checks of settings that both Wan recipes have, made before anything is loaded or written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from unisono.config.values import shown
from unisono.errors import ConfigError


def check_frames(num_frames: int) -> None:
    """Refuses numbers of frames that Wan's VAE cannot encode."""
    if num_frames < 1 or num_frames % 4 != 1:
        below = max(1, (num_frames - 1) // 4 * 4 + 1)
        raise ConfigError(f"num_frames: Wan takes 1, 5, 9, …; got {num_frames}, use {below} or {below + 4}")


def check_prompts(config: Any, name: str) -> None:
    """Refuses prompts that are no text, and a file of prompts that is not there."""
    prompts = getattr(config, name)
    if not _is_text(prompts):
        raise ConfigError(f"{name}: {shown(prompts)} is not proper Unicode")
    if prompts.endswith(".txt") and not os.path.isfile(os.path.expanduser(prompts)):
        raise ConfigError(f"{name} {shown(prompts)}: there is no such file; expected one caption in each line")


def check_positions(shapes: Iterable[tuple[int, ...]], transformer: Mapping[str, Any], pixels: int) -> None:
    """Refuses samples that reach beyond the positions that the transformer tells apart."""
    most, patch = int(transformer.get("rope_max_seq_len") or 1024), transformer["patch_size"]
    for shape in shapes:
        if any(side // size > most for side, size in zip(shape[1:], patch, strict=True)):
            raise ConfigError(
                f"a sample of {shape[1]} latent frames, {shape[2] * pixels} × {shape[3] * pixels} pixels, is more than "
                f"this model has positions for ({most} along each side, of {patch[1] * pixels} pixels each); use a "
                "smaller max_pixels, or height and width"
            )


def _is_text(text: str) -> bool:
    try:
        return "\0" not in text and bool(text.encode() or True)
    except UnicodeEncodeError:
        return False
