"""Renders frames as an MP4 video, or many samples as one image, for previews."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont, ImageFont

_BT709 = 1  # FFmpeg uses the same number for the colour space, the primaries and the transfer curve
_LIMITED = 1  # limited ("TV") range of pixel values, which is usual in videos
_GAP = 2  # pixels between images
_ACROSS = 8  # frames per row of a video
_LINE, _LINES = 14, 3  # height of a line of text in pixels, and maximum number of lines per caption


def write_video(frames: Tensor, to: Path | BinaryIO, fps: float) -> None:
    """Writes frames uint8 [F, H, W, 3] to an open or a new file, as an MP4 video that browsers can play."""
    if isinstance(to, Path):
        with to.open("xb") as file:  # x: never overwrites a file
            _encode(frames, file, fps)
    else:
        _encode(frames, to, fps)


def _encode(frames: Tensor, file: BinaryIO, fps: float) -> None:
    import av

    pixels = frames.cpu().numpy()
    # The video stores one colour per 2×2 pixels, so the last row or column is repeated if their number is odd.
    pixels = np.pad(pixels, ((0, 0), (0, pixels.shape[1] % 2), (0, pixels.shape[2] % 2), (0, 0)), mode="edge")
    with av.open(file, mode="w", format="mp4") as container:
        codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
        options = {"crf": "17"} if codec == "libx264" else {"qscale": "2"}
        stream = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001), options=options)
        assert isinstance(stream, av.VideoStream)
        stream.height, stream.width, stream.pix_fmt = pixels.shape[1], pixels.shape[2], "yuv420p"
        context = stream.codec_context
        # Set explicitly: players assume BT.601 for small videos and BT.709 for large ones.
        context.colorspace = context.color_primaries = context.color_trc = _BT709
        context.color_range = _LIMITED
        for image in pixels:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
            frame = frame.reformat(format="yuv420p", dst_colorspace=_BT709, dst_color_range=_LIMITED)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def grid(samples: Sequence[Tensor], columns: int = 0, captions: Sequence[str] = ()) -> Image:
    """Arranges samples uint8 [F, H, W, 3] in one image: still images in `columns` columns, or one video per row.

    With `columns` 0, the grid is nearly square. Of a long video, the row shows evenly spaced frames from the first to
    the last. Captions, one per sample, are written below each still image or row.
    """
    from PIL import Image

    stills_only = all(len(sample) == 1 for sample in samples)
    if stills_only:
        columns = columns or math.ceil(math.sqrt(len(samples)))
        stills = [sample[0] for sample in samples]
        rows = [stills[begin : begin + columns] for begin in range(0, len(stills), columns)]
    else:
        rows = [[sample[number] for number in _spread(len(sample), columns or _ACROSS)] for sample in samples]
    images = [image for row in rows for image in row]
    tall = max(image.shape[0] for image in images)
    wide = max(image.shape[1] for image in images) + _GAP
    across = max(len(row) for row in rows)
    wrapped = [_wrapped(caption, (wide if stills_only else wide * across) - _GAP) for caption in captions]
    high = tall + _GAP + _LINE * max((len(lines) for lines in wrapped), default=0)
    sheet = Image.new("RGB", (wide * across - _GAP, high * len(rows) - _GAP), "white")
    for y, row in enumerate(rows):
        for x, image in enumerate(row):
            sheet.paste(Image.fromarray(image.cpu().numpy()), (x * wide, y * high))
    for number, lines in enumerate(wrapped):
        y, x = divmod(number, columns) if stills_only else (number, 0)
        _write(sheet, lines, x * wide, y * high + tall)
    return sheet


def labelled(frames: Tensor, label: str) -> Tensor:
    """Adds a line of text above each of the frames uint8 [F, H, W, 3]."""
    from PIL import Image

    strip = Image.new("RGB", (frames.shape[2], _LINE), "white")
    _write(strip, _wrapped(label, frames.shape[2])[:1], 0, 0)
    line = torch.from_numpy(np.array(strip)).to(frames).expand(len(frames), -1, -1, -1)
    return torch.cat([line, frames], dim=1)


def _wrapped(text: str, width: int) -> list[str]:
    """Wraps a text to at most three lines of `width` pixels, and cuts off the rest."""
    font, lines = _font(), [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    if len(lines) > _LINES:
        lines = [*lines[: _LINES - 1], f"{lines[_LINES - 1]} …"]
    return lines


def _write(sheet: Image, lines: Sequence[str], x: int, y: int) -> None:
    from PIL import ImageDraw

    for number, line in enumerate(lines):
        ImageDraw.Draw(sheet).text((x + 1, y + number * _LINE), line, fill="black", font=_font())


@cache
def _font() -> FreeTypeFont | ImageFont:
    from PIL import ImageFont

    return ImageFont.load_default(_LINE - 3)


def _spread(length: int, most: int) -> list[int]:
    if length <= most:
        return list(range(length))
    return [round(number * (length - 1) / max(1, most - 1)) for number in range(most)]
