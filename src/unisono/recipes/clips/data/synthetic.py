"""The mirror set: generated videos in which only a pattern distinguishes highlights from decoys.

If highlights merely moved more, the frame difference would find them, and good metrics of a trained model would prove
nothing. Here every highlight has a decoy that is its mirror image: the same dot on the same circle at the same speed
with the same sound, except that it moves anticlockwise where the highlight moves clockwise. Both have the same
brightness, colour, amount of motion and loudness, and no single frame reveals which is which. Calm clips lie between
them. The files are real MP4 files with sound; their content depends only on (seed, split, number).
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from unisono.errors import ConfigError

LABELS = "labels.csv"
CALM, HIGHLIGHT, DECOY = 0, 1, 2
PATTERNS = ("motion", "sound", "none")
"""The difference between highlights and decoys. "none" is a control experiment: only calm clips can be recognised."""

_HIGHLIGHTS = 0.19  # fraction of clips that are highlights; the same fraction are decoys
_SAMPLE_RATE = 8_000
_AUDIO_NOISE = 0.01  # background noise, as in any recording; without it, the encoder is slow
_MOST_NOISE = 30.0  # largest standard deviation of the noise in frames, on a scale of 0 to 255
_CONTRAST = 140.0  # mean difference between dot and background, on a scale of 0 to 255
_BT709, _LIMITED_RANGE = 1, 1  # FFmpeg's numbers for BT.709 and limited range


@dataclass(frozen=True)
class Plan:
    """The content of one video: for each clip its kind, and the parameters of its frames and sound."""

    kinds: NDArray[np.int64]  # [T] CALM, HIGHLIGHT or DECOY
    turns: NDArray[np.float64]  # [T] revolutions per clip; positive is clockwise
    phases: NDArray[np.float64]  # [T] angle at which the dot starts, in radians
    centres: NDArray[np.float64]  # [T, 2] offset of the circle's centre from the frame's: x and y in frame widths
    loudness: NDArray[np.float64]  # [T]
    pitches: NDArray[np.float64]  # [T] in Hz
    sweeps: NDArray[np.float64]  # [T] octaves by which the pitch rises (or falls) within a clip
    background: NDArray[np.float64]  # [4, 4, 3] colours to interpolate between
    colour: NDArray[np.float64]  # [3] of the dot
    noise_seed: int

    @property
    def scores(self) -> NDArray[np.float32]:
        """Score of each clip [T]: 1 for highlights, 0 for all others."""
        return np.asarray(self.kinds == HIGHLIGHT, dtype=np.float32)


def plan(seed: int, split: str, number: int, num_clips: int = 30, pattern: str = "motion") -> Plan:
    """Draws the content of one video of the set."""
    if pattern not in PATTERNS:
        raise ConfigError(f"pattern {pattern!r}: expected one of {', '.join(PATTERNS)}")
    if num_clips < 4:
        raise ConfigError(f"num_clips {num_clips}: expected at least 4, for a highlight, its decoy and calm clips")
    key = f"{seed}\0{split}\0{number}".encode()
    # Uses RandomState, because numpy guarantees that its numbers never change.
    random = np.random.RandomState(np.frombuffer(hashlib.sha256(key).digest(), np.uint32))
    pairs = max(1, round(_HIGHLIGHTS * num_clips))
    order = random.permutation(num_clips)
    highlights, decoys = order[:pairs], order[pairs : 2 * pairs]
    kinds = np.zeros(num_clips, np.int64)
    kinds[highlights], kinds[decoys] = HIGHLIGHT, DECOY

    turns = random.uniform(0.7, 1.3, num_clips)
    phases = random.uniform(0, 2 * np.pi, num_clips)
    centres = random.uniform(-0.12, 0.12, (num_clips, 2))
    loudness = random.uniform(0.05, 0.4, num_clips)
    pitches = random.uniform(300, 1200, num_clips)
    sweeps = random.uniform(0.7, 1.3, num_clips)
    calm = kinds == CALM
    turns[calm] *= 0.15 * random.choice([-1.0, 1.0], calm.sum())
    sweeps[calm] *= 0.15 * random.choice([-1.0, 1.0], calm.sum())
    # Only the pattern may distinguish highlights from decoys, so all other directions are random.
    if pattern != "motion":
        turns[highlights] *= random.choice([-1.0, 1.0], pairs)
    if pattern != "sound":
        sweeps[highlights] *= random.choice([-1.0, 1.0], pairs)

    for values in (turns, phases, centres, loudness, pitches, sweeps):
        values[decoys] = values[highlights]
    if pattern != "sound":  # the decoy moves like the highlight in a mirror
        turns[decoys] *= -1
        phases[decoys] = np.pi - phases[highlights]
        centres[decoys, 0] *= -1
    else:  # the decoy's tone is the highlight's tone backwards: it starts at the pitch at which the highlight's ends
        pitches[decoys] *= 2.0 ** sweeps[highlights]
        sweeps[decoys] *= -1
    background = random.uniform(40, 110, (4, 4, 3))
    return Plan(
        kinds,
        turns,
        phases,
        centres,
        loudness,
        pitches,
        sweeps,
        background,
        random.uniform(180, 250, 3),
        random.randint(2**31),
    )


def frames_of(
    plan: Plan, size: int = 32, fps: int = 4, clip_seconds: float = 2.0, noise: float = 0.0
) -> NDArray[np.uint8]:
    """Draws the frames [frames, size, size, 3] of a video, before encoding.

    `noise` is the standard deviation of the noise relative to the dot's contrast. Strong noise would be clipped, so the
    contrast is reduced instead.
    """
    per_clip = round(fps * clip_seconds)
    number = np.arange(len(plan.kinds) * per_clip)
    clip = number // per_clip
    # Computes angles at the middle of each frame, so that a clip and its mirror image show the same angles.
    angle = plan.phases[clip] + 2 * np.pi * plan.turns[clip] * ((number % per_clip + 0.5) / per_clip)
    x, y = np.meshgrid(*[(np.arange(size) + 0.5) / size - 0.5] * 2)
    dot_x = plan.centres[clip, 0] + 0.3 * np.cos(angle)
    dot_y = plan.centres[clip, 1] + 0.3 * np.sin(angle)
    squared_distance = (x - dot_x[:, None, None]) ** 2 + (y - dot_y[:, None, None]) ** 2
    dot = np.exp(-squared_distance / (2 * 0.09**2))
    background = _interpolated(plan.background, size)
    deviation = min(_MOST_NOISE, noise * _CONTRAST)
    contrast = deviation / (noise * _CONTRAST) if noise else 1.0
    frames = background + contrast * dot[..., None] * (plan.colour - background)
    if noise:
        frames += deviation * np.random.RandomState(plan.noise_seed).standard_normal(frames.shape)
    return np.asarray(frames.round().clip(0, 255), dtype=np.uint8)


def sound_of(plan: Plan, clip_seconds: float = 2.0, sample_rate: int = _SAMPLE_RATE) -> NDArray[np.float32]:
    """Generates the sound [samples] of a video, before encoding: in each clip, a tone that rises or falls."""
    per_clip = round(clip_seconds * sample_rate)
    time = np.arange(per_clip) / per_clip
    envelope = np.minimum(1, np.minimum(time, 1 - time) * 20)  # avoids clicks between clips
    tones = []
    for pitch, sweep, loudness in zip(plan.pitches, plan.sweeps, plan.loudness, strict=True):
        frequency = pitch * 2.0 ** (sweep * time)
        tones.append(loudness * envelope * np.sin(2 * np.pi * np.cumsum(frequency) / sample_rate))
    noise = _AUDIO_NOISE * np.random.RandomState(plan.noise_seed).standard_normal(len(tones) * per_clip)
    return (np.concatenate(tones) + noise).astype(np.float32)


def make(
    folder: Path,
    num_videos: int,
    seed: int = 0,
    split: str = "train",
    *,
    num_clips: int = 30,
    clip_seconds: float = 2.0,
    size: int = 32,
    fps: int = 4,
    pattern: str = "motion",
    noise: float = 0.0,
    on_video: Callable[[], object] = lambda: None,
) -> Path:
    """Writes videos and labels.csv into a new or empty folder; returns the path of the labels.

    The labels contain decoys too, with score 0. With the pattern "sound", rising tones are highlights and falling ones
    decoys, and the direction of motion is random. With `noise` around 1 the dot is hard to see. Calls `on_video` after
    each video.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty and is not overwritten; pass a new or empty folder")
    if num_videos < 1 or size < 16 or size % 2 or fps < 2 or not 0 <= noise < 1000:
        raise ConfigError(
            "a mirror set needs at least 1 video, an even size of at least 16, at least 2 frames per second and a "
            "noise of at least 0"
        )
    plans = [plan(seed, split, number, num_clips, pattern) for number in range(num_videos)]
    folder.mkdir(parents=True, exist_ok=True)
    rows = io.StringIO()
    table = csv.writer(rows, lineterminator="\n")
    table.writerow(["video", "start", "end", "score"])
    for number, content in enumerate(plans):
        name = f"{split}_{number:04d}.mp4"
        with (folder / name).open("xb") as file:
            _encode(file, frames_of(content, size, fps, clip_seconds, noise), fps, sound_of(content, clip_seconds))
        for clip in np.flatnonzero(content.kinds):
            begin, end = clip * clip_seconds, (clip + 1) * clip_seconds
            table.writerow([name, f"{begin:g}", f"{end:g}", int(content.scores[clip])])
        on_video()
    labels = folder / LABELS
    with labels.open("x", newline="") as text:
        text.write(rows.getvalue())
    return labels


