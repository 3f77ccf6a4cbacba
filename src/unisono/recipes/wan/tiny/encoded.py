"""The built-in shapes as latents; the ranks encode the shapes once and keep the latents in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import Dataset

from unisono.atomic_files import atomic_file
from unisono.engine.recipe import Work
from unisono.recipes.wan.condition.inputs import condition_channels
from unisono.recipes.wan.condition.kind import ConditionKind
from unisono.recipes.wan.data.media import from_unit
from unisono.recipes.wan.models.vae import WanVae
from unisono.recipes.wan.tiny.shapes import Shapes, directions, labels

_AT_ONCE = 64


class EncodedShapes(Dataset[dict[str, Any]]):
    """The shapes' latents, caption embeddings and labels.

    For an image-to-video model, also the condition, the given frames and the direction of motion.
    """

    def __init__(self, shapes: Shapes, encoded: dict[str, Tensor], texts: dict[str, Tensor]) -> None:
        self.shapes, self._encoded, self._texts = shapes, encoded, texts
        plans = [shapes.plan(index) for index in range(len(shapes))]
        self._captions = [plan.caption for plan in plans]
        self._colours, self._kinds = labels(plans)
        self._directions = directions(plans)

    def __len__(self) -> int:
        return len(self._colours)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = {
            **{name: tensors[index] for name, tensors in self._encoded.items()},
            "text": self._texts[self._captions[index]],
            "colour": self._colours[index],
            "kind": self._kinds[index],
        }
        return sample if "given" not in sample else {**sample, "direction": self._directions[index]}


def is_encoded(shapes: Shapes, folder: Path) -> bool:
    """Whether all files of encoded shapes exist."""
    return all(_file(folder, start).exists() for start in range(0, len(shapes), _AT_ONCE))


def _file(folder: Path, start: int) -> Path:
    return folder / f"{start:08d}.safetensors"


def encode(work: Work, shapes: Shapes, folder: Path, vae: WanVae, condition: ConditionKind) -> None:
    """Encodes this rank's share of the shapes and the given frames of `condition`, several samples per file."""
    folder.mkdir(parents=True, exist_ok=True)
    for start in work.share(range(0, len(shapes), _AT_ONCE)):
        file = _file(folder, start)
        if file.exists() or work.stopping:
            continue
        frames = torch.stack([shapes[index]["frames"] for index in range(start, min(start + _AT_ONCE, len(shapes)))])
        encoded = {"latent": vae.encode(frames)}
        if condition.has_channels:
            given = torch.stack([from_unit(clip)[[0, -1][: condition.num_frames]] for clip in frames])
            channels = [condition_channels(vae, pictures, frames.shape[2]) for pictures in given]
            encoded |= {"given": given, "condition": torch.stack(channels)}
        with atomic_file(file) as temporary:
            save_file(encoded, temporary)


def read(shapes: Shapes, folder: Path, texts: dict[str, Tensor]) -> EncodedShapes:
    """Reads the shapes that all ranks have encoded."""
    files = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    return EncodedShapes(shapes, {name: torch.cat([file[name] for file in files]) for name in files[0]}, texts)
