"""The mirror set: videos in which highlights can be told from decoys by their pattern and by nothing else.

A set in which highlights just move more is solved by the difference of neighbouring frames, and proves nothing. Here
every highlight of a video has a twin, a decoy that is its mirror image: the same dot on the same circle at the same
speed, with the same sound, but going round anticlockwise where the highlight goes clockwise. Brightness, colour,
motion and loudness of the two are the same, and no single picture tells which it is. Between them lie calm clips. The
files are real MP4 with sound; all that is in them is a function of (seed, split, number).
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
"""What tells highlights from their twins; "none" is a control, in which there is nothing to learn but what is calm."""

_SHARE = 0.19  # of the clips are highlights, and as many decoys
_SAMPLE_RATE = 8_000
_HISS = 0.01  # as loud as in any recording; without it, the encoder takes long over the silence beside a tone
_GRAIN = 30.0  # of 255: the spread of strong noise in the pictures
_STANDS_OUT = 140.0  # by which the dot is brighter than what is behind it, on average
_BT709, _LIMITED = 1, 1  # in FFmpeg's tables


@dataclass(frozen=True)
class Plan:
    """What is shown in one video: for each clip its kind, and the numbers that its pictures and sound are made of."""

    kinds: NDArray[np.int64]  # [T] CALM, HIGHLIGHT or DECOY
    turns: NDArray[np.float64]  # [T] per clip; positive is clockwise as one sees it
    phases: NDArray[np.float64]  # [T] where the dot begins, in radians
    centres: NDArray[np.float64]  # [T, 2] x and y of the circle's middle, from the middle of the picture, in widths
    loudness: NDArray[np.float64]  # [T]
    pitches: NDArray[np.float64]  # [T] in Hz
    sweeps: NDArray[np.float64]  # [T] octaves by which the pitch rises (or falls) within a clip
    background: NDArray[np.float64]  # [4, 4, 3] colours, between which the picture changes smoothly
    colour: NDArray[np.float64]  # [3] of the dot
    hiss: int  # the seed of the noise in the sound

    @property
    def scores(self) -> NDArray[np.float32]:
        """[T] 1 for highlights, 0 for the rest."""
        return np.asarray(self.kinds == HIGHLIGHT, dtype=np.float32)


def plan(seed: int, split: str, number: int, num_clips: int = 30, pattern: str = "motion") -> Plan:
    """What is shown in a video of the set."""
    if pattern not in PATTERNS:
        raise ConfigError(f"pattern {pattern!r}: expected one of {', '.join(PATTERNS)}")
    if num_clips < 4:
        raise ConfigError(f"num_clips {num_clips}: a video needs at least 4, for a highlight, its twin and calm clips")
    told = f"{seed}\0{split}\0{number}".encode()
    # RandomState's numbers are promised never to change, whatever the version of numpy.
    random = np.random.RandomState(np.frombuffer(hashlib.sha256(told).digest(), np.uint32))
    pairs = max(1, round(_SHARE * num_clips))
    places = random.permutation(num_clips)
    highlights, decoys = places[:pairs], places[pairs : 2 * pairs]
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
    # What is not the pattern goes either way, and says nothing.
    if pattern != "motion":
        turns[highlights] *= random.choice([-1.0, 1.0], pairs)
    if pattern != "sound":
        sweeps[highlights] *= random.choice([-1.0, 1.0], pairs)

    for each in (turns, phases, centres, loudness, pitches, sweeps):
        each[decoys] = each[highlights]
    if pattern != "sound":  # left becomes right
        turns[decoys] *= -1
        phases[decoys] = np.pi - phases[highlights]
        centres[decoys, 0] *= -1
    else:  # the same sound played backwards: it begins where the other one ends
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
    """[frames, size, size, 3] the pictures of a video, before they are encoded.

    `noise` is how strong the grain of the pictures is beside the dot: where it is much, the dot is faint instead.
    """
    per_clip = round(fps * clip_seconds)
    number = np.arange(len(plan.kinds) * per_clip)
    clip = number // per_clip
    # The middle of each frame's time: forwards and backwards, a clip then shows the same angles.
    angle = plan.phases[clip] + 2 * np.pi * plan.turns[clip] * ((number % per_clip + 0.5) / per_clip)
    x, y = np.meshgrid(*[(np.arange(size) + 0.5) / size - 0.5] * 2)
    across, down = (plan.centres[clip, side] + 0.3 * turn(angle) for side, turn in enumerate((np.cos, np.sin)))
    distance = (x - across[:, None, None]) ** 2 + (y - down[:, None, None]) ** 2
    bright = np.exp(-distance / (2 * 0.09**2))
    ground = _smooth(plan.background, size)
    grain = min(_GRAIN, noise * _STANDS_OUT)
    faint = grain / (noise * _STANDS_OUT) if noise else 1.0
    pictures = ground + faint * bright[..., None] * (plan.colour - ground)
    if noise:
        pictures += grain * np.random.RandomState(plan.hiss).standard_normal(pictures.shape)
    return np.asarray(pictures.round().clip(0, 255), dtype=np.uint8)


def sound_of(plan: Plan, clip_seconds: float = 2.0, sample_rate: int = _SAMPLE_RATE) -> NDArray[np.float32]:
    """[samples] the sound of a video, before it is encoded: a tone in each clip that rises or falls."""
    per_clip = round(clip_seconds * sample_rate)
    passed = np.arange(per_clip) / per_clip
    swell = np.minimum(1, np.minimum(passed, 1 - passed) * 20)  # no clicks where clips meet
    parts = []
    for pitch, sweep, loudness in zip(plan.pitches, plan.sweeps, plan.loudness, strict=True):
        frequency = pitch * 2.0 ** (sweep * passed)
        parts.append(loudness * swell * np.sin(2 * np.pi * np.cumsum(frequency) / sample_rate))
    hiss = _HISS * np.random.RandomState(plan.hiss).standard_normal(len(parts) * per_clip)
    return (np.concatenate(parts) + hiss).astype(np.float32)


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
    made: Callable[[], object] = lambda: None,
) -> Path:
    """Writes a mirror set into a new or empty folder: videos and their labels.csv; returns the labels' path.

    Decoys are in the labels too, with score 0. With the pattern "sound", tones that rise are highlights and tones that
    fall are decoys, and the motion says nothing. With `noise` (about 1) the pictures are hard to see anything in.
    `made` is called after each video.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty and is not overwritten; pass a new or empty folder")
    if num_videos < 1 or size < 16 or size % 2 or fps < 2 or not 0 <= noise < 1000:
        raise ConfigError(
            "a mirror set needs a video, an even size from 16 on, 2 frames per second, and noise from 0 on"
        )
    plans = [plan(seed, split, number, num_clips, pattern) for number in range(num_videos)]
    folder.mkdir(parents=True, exist_ok=True)
    rows = io.StringIO()
    table = csv.writer(rows, lineterminator="\n")
    table.writerow(["video", "start", "end", "score"])
    for number, shown in enumerate(plans):
        name = f"{split}_{number:04d}.mp4"
        with (folder / name).open("xb") as file:
            _encode(file, frames_of(shown, size, fps, clip_seconds, noise), fps, sound_of(shown, clip_seconds))
        for clip in np.flatnonzero(shown.kinds):
            begin, end = clip * clip_seconds, (clip + 1) * clip_seconds
            table.writerow([name, f"{begin:g}", f"{end:g}", int(shown.scores[clip])])
        made()
    labels = folder / LABELS
    with labels.open("x", newline="") as text:
        text.write(rows.getvalue())
    return labels


