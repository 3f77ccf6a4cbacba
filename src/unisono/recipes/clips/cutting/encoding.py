"""Re-encodes a moment of a video as H.264 and AAC with exact start and end, optionally cropped and scaled."""

from __future__ import annotations

from fractions import Fraction
from itertools import chain, islice
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

_TICK = Fraction(1, 90_000)  # time base of the video; at all usual frame rates, a frame is a whole number of ticks
_AAC_RATES = (48_000, 44_100, 32_000, 24_000, 22_050, 16_000, 12_000, 11_025, 8_000)
_AAC_SAMPLES = 1024
_QUALITY = {"crf": "19", "preset": "fast"}
_HALF_FRAME = 0.02  # seconds; fixed, because half of the mean duration is meaningless at a variable frame rate
_LIMITED_RANGE = 1  # FFmpeg's number for limited range


def encode(
    footage: Footage, moment: Moment, to: Path, crop: Crop | None, height: int | None = None
) -> tuple[float, float]:
    """Re-encodes a moment, scaled to `height` pixels if given; returns the start and end of the part in the file."""
    half = min(0.5 / footage.fps, _HALF_FRAME)
    frames = footage.frames(moment.start, min(moment.end, footage.duration) + half)
    first_two = list(islice(frames, 2))
    if not first_two:
        raise UserError(f"{footage.path}: no frame can be read at {moment.start:.1f} s")
    # Starts at the frame nearest to the moment's start, so that frames stay evenly spaced. If that frame is too far
    # away (because a frame lasts long), the clip starts exactly at the moment's start.
    near = [time for time, _ in first_two if abs(time - moment.start) <= half + 1e-6]
    origin = min(near, key=lambda time: abs(time - moment.start)) if near else moment.start
    if len(first_two) == 2 and first_two[1][0] <= origin:
        first_two.pop(0)
    length = min(moment.end, footage.duration) - moment.start
    with writing(to) as output:
        video, prepare = _video_stream(output, footage, crop, height)
        sound = _SoundTrack(output, footage, origin, origin + length) if footage.has_sound else None
        durations: dict[int, int] = {}
        previous: int | None = None
        for time, frame in chain(first_two, frames):
            if time - origin >= length - half and previous is not None:
                break
            prepared = prepare(time, frame)
            prepared.pts, prepared.time_base = round(max(0.0, time - origin) / _TICK), _TICK
            if previous is not None:
                durations[previous] = prepared.pts - previous
            previous = prepared.pts
            _mux(output, video.encode(prepared), durations)
            if sound is not None:
                sound.write(until=time - origin)
        assert previous is not None
        durations[previous] = max(1, round(length / _TICK) - previous)
        _mux(output, video.encode(None), durations)
        if sound is not None:
            sound.write(until=None)
    return origin, origin + length


def _video_stream(
    output: OutputContainer, footage: Footage, crop: Crop | None, height: int | None
) -> tuple[VideoStream, _Prepare]:
    """Adds the video stream; also returns a function that prepares frames for the stream."""
    import av

    name = "libx264" if "libx264" in av.codecs_available else "h264"
    rate = Fraction(footage.fps).limit_denominator(1001)
    try:
        video = output.add_stream(name, rate=rate, options=_QUALITY if name == "libx264" else {})
    except (ValueError, av.error.FFmpegError):
        raise UserError("this installation of PyAV cannot encode H.264; cut without --exact and --crop") from None
    assert isinstance(video, av.VideoStream)
    prepare = _Prepare(footage, crop, height)
    video.height, video.width = prepare.size
    video.pix_fmt = "yuv420p"
    video.time_base = video.codec_context.time_base = _TICK
    video.codec_context.sample_aspect_ratio = prepare.pixel_aspect
    video.codec_context.color_range = _LIMITED_RANGE
    for name in ("colorspace", "color_primaries", "color_trc"):
        setattr(video.codec_context, name, prepare.colours[name])
    return video, prepare


class _Prepare:
    """Rotates frames upright, crops and scales them, and converts them to 8-bit 4:2:0, which every player supports."""

    def __init__(self, footage: Footage, crop: Crop | None, target_height: int | None) -> None:
        self._footage, self._crop = footage, crop
        height, width = footage.height // 2 * 2, footage.width // 2 * 2
        self._whole = height, width
        self._window = crop.size(height, width, footage.pixel_aspect) if crop else (height, width)
        self.size, self.pixel_aspect = self._window, Fraction(footage.pixel_aspect).limit_denominator(1000)
        if target_height:  # scaled frames have square pixels
            shape = crop.aspect if crop else width * footage.pixel_aspect / height
            self.size, self.pixel_aspect = (_even(target_height), _even(target_height * shape)), Fraction(1)
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
        frame = frame.reformat(width=coded[1], height=coded[0], format="yuv420p", dst_color_range=_LIMITED_RANGE)
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
    """Returns the luma plane and the two chroma planes of a 4:2:0 frame."""
    luma, chroma = np.split(pixels.reshape(-1), [height * width])
    return [luma.reshape(height, width), *chroma.reshape(2, height // 2, width // 2)]


class _SoundTrack:
    """The audio stream of a clip, written in step with the frames."""

    def __init__(self, output: OutputContainer, footage: Footage, start: float, end: float) -> None:
        import av

        self._output = output
        self._rate = footage.sound_rate if footage.sound_rate in _AAC_RATES else _AAC_RATES[0]
        self._layout: Literal["mono", "stereo"] = "mono" if footage.sound_channels == 1 else "stereo"
        stream = output.add_stream("aac", rate=self._rate, layout=self._layout)
        assert isinstance(stream, av.AudioStream)
        self._stream: AudioStream = stream
        self._parts = footage.sound(start, end, self._rate, self._layout)
        self._pending = np.zeros((1 if self._layout == "mono" else 2, 0), np.float32)
        self._written = 0

    def write(self, until: float | None) -> None:
        """Writes the sound up to the time `until`; None writes all remaining sound."""
        import av

        while until is None or self._written < until * self._rate:
            while self._pending.shape[1] < _AAC_SAMPLES and (part := next(self._parts, None)) is not None:
                self._pending = np.concatenate([self._pending, part], axis=1)
            chunk, self._pending = self._pending[:, :_AAC_SAMPLES], self._pending[:, _AAC_SAMPLES:]
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
        # The encoder does not set the packets' durations, but the last frame's duration determines the file's length.
        duration = durations.get(packet.pts)
        if duration is not None and packet.time_base == _TICK:
            packet.duration = duration
        output.mux(packet)
