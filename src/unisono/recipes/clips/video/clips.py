"""A video as clips of a few seconds: small pictures and sound, one clip after the other, whatever its length.

Pictures and sound are read through two openings of the file, each only as far as the clip at hand: it does not matter
how the file interleaves them, and an hour takes no more memory than a minute. Time 0 is the first picture.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from unisono.recipes.clips.video.damage import Damage, Faults, decoded
from unisono.recipes.clips.video.truncated import hint
from unisono.recipes.common.bad_files import BadMedia
from unisono.recipes.common.streams import FILMS, opened, sound_of, video_of

if TYPE_CHECKING:
    from av.audio.frame import AudioFrame
    from av.video.frame import VideoFrame

VIDEOS = (*FILMS, ".m4v", ".mpg", ".mpeg", ".ts", ".mts", ".m2ts", ".flv", ".wmv", ".ogv")

Clip = tuple[NDArray[np.uint8], NDArray[np.float32]]
"""Frames [F, height, width, 3] and samples of sound."""

_ROUNDED = 0.002  # seconds; the times in most files are whole milliseconds
_LONGEST_STILL = 3600.0  # seconds for which one picture may stand; what claims more is damaged
_MISSED = 1.0  # seconds that may be missing at the end before it is worth a word
_JITTER = 0.05  # seconds by which the times of sound may tremble without a gap being meant


@dataclass(frozen=True)
class VideoFacts:
    """What a file holds, by its header and first picture. A file of sound only has no video, size 0 and fps 0."""

    duration: float
    """Seconds from the first picture to the end of the last one, as the file says; it may be cut off before."""
    fps: float
    """0 where it is not known."""
    height: int
    """As displayed: turned upright."""
    width: int
    has_sound: bool
    has_video: bool = True


def num_clips(duration: float, clip_seconds: float) -> int:
    """How many clips a video is cut into; the last one may be shorter."""
    return max(1, math.ceil((duration - _ROUNDED) / clip_seconds))


def facts(path: Path) -> VideoFacts:
    """What a file holds; BadMedia where it cannot be read. Reads the header and one picture."""
    try:
        return _facts(path)
    except BadMedia as error:
        raise BadMedia(path, f"{error.what}{hint(path)}") from error


def _facts(path: Path) -> VideoFacts:
    with opened(path) as container:
        stream, has_sound = video_of(path, container), sound_of(container) is not None
        if stream is None:
            if not has_sound:
                raise BadMedia(path, "there is neither a picture nor sound in it that can be decoded")
            return VideoFacts((container.duration or 0) / 1e6, 0.0, 0, 0, has_sound, has_video=False)
        first: VideoFrame | None = next(decoded(container, stream, Faults()), None)
        if first is None:
            raise BadMedia(path, "there is not one picture in it that can be decoded")
        height, width = first.height, first.width
        if _quarter_turns(first) % 2:
            height, width = width, height
        rate = float(stream.average_rate or stream.guessed_rate or 0)
        # What a header says of the whole may count sound that goes on longer, or pictures that are cut away.
        told = [stream.duration * float(stream.time_base)] if stream.duration and stream.time_base else []
        told += [container.duration / 1e6] if container.duration else []
    duration = min(told) if told and min(told) > 0 else _walked(path)
    return VideoFacts(duration, rate if 0.001 < rate < 1000 else 0.0, height, width, has_sound)


def clips(
    path: Path, clip_seconds: float, frames_per_clip: int, size: tuple[int, int] | int, sample_rate: int
) -> Reading:
    """The clips of a video in order: frames uint8 [F, height, width, 3] and sound float32 [samples], -1 to 1.

    Frame j of a clip is the one on the screen when j / F of it is over. The whole picture is squeezed into a `size` of
    (height, width); one number is its shorter side, and it keeps its proportions. Where there is no sound the samples
    are zeros. BadMedia where there is nothing to be read.
    """
    return Reading(path, clip_seconds, frames_per_clip, size, sample_rate)


class Reading(Iterator[Clip]):
    """The clips of a video, and what is known of it only when they have been read."""

    def __init__(
        self, path: Path, clip_seconds: float, frames_per_clip: int, size: tuple[int, int] | int, sample_rate: int
    ) -> None:
        self.facts = facts(path)
        if not self.facts.has_video:
            raise BadMedia(path, "there is no video in it, only sound or a cover")
        self.duration = 0.0
        """Seconds: so far, and at the end those of the whole video."""
        self.damage: Damage | None = None
        """What of it could not be read, once it has been read to its end."""
        self._path, self._seconds, self._num_frames = path, clip_seconds, frames_per_clip
        self._period = 1 / self.facts.fps if self.facts.fps else 0.04
        self._shrink = _Shrink(_in_proportion(self.facts, size) if isinstance(size, int) else size)
        self._sound = _Sound(path, sample_rate)
        self._begin = 0.0  # of the first picture, by the clock of the file
        self._faults, self._broken = Faults(), ""  # packets that cannot be decoded; what ended it all
        self._num_frames_told = self._num_decoded = 0
        self._clips = self._read()

    def __next__(self) -> Clip:
        return next(self._clips)

    def close(self) -> None:
        """Closes the file before its end."""
        self._clips.close()

    @property
    def has_sound(self) -> bool:
        """Whether sound was found, so far."""
        return self._sound.found

    @property
    def remark(self) -> str:
        """What is wrong with the file, if anything; it has been read as far as it can be."""
        return f"{self._path} is {self.damage}" if self.damage else ""

    def _read(self) -> Generator[Clip]:
        frames: list[NDArray[np.uint8]] = []
        early = min(0.01, 0.3 * self._period)  # by which a picture may come: times are rounded
        step, wanted = self._seconds / self._num_frames, 0
        try:
            for picture, until in self._stills():
                small: NDArray[np.uint8] | None = None
                while wanted * step + early < until:
                    small = self._small(picture) if small is None else small
                    frames.append(small)
                    wanted += 1
                    if len(frames) == self._num_frames:
                        number = wanted // self._num_frames
                        yield np.stack(frames), self._sound.clip(number - 1, self._seconds, self._begin)
                        frames.clear()
            self.damage = self._judged()
        finally:
            self._sound.close()

    def _small(self, picture: VideoFrame) -> NDArray[np.uint8]:
        try:
            return self._shrink(picture)
        except Exception as error:  # a picture that the decoder gives and the scaler does not take
            raise BadMedia(self._path, f"has a picture that cannot be converted ({error})") from error

    def _stills(self) -> Iterator[tuple[VideoFrame, float]]:
        """The pictures, each with the time until which it is on the screen: the last one to the end of its clip."""
        last: tuple[VideoFrame, float] | None = None
        for picture, time in self._timed():
            if last is not None:
                if time <= last[1]:  # it comes too late to be shown
                    continue
                if time - last[1] > _LONGEST_STILL:
                    self._broken = f"its times jump from {last[1]:.0f} s to {time:.0f} s"
                    break
                yield last[0], time
            last, self.duration = (picture, time), time
        if last is None:
            raise BadMedia(self._path, "there is not one picture in it that can be decoded")
        told = float((last[0].duration or 0) * (last[0].time_base or 0))
        latest = max(self.facts.duration, last[1] + self._period) + _ROUNDED
        self.duration += told if 0 < told <= _LONGEST_STILL and last[1] + told <= latest else self._period
        yield last[0], num_clips(self.duration, self._seconds) * self._seconds

    def _timed(self) -> Iterator[tuple[VideoFrame, float]]:
        """The pictures with their times, as far as they can be decoded."""
        try:
            with opened(self._path) as container:
                stream = video_of(self._path, container)
                self._num_frames_told = stream.frames if stream is not None else 0
                for number, frame in enumerate(decoded(container, stream, self._faults)):
                    self._num_decoded += 1
                    if not number and frame.pts is not None:
                        self._begin = frame.time
                    yield frame, number * self._period if frame.pts is None else frame.time - self._begin
        except BadMedia as error:  # what came before it is good
            self._broken = error.what

    def _judged(self) -> Damage | None:
        missing = self.facts.duration - self.duration
        # Where sound goes on, the pictures just end before it.
        cut_off = missing > max(_MISSED, 0.02 * self.facts.duration) and self._sound.ended
        short = cut_off or (bool(self._broken) and missing > _ROUNDED)
        lost = self._faults.number
        # Decoders drop pictures that follow a fault without a word. Without a fault, fewer of them are meant.
        if lost and not short:
            lost = max(lost, self._num_frames_told - self._num_decoded)
        damage = Damage(
            self._broken or self._faults.first or self._sound.faults.first,
            self.duration,
            self.facts.duration if short else self.duration,
            lost,
            self._faults.any_frame,
            self._num_frames_told,
            self._sound.missing(self.duration),
            self._sound.seconds,
        )
        return damage if damage else None


class _Shrink:
    """Makes pictures small, upright and RGB, straight from the decoder's planes: a large one is never converted."""

    def __init__(self, size: tuple[int, int]) -> None:
        from av.video.reformatter import VideoReformatter

        self._size, self._reformatter = size, VideoReformatter()

    def __call__(self, picture: VideoFrame) -> NDArray[np.uint8]:
        turns = _quarter_turns(picture)
        height, width = self._size if turns % 2 == 0 else self._size[::-1]
        small = self._reformatter.reformat(picture, width, height, "rgb24", interpolation="AREA")
        return np.rot90(np.asarray(small.to_ndarray(), dtype=np.uint8), turns)


