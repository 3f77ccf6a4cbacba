"""A moment of a video encoded anew, as H.264 and AAC: it begins and ends where it should."""

from __future__ import annotations

from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from unisono.errors import UserError
from unisono.recipes.clips.cutting.crop import Crop
from unisono.recipes.clips.cutting.moments import Moment
from unisono.recipes.clips.cutting.mp4 import writing
from unisono.recipes.clips.video.footage import Footage
from unisono.recipes.common.streams import open_media, video_stream

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import OutputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

_TICK = Fraction(1, 90_000)  # of the pictures' clock: whole for every usual frame rate
_AAC_RATES = (48_000, 44_100, 32_000, 24_000, 22_050, 16_000, 12_000, 11_025, 8_000)
_AAC_SAMPLES = 1024
_QUALITY = {"crf": "19", "preset": "fast"}
_NEAR = 0.02  # seconds; where frames come at an uneven pace, half of the mean says nothing
_LIMITED = 1  # the range of values that films have, in FFmpeg's table


def encode(
    footage: Footage, moment: Moment, to: Path, crop: Crop | None, high: int | None = None
) -> tuple[float, float]:
    """Encodes the moment anew, `high` pixels high or as the video is; what came out, in seconds of the video."""
    half = min(0.5 / footage.fps, _NEAR)
    frames = footage.frames(moment.start, min(moment.end, footage.duration) + half)
    ahead = [frame for _, frame in zip(range(2), frames, strict=False)]
    if not ahead:
        raise UserError(f"{footage.path}: no picture can be read at {moment.start:.1f} s")
    # The nearest frame, so that frames keep their pace; where one stands for long, the moment itself.
    near = [time for time, _ in ahead if abs(time - moment.start) <= half + 1e-6]
    origin = min(near, key=lambda time: abs(time - moment.start)) if near else moment.start
    if len(ahead) == 2 and ahead[1][0] <= origin:
        ahead.pop(0)
    length = min(moment.end, footage.duration) - moment.start
    with writing(to) as output:
        film, prepare = _film(output, footage, crop, high)
        sound = _Track(output, footage, origin, origin + length) if footage.has_sound else None
        durations: dict[int, int] = {}
        before: int | None = None
        for time, frame in chain(ahead, frames):
            if time - origin >= length - half and before is not None:
                break
            picture = prepare(time, frame)
            picture.pts, picture.time_base = round(max(0.0, time - origin) / _TICK), _TICK
            if before is not None:
                durations[before] = picture.pts - before
            before = picture.pts
            _mux(output, film.encode(picture), durations)
            if sound is not None:
                sound.write(until=time - origin)
        assert before is not None
        durations[before] = max(1, round(length / _TICK) - before)
        _mux(output, film.encode(None), durations)
        if sound is not None:
            sound.write(until=None)
    return origin, origin + length


def _film(
    output: OutputContainer, footage: Footage, crop: Crop | None, high: int | None
) -> tuple[VideoStream, _Prepare]:
    """The stream of pictures, and what makes each frame fit for it."""
    import av

    name = "libx264" if "libx264" in av.codecs_available else "h264"
    rate = Fraction(footage.fps).limit_denominator(1001)
    try:
        film = output.add_stream(name, rate=rate, options=_QUALITY if name == "libx264" else {})
    except (ValueError, av.error.FFmpegError):
        raise UserError("this installation of PyAV cannot encode H.264; cut without --exact and --crop") from None
    assert isinstance(film, av.VideoStream)
    prepare = _Prepare(footage, crop, high)
    film.height, film.width = prepare.size
    film.pix_fmt = "yuv420p"
    film.time_base = film.codec_context.time_base = _TICK
    film.codec_context.sample_aspect_ratio = prepare.pixel_aspect
    film.codec_context.color_range = _LIMITED
    for name in ("colorspace", "color_primaries", "color_trc"):
        setattr(film.codec_context, name, prepare.colours[name])
    return film, prepare


