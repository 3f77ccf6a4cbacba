"""Computes the features of a clip that need no model: named statistics, and a log-mel spectrogram.

The baselines (`metrics/baselines.py`) score clips by single statistics, for comparison with a trained model. This
module uses numpy instead of torch: with such small arrays, and if processes share cores, torch's threads spent ten
times longer waiting for each other than computing.
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
"""The columns of a clip's statistics; all lie between 0 and 1, up to rounding."""

_LUMA = (0.299, 0.587, 0.114)
_QUIETEST = -80.0  # loudness in dB that counts as silence
_STEP_S = 0.01  # hop length of the spectrogram in seconds
_LOWEST_HZ = 40.0

Floats = NDArray[np.float64]


def stats(
    frames: NDArray[np.uint8], sound: NDArray[np.float32], powers: Floats, sample_rate: int
) -> NDArray[np.float16]:
    """Computes the statistics [len(STATS)] of a clip from its frames [F, H, W, 3], samples and `spectra`."""
    pixels = frames.astype(np.float64) / 255
    if pixels.shape[1] * pixels.shape[2] > 64 * 64:  # makes the statistics nearly independent of the frame size
        pixels = _pooled(_pooled(pixels, 1, 32), 2, 32)
    luma = pixels @ np.array(_LUMA)
    differences = np.abs(np.diff(luma, axis=0)).mean(axis=(1, 2)) if len(luma) > 1 else np.zeros(1)
    power = np.square(sound.astype(np.float64))
    steps = max(1, round(len(sound) / sample_rate / 0.1))
    loudness = _decibel(np.array([part.mean() for part in np.array_split(power, steps)]))
    signs = np.signbit(sound)
    values = [
        *pixels.mean(axis=(0, 1, 2)),
        *pixels.std(axis=(0, 1, 2)),
        luma.mean(),
        luma.std(),
        differences.mean(),
        differences.std(),
        differences.max(),
        _decibel(power.mean()),
        loudness.std(),
        loudness.max(),
        _spectral_centroid(powers),
        np.mean(signs[1:] != signs[:-1]) if len(sound) > 1 else 0.0,
    ]
    return np.array(values, dtype=np.float16)


def _decibel(power: Floats | np.float64) -> Floats:
    """Converts power to loudness from 0 (silence) to 1 (full scale)."""
    decibel = 10 * np.log10(np.maximum(power, 1e-12))
    return np.asarray((decibel.clip(_QUIETEST, 0) - _QUIETEST) / -_QUIETEST)


def _spectral_centroid(powers: Floats) -> float:
    """Returns the power-weighted mean frequency, as a fraction of the highest frequency."""
    spectrum = powers.sum(axis=0)
    total = spectrum.sum()
    return float((spectrum * np.linspace(0, 1, len(spectrum))).sum() / total) if total > 1e-9 else 0.0


def log_mel(powers: Floats, sample_rate: int, steps: int, bands: int) -> NDArray[np.float16]:
    """Computes a clip's log-mel spectrogram [steps, bands] from its `spectra`: -1 is silence, about 0 loud sound."""
    # Averages over time first, because the result is the same and the matrix product is smaller.
    mel = _pooled(powers, 0, steps) @ _mel_filters(sample_rate, bands)
    return np.asarray(np.log10(np.maximum(mel, 1e-8)) / 8, dtype=np.float16)


def _pooled(values: Floats, axis: int, parts: int) -> Floats:
    """Pools an axis to `parts` averages; parts overlap by one item if `parts` does not divide the axis's length."""
    size = values.shape[axis]
    starts = np.arange(parts) * size // parts
    stops = -(-(np.arange(parts) + 1) * size // parts)
    summed = np.concatenate([np.zeros_like(values.take([0], axis)), np.cumsum(values, axis)], axis)
    shape = [-1 if dimension == axis else 1 for dimension in range(values.ndim)]
    return np.asarray((summed.take(stops, axis) - summed.take(starts, axis)) / (stops - starts).reshape(shape))


def _window_length(sample_rate: int) -> int:
    return int(2 ** round(np.log2(0.03 * sample_rate)))  # about 30 ms


def spectra(sound: NDArray[np.float32], sample_rate: int) -> Floats:
    """Computes the power spectrum over time, [times, frequencies] (Hann window); 1 is a full-scale tone."""
    length, step = _window_length(sample_rate), max(1, round(_STEP_S * sample_rate))
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / length)
    padded = np.pad(sound.astype(np.float64), length // 2)
    spectrum = np.fft.rfft(sliding_window_view(padded, length)[::step] * window)
    return np.asarray((spectrum.real**2 + spectrum.imag**2) * (2 / window.sum()) ** 2)


@functools.lru_cache(maxsize=8)
def _mel_filters(sample_rate: int, bands: int) -> Floats:
    """Returns triangular filters [frequencies, bands], equally spaced on the mel scale."""
    size = _window_length(sample_rate) // 2 + 1
    frequencies = np.linspace(0, sample_rate / 2, size)
    edges = 700 * (10 ** (np.linspace(_mel(_LOWEST_HZ), _mel(sample_rate / 2), bands + 2) / 2595) - 1)
    rising = (frequencies[:, None] - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - frequencies[:, None]) / (edges[2:] - edges[1:-1])
    filters = np.minimum(rising, falling).clip(0)
    for band in np.flatnonzero(filters.sum(0) == 0):  # filters that are narrower than the frequency spacing
        filters[np.abs(frequencies - edges[band + 1]).argmin(), band] = 1
    return np.asarray(filters, np.float64)


def _mel(hertz: float) -> float:
    return float(2595 * np.log10(1 + hertz / 700))
