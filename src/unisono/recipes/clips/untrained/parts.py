"""The measurements of the built-in scorer, and their weights in the score."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One measurement of a clip."""

    name: str
    label: str
    """Display name, for the page and for messages."""
    weight: float
    """Weight of this part in the score, from 0 to 1."""
    least_spread: float
    """Smallest spread of the measurement over a video that is not just noise."""


PARTS = (
    Part("speech", "speech", 0.15, 0.08),
    Part("laughter", "laughter and applause", 0.20, 0.08),
    Part("loudness", "rising loudness", 0.20, 2.0),
    Part("motion", "motion", 0.15, 0.008),
    Part("scenes", "scene rhythm", 0.10, 0.5),
    Part("screen", "change on the screen", 0.10, 0.04),
    Part("faces", "faces", 0.10, 0.08),
)
"""All parts. The weights add up to 1; if a part cannot be measured, the others share its weight."""

LABELS = {part.name: part.label for part in PARTS}
