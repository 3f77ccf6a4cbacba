"""Generates videos of a talk with planted events: laughter, applause, a raised voice, motion, quick cuts, a new slide.

A highlight is a moment with two events at once. Each event also happens by itself, as a decoy, so no single measurement
finds the highlights. The sound is synthesised: syllables of a voice with pauses, bursts of laughter, noise bursts of
clapping hands. The content is a function of (seed, number).
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

RATE = 16_000
FPS = 10
SIZE = (320, 180)
CLIP_SECONDS = 2.0
EVENTS = ("laughter", "applause", "raised voice", "motion", "quick cuts", "new slide")
OF_SOUND = EVENTS[:3]


@dataclass(frozen=True)
class Talk:
    """The events of each clip, and its score: 1 for a highlight."""

    events: list[tuple[str, ...]]

    @property
    def scores(self) -> NDArray[np.float32]:
        return np.array([float(len(events) > 1) for events in self.events], np.float32)


def plan(seed: int, number: int, num_clips: int = 60) -> Talk:
    """Events of two clips each, at least four clips apart: half of them highlights, half single events."""
    random = np.random.default_rng([seed, number])
    events: list[tuple[str, ...]] = [()] * num_clips
    starts = np.arange(4, num_clips - 3, 6)
    for place, start in enumerate(random.permutation(starts)):
        sound, sight = random.choice(OF_SOUND), random.choice(EVENTS[3:])
        both = place < len(starts) // 2
        names = (str(sound), str(sight)) if both else (str(random.choice([sound, sight])),)
        events[start] = events[start + 1] = names
    return Talk(events)


def syllables(random: np.random.Generator, seconds: float, pitch: float = 120.0, *, rate: float = 4.5) -> Any:
    """A voice: voiced syllables of varying length and pitch with pauses between phrases."""
    sound = np.zeros(round(seconds * RATE))
    at = 0.0
    while at < seconds:
        length = random.uniform(0.6, 1.4) / rate
        if random.random() < 0.12:  # a pause
            at += random.uniform(0.2, 0.5)
            continue
        first, number = round(at * RATE), round(0.8 * length * RATE)
        part = sound[first : first + number]
        part += _voiced(random, number, pitch * random.uniform(0.85, 1.2))[: len(part)]
        at += length
    return sound


def _voiced(random: np.random.Generator, number: int, pitch: float) -> Any:
    time = np.arange(number) / RATE
    formants = random.uniform([400, 1000, 2200], [800, 2000, 3000])
    sound = np.zeros(number)
    for harmonic in np.arange(1, int(4000 / pitch)):
        gain = np.exp(-(((harmonic * pitch - formants) / 250) ** 2)).sum() + 0.05
        sound += gain * np.sin(2 * np.pi * harmonic * pitch * time)
    return 0.3 * np.sin(np.pi * np.arange(number) / max(1, number)) ** 0.5 * sound / max(1.0, np.abs(sound).max())


def laughter(random: np.random.Generator, seconds: float) -> Any:
    """ "Ha" about five times a second."""
    sound, period = np.zeros(round(seconds * RATE)), random.uniform(0.18, 0.22)
    for number in range(int(seconds / period)):
        first, length = round(number * period * RATE), round(0.55 * period * RATE)
        part = sound[first : first + length]
        part += _voiced(random, length, random.uniform(230, 260))[: len(part)]
    return sound + 0.01 * random.standard_normal(len(sound))


def applause(random: np.random.Generator, seconds: float) -> Any:
    """Many claps per second: short bursts of noise."""
    sound = 0.02 * random.standard_normal(round(seconds * RATE))
    for first in random.integers(0, len(sound), round(200 * seconds)):
        part = sound[first : first + 160]
        part += 0.25 * random.standard_normal(len(part)) * np.exp(-np.arange(len(part)) / 40)
    return sound


def sound_of(talk: Talk, seed: int) -> NDArray[np.float32]:
    random = np.random.default_rng([seed, 1])
    clips = []
    for events in talk.events:
        if "laughter" in events:
            clip = 0.6 * laughter(random, CLIP_SECONDS)
        elif "applause" in events:
            clip = 0.6 * applause(random, CLIP_SECONDS)
        else:
            clip = syllables(random, CLIP_SECONDS, 160 if "raised voice" in events else 120)
            clip *= 1.5 if "raised voice" in events else 0.5
        clips.append(clip)
    joined = np.concatenate(clips)
    return np.asarray((joined + 0.002 * random.standard_normal(len(joined))).clip(-1, 1), np.float32)


def frames_of(talk: Talk, seed: int) -> Any:
    """Yields the frames: a speaker who moves a little before a slide."""
    random = np.random.default_rng([seed, 2])
    width, height = SIZE
    slides = [random.integers(30, 220, (6, 8, 3)) for _ in range(400)]
    noise = random.normal(0, 2, (16, height, width, 1))
    slide, x = 0, 0.2
    per_clip = round(FPS * CLIP_SECONDS)
    for clip, events in enumerate(talk.events):
        is_new = clip == 0 or events != talk.events[clip - 1]
        for number in range(per_clip):
            if "new slide" in events and is_new and number == 0:
                slide += 1
            if "quick cuts" in events and number % 7 == 0:
                slide += 1
            frame = np.repeat(np.repeat(slides[slide % len(slides)], height // 6, 0), width // 8, 1)
            shift = (
                0.5 * np.sin(2 * np.pi * number / per_clip * 2) if "motion" in events else 0.02 * random.uniform(-1, 1)
            )
            left = int(np.clip((x + 0.3 + shift) * width - 20, 0, width - 40))
            frame[60:170, left : left + 40] = (200, 160, 130)
            yield np.asarray((frame + noise[number % len(noise)]).clip(0, 255), np.uint8)


def write(path: Path, talk: Talk, seed: int) -> None:
    """Encodes a talk as MP4 with H.264 and AAC."""
    import av

    with av.open(str(path), "w") as container:
        video = container.add_stream("libx264", rate=FPS, options={"preset": "ultrafast", "crf": "20"})
        video.width, video.height, video.pix_fmt = *SIZE, "yuv420p"
        audio = container.add_stream("aac", rate=RATE, layout="mono")
        for pixels in frames_of(talk, seed):
            container.mux(video.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(video.encode(None))
        sound = sound_of(talk, seed)
        for start in range(0, len(sound), 1024):
            frame = av.AudioFrame.from_ndarray(sound[None, start : start + 1024], format="fltp", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = RATE, start, Fraction(1, RATE)
            container.mux(audio.encode(frame))
        container.mux(audio.encode(None))


def make(folder: Path, number: int, seed: int = 0, num_clips: int = 60) -> list[Talk]:
    """Writes talks and their labels.csv into a new folder."""
    folder.mkdir(parents=True)
    talks = [plan(seed, each, num_clips) for each in range(number)]
    with (folder / "labels.csv").open("x", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["video", "start", "end", "score"])
        for each, talk in enumerate(talks):
            write(folder / f"talk_{each:03}.mp4", talk, seed + each)
            for clip in np.flatnonzero(talk.scores):
                rows.writerow([f"talk_{each:03}.mp4", clip * CLIP_SECONDS, (clip + 1) * CLIP_SECONDS, 1])
    return talks