def _smooth(colours: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """[size, size, 3] a picture that goes smoothly from colour to colour."""
    place = np.linspace(0, len(colours) - 1, size)
    low = np.minimum(place.astype(int), len(colours) - 2)
    share = (place - low)[:, None, None]
    rows = colours[low] * (1 - share) + colours[low + 1] * share  # [size, 4, 3]
    columns = rows.swapaxes(0, 1)
    return np.asarray((columns[low] * (1 - share) + columns[low + 1] * share).swapaxes(0, 1))


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
        context.color_range = _LIMITED
        audio = container.add_stream("aac", rate=_SAMPLE_RATE, layout="mono", options={"aac_coder": "fast"})
        assert isinstance(audio, av.AudioStream)
        for picture in frames:
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame = frame.reformat(format="yuv420p", dst_colorspace=_BT709, dst_color_range=_LIMITED)
            container.mux(video.encode(frame))
        container.mux(video.encode(None))
        block = audio.codec_context.frame_size or 1024
        for start in range(0, len(sound), block):
            piece = av.AudioFrame.from_ndarray(sound[None, start : start + block], format="fltp", layout="mono")
            piece.sample_rate, piece.pts, piece.time_base = _SAMPLE_RATE, start, Fraction(1, _SAMPLE_RATE)
            container.mux(audio.encode(piece))
        container.mux(audio.encode(None))