def _interpolated(colours: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Interpolates a grid of colours [4, 4, 3] bilinearly to [size, size, 3]."""
    position = np.linspace(0, len(colours) - 1, size)
    low = np.minimum(position.astype(int), len(colours) - 2)
    weight = (position - low)[:, None, None]
    rows = colours[low] * (1 - weight) + colours[low + 1] * weight  # [size, 4, 3]
    columns = rows.swapaxes(0, 1)
    return np.asarray((columns[low] * (1 - weight) + columns[low + 1] * weight).swapaxes(0, 1))


def _encode(file: BinaryIO, frames: NDArray[np.uint8], fps: int, sound: NDArray[np.float32]) -> None:
    import av

    with av.open(file, mode="w", format="mp4") as container:
        codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
        options = {"crf": "18", "preset": "veryfast", "threads": "1"} if codec == "libx264" else {"qscale": "2"}
        video = container.add_stream(codec, rate=fps, options=options)
        assert isinstance(video, av.VideoStream)
        video.height, video.width, video.pix_fmt = frames.shape[1], frames.shape[2], "yuv420p"
        context = video.codec_context
        context.colorspace = context.color_primaries = context.color_trc = _BT709
        context.color_range = _LIMITED_RANGE
        audio = container.add_stream("aac", rate=_SAMPLE_RATE, layout="mono", options={"aac_coder": "fast"})
        assert isinstance(audio, av.AudioStream)
        for pixels in frames:
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame = frame.reformat(format="yuv420p", dst_colorspace=_BT709, dst_color_range=_LIMITED_RANGE)
            container.mux(video.encode(frame))
        container.mux(video.encode(None))
        block = audio.codec_context.frame_size or 1024
        for start in range(0, len(sound), block):
            piece = av.AudioFrame.from_ndarray(sound[None, start : start + block], format="fltp", layout="mono")
            piece.sample_rate, piece.pts, piece.time_base = _SAMPLE_RATE, start, Fraction(1, _SAMPLE_RATE)
            container.mux(audio.encode(piece))
        container.mux(audio.encode(None))
