"""Frames for people to look at: a film as MP4, or many samples side by side in one picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

_BT709 = 1  # in FFmpeg's tables of colour spaces, primaries and transfer curves alike
_LIMITED = 1  # the range of values that films have
_GAP = 2  # pixels between pictures
_ACROSS = 8  # frames of a film in a row


def write_film(frames: Tensor, to: Path | BinaryIO, fps: float) -> None:
    """Writes frames uint8 [F, H, W, 3] as an MP4 that browsers play, into an open file or a new one."""
    if isinstance(to, Path):
        with to.open("xb") as file:  # x: nothing is overwritten
            _encode(frames, file, fps)
    else:
        _encode(frames, to, fps)


def _encode(frames: Tensor, file: BinaryIO, fps: float) -> None:
    import av

    pixels = frames.cpu().numpy()
    # MP4 stores one colour for 2×2 pixels: an odd side gets its last line twice.
    pixels = np.pad(pixels, ((0, 0), (0, pixels.shape[1] % 2), (0, pixels.shape[2] % 2), (0, 0)), mode="edge")
    with av.open(file, mode="w", format="mp4") as container:
        codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
        options = {"crf": "17"} if codec == "libx264" else {"qscale": "2"}
        stream = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001), options=options)
        assert isinstance(stream, av.VideoStream)
        stream.height, stream.width, stream.pix_fmt = pixels.shape[1], pixels.shape[2], "yuv420p"
        context = stream.codec_context
        # Said and meant: players take small films without a word for BT.601, and large ones for BT.709.
        context.colorspace = context.color_primaries = context.color_trc = _BT709
        context.color_range = _LIMITED
        for picture in pixels:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            frame = frame.reformat(format="yuv420p", dst_colorspace=_BT709, dst_color_range=_LIMITED)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def grid(samples: Sequence[Tensor], columns: int = 0) -> Image:
    """Samples uint8 [F, H, W, 3] in one picture: stills in rows of `columns` (0: nearly square), films one to a row.

    A film that is longer than the row is shown by frames evenly spaced from its first to its last.
    """
    from PIL import Image

    if all(len(sample) == 1 for sample in samples):
        columns = columns or math.ceil(math.sqrt(len(samples)))
        stills = [sample[0] for sample in samples]
        rows = [stills[begin : begin + columns] for begin in range(0, len(stills), columns)]
    else:
        rows = [[sample[number] for number in _spread(len(sample), columns or _ACROSS)] for sample in samples]
    pictures = [picture for row in rows for picture in row]
    high = max(picture.shape[0] for picture in pictures) + _GAP
    wide = max(picture.shape[1] for picture in pictures) + _GAP
    sheet = Image.new("RGB", (wide * max(len(row) for row in rows) - _GAP, high * len(rows) - _GAP), "white")
    for y, row in enumerate(rows):
        for x, picture in enumerate(row):
            sheet.paste(Image.fromarray(picture.cpu().numpy()), (x * wide, y * high))
    return sheet


def _spread(length: int, most: int) -> list[int]:
    if length <= most:
        return list(range(length))
    return [round(number * (length - 1) / max(1, most - 1)) for number in range(most)]
