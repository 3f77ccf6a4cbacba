"""A file as pictures with their times: stills and animations by Pillow, films by PyAV.

Files come from anywhere: what cannot be read is a BadMedia that names the file, never a crash, a hang or a read of
anything but the file itself.
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
from unisono.recipes.common.bad_files import BadMedia, check_file, faults
from unisono.recipes.common.streams import FILMS, MOST_PIXELS

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream
    from PIL.Image import Image

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")

_MOST_TO_DECODE = 2**32  # pixels of an animation, which is decoded from its beginning whatever is wanted of it
_PICTURE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")  # Pillow also knows formats that start other programs
_WORTH_SEEKING = 1.0  # seconds
_ANIMATED = 2  # the flag in an extended WebP's header
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # the EXIF tag, and its values that swap height and width


@dataclass(frozen=True)
class MediaFacts:
    """What a file shows: how many pictures, how large as displayed, how fast. A still picture has 1 frame and fps 0."""

    frames: int
    height: int
    width: int
    fps: float


@dataclass(frozen=True)
class Shown:
    """One picture of a file, not yet converted, and its time in seconds after the first one."""

    time: float
    frame: Any


def opened(path: Path) -> StillOrAnimation | Film:
    """The file, looked at and ready to be read."""
    check_file(path)
    if path.suffix.lower() in PICTURES:
        return StillOrAnimation(path)
    if path.suffix.lower() in FILMS:
        return Film(path)
    raise BadMedia(path, f"files of this kind are not read; those that are: {' '.join((*FILMS, *PICTURES))}")


def is_still(path: Path) -> bool:
    """Whether a file is one picture for sure, by its first bytes: an animation may have any picture's suffix."""
    try:
        if path.suffix.lower() not in PICTURES or not path.is_file():  # a pipe would be waited for, for ever
            return False
        with path.open("rb") as file:
            head = file.read(21)
    except OSError:  # whoever reads it will say what is wrong with it
        return False
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return head[12:15] == b"VP8" and not (head[15:16] == b"X" and int.from_bytes(head[20:]) & _ANIMATED)
    return head.startswith((b"\xff\xd8", b"\x89PNG", b"BM"))


class StillOrAnimation:
    """A still picture, or an animation in a picture format (GIF, WebP)."""

    pixel_aspect = 1.0

    def __init__(self, path: Path) -> None:
        self._path = path
        with faults(path, "picture"), self._open() as image:
            height, width = image.height, image.width
            if image.getexif().get(_ORIENTATION) in _TURNED:
                height, width = width, height
            frames: int = getattr(image, "n_frames", 1) if image.format in ("GIF", "WEBP") else 1
            if frames > 1 and frames * height * width > _MOST_TO_DECODE:
                raise BadMedia(
                    path, f"{frames:,} pictures of {height}×{width} are too long an animation; make a film of it"
                )
            self._delays = [self._delay(image, number) for number in range(frames)] if frames > 1 else []
        fps = frames / sum(self._delays) if self._delays else 0.0
        self.facts = MediaFacts(frames, height, width, fps)

    @staticmethod
    def _delay(image: Image, number: int) -> float:
        image.seek(number)
        image.load()  # WebP tells the delay of a frame only once it is decoded
        milliseconds = float(image.info.get("duration") or 0)
        return (
            milliseconds / 1000 if milliseconds > 10 else 0.1
        )  # shorter ones are not meant, and no browser obeys them

    @contextmanager
    def _open(self) -> Iterator[Image]:
        from PIL import Image

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit is ours
            opened_image = Image.open(self._path, formats=_PICTURE_FORMATS)
        with opened_image as image:
            if image.height * image.width > MOST_PIXELS:
                raise BadMedia(self._path, f"{image.height}×{image.width} is more than {MOST_PIXELS:,} pixels")
            yield image

    def frames(self, start: float) -> Iterator[Shown]:
        """The pictures in order; from the beginning, since an animation has no place to start in the middle."""
        from PIL import ImageOps

        time = 0.0
        with faults(self._path, "picture"), self._open() as image:
            for number in range(self.facts.frames):
                image.seek(number)
                image.load()
                yield Shown(time, ImageOps.exif_transpose(image) if self.facts.frames == 1 else image.copy())
                time += self._delays[number] if self._delays else 0.0

    def picture(self, shown: Shown) -> NDArray[np.uint8]:
        """[height, width, 3] as 8-bit RGB; what is transparent becomes white."""
        with faults(self._path, "picture"):
            return np.array(_rgb(shown.frame))


