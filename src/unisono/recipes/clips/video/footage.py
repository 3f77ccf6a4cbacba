"""Any stretch of a video: its frames as they are, and its sound to the sample, by time after the first frame."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from unisono.recipes.clips.video.clips import facts
from unisono.recipes.clips.video.damage import Faults, decoded
from unisono.recipes.common.bad_files import BadMedia
from unisono.recipes.common.streams import opened, sound_of, video_of

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

_JITTER = 0.03  # seconds by which the times of sound may be off before it is taken for a gap
_PRIMING = 0.25  # seconds that a decoder of sound needs before what it gives is right
_BACK = 10.0  # seconds to go back where a file does not lead to the place that was asked for
_TINY = 1e-4


class Footage:
    """A video of which parts are wanted; each part opens the file anew, so parts can be read side by side."""

    def __init__(self, path: Path) -> None:
        known = facts(path)
        if not known.has_video:
            raise BadMedia(path, "there is no video in it, only sound or a cover")
        self.path, self.duration, self.has_sound = path, known.duration, known.has_sound
        self.height, self.width = known.height, known.width
        """As displayed: turned upright."""
        with opened(path) as container:
            stream = video_of(path, container)
            assert stream is not None
            self.fps = known.fps or 25.0
            first: VideoFrame = next(decoded(container, stream, Faults()))
            self.begin = float(first.time) if first.pts is not None else 0.0
            """The time in the file at which the video begins."""
            self.quarter_turns = round(first.rotation / 90) % 4
            """Counter-clockwise, to turn a frame upright."""
            aspect = float(stream.sample_aspect_ratio or 1)
            aspect = aspect if 0.1 < aspect < 10 else 1.0
            self.pixel_aspect = 1 / aspect if self.quarter_turns % 2 else aspect
            """How much wider than high a pixel is shown, upright."""
            sound = sound_of(container)
            self.sound_rate = sound.sample_rate if sound else 0
            self.sound_channels = sound.channels if sound else 0

    def frames(self, start: float, end: float) -> Iterator[tuple[float, VideoFrame]]:
        """The frames on the screen from `start` to before `end`, with their times: the first may have begun before."""
        for back in (0.0, _BACK, start):
            shown: tuple[float, VideoFrame] | None = None
            try:
                for time, frame in self._decoded(max(0.0, start - back)):
                    if time > start + _TINY:
                        if shown is None:
                            # Not every file can be entered at every place; one that begins later has no earlier frame.
                            if back < start and time > 0:
                                break
                            shown = (time, frame)
                            continue
                        if time <= shown[0]:
                            continue  # a frame that comes too late is not shown
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
                    return  # cut off: as far as it goes
                if back >= start:
                    raise

    def key_frame(self, time: float) -> tuple[float, float] | None:
        """When the last key frame at or before a time is shown, and the time to `seek` that leads to it."""
        for back in (0.0, _BACK, time):
            found = None
            with opened(self.path) as container:
                stream = video_of(self.path, container)
                assert stream is not None
                self.seek(container, stream, max(0.0, time - back))
                for packet in container.demux(stream):
                    if packet.pts is None or packet.dts is None or packet.time_base is None:
                        continue
                    if float(packet.dts * packet.time_base) - self.begin > time + _TINY:
                        break
                    shown = float(packet.pts * packet.time_base) - self.begin
                    if packet.is_keyframe and shown <= time + _TINY:
                        found = shown
            if found is not None:
                return found, max(0.0, time - back)
        return None

    def seek(self, container: InputContainer, stream: VideoStream, time: float) -> None:
        """Leads to the last key frame at or before a time, as far as the file allows it."""
        if time > 0 and stream.time_base:
            container.seek(int((self.begin + time + _TINY) / float(stream.time_base)), stream=stream)

    def _decoded(self, start: float) -> Iterator[tuple[float, VideoFrame]]:
        with opened(self.path) as container:
            stream = video_of(self.path, container)
            assert stream is not None
            self.seek(container, stream, start)
            for number, frame in enumerate(decoded(container, stream, Faults())):
                yield (float(frame.time) - self.begin if frame.pts is not None else number / self.fps), frame

    def picture(self, frame: VideoFrame, size: tuple[int, int] | None = None) -> NDArray[np.uint8]:
        """A frame as [height, width, 3], upright; squeezed into (width, height) where `size` says so."""
        width, height = size or (self.width, self.height)
        if self.quarter_turns % 2:
            width, height = height, width
        pixels = frame.reformat(width=width, height=height, format="rgb24").to_ndarray()
        return np.ascontiguousarray(np.rot90(np.asarray(pixels, np.uint8), self.quarter_turns))

    def picture_at(self, time: float, size: tuple[int, int], *, roughly: bool = False) -> NDArray[np.uint8] | None:
        """The frame on the screen at a time, or roughly then, which is quicker; None where none can be read."""
        try:
            for _, frame in self._decoded(time) if roughly else self.frames(time, time + 2 * _TINY):
                return self.picture(frame, size)
        except BadMedia:
            pass
        return None

    def sound(
        self, start: float, end: float, rate: int, layout: Literal["mono", "stereo"]
    ) -> Iterator[NDArray[np.float32]]:
        """The sound from `start` to `end`, in parts [channels, samples]: exactly as many samples as the time has.

        Each sample stands where its time in the file puts it; where there is no sound (before its beginning, in a
        gap) there are zeros. So it stays in step with the frames.
        """
        total = round((end - start) * rate)
        channels = 1 if layout == "mono" else 2
        given = 0
        expected: int | None = None
        for time, samples in self._heard(start, rate, layout):
            at = round((time - start) * rate)
            if expected is not None and abs(at - expected) <= _JITTER * rate:
                at = expected  # times are rounded; samples that follow each other do so without a seam
            expected = at + samples.shape[1]
            if expected <= given:
                continue
            if at >= total:
                break
            if at > given:
                yield np.zeros((channels, at - given), np.float32)
                given = at
            part = samples[:, given - at : total - at]
            given += part.shape[1]
            yield part
            if given >= total:
                return
        if given < total:
            yield np.zeros((channels, total - given), np.float32)

    def _heard(self, start: float, rate: int, layout: str) -> Iterator[tuple[float, NDArray[np.float32]]]:
        """Decoded sound from before `start` on, with its time; ends where the file can be read no further."""
        import av

        if not self.has_sound:
            return
        try:
            with opened(self.path) as container:
                stream = sound_of(container)
                before = self.begin + start - _PRIMING
                if before > 0 and stream is not None and stream.time_base:
                    container.seek(int(before / float(stream.time_base)), stream=stream)
                resampler = av.AudioResampler(format="fltp", layout=layout, rate=rate)
                for frame in decoded(container, stream, Faults()):
                    for part in resampler.resample(frame):
                        if part.pts is not None and part.time_base:
                            time = float(part.pts * part.time_base)
                            yield time - self.begin, np.asarray(part.to_ndarray(), np.float32)
        except BadMedia:  # a damaged track of sound is silent from there on
            return
