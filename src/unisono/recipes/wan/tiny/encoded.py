"""The built-in shapes as latents: encoded once by all ranks together, and kept in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import Dataset

from unisono.atomic_files import atomic_file
from unisono.engine.recipe import Work
from unisono.recipes.wan.models.vae import WanVae
from unisono.recipes.wan.tiny.shapes import Shapes, labels

_AT_ONCE = 64


class EncodedShapes(Dataset[dict[str, Any]]):
    """Latents of shapes with the embeddings of their captions, and their labels."""

    def __init__(self, shapes: Shapes, latents: Tensor, texts: dict[str, Tensor]) -> None:
        self.shapes, self._latents, self._texts = shapes, latents, texts
        plans = [shapes.plan(index) for index in range(len(shapes))]
        self._captions = [plan.caption for plan in plans]
        self._colours, self._kinds = labels(plans)

    def __len__(self) -> int:
        return len(self._latents)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "latent": self._latents[index],
            "text": self._texts[self._captions[index]],
            "colour": self._colours[index],
            "kind": self._kinds[index],
        }


def is_encoded(shapes: Shapes, folder: Path) -> bool:
    """Whether all files exist."""
    return all(_file(folder, start).exists() for start in range(0, len(shapes), _AT_ONCE))


def _file(folder: Path, start: int) -> Path:
    return folder / f"{start:08d}.safetensors"


def encode(work: Work, shapes: Shapes, folder: Path, vae: WanVae) -> None:
    """Encodes this rank's share of the shapes, in files of several samples each."""
    folder.mkdir(parents=True, exist_ok=True)
    for start in work.share(range(0, len(shapes), _AT_ONCE)):
        file = _file(folder, start)
        if file.exists() or work.stopping:
            continue
        frames = torch.stack([shapes[index]["frames"] for index in range(start, min(start + _AT_ONCE, len(shapes)))])
        with atomic_file(file) as temporary:
            save_file({"latents": vae.encode(frames)}, temporary)


def read(shapes: Shapes, folder: Path, texts: dict[str, Tensor]) -> EncodedShapes:
    """The shapes that all ranks have encoded."""
    latents = [load_file(file)["latents"] for file in sorted(folder.glob("*.safetensors"))]
    return EncodedShapes(shapes, torch.cat(latents), texts)