def _rgb(image: Image) -> Image:
    from PIL import Image

    if image.mode.startswith(("I", "F")):  # 16 bits per pixel; Pillow's own conversion would clip, not scale
        image = Image.fromarray((np.asarray(image).clip(0, 65535) / 257).round().astype(np.uint8))
    if not image.has_transparency_data:
        return image.convert("RGB")
    ground = Image.new("RGBA", image.size, "white")
    ground.alpha_composite(image.convert("RGBA"))
    return ground.convert("RGB")


class Film:
    """A film."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._open() as (container, stream):
            rate = float(stream.average_rate or stream.guessed_rate or 0)
            times = self._times_by_index(container, stream)
            first = next(container.decode(stream), None)
            if first is None:
                raise BadMedia(path, "there is not one frame in it")
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
            # The rate of the header is exact where it is right; times in a file are often rounded to milliseconds.
            measured = (frames - 1) / span if span > 0 else rate
            rate = rate if rate and abs(rate - measured) < 0.01 * rate else measured
            if not 0.001 < rate < 10_000:
                raise BadMedia(path, "it does not say how fast its frames follow each other")
        elif not 0.001 < rate < 10_000:
            rate = 1.0  # of a single frame it does not matter
        self.facts = MediaFacts(frames, height, max(1, round(width * self.pixel_aspect)), rate)

    @contextmanager
    def _open(self) -> Iterator[tuple[InputContainer, VideoStream]]:
        with streams.opened(self._path, "film") as container:
            stream = streams.video_of(self._path, container)
            if stream is None:
                raise BadMedia(self._path, "there is no film in it, only sound or a cover")
            yield container, stream

    def _times_by_index(self, container: InputContainer, stream: VideoStream) -> list[float]:
        """When the frames come, by the table in the header; nothing where it is missing, not complete or not enough."""
        entries = [entry for entry in stream.index_entries if entry.size]
        if not entries or len(entries) < stream.frames or not stream.frames:
            return []
        if max(entry.pos + entry.size for entry in entries) > container.size:
            raise BadMedia(self._path, "it is cut off: frames of its table lie behind its end")
        tick = _seconds(stream.time_base)
        times = [entry.timestamp * tick for entry in entries if not entry.is_discard]
        # Frames are listed when they are decoded, not when they are shown: the same only at an even pace.
        steps = [later - sooner for sooner, later in pairwise(times)]
        even = not steps or max(steps) < 1.5 * min(steps)
        return times if even and entries[0].is_keyframe else []

    def _times_by_counting(self) -> list[float]:
        """When the frames come, by walking through the whole file without decoding it."""
        times: list[float] = []
        decodable = False  # what comes before the first key frame is not
        with self._open() as (container, stream):
            for packet in container.demux(stream):
                decodable = decodable or packet.is_keyframe
                if decodable and packet.size and not packet.is_discard:
                    ticks = packet.pts if packet.pts is not None else packet.dts
                    times.append((ticks or 0) * _seconds(packet.time_base))
        if not times:
            raise BadMedia(self._path, "there is not one key frame in it")
        return times

    def frames(self, start: float) -> Iterator[Shown]:
        """The frames in order, from the last key frame at or before `start` where the file allows it."""
        if start > _WORTH_SEEKING and self._begin is not None:
            decoded = self._decoded(start)
            try:
                first = next(decoded, None)
            except BadMedia:  # not every file can be entered in the middle
                first = None
            if first is not None and first.frame.pts is not None and first.time <= start:
                yield first
                yield from decoded
                return
        yield from self._decoded(0)

    def _decoded(self, start: float) -> Iterator[Shown]:
        with self._open() as (container, stream):
            if start:
                assert self._begin is not None
                container.seek(int((self._begin + start) / _seconds(stream.time_base)), stream=stream)
            for number, frame in enumerate(container.decode(stream)):
                if self._begin is None or frame.pts is None:
                    yield Shown(number / self.facts.fps, frame)
                else:
                    yield Shown(frame.time - self._begin, frame)

    def picture(self, shown: Shown) -> NDArray[np.uint8]:
        """[height, width, 3] as 8-bit RGB, upright."""
        frame: VideoFrame = shown.frame
        with faults(self._path, "film"):
            pixels = np.asarray(frame.to_ndarray(format="rgb24"), dtype=np.uint8)
            return np.ascontiguousarray(np.rot90(pixels, self._quarter_turns))


def _seconds(tick: Any) -> float:
    # A fraction or None, and from PyAV 19 on a type of its own.
    return float(tick) if tick else 0.0