class _Prepare:
    """Turns frames upright, cuts them to the crop, scales them, and makes them 8-bit 4:2:0 as every player takes it."""

    def __init__(self, footage: Footage, crop: Crop | None, high: int | None = None) -> None:
        self._footage, self._crop = footage, crop
        height, width = footage.height // 2 * 2, footage.width // 2 * 2
        self._whole = height, width
        self._window = crop.size(height, width, footage.pixel_aspect) if crop else (height, width)
        self.size, self.pixel_aspect = self._window, Fraction(footage.pixel_aspect).limit_denominator(1000)
        if high:  # in square pixels
            shape = crop.aspect if crop else width * footage.pixel_aspect / height
            self.size, self.pixel_aspect = (_even(high), _even(high * shape)), Fraction(1)
        with open_media(footage.path) as container:
            stream = video_stream(footage.path, container)
            assert stream is not None
            context = stream.codec_context
            self.colours = {name: getattr(context, name) for name in ("colorspace", "color_primaries", "color_trc")}

    def __call__(self, time: float, frame: VideoFrame) -> VideoFrame:
        import av

        turns = self._footage.quarter_turns
        height, width = self._whole
        coded = (width, height) if turns % 2 else (height, width)
        frame = frame.reformat(width=coded[1], height=coded[0], format="yuv420p", dst_color_range=_LIMITED)
        if not turns and self._crop is None:
            return self._scaled(frame)
        planes = _planes(frame.to_ndarray(), *coded)
        if turns:
            planes = [np.rot90(plane, turns) for plane in planes]
        if self._crop is not None:
            top, left = self._crop.corner(time, height, width, self._footage.pixel_aspect)
            high, wide = self._window
            planes = [
                plane[top // part : (top + high) // part, left // part : (left + wide) // part]
                for plane, part in zip(planes, (1, 2, 2), strict=True)
            ]
        flat = np.concatenate([plane.reshape(-1) for plane in planes])
        high, wide = self._window
        return self._scaled(av.VideoFrame.from_ndarray(flat.reshape(high * 3 // 2, wide), format="yuv420p"))

    def _scaled(self, frame: VideoFrame) -> VideoFrame:
        if self.size == self._window:
            return frame
        height, width = self.size
        return frame.reformat(width=width, height=height, interpolation="LANCZOS")


def _even(length: float) -> int:
    return max(2, round(length / 2) * 2)


def _planes(pixels: NDArray[Any], height: int, width: int) -> list[NDArray[Any]]:
    """Luma and the two colours, each as a picture of its own."""
    flat = pixels.reshape(-1)
    whole, quarter = height * width, height * width // 4
    colours = (flat[whole + place * quarter : whole + (place + 1) * quarter] for place in range(2))
    return [flat[:whole].reshape(height, width), *(each.reshape(height // 2, width // 2) for each in colours)]


class _Track:
    """The sound of a cut, written as far as the pictures are."""

    def __init__(self, output: OutputContainer, footage: Footage, start: float, end: float) -> None:
        import av

        self._output = output
        self._rate = footage.sound_rate if footage.sound_rate in _AAC_RATES else _AAC_RATES[0]
        self._layout: Literal["mono", "stereo"] = "mono" if footage.sound_channels == 1 else "stereo"
        stream = output.add_stream("aac", rate=self._rate, layout=self._layout)
        assert isinstance(stream, av.AudioStream)
        self._stream: AudioStream = stream
        self._parts = footage.sound(start, end, self._rate, self._layout)
        self._left = np.zeros((1 if self._layout == "mono" else 2, 0), np.float32)
        self._written = 0

    def write(self, until: float | None) -> None:
        """Writes the sound up to a time, or all that is left."""
        import av

        while until is None or self._written < until * self._rate:
            while self._left.shape[1] < _AAC_SAMPLES and (part := next(self._parts, None)) is not None:
                self._left = np.concatenate([self._left, part], axis=1)
            chunk, self._left = self._left[:, :_AAC_SAMPLES], self._left[:, _AAC_SAMPLES:]
            if not chunk.shape[1]:
                break
            frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(chunk), format="fltp", layout=self._layout)
            frame.sample_rate, frame.pts, frame.time_base = self._rate, self._written, Fraction(1, self._rate)
            self._written += chunk.shape[1]
            self._output.mux(self._stream.encode(frame))
        if until is None:
            self._output.mux(self._stream.encode(None))


def _mux(output: OutputContainer, packets: Any, durations: dict[int, int]) -> None:
    for packet in packets:
        # The encoder does not know for how long a frame stands; the last one's duration is that of the film.
        duration = durations.get(packet.pts)
        if duration is not None and packet.time_base == _TICK:
            packet.duration = duration
        output.mux(packet)
