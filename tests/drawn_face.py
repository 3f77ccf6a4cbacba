"""Draws a face that detectors of faces recognise, so that tests need no photograph."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

_SKIN, _HAIR, _BACKGROUND = (222, 184, 160), (60, 40, 30), (90, 110, 130)


def picture_with_faces(size: tuple[int, int], faces: list[tuple[float, float, float]]) -> NDArray[np.uint8]:
    """A picture [height, width, 3] of `size` (width, height) with faces (x, y, half of the face's height)."""
    image = Image.new("RGB", size, _BACKGROUND)
    for x, y, radius in faces:
        _draw(ImageDraw.Draw(image), x, y, radius)
    return np.asarray(image.filter(ImageFilter.GaussianBlur(1)))


def _draw(draw: ImageDraw.ImageDraw, x: float, y: float, r: float) -> None:
    def ellipse(left: float, top: float, right: float, bottom: float, colour: tuple[int, int, int]) -> None:
        draw.ellipse([x + left * r, y + top * r, x + right * r, y + bottom * r], fill=colour)

    ellipse(-0.75, -1, 0.75, 1, _SKIN)
    draw.pieslice([x - 0.8 * r, y - 1.1 * r, x + 0.8 * r, y + 0.3 * r], 180, 360, fill=_HAIR)
    ellipse(-0.68, -0.75, 0.68, 0.9, _SKIN)
    for middle in (-0.3, 0.3):
        brow = [x + (middle - 0.2) * r, y - 0.38 * r, x + (middle + 0.2) * r, y - 0.3 * r]
        draw.rectangle(brow, fill=(70, 45, 35))
        ellipse(middle - 0.2, -0.28, middle + 0.2, -0.04, (150, 110, 95))
        ellipse(middle - 0.14, -0.2, middle + 0.14, -0.08, (245, 245, 245))
        ellipse(middle - 0.07, -0.22, middle + 0.07, -0.07, (20, 20, 20))
    nose = [(x - 0.04 * r, y - 0.15 * r), (x - 0.14 * r, y + 0.22 * r), (x + 0.14 * r, y + 0.22 * r)]
    draw.polygon([*nose, (x + 0.04 * r, y - 0.15 * r)], fill=(200, 160, 138))
    ellipse(-0.14, 0.16, 0.14, 0.26, (170, 125, 105))
    ellipse(-0.28, 0.42, 0.28, 0.58, (150, 70, 70))