class _Sound:
    """The sound of a file as one channel, clip after clip. Gaps, and what is behind its end, are silent."""

    def __init__(self, path: Path, rate: int) -> None:
        self.found, self.ended = False, False
        self.faults = Faults()
        self.seconds = 0.0
        """Of the whole sound, as the file says; 0 where it does not."""
        self._silent_from = math.inf  # seconds, where the file could be read no further
        self._path, self._rate = path, rate
        self._chunks: Generator[tuple[int, NDArray[np.float32]]] | None = None
        self._chunk: tuple[int, NDArray[np.float32]] | None = None

    def clip(self, number: int, seconds: float, begin: float) -> NDArray[np.float32]:
        """The samples of a clip; clips are asked for in order. `begin` is time 0 by the clock of the file."""
        if self._chunks is None:
            self._chunks = self._placed(begin)
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
            if start + len(chunk) > end:  # some of it belongs to the next clip
                break
            self._chunk = None
        return samples

    def missing(self, duration: float) -> float:
        """Seconds that could not be decoded, of those that belong to so many seconds of video."""
        return self.faults.seconds + max(0.0, min(self.seconds or duration, duration) - self._silent_from)

    def close(self) -> None:
        if self._chunks is not None:
            self._chunks.close()

    def _placed(self, begin: float) -> Generator[tuple[int, NDArray[np.float32]]]:
        """Chunks of samples, each with the number of its first one."""
        expected: int | None = None
        try:
            with opened(self._path) as container:
                stream = sound_of(container)
                if stream and stream.duration and stream.time_base:
                    self.seconds = float(stream.duration * stream.time_base)
                for frame in self._resampled(decoded(container, stream, self.faults)) if stream else ():
                    samples = np.asarray(frame.to_ndarray(), dtype=np.float32).reshape(-1)
                    told = expected or 0 if frame.time is None else round((frame.time - begin) * self._rate)
                    # Rounded times must not tear holes into sound that goes on.
                    near = expected is not None and abs(told - expected) <= _JITTER * self._rate
                    start = expected if near and expected is not None else told
                    self.found, expected = True, start + len(samples)
                    yield start, np.nan_to_num(samples, posinf=0.0, neginf=0.0).clip(-1, 1)
        except BadMedia as error:  # the rest is silent
            self.faults.first = self.faults.first or error.what
            self._silent_from = (expected or 0) / self._rate

    def _resampled(self, frames: Iterator[AudioFrame]) -> Iterator[AudioFrame]:
        import av

        resampler, like = None, None
        for frame in frames:
            kind = (frame.format.name, frame.layout.name, frame.sample_rate)
            if kind != like:  # also in the middle of a file
                if resampler is not None:
                    yield from resampler.resample(None)
                resampler, like = av.AudioResampler(format="flt", layout="mono", rate=self._rate), kind
            assert resampler is not None
            yield from resampler.resample(frame)
        if resampler is not None:
            yield from resampler.resample(None)


def _in_proportion(facts: VideoFacts, shorter: int) -> tuple[int, int]:
    scale = shorter / min(facts.height, facts.width)
    # Nothing is so long that a model would see more of it than a strip.
    height, width = (min(4 * shorter, max(1, round(side * scale))) for side in (facts.height, facts.width))
    return height, width


def _quarter_turns(picture: VideoFrame) -> int:
    return round(picture.rotation / 90) % 4  # counter-clockwise


def _walked(path: Path) -> float:
    """The duration by walking through the whole file without decoding it: live recordings do not say it."""
    first, last = math.inf, 0.0
    with opened(path) as container:
        for packet in container.demux(video_of(path, container)):
            if packet.pts is not None and packet.time_base:
                first = min(first, float(packet.pts * packet.time_base))
                last = max(last, float((packet.pts + (packet.duration or 0)) * packet.time_base))
    return max(0.0, last - first) if first < math.inf else 0.0
