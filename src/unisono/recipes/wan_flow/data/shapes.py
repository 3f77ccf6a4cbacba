"""The built-in dataset: coloured shapes drawn by code, for the tiny model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from unisono.engine.recipe import Work
from unisono.errors import ConfigError
from unisono.recipes.wan.condition.kind import ConditionKind
from unisono.recipes.wan.models.encoders import Encoders
from unisono.recipes.wan.models.text import pad
from unisono.recipes.wan.tiny.encoded import encode, is_encoded, read
from unisono.recipes.wan.tiny.shapes import Shapes

_SIZE = 32
_NUM_EVAL = 96  # four for each combination of colour and shape


class ShapesData:
    """The built-in dataset: coloured shapes drawn by code."""

    def __init__(self, config: Any, encoders: Encoders, prompts: Sequence[str], condition: ConditionKind) -> None:
        self._encoders, self._condition = encoders, condition
        size, frames = config.height or _SIZE, config.num_frames
        if config.width not in (0, size):
            raise ConfigError(f"height {config.height}, width {config.width}: shapes are square; use equal values")
        self._shapes = {
            "train": Shapes(config.num_shapes, frames, size, split="train"),
            "eval": Shapes(_NUM_EVAL, frames, size, split="eval"),
        }
        self._folder = Path()
        self.remarks: list[str] = []

    def prepare(self, work: Work) -> None:
        """Draws and encodes the shapes."""
        vae = self._encoders.vae()
        self._folder = work.folder / "shapes" / vae.fingerprint()
        missing = [split for split in self._shapes if not is_encoded(self._shapes[split], self._split_folder(split))]
        if missing:
            work.message(f"drawing and encoding {sum(len(self._shapes[split]) for split in missing):,} shapes")
        for split in missing:
            encode(work, self._shapes[split], self._split_folder(split), vae, self._condition)

    def dataset(self, split: str) -> Any:
        """Reads the samples of a split."""
        shapes = self._shapes[split]
        captions = {shapes.plan(index).caption for index in range(len(shapes))}
        return read(shapes, self._split_folder(split), self._embeddings(captions))

    def most_tokens(self) -> int:
        """Returns the number of transformer tokens per sample."""
        geometry, shapes = self._encoders.geometry, self._shapes["train"]
        side = shapes.size // geometry.spatial_factor
        return geometry.tokens((0, 1 + shapes.num_frames // geometry.temporal_factor, side, side))

    def text(self, caption: str) -> Tensor:
        """Returns the text embedding of a caption, [text length, width]."""
        return self._embeddings({caption})[caption]

    def _embeddings(self, captions: set[str]) -> dict[str, Tensor]:
        encoder, length = self._encoders.text_encoder(), self._encoders.text_length
        return {caption: pad(encoder.encode([caption], length)[0], length) for caption in sorted(captions)}

    def _split_folder(self, split: str) -> Path:
        shapes = self._shapes[split]
        given = f"_{self._condition.frames}" if self._condition.has_channels else ""
        return self._folder / f"{split}_{len(shapes)}x{shapes.num_frames}x{shapes.size}{given}"
