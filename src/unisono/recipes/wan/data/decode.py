"""Decodes a file into timed frames: still images and animations with Pillow, videos with PyAV.

The files are not trusted. A file that cannot be decoded raises BadMedia with its name; it cannot crash or hang the
run, or make the run read another file.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unisono.recipes.common import streams
from unisono.recipes.common.bad_files import BadMedia, as_bad_media, check_file
from unisono.recipes.common.streams import MAX_PIXELS, VIDEO_SUFFIXES

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream
    from PIL.Image import Image

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")

_MOST_TO_DECODE = 2**32  # maximum number of pixels in an animation, because it is always decoded from its first frame
_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")  # no others: for some formats, Pillow starts other programs
_WORTH_SEEKING = 1.0  # seconds; for an earlier time, seeking is not faster than decoding from the start
_ANIMATED = 2  # the flag in an extended WebP's header
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # an EXIF tag, and its values that swap height and width


@dataclass(frozen=True)
class MediaFacts:
    """The number of frames of a file, its displayed size and its frame rate (for a still image: 1 frame, fps 0)."""

    frames: int
    height: int
    width: int
    fps: float


@dataclass(frozen=True)
class TimedFrame:
    """One frame of a file, not yet converted to RGB, and its time in seconds after the first frame."""

    time: float
    frame: Any


def opened(path: Path) -> ImageOrAnimation | Video:
    """Opens a file and reads its frame count, size and frame rate."""
    check_file(path)
    if path.suffix.lower() in IMAGES:
        return ImageOrAnimation(path)
    if path.suffix.lower() in VIDEO_SUFFIXES:
        return Video(path)
    raise BadMedia(path, f"unsupported file type; supported are {' '.join((*VIDEO_SUFFIXES, *IMAGES))}")


def is_still(path: Path) -> bool:
    """Whether the first bytes of a file show that it is a still image; animations may have the same suffixes."""
    try:
        if path.suffix.lower() not in IMAGES or not path.is_file():  # a pipe would block for ever
            return False
        with path.open("rb") as file:
            head = file.read(21)
    except OSError:  # decoding it will report the error
        return False
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return head[12:15] == b"VP8" and not (head[15:16] == b"X" and int.from_bytes(head[20:]) & _ANIMATED)
    return head.startswith((b"\xff\xd8", b"\x89PNG", b"BM"))


class ImageOrAnimation:
    """A still image, or an animation in an image format (GIF, WebP)."""

    pixel_aspect = 1.0

    def __init__(self, path: Path) -> None:
        self._path = path
        with as_bad_media(path, "image"), self._open() as image:
            height, width = image.height, image.width
            if image.getexif().get(_ORIENTATION) in _TURNED:
                height, width = width, height
            frames: int = getattr(image, "n_frames", 1) if image.format in ("GIF", "WEBP") else 1
            if frames > 1 and frames * height * width > _MOST_TO_DECODE:
                raise BadMedia(
                    path, f"an animation of {frames:,} frames of {height}×{width} is too long; convert it to a video"
                )
            self._delays = [self._delay(image, number) for number in range(frames)] if frames > 1 else []
        fps = frames / sum(self._delays) if self._delays else 0.0
        self.facts = MediaFacts(frames, height, width, fps)

    @staticmethod
    def _delay(image: Image, number: int) -> float:
        image.seek(number)
        image.load()  # for WebP, a frame's delay is known only after the frame has been decoded
        milliseconds = float(image.info.get("duration") or 0)
        return milliseconds / 1000 if milliseconds > 10 else 0.1  # browsers show shorter delays as 100 ms too

    @contextmanager
    def _open(self) -> Iterator[Image]:
        from PIL import Image

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # unisono checks its own limit
            opened_image = Image.open(self._path, formats=_IMAGE_FORMATS)
        with opened_image as image:
            if image.height * image.width > MAX_PIXELS:
                raise BadMedia(self._path, f"{image.height}×{image.width} is more than {MAX_PIXELS:,} pixels")
            yield image

    def frames(self, start: float) -> Iterator[TimedFrame]:
        """Yields the frames in order, always from the first: decoding an animation cannot start in the middle."""
        from PIL import ImageOps

        time = 0.0
        with as_bad_media(self._path, "image"), self._open() as image:
            for number in range(self.facts.frames):
                image.seek(number)
                image.load()
                yield TimedFrame(time, ImageOps.exif_transpose(image) if self.facts.frames == 1 else image.copy())
                time += self._delays[number] if self._delays else 0.0

    def rgb(self, frame: TimedFrame) -> NDArray[np.uint8]:
        """Converts a frame to 8-bit RGB, [height, width, 3]; transparent pixels become white."""
        with as_bad_media(self._path, "image"):
            return np.array(_rgb(frame.frame))


def _rgb(image: Image) -> Image:
    from PIL import Image

    if image.mode.startswith(("I", "F")):  # 16 bits per pixel; Pillow's own conversion would clip, not scale
        image = Image.fromarray((np.asarray(image).clip(0, 65535) / 257).round().astype(np.uint8))
    if not image.has_transparency_data:
        return image.convert("RGB")
    background = Image.new("RGBA", image.size, "white")
    background.alpha_composite(image.convert("RGBA"))
    return background.convert("RGB")


class Video:
    """A video file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._open() as (container, stream):
            rate = float(stream.average_rate or stream.guessed_rate or 0)
            times = self._times_by_index(container, stream)
            first = next(container.decode(stream), None)
            if first is None:
                raise BadMedia(path, "has no frames")
            self._begin = first.time if first.pts is not None else None
            self._quarter_turns = round(first.rotation / 90) % 4  # counter-clockwise
            aspect = float(stream.sample_aspect_ratio or 1)
            height, width = first.height, first.width
        times = times or self._times_by_counting()
        aspect = aspect if 0.1 < aspect < 10 else 1.0
        self.pixel_aspect = 1 / aspect if self._quarter_turns % 2 else aspect
        if self._quarter_turns % 2:
            height, width = width, height
        frames, span = len(times), max(times) - min(times)
        if frames > 1:
            # If the header's rate is right, it is more precise: times in a file are often rounded to milliseconds.
            measured = (frames - 1) / span if span > 0 else rate
            rate = rate if rate and abs(rate - measured) < 0.01 * rate else measured
            if not 0.001 < rate < 10_000:
                raise BadMedia(path, "has no usable frame rate")
        elif not 0.001 < rate < 10_000:
            rate = 1.0  # irrelevant for a single frame
        self.facts = MediaFacts(frames, height, max(1, round(width * self.pixel_aspect)), rate)

    @contextmanager
    def _open(self) -> Iterator[tuple[InputContainer, VideoStream]]:
        with streams.open_media(self._path, "video") as container:
            stream = streams.video_stream(self._path, container)
            if stream is None:
                raise BadMedia(self._path, "has no video stream, only audio or a cover image")
            yield container, stream

    def _times_by_index(self, container: InputContainer, stream: VideoStream) -> list[float]:
        """Returns the frames' times from the header's index; empty if the index is missing, incomplete or ambiguous."""
        entries = [entry for entry in stream.index_entries if entry.size]
        if not entries or len(entries) < stream.frames or not stream.frames:
            return []
        if max(entry.pos + entry.size for entry in entries) > container.size:
            raise BadMedia(self._path, "is truncated: its index lists frames beyond its end")
        tick = _seconds(stream.time_base)
        times = [entry.timestamp * tick for entry in entries if not entry.is_discard]
        # The index contains decoding times, which equal the presentation times only at a constant frame rate.
        steps = [later - sooner for sooner, later in pairwise(times)]
        even = not steps or max(steps) < 1.5 * min(steps)
        return times if even and entries[0].is_keyframe else []

    def _times_by_counting(self) -> list[float]:
        """Reads the frames' times from all packets of the file, without decoding them."""
        times: list[float] = []
        decodable = False  # frames before the first key frame cannot be decoded
        with self._open() as (container, stream):
            for packet in container.demux(stream):
                decodable = decodable or packet.is_keyframe
                if decodable and packet.size and not packet.is_discard:
                    ticks = packet.pts if packet.pts is not None else packet.dts
                    times.append((ticks or 0) * _seconds(packet.time_base))
        if not times:
            raise BadMedia(self._path, "has no key frame")
        return times

    def frames(self, start: float) -> Iterator[TimedFrame]:
        """Yields frames in order, from the last key frame at or before `start`, or from the first if seeking fails."""
        if start > _WORTH_SEEKING and self._begin is not None:
            decoded = self._decoded(start)
            try:
                first = next(decoded, None)
            except BadMedia:  # not every file supports seeking
                first = None
            if first is not None and first.frame.pts is not None and first.time <= start:
                yield first
                yield from decoded
                return
        yield from self._decoded(0)

    def _decoded(self, start: float) -> Iterator[TimedFrame]:
        with self._open() as (container, stream):
            if start:
                assert self._begin is not None
                container.seek(int((self._begin + start) / _seconds(stream.time_base)), stream=stream)
            for number, frame in enumerate(container.decode(stream)):
                if self._begin is None or frame.pts is None:
                    yield TimedFrame(number / self.facts.fps, frame)
                else:
                    yield TimedFrame(frame.time - self._begin, frame)

    def rgb(self, frame: TimedFrame) -> NDArray[np.uint8]:
        """Converts a frame to upright 8-bit RGB, [height, width, 3]."""
        decoded: VideoFrame = frame.frame
        with as_bad_media(self._path, "video"):
            pixels = np.asarray(decoded.to_ndarray(format="rgb24"), dtype=np.uint8)
            return np.ascontiguousarray(np.rot90(pixels, self._quarter_turns))


def _seconds(tick: Any) -> float:
    # `tick` is a fraction or None; since PyAV 19, it is an instance of a PyAV type.
    return float(tick) if tick else 0.0
