"""Finds faces with OpenCV's cascade, which is part of its wheel (`unisono[faces]`); nothing is downloaded."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MISSING = "faces are not counted, because OpenCV is not installed: pip install 'unisono[faces]'"
SIZE = 180
"""Length in pixels of a frame's shorter side for face detection."""
_SMALLEST = 24  # minimum size of a face in pixels: an eighth of the frame's shorter side

Box = tuple[int, int, int, int]
"""Left edge, top edge, width and height in pixels."""


def available() -> bool:
    """Whether OpenCV is installed with its cascades, which version 5 lacks."""
    return _cascade_file() is not None


@functools.cache
def _cascade_file() -> Path | None:
    found = importlib.util.find_spec("cv2")
    folders = found.submodule_search_locations if found is not None else None
    files = (Path(folder) / "data" / "haarcascade_frontalface_default.xml" for folder in folders or ())
    return next((file for file in files if file.is_file()), None)


@functools.cache
def _cascade() -> Any:
    import cv2

    cv2.setNumThreads(1)  # more threads do not help with small pictures, and other processes need the cores
    return cv2.CascadeClassifier(str(_cascade_file()))


def faces(frame: NDArray[np.uint8]) -> list[Box]:
    """Finds the faces in an RGB frame [height, width, 3]; the largest face comes first."""
    import cv2

    grey = cv2.equalizeHist(cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY))
    found = _cascade().detectMultiScale(grey, scaleFactor=1.15, minNeighbors=5, minSize=(_SMALLEST, _SMALLEST))
    boxes = [(int(left), int(top), int(width), int(height)) for left, top, width, height in found]
    boxes.sort(key=lambda box: (-box[2] * box[3], box))
    return [box for number, box in enumerate(boxes) if not any(_inside(box, larger) for larger in boxes[:number])]


def _inside(box: Box, larger: Box) -> bool:
    """Whether the centre of a box is inside a larger box, because the cascade finds some faces twice, in two sizes."""
    x, y = box[0] + box[2] / 2, box[1] + box[3] / 2
    return larger[0] <= x <= larger[0] + larger[2] and larger[1] <= y <= larger[1] + larger[3]


def presence(frame: NDArray[np.uint8]) -> float:
    """Returns the sum of the faces' heights as a fraction of the frame's shorter side, at most 1."""
    shorter = min(frame.shape[:2])
    return min(1.0, float(sum(height for _, _, _, height in faces(frame)) / shorter))
