"""Measures speech, laughter, applause and loudness in the sound of a clip, without a model.

- Speech alternates between voiced sounds and pauses two to eight times a second. Music is voiced but steadier; noise is
  not voiced.
- Laughter repeats a voiced sound about five times a second, more regularly than speech.
- Applause is loud, has a flat spectrum, and no rhythm.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono.recipes.clips.data.statistics import spectra

SAMPLE_RATE = 16_000
_HOPS_PER_S = 100  # number of spectra per second
_VOICE_HZ = (150.0, 4000.0)
_PITCH_HZ = (75.0, 500.0)
_VOICED_FROM = 0.45  # minimum height of the autocorrelation peak of a voiced sound; a pure tone has 1
_ACTIVE_DB = 25.0  # frames this many dB below the loudest frame of the clip count as pauses
_SYLLABLES_HZ = (2.0, 8.0)
_LAUGHS_HZ = (3.5, 7.0)
_APPLAUSE_HZ = (500.0, 7000.0)
_QUIETEST_DB, _APPLAUSE_DB = -70.0, -45.0

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class SoundOfClip:
    """The measurements of a clip's sound."""

    speech: float
    """Amount of speech, from 0 to 1."""
    laughter: float
    """Laughter or applause, from 0 to 1."""
    decibel: float
    """Loudness relative to full scale, at least -70."""


def measure(sound: NDArray[np.float32]) -> SoundOfClip:
    """Measures the samples of a clip, recorded at `SAMPLE_RATE`."""
    decibel = _decibel(np.square(sound.astype(np.float64)).mean()) if len(sound) else _QUIETEST_DB
    if decibel <= _QUIETEST_DB:
        return SoundOfClip(0.0, 0.0, _QUIETEST_DB)
    powers = spectra(sound, SAMPLE_RATE)  # [times, frequencies]
    frequencies = np.linspace(0, SAMPLE_RATE / 2, powers.shape[1])
    band = powers[:, (frequencies >= _VOICE_HZ[0]) & (frequencies <= _VOICE_HZ[1])].sum(axis=1)
    active = band > band.max() * 10 ** (-_ACTIVE_DB / 10)
    voiced = float((_harmonicity(powers)[active] > _VOICED_FROM).mean()) if active.any() else 0.0
    envelope = np.sqrt(band)
    return SoundOfClip(
        speech=voiced * _syllables(envelope),
        laughter=max(voiced * _laughs(envelope), _applause(powers, frequencies, decibel, envelope)),
        decibel=decibel,
    )


def _decibel(power: float | np.float64) -> float:
    return max(_QUIETEST_DB, float(10 * np.log10(max(float(power), 1e-12))))


def _harmonicity(powers: Floats) -> Floats:
    """Returns, for each time, the autocorrelation at the best pitch period, relative to that at lag 0."""
    autocorrelation = np.fft.irfft(powers, axis=1)
    low, high = (round(SAMPLE_RATE / hertz) for hertz in reversed(_PITCH_HZ))
    # The window of the spectrum shortens longer periods more.
    lags = np.arange(low, high)
    overlap = 1 - lags / autocorrelation.shape[1]
    peaks = (autocorrelation[:, low:high] / overlap).max(axis=1)
    return np.asarray(np.minimum(1, peaks / np.maximum(autocorrelation[:, 0], 1e-12)))


def _syllables(envelope: Floats) -> float:
    """Measures how strongly the envelope varies at two to eight times a second; 0 for a steady sound."""
    mean = envelope.mean()
    depth = min(1.0, float(envelope.std() / max(mean, 1e-9)) / 0.5)
    spectrum = np.square(np.abs(np.fft.rfft((envelope - mean) * np.hanning(len(envelope)))))
    rates = np.fft.rfftfreq(len(envelope), 1 / _HOPS_PER_S)
    varying = spectrum[(rates >= 0.75) & (rates <= 30)].sum()
    syllables = spectrum[(rates >= _SYLLABLES_HZ[0]) & (rates <= _SYLLABLES_HZ[1])].sum()
    return depth * float(syllables / max(varying, 1e-12))


def _laughs(envelope: Floats) -> float:
    """Measures how regularly the envelope repeats at the rate of laughter, from 0 to 1."""
    centred = envelope - envelope.mean()
    autocorrelation = np.correlate(centred, centred, "full")[len(centred) - 1 :]
    low, high = (round(_HOPS_PER_S / rate) for rate in reversed(_LAUGHS_HZ))
    if len(autocorrelation) <= 2 * high or autocorrelation[0] <= 1e-12:
        return 0.0
    overlap = 1 - np.arange(len(autocorrelation)) / len(autocorrelation)
    lags = np.arange(low, high + 1)
    once, twice = ((autocorrelation / overlap)[number * lags] / autocorrelation[0] for number in (1, 2))
    # Unlike a single pair of syllables, a rhythm also repeats after two periods.
    return float(np.clip(np.minimum(once, twice).max(), 0, 1) ** 2)


def _applause(powers: Floats, frequencies: Floats, decibel: float, envelope: Floats) -> float:
    inside = powers.mean(axis=0)[(frequencies >= _APPLAUSE_HZ[0]) & (frequencies <= _APPLAUSE_HZ[1])] + 1e-12
    flatness = float(np.exp(np.log(inside).mean()) / inside.mean())
    loud = min(1.0, max(0.0, (decibel - _APPLAUSE_DB) / -_APPLAUSE_DB) * 2)
    even = 1 - min(1.0, float(envelope.std() / max(envelope.mean(), 1e-9)))
    return flatness * loud * even
