"""A dataset drawn by code: one coloured shape on grey, still or moving, with a caption that describes it.

Item i depends only on (seed, split, i), so there are no files, no downloads and no state. Colours and shapes alternate,
so all pairs occur equally often; everything else about an image is random.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypedDict, cast
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.data import Dataset

from unisono.data.bits import key_of, random_bits, to_unit
from unisono.errors import ConfigError

COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.9, 0.1, 0.1),
    "green": (0.1, 0.8, 0.15),
    "blue": (0.15, 0.2, 0.95),
    "yellow": (0.95, 0.9, 0.1),
    "purple": (0.8, 0.1, 0.85),
    "cyan": (0.1, 0.85, 0.9),
}
"""Colour names, with red, green and blue in [0, 1]."""

SHAPES = ("circle", "square", "triangle", "cross")

DIRECTIONS: dict[str, tuple[float, float]] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
"""Direction names, with vectors whose x points right and y points down."""

TRAVEL = (0.2, 0.3)
"""Range of the distance that a moving shape covers in a clip, as fractions of the image's side."""

WORDINGS = (
    "a {colour} {shape}",
    "one {colour} {shape}",
    "a {shape} that is {colour}",
    "a picture of a {colour} {shape}",
)

_DRAWS = 16  # number of random numbers to draw per item; not all are used


class Drawing(TypedDict):
    """An item of the dataset."""

    frames: Tensor  # [3, frames, height, width] in [-1, 1]
    caption: str


class Plan(NamedTuple):
    """The content of an item. Lengths are fractions of the image's side; y points down."""

    colour: str
    shape: str
    direction: str | None  # None: the shape does not move
    caption: str
    rgb: tuple[float, float, float]
    background: float
    centre: tuple[float, float]  # x and y in the middle of the clip
    radius: float
    travel: float  # distance moved from the first frame to the last


class Shapes(Dataset[Drawing]):
    """Coloured shapes with captions; clips of more than one frame show them moving."""

    def __init__(
        self, num_samples: int, num_frames: int = 1, size: int = 32, seed: int = 0, split: str = "train"
    ) -> None:
        if num_samples < 1:
            raise ConfigError(f"num_shapes {num_samples}: expected at least 1")
        if num_frames < 1 or num_frames % 4 != 1:
            raise ConfigError(f"num_frames {num_frames}: expected 1, 5, 9, … (a multiple of 4, plus 1)")
        if size < 16 or size % 8:
            raise ConfigError(f"shapes of {size} × {size} pixels: expected a multiple of 8, at least 16")
        self.num_samples, self.num_frames, self.size = num_samples, num_frames, size
        self._key = key_of(seed, crc32(split.encode()))

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Drawing:
        plan = self.plan(index)
        return {"frames": draw(plan, self.num_frames, self.size), "caption": plan.caption}

    def plan(self, index: int) -> Plan:
        """Returns the content of item `index`."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        index %= len(self)
        colour = list(COLOURS)[index % len(COLOURS)]
        shape = SHAPES[index // len(COLOURS) % len(SHAPES)]
        bits = random_bits(key_of(self._key, index), torch.arange(_DRAWS))
        chances = iter(cast(list[float], to_unit(bits, torch.float64).tolist()))

        def between(low: float, high: float) -> float:
            return low + (high - low) * next(chances)

        wording = WORDINGS[int(between(0, len(WORDINGS)))]
        direction = list(DIRECTIONS)[int(between(0, len(DIRECTIONS)))] if self.num_frames > 1 else None
        red, green, blue = (part + between(-0.05, 0.05) for part in COLOURS[colour])
        return Plan(
            colour,
            shape,
            direction,
            caption=wording.format(colour=colour, shape=shape) + (f" moving {direction}" if direction else ""),
            rgb=(red, green, blue),
            background=between(0.0, 0.3),
            centre=(between(0.44, 0.56), between(0.44, 0.56)),
            radius=between(0.26, 0.34),
            travel=between(*TRAVEL) if direction else 0.0,
        )


def draw(plan: Plan, num_frames: int, size: int) -> Tensor:
    """Draws an item, [3, frames, size, size] in [-1, 1]."""
    ahead = torch.linspace(-0.5, 0.5, num_frames) if num_frames > 1 else torch.zeros(1)
    towards = DIRECTIONS[plan.direction] if plan.direction else (0.0, 0.0)
    middles = (torch.arange(size) + 0.5) / size  # centres of the pixels
    x = middles[None, None, :] - (plan.centre[0] + plan.travel * towards[0] * ahead)[:, None, None]
    y = middles[None, :, None] - (plan.centre[1] + plan.travel * towards[1] * ahead)[:, None, None]
    # Antialiasing: a pixel on the outline is partly covered.
    covered = (0.5 - _outside(plan.shape, x, y, plan.radius) * size).clamp(0, 1)  # [frames, size, size]
    rgb = torch.tensor(plan.rgb).clamp(0, 1)[:, None, None, None]
    return (plan.background + (rgb - plan.background) * covered) * 2 - 1


def labels(plans: list[Plan]) -> tuple[Tensor, Tensor]:
    """Returns the colour index and the shape index of each plan, as two tensors of shape [plans]."""
    colours = torch.tensor([list(COLOURS).index(plan.colour) for plan in plans])
    return colours, torch.tensor([SHAPES.index(plan.shape) for plan in plans])


def directions(plans: list[Plan]) -> Tensor:
    """Returns the indices of the directions of motion, [items]; -1 for a shape that does not move."""
    return torch.tensor([list(DIRECTIONS).index(plan.direction) if plan.direction else -1 for plan in plans])


def _outside(shape: str, x: Tensor, y: Tensor, radius: float) -> Tensor:
    """Returns the distance of points from a shape centred at the origin; negative inside. Areas are about equal."""
    if shape == "circle":
        return torch.sqrt(x * x + y * y) - radius
    if shape == "square":
        return torch.maximum(x.abs(), y.abs()) - radius * 0.9
    if shape == "triangle":
        # A triangle that stands on its base: three lines at the same distance from the centre.
        inner, slope = radius * 0.75, math.sqrt(0.75)
        y = y - radius * 0.3
        return torch.maximum(slope * x.abs() - 0.5 * y, y.expand_as(x + y)) - inner
    arm = radius * 0.36
    bars = [torch.maximum(a.abs() - radius * 1.1, b.abs() - arm) for a, b in ((x, y), (y, x))]
    return torch.minimum(*bars)
