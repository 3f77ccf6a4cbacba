"""Reads the frames and the sound of any time range of a video; times are in seconds after the first frame."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from unisono.recipes.clips.video.clips import NO_VIDEO, facts, quarter_turns
from unisono.recipes.clips.video.damage import Faults, decoded
from unisono.recipes.common.bad_files import BadMedia
from unisono.recipes.common.streams import audio_stream, open_media, video_stream

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

_JITTER = 0.03  # tolerance of audio timestamps in seconds; a larger difference is a gap
_PRIMING = 0.25  # seconds of audio that a decoder needs before its output is correct
_BACK = 10.0  # how many seconds further back to seek if the first seek ended after the requested time
_TINY = 1e-4


class Footage:
    """Reads parts of a video; each call opens the file again, so several parts can be read in parallel."""

    def __init__(self, path: Path) -> None:
        header = facts(path)
        if not header.has_video:
            raise BadMedia(path, NO_VIDEO)
        self.path, self.duration, self.has_sound = path, header.duration, header.has_sound
        self.height, self.width = header.height, header.width
        """Height and width in pixels as displayed, after rotation."""
        with open_media(path) as container:
            stream = video_stream(path, container)
            assert stream is not None
            self.fps = header.fps or 25.0
            first: VideoFrame = next(decoded(container, stream, Faults()))
            self.begin = float(first.time) if first.pts is not None else 0.0
            """Timestamp of the first frame."""
            self.quarter_turns = quarter_turns(first)
            aspect = float(stream.sample_aspect_ratio or 1)
            aspect = aspect if 0.1 < aspect < 10 else 1.0
            self.pixel_aspect = 1 / aspect if self.quarter_turns % 2 else aspect
            """Width of a pixel divided by its height, after rotation."""
            sound = audio_stream(container)
            self.sound_rate = sound.sample_rate if sound else 0
            self.sound_channels = sound.channels if sound else 0

    def frames(self, start: float, end: float) -> Iterator[tuple[float, VideoFrame]]:
        """Yields the frames on screen from `start` to before `end`, with their times; the first may begin earlier."""
        for back in (0.0, _BACK, start):
            shown: tuple[float, VideoFrame] | None = None
            try:
                for time, frame in self._decoded(max(0.0, start - back)):
                    if time > start + _TINY:
                        if shown is None:
                            # The seek ended after the requested time, unless there is no earlier frame.
                            if back < start and time > 0:
                                break
                            shown = (time, frame)
                            continue
                        if time <= shown[0]:
                            continue  # skips a late frame, as a player would
                        yield shown
                        if time >= end - _TINY:
                            return
                    shown = (time, frame)
                else:
                    if shown is not None and shown[0] < end - _TINY:
                        yield shown
                    return
            except BadMedia:
                if shown is not None and shown[0] >= start - _TINY:
                    yield shown
                    return  # the file is truncated
                if back >= start:
                    raise

    def key_frame(self, time: float) -> tuple[float, float] | None:
        """Returns the time of the last key frame at or before `time`, and the time to pass to `seek` to reach it."""
        for back in (0.0, _BACK, time):
            last: float | None = None
            with open_media(self.path) as container:
                stream = video_stream(self.path, container)
                assert stream is not None
                self.seek(container, stream, max(0.0, time - back))
                for packet in container.demux(stream):
                    if packet.pts is None or packet.dts is None or packet.time_base is None:
                        continue
                    if float(packet.dts * packet.time_base) - self.begin > time + _TINY:
                        break
                    shown = float(packet.pts * packet.time_base) - self.begin
                    if packet.is_keyframe and shown <= time + _TINY:
                        last = shown
            if last is not None:
                return last, max(0.0, time - back)
        return None

    def seek(self, container: InputContainer, stream: VideoStream, time: float) -> None:
        """Seeks to the last key frame at or before a time, as far as the file supports seeking."""
        if time > 0 and stream.time_base:
            container.seek(int((self.begin + time + _TINY) / float(stream.time_base)), stream=stream)

    def _decoded(self, start: float) -> Iterator[tuple[float, VideoFrame]]:
        with open_media(self.path) as container:
            stream = video_stream(self.path, container)
            assert stream is not None
            self.seek(container, stream, start)
            for number, frame in enumerate(decoded(container, stream, Faults())):
                yield (float(frame.time) - self.begin if frame.pts is not None else number / self.fps), frame

    def picture(self, frame: VideoFrame, size: tuple[int, int] | None = None) -> NDArray[np.uint8]:
        """Converts a frame to upright RGB [height, width, 3], scaled to `size` (width, height) if given."""
        width, height = size or (self.width, self.height)
        if self.quarter_turns % 2:
            width, height = height, width
        pixels = frame.reformat(width=width, height=height, format="rgb24").to_ndarray()
        return np.ascontiguousarray(np.rot90(np.asarray(pixels, np.uint8), self.quarter_turns))

    def picture_at(self, time: float, size: tuple[int, int], *, roughly: bool = False) -> NDArray[np.uint8] | None:
        """Returns the frame on screen at a time or, with `roughly`, a nearby frame (faster); None if unreadable."""
        try:
            for _, frame in self._decoded(time) if roughly else self.frames(time, time + 2 * _TINY):
                return self.picture(frame, size)
        except BadMedia:
            pass
        return None

    def sound(
        self, start: float, end: float, rate: int, layout: Literal["mono", "stereo"]
    ) -> Iterator[NDArray[np.float32]]:
        """Yields the sound from `start` to `end` in parts [channels, samples]: in all, (end - start) * rate samples.

        Samples are placed by their timestamps, with zeros where there is no sound, so sound and frames stay in sync.
        """
        total = round((end - start) * rate)
        channels = 1 if layout == "mono" else 2
        done = 0
        expected: int | None = None
        for time, samples in self._decoded_sound(start, rate, layout):
            at = round((time - start) * rate)
            if expected is not None and abs(at - expected) <= _JITTER * rate:
                at = expected  # timestamps are rounded, but consecutive samples have no gap
            expected = at + samples.shape[1]
            if expected <= done:
                continue
            if at >= total:
                break
            if at > done:
                yield np.zeros((channels, at - done), np.float32)
                done = at
            part = samples[:, done - at : total - at]
            done += part.shape[1]
            yield part
            if done >= total:
                return
        if done < total:
            yield np.zeros((channels, total - done), np.float32)

    def _decoded_sound(self, start: float, rate: int, layout: str) -> Iterator[tuple[float, NDArray[np.float32]]]:
        """Yields decoded sound from shortly before `start`, with its times, as far as the file can be read."""
        import av

        if not self.has_sound:
            return
        try:
            with open_media(self.path) as container:
                stream = audio_stream(container)
                before = self.begin + start - _PRIMING
                if before > 0 and stream is not None and stream.time_base:
                    container.seek(int(before / float(stream.time_base)), stream=stream)
                resampler = av.AudioResampler(format="fltp", layout=layout, rate=rate)
                for frame in decoded(container, stream, Faults()):
                    for part in resampler.resample(frame):
                        if part.pts is not None and part.time_base:
                            time = float(part.pts * part.time_base)
                            yield time - self.begin, np.asarray(part.to_ndarray(), np.float32)
        except BadMedia:  # treat the rest as silence
            return
