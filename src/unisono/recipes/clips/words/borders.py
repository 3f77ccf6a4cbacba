"""Moves the ends of moments to sentence boundaries, so that no speaker is cut off."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from unisono.recipes.clips.cutting.moments import Moment
from unisono.recipes.clips.words.transcript import Piece, Sentence, Transcript

_BEFORE_S, _AFTER_S = 0.15, 0.25  # speech begins a little before and ends a little after a transcript's times
_TINY = 1e-6


def at_sentences(
    moments: Sequence[Moment],
    transcript: Transcript,
    *,
    shortest: float,
    longest: float,
    gap: float = 0.0,
    duration: float = math.inf,
) -> tuple[list[Moment], int]:
    """Moves moments (sorted, best first) to sentence boundaries; also returns how many could not be moved there.

    Each moment gets the boundaries that move its ends the least and give it an allowed length. An end at which nobody
    speaks may stay. If no sentences fit, the moment begins and ends between two words (or captions). A moment that
    would overlap a better moment is dropped.
    """
    pieces = [piece for sentence in transcript.sentences for piece in sentence.pieces]
    placed: list[Moment] = []
    num_unfitted = 0
    for moment in moments:
        middle = (moment.start + moment.end) / 2
        if any(other.start < middle < other.end for other in placed):
            continue
        low = max((other.end + gap for other in placed if other.end <= middle), default=0.0)
        high = min((other.start - gap for other in placed if other.start >= middle), default=duration)
        least = min(shortest, moment.seconds)
        fitted = None
        for units in (transcript.sentences, pieces):
            starts, ends = _candidates(moment, units, duration)
            fitted = fitted or _nearest(moment, starts, ends, low, high, least, max(longest, least))
        if fitted is None:
            if moment.start < low - _TINY or moment.end > high + _TINY:
                continue
            num_unfitted += 1
        placed.append(replace(moment, start=fitted[0], end=fitted[1]) if fitted else moment)
    return placed, num_unfitted


def _candidates(moment: Moment, units: Iterable[Sentence | Piece], duration: float) -> tuple[list[float], list[float]]:
    """Returns the times at which a clip may start and end: around each unit, and at the moment's ends if silent."""
    starts, ends, silent_start, silent_end = [], [], True, True
    ordered = sorted(units, key=lambda unit: unit.start)
    spoken_until = 0.0
    for number, unit in enumerate(ordered):
        following = ordered[number + 1].start if number + 1 < len(ordered) else duration
        if unit.start >= spoken_until - _TINY:  # no other unit is still being spoken
            starts.append(unit.start - min(_BEFORE_S, max(0.0, unit.start - spoken_until) / 2))
        spoken_until = max(spoken_until, unit.end)
        if following >= spoken_until - _TINY:
            ends.append(min(spoken_until + min(_AFTER_S, max(0.0, following - spoken_until) / 2), duration))
        silent_start &= not unit.start - _TINY < moment.start < unit.end - _TINY
        silent_end &= not unit.start + _TINY < moment.end < unit.end + _TINY
    return [*starts, *([moment.start] if silent_start else [])], [*ends, *([moment.end] if silent_end else [])]


def _nearest(
    moment: Moment, starts: list[float], ends: list[float], low: float, high: float, least: float, most: float
) -> tuple[float, float] | None:
    """Returns the pair of candidates that moves the ends the least."""
    near_starts = sorted(
        (start for start in starts if start >= low - _TINY and abs(start - moment.start) <= most),
        key=lambda start: abs(start - moment.start),
    )
    near_ends = sorted(
        (end for end in ends if end <= high + _TINY and abs(end - moment.end) <= most),
        key=lambda end: abs(end - moment.end),
    )
    best, cost = None, math.inf
    for start in near_starts:
        moved = abs(start - moment.start)
        if moved >= cost:
            break
        for end in near_ends:
            if moved + abs(end - moment.end) >= cost:
                break
            if least - _TINY <= end - start <= most + _TINY:
                best, cost = (start, end), moved + abs(end - moment.end)
    return best
