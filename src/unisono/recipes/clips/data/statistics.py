"""What can be said of a clip without a model: statistics with names, and a picture of its sound.

The statistics are what scorers without skill go by, so that a trained one can be held against them. All of it is plain
numpy: torch would start its threads for these small arrays, thousands of times per video, and where processes share
the cores those threads spend ten times the work waiting for each other.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

STATS = (
    "red",
    "green",
    "blue",
    "red_spread",
    "green_spread",
    "blue_spread",
    "luma",
    "luma_spread",
    "frame_difference",
    "frame_difference_spread",
    "frame_difference_most",
    "loudness",
    "loudness_spread",
    "loudness_most",
    "sound_height",
    "sound_crossings",
)
"""The columns of a clip's statistics; all lie between 0 and 1, but for rounding."""


_LUMA = (0.299, 0.587, 0.114)
_QUIETEST = -80.0  # dB that count as silence
_STEP_S = 0.01  # seconds from one spectrum to the next
_LOWEST_HZ = 40.0

Floats = NDArray[np.float64]


def column(name: str) -> int:
    """The number of a column of the statistics."""
    return STATS.index(name)


def stats(
    frames: NDArray[np.uint8], sound: NDArray[np.float32], powers: Floats, sample_rate: int
) -> NDArray[np.float16]:
    """[len(STATS)] the statistics of a clip: frames [F, H, W, 3] of any size, samples of sound, and its `spectra`."""
    pixels = frames.astype(np.float64) / 255
    if pixels.shape[1] * pixels.shape[2] > 64 * 64:  # the same for small and large frames, nearly
        pixels = _pooled(_pooled(pixels, 1, 32), 2, 32)
    luma = pixels @ np.array(_LUMA)
    moved = np.abs(np.diff(luma, axis=0)).mean(axis=(1, 2)) if len(luma) > 1 else np.zeros(1)
    power = np.square(sound.astype(np.float64))
    steps = max(1, round(len(sound) / sample_rate / 0.1))
    louds = _decibel(np.array([part.mean() for part in np.array_split(power, steps)]))
    signs = np.signbit(sound)
    values = [
        *pixels.mean(axis=(0, 1, 2)),
        *pixels.std(axis=(0, 1, 2)),
        luma.mean(),
        luma.std(),
        moved.mean(),
        moved.std(),
        moved.max(),
        _decibel(power.mean()),
        louds.std(),
        louds.max(),
        _height(powers),
        np.mean(signs[1:] != signs[:-1]) if len(sound) > 1 else 0.0,
    ]
    return np.array(values, dtype=np.float16)


def _decibel(power: Floats | np.float64) -> Floats:
    """0 for silence and 1 for the loudest a file can be."""
    decibel = 10 * np.log10(np.maximum(power, 1e-12))
    return np.asarray((decibel.clip(_QUIETEST, 0) - _QUIETEST) / -_QUIETEST)


def _height(powers: Floats) -> float:
    """How high the sound is: the middle of its spectrum, as a share of the highest."""
    spectrum = powers.sum(axis=0)
    total = spectrum.sum()
    return float((spectrum * np.linspace(0, 1, len(spectrum))).sum() / total) if total > 1e-9 else 0.0


def log_mel(powers: Floats, sample_rate: int, steps: int, bands: int) -> NDArray[np.float16]:
    """[steps, bands] how loud a clip is at each time and pitch, from its `spectra`.

    -1 for silence, and little above 0 for loud sound.
    """
    # Averaged over time first: both are sums, and so the product is small.
    mel = _pooled(powers, 0, steps) @ _triangles(sample_rate, bands)
    return np.asarray(np.log10(np.maximum(mel, 1e-8)) / 8, dtype=np.float16)


def _pooled(values: Floats, axis: int, parts: int) -> Floats:
    """The means of equal parts of an axis; parts that do not divide it overlap by an item."""
    size = values.shape[axis]
    starts = np.arange(parts) * size // parts
    stops = -(-(np.arange(parts) + 1) * size // parts)
    summed = np.concatenate([np.zeros_like(values.take([0], axis)), np.cumsum(values, axis)], axis)
    shape = [-1 if each == axis else 1 for each in range(values.ndim)]
    return np.asarray((summed.take(stops, axis) - summed.take(starts, axis)) / (stops - starts).reshape(shape))


def _window(sample_rate: int) -> int:
    return int(2 ** round(np.log2(0.03 * sample_rate)))  # about 30 ms


def spectra(sound: NDArray[np.float32], sample_rate: int) -> Floats:
    """[times, frequencies] the power of each frequency, where 1 is a tone as loud as can be."""
    length, step = _window(sample_rate), max(1, round(_STEP_S * sample_rate))
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / length)
    around = np.pad(sound.astype(np.float64), length // 2)
    waves = np.fft.rfft(sliding_window_view(around, length)[::step] * window)
    return np.asarray((waves.real**2 + waves.imag**2) * (2 / window.sum()) ** 2)


@functools.lru_cache(maxsize=8)
def _triangles(sample_rate: int, bands: int) -> Floats:
    """[frequencies, bands] which frequencies count for which band: equally wide to the ear, as triangles."""
    size = _window(sample_rate) // 2 + 1
    frequencies = np.linspace(0, sample_rate / 2, size)
    edges = 700 * (10 ** (np.linspace(_mel(_LOWEST_HZ), _mel(sample_rate / 2), bands + 2) / 2595) - 1)
    rising = (frequencies[:, None] - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - frequencies[:, None]) / (edges[2:] - edges[1:-1])
    triangles = np.minimum(rising, falling).clip(0)
    for band in np.flatnonzero(triangles.sum(0) == 0):  # narrower than the distance of two frequencies
        triangles[np.abs(frequencies - edges[band + 1]).argmin(), band] = 1
    return np.asarray(triangles, np.float64)


def _mel(hertz: float) -> float:
    return float(2595 * np.log10(1 + hertz / 700))
