"""Reads latents and text embeddings that users computed themselves and stored next to their images and videos.

Each file is checked before training uses it. A setting says whether latents are normalised, as the transformer takes
them, or raw, as the VAE outputs them. Padding is removed from embeddings.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from unisono.recipes.common.bad_files import BadMedia
from unisono.recipes.wan.models.vae import Geometry, normalised


def read_latent(path: Path, geometry: Geometry, statistics: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Reads the latent in a file (key "latent") as float32 [C, f, h, w]; `statistics`, if given, normalise it."""
    latent = _read(path, "latent")
    if latent.dim() == 5 and len(latent) == 1:
        latent = latent[0]
    if latent.dim() == 3:  # an image
        latent = latent[:, None]
    if latent.dim() != 4 or 0 in latent.shape:
        raise BadMedia(path, f"a latent of shape {tuple(latent.shape)}; expected (channels, frames, height, width)")
    channels, _, height, width = latent.shape
    if channels != geometry.channels:
        raise BadMedia(
            path,
            f"a latent of {channels} channels, but the model takes {geometry.channels}; it is from the VAE of another "
            "model",
        )
    if height % geometry.patch or width % geometry.patch:
        raise BadMedia(path, f"has a latent of {height} × {width}; both sides must be divisible by {geometry.patch}")
    return latent if statistics is None else normalised(latent, statistics)


def read_embedding(path: Path, width: int, max_length: int) -> Tensor:
    """Reads the caption embedding in a file (key "embeddings") as float32 [n, width], without padding."""
    rows = _read(path, "embeddings")
    if rows.dim() == 3 and len(rows) == 1:
        rows = rows[0]
    if rows.dim() != 2 or rows.shape[1] != width:
        raise BadMedia(path, f"an embedding of shape {tuple(rows.shape)}; expected (rows, {width})")
    filled = rows.any(dim=1).nonzero()
    if not len(filled):
        raise BadMedia(path, "an embedding that contains only zeros")
    rows = rows[: int(filled[-1]) + 1]
    if len(rows) > max_length:
        raise BadMedia(path, f"an embedding of {len(rows)} rows, but the model takes {max_length}")
    return rows


def _read(path: Path, key: str) -> Tensor:
    try:
        if not path.is_file():  # a pipe would block for ever
            raise BadMedia(path, "not a file")
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            if key not in names:
                contents = ", ".join(map(repr, names[:3])) or "nothing"
                raise BadMedia(path, f"contains {contents}; expected a tensor {key!r}")
            tensor: Tensor = file.get_tensor(key)
    except (OSError, SafetensorError) as error:
        raise BadMedia(path, f"cannot be read as safetensors ({error})") from None
    if not tensor.is_floating_point():
        raise BadMedia(path, f"{key!r} has dtype {tensor.dtype}; expected floating point")
    tensor = tensor.to(torch.float32)
    if not tensor.isfinite().all():
        raise BadMedia(path, f"{key!r} has values that are not finite")
    return tensor
