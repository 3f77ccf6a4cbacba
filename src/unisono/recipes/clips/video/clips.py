"""Reads a video clip by clip: small frames and sound of a few seconds each.

Frames and sound are read through two separate file handles, each only as far as the current clip. The file may
therefore interleave them in any way, and an hour takes no more memory than a minute. Time 0 is the first frame.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from unisono.recipes.clips.video.damage import Damage, Faults, decoded
from unisono.recipes.clips.video.truncated import hint
from unisono.recipes.common.bad_files import BadMedia
from unisono.recipes.common.streams import VIDEO_SUFFIXES, audio_stream, open_media, video_stream

if TYPE_CHECKING:
    from av.audio.frame import AudioFrame
    from av.video.frame import VideoFrame

NO_VIDEO = "has no video stream, only sound or a cover image"
_NO_FRAME = "none of its frames can be decoded"

VIDEOS = (*VIDEO_SUFFIXES, ".m4v", ".mpg", ".mpeg", ".ts", ".mts", ".m2ts", ".flv", ".wmv", ".ogv")

Clip = tuple[NDArray[np.uint8], NDArray[np.float32]]
"""Frames [F, height, width, 3] and samples of sound."""

_ROUNDING = 0.002  # in seconds; most files store whole milliseconds
_LONGEST_FRAME = 3600.0  # in seconds; if a frame lasts longer, its timestamps are damaged
_MISSING_END = 1.0  # seconds that may be missing at the end before the file counts as truncated
_JITTER = 0.05  # tolerance of audio timestamps in seconds; a larger difference is a gap


@dataclass(frozen=True)
class VideoFacts:
    """The properties of a file according to its header and first frame. A sound-only file has size 0 and fps 0."""

    duration: float
    """Seconds from the first frame to the end of the last frame, as stated in the header, even of a truncated file."""
    fps: float
    """Frames per second; 0 if unknown."""
    height: int
    """Height in pixels; like the width, as displayed after rotation."""
    width: int
    has_sound: bool
    has_video: bool = True


def num_clips(duration: float, clip_seconds: float) -> int:
    """Returns the number of clips of a video; the last clip may be shorter."""
    return max(1, math.ceil((duration - _ROUNDING) / clip_seconds))


def facts(path: Path) -> VideoFacts:
    """Reads the header and one frame of a file; raises BadMedia if that is impossible."""
    try:
        return _facts(path)
    except BadMedia as error:
        raise BadMedia(path, f"{error.problem}{hint(path)}") from error


def _facts(path: Path) -> VideoFacts:
    with open_media(path) as container:
        stream, has_sound = video_stream(path, container), audio_stream(container) is not None
        if stream is None:
            if not has_sound:
                raise BadMedia(path, "none of its video and audio streams can be decoded")
            return VideoFacts((container.duration or 0) / 1e6, 0.0, 0, 0, has_sound, has_video=False)
        first: VideoFrame | None = next(decoded(container, stream, Faults()), None)
        if first is None:
            raise BadMedia(path, _NO_FRAME)
        height, width = first.height, first.width
        if quarter_turns(first) % 2:
            height, width = width, height
        rate = float(stream.average_rate or stream.guessed_rate or 0)
        # Takes the minimum, because the file's duration includes sound after the last frame, and the stream's duration
        # includes frames that an edit list skips.
        durations = [stream.duration * float(stream.time_base)] if stream.duration and stream.time_base else []
        durations += [container.duration / 1e6] if container.duration else []
    duration = min(durations) if durations and min(durations) > 0 else _duration_by_packets(path)
    return VideoFacts(duration, rate if 0.001 < rate < 1000 else 0.0, height, width, has_sound)


def clips(
    path: Path, clip_seconds: float, frames_per_clip: int, size: tuple[int, int] | int, sample_rate: int
) -> Reading:
    """Yields a video's clips in order: frames uint8 [F, height, width, 3] and sound float32 [samples] from -1 to 1.

    Frame j of a clip is the frame on screen after the fraction j / F of the clip. `size` is (height, width), or the
    length of the shorter side, which preserves the aspect ratio. Samples are 0 where there is no sound. Raises BadMedia
    if nothing can be read.
    """
    return Reading(path, clip_seconds, frames_per_clip, size, sample_rate)


class Reading(Iterator[Clip]):
    """Yields the clips of a video; `duration`, `damage` and `has_sound` are final after the last clip."""

    def __init__(
        self, path: Path, clip_seconds: float, frames_per_clip: int, size: tuple[int, int] | int, sample_rate: int
    ) -> None:
        self.facts = facts(path)
        if not self.facts.has_video:
            raise BadMedia(path, NO_VIDEO)
        self.duration = 0.0
        """Seconds read so far; after the last clip, the length of the video."""
        self.damage: Damage | None = None
        """The parts that could not be decoded; set after the last clip."""
        self._path, self._seconds, self._num_frames = path, clip_seconds, frames_per_clip
        self._period = 1 / self.facts.fps if self.facts.fps else 0.04
        self._shrink = _Shrink(_in_proportion(self.facts, size) if isinstance(size, int) else size)
        self._sound = _Sound(path, sample_rate)
        self._begin = 0.0  # timestamp of the first frame
        self._faults = Faults()
        self._broken = ""  # the error after which nothing more could be read
        self._num_frames_in_header = self._num_decoded = 0
        self._clips = self._read()

    def __next__(self) -> Clip:
        return next(self._clips)

    def close(self) -> None:
        """Closes the file."""
        self._clips.close()

    @property
    def has_sound(self) -> bool:
        """Whether any sound has been decoded so far."""
        return self._sound.was_decoded

    @property
    def remark(self) -> str:
        """Describes the damage to the file; empty if the file is intact."""
        return f"{self._path} is {self.damage}" if self.damage else ""

    def _read(self) -> Generator[Clip]:
        frames: list[NDArray[np.uint8]] = []
        tolerance = min(0.01, 0.3 * self._period)  # timestamps are rounded
        step, sampled = self._seconds / self._num_frames, 0
        try:
            for frame, until in self._frames_on_screen():
                small: NDArray[np.uint8] | None = None
                while sampled * step + tolerance < until:
                    small = self._small(frame) if small is None else small
                    frames.append(small)
                    sampled += 1
                    if len(frames) == self._num_frames:
                        number = sampled // self._num_frames
                        yield np.stack(frames), self._sound.clip(number - 1, self._seconds, self._begin)
                        frames.clear()
            self.damage = self._find_damage()
        finally:
            self._sound.close()

    def _small(self, frame: VideoFrame) -> NDArray[np.uint8]:
        try:
            return self._shrink(frame)
        except Exception as error:  # the scaler rejects some frames that decoders produce
            raise BadMedia(self._path, f"has a frame that cannot be converted ({error})") from error

    def _frames_on_screen(self) -> Iterator[tuple[VideoFrame, float]]:
        """Yields each frame with the time until which it is on screen; the last frame stays to the end of its clip."""
        last: tuple[VideoFrame, float] | None = None
        for frame, time in self._timed_frames():
            if last is not None:
                if time <= last[1]:  # skips a late frame, as a player would
                    continue
                if time - last[1] > _LONGEST_FRAME:
                    self._broken = f"its timestamps jump from {last[1]:.0f} s to {time:.0f} s"
                    break
                yield last[0], time
            last, self.duration = (frame, time), time
        if last is None:
            raise BadMedia(self._path, _NO_FRAME)
        length = float((last[0].duration or 0) * (last[0].time_base or 0))
        latest_end = max(self.facts.duration, last[1] + self._period) + _ROUNDING
        self.duration += length if 0 < length <= _LONGEST_FRAME and last[1] + length <= latest_end else self._period
        yield last[0], num_clips(self.duration, self._seconds) * self._seconds

    def _timed_frames(self) -> Iterator[tuple[VideoFrame, float]]:
        """Yields the frames with their times, as far as they can be decoded."""
        try:
            with open_media(self._path) as container:
                stream = video_stream(self._path, container)
                self._num_frames_in_header = stream.frames if stream is not None else 0
                for number, frame in enumerate(decoded(container, stream, self._faults)):
                    self._num_decoded += 1
                    if not number and frame.pts is not None:
                        self._begin = frame.time
                    yield frame, number * self._period if frame.pts is None else frame.time - self._begin
        except BadMedia as error:  # the frames before the error are used
            self._broken = error.problem

    def _find_damage(self) -> Damage | None:
        missing = self.facts.duration - self.duration
        # A file whose sound is longer than its frames is not truncated.
        truncated = missing > max(_MISSING_END, 0.02 * self.facts.duration) and self._sound.ended
        is_short = truncated or (bool(self._broken) and missing > _ROUNDING)
        frames_missing = self._faults.number
        # After an error, decoders silently drop frames. If there was no error, a header that promises more frames is no
        # sign of damage.
        if frames_missing and not is_short:
            frames_missing = max(frames_missing, self._num_frames_in_header - self._num_decoded)
        damage = Damage(
            self._broken or self._faults.first or self._sound.faults.first,
            self.duration,
            self.facts.duration if is_short else self.duration,
            frames_missing,
            self._faults.any_frame,
            self._num_frames_in_header,
            self._sound.missing(self.duration),
            self._sound.seconds,
        )
        return damage if damage else None


class _Shrink:
    """Scales a frame, converts it to RGB and rotates it upright, without converting the large frame first."""

    def __init__(self, size: tuple[int, int]) -> None:
        from av.video.reformatter import VideoReformatter

        self._size, self._reformatter = size, VideoReformatter()

    def __call__(self, frame: VideoFrame) -> NDArray[np.uint8]:
        turns = quarter_turns(frame)
        height, width = self._size if turns % 2 == 0 else self._size[::-1]
        small = self._reformatter.reformat(frame, width, height, "rgb24", interpolation="AREA")
        return np.rot90(np.asarray(small.to_ndarray(), dtype=np.uint8), turns)


class _Sound:
    """Reads the audio track of a file clip by clip, mixed down to mono.

    Gaps in the track and the time after its end are filled with silence.
    """

    def __init__(self, path: Path, rate: int) -> None:
        self.was_decoded, self.ended = False, False
        self.faults = Faults()
        self.seconds = 0.0
        """Length of the audio stream in seconds according to the header; 0 if unknown."""
        self._silent_from = math.inf  # time in seconds at which reading failed
        self._path, self._rate = path, rate
        self._chunks: Generator[tuple[int, NDArray[np.float32]]] | None = None
        self._chunk: tuple[int, NDArray[np.float32]] | None = None

    def clip(self, number: int, seconds: float, begin: float) -> NDArray[np.float32]:
        """Returns the samples of the next clip. `begin` is the timestamp of time 0."""
        if self._chunks is None:
            self._chunks = self._timed_chunks(begin)
        first = round(number * seconds * self._rate)
        samples = np.zeros(round(seconds * self._rate), np.float32)
        end = first + len(samples)
        while not self.ended:
            self._chunk = self._chunk or next(self._chunks, None)
            if self._chunk is None:
                self.ended = True
                break
            start, chunk = self._chunk
            low, high = max(start, first), min(start + len(chunk), end)
            if low < high:
                samples[low - first : high - first] = chunk[low - start : high - start]
            if start + len(chunk) > end:  # the rest belongs to the next clip
                break
            self._chunk = None
        return samples

    def missing(self, duration: float) -> float:
        """Returns the seconds of sound in the first `duration` seconds that could not be decoded."""
        return self.faults.seconds + max(0.0, min(self.seconds or duration, duration) - self._silent_from)

    def close(self) -> None:
        if self._chunks is not None:
            self._chunks.close()

    def _timed_chunks(self, begin: float) -> Generator[tuple[int, NDArray[np.float32]]]:
        """Yields chunks of samples, each with the index of its first sample."""
        expected: int | None = None
        try:
            with open_media(self._path) as container:
                stream = audio_stream(container)
                if stream and stream.duration and stream.time_base:
                    self.seconds = float(stream.duration * stream.time_base)
                for frame in self._resampled(decoded(container, stream, self.faults)) if stream else ():
                    samples = np.asarray(frame.to_ndarray(), dtype=np.float32).reshape(-1)
                    start = expected or 0 if frame.time is None else round((frame.time - begin) * self._rate)
                    # Rounded timestamps must not cause gaps in continuous sound.
                    if expected is not None and abs(start - expected) <= _JITTER * self._rate:
                        start = expected
                    self.was_decoded, expected = True, start + len(samples)
                    yield start, np.nan_to_num(samples, posinf=0.0, neginf=0.0).clip(-1, 1)
        except BadMedia as error:  # treat the rest as silence
            self.faults.first = self.faults.first or error.problem
            self._silent_from = (expected or 0) / self._rate

    def _resampled(self, frames: Iterator[AudioFrame]) -> Iterator[AudioFrame]:
        import av

        def format_of(frame: AudioFrame) -> tuple[str, str, int]:
            return frame.format.name, frame.layout.name, frame.sample_rate

        for _, same_format in groupby(frames, format_of):  # the format may change in the middle of a file
            resampler = av.AudioResampler(format="flt", layout="mono", rate=self._rate)
            for frame in same_format:
                yield from resampler.resample(frame)
            yield from resampler.resample(None)


def _in_proportion(facts: VideoFacts, shorter: int) -> tuple[int, int]:
    scale = shorter / min(facts.height, facts.width)
    # Limits the longer side of frames with an absurd aspect ratio.
    height, width = (min(4 * shorter, max(1, round(side * scale))) for side in (facts.height, facts.width))
    return height, width


def quarter_turns(frame: VideoFrame) -> int:
    """Returns the number of counter-clockwise quarter turns that make a frame upright."""
    return round(frame.rotation / 90) % 4


def _duration_by_packets(path: Path) -> float:
    """Computes the duration from all packets' timestamps: the header of a live recording does not contain it."""
    first, last = math.inf, 0.0
    with open_media(path) as container:
        for packet in container.demux(video_stream(path, container)):
            if packet.pts is not None and packet.time_base:
                first = min(first, float(packet.pts * packet.time_base))
                last = max(last, float((packet.pts + (packet.duration or 0)) * packet.time_base))
    return max(0.0, last - first) if first < math.inf else 0.0
