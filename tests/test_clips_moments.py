"""The chosen moments are the best ones, have allowed lengths, do not overlap, and are deterministic."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.errors import ConfigError
from unisono.recipes.clips.cutting.edges import Edge, shots, silences, snap
from unisono.recipes.clips.cutting.moments import Moment, pick


def spans(moments: list[Moment]) -> list[tuple[float, float]]:
    return [(moment.start, moment.end) for moment in moments]


def overlapping(moments: list[Moment]) -> bool:
    """Whether any two moments share a part of the video."""
    ordered = sorted(moments, key=lambda moment: moment.start)
    return any(after.start < before.end - 1e-6 for before, after in pairwise(ordered))


def test_peaks_become_moments_best_first() -> None:
    scores = np.full(40, 0.1)
    scores[10:13] = 0.7
    scores[30:34] = 0.9
    chosen = pick(scores, 2.0, number=2)
    assert spans(chosen) == [(60, 68), (20, 26)]
    assert [moment.score for moment in chosen] == pytest.approx([0.9, 0.7])


def test_a_short_peak_is_extended_to_the_shortest_length_on_its_better_side() -> None:
    scores = np.full(20, 0.1)
    scores[8:11] = [0.2, 1.0, 0.4]
    assert spans(pick(scores, 2.0, number=1, shortest=4)) == [(18, 22)]
    assert spans(pick(scores, 2.0, number=1, shortest=5)) == [(16, 22)]  # whole clips: 6 s, the next length above 5 s


def test_a_long_plateau_is_cut_at_the_longest_length() -> None:
    scores = np.full(100, 0.1)
    scores[20:60] = 0.9
    chosen = pick(scores, 2.0, number=3, longest=30, gap=0)
    assert spans(chosen)[:2] == [(40, 70), (70, 100)]
    assert all(moment.seconds <= 30 for moment in chosen)


def test_moments_keep_their_distance() -> None:
    scores = np.linspace(0.5, 0.6, 60)
    chosen = pick(scores, 2.0, number=10, shortest=4, longest=8, gap=6)
    ordered = sorted(chosen, key=lambda moment: moment.start)
    assert len(chosen) > 5
    assert min(b.start - a.end for a, b in pairwise(ordered)) >= 6


def test_equal_scores_give_the_shortest_moments_from_the_beginning() -> None:
    chosen = pick(np.full(50, 1 / 3), 2.0, number=3, shortest=6, gap=2)
    assert spans(chosen) == [(0, 6), (8, 14), (16, 22)]


def test_the_best_moment_is_always_included() -> None:
    scores = np.full(60, 0.05)
    scores[10:14] = [0.6, 0.99, 0.98, 0.6]  # the best core, which grows into a moment with a lower mean
    scores[30:32] = 0.97
    best, second = pick(scores, 2.0, number=2)[:2]
    assert (best.start, best.score) == (60, pytest.approx(0.97)) and second.start == 20
    assert pick(scores, 2.0, number=1) == [best]


@pytest.mark.parametrize("seed", range(20))
def test_fewer_moments_are_a_prefix_of_more(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = np.convolve(rng.random(150) ** 3, np.hanning(7) / 3, mode="same").clip(0, 1)
    settings = {"shortest": 4.0, "longest": 16.0, "gap": float(seed % 3)}
    everything = pick(scores, 2.0, number=1000, **settings)  # type: ignore[arg-type]
    assert (
        [pick(scores, 2.0, number=number, **settings) for number in range(1, 9)]
        == [  # type: ignore[arg-type]
            everything[:number] for number in range(1, 9)
        ]
    )


def test_rounding_does_not_decide_between_clips() -> None:
    noisy = 0.5 + 1e-9 * np.random.default_rng(0).random(50)
    assert spans(pick(noisy, 2.0, number=3)) == spans(pick(np.full(50, 0.5), 2.0, number=3))


@pytest.mark.parametrize(("num_clips", "duration"), [(1, 0.5), (1, 2.0), (2, 3.1)])
def test_a_video_shorter_than_the_shortest_moment_is_one(num_clips: int, duration: float) -> None:
    assert spans(pick(np.ones(num_clips), 2.0, shortest=4, duration=duration)) == [(0, duration)]


def test_a_moment_at_the_end_ends_with_the_video() -> None:
    scores = [0.1] * 10 + [0.9, 0.9]
    assert spans(pick(scores, 2.0, number=1, shortest=3, duration=23.2)) == [(20, 23.2)]


def test_clips_without_a_score_are_in_no_moment() -> None:
    scores = np.full(20, 0.5)
    scores[4:7] = math.nan
    scores[3] = scores[7] = 0.9
    chosen = pick(scores, 2.0, number=9, shortest=4, gap=0)
    assert chosen and all(moment.end <= 8 or moment.start >= 14 for moment in chosen)
    assert pick([math.nan] * 5, 2.0) == [] and pick([], 2.0) == []


@pytest.mark.parametrize(
    "wrong",
    [{"number": 0}, {"shortest": 0}, {"shortest": 9, "longest": 8}, {"gap": -1}, {"shortest": 4.5, "longest": 5}],
)
def test_impossible_lengths_are_rejected(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"expected|use --longest"):
        pick(np.ones(9), 2.0, **wrong)  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None)
@given(
    scores=st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.5, math.nan, 1.0])), min_size=1, max_size=80),
    number=st.integers(1, 9),
    shortest=st.sampled_from([1.0, 4.0, 7.0]),
    longest=st.sampled_from([8.0, 30.0]),
    gap=st.sampled_from([0.0, 2.0, 5.0]),
    cut=st.floats(0, 1.9),
)
def test_moments_are_valid_for_any_scores(
    scores: list[float], number: int, shortest: float, longest: float, gap: float, cut: float
) -> None:
    duration = 2.0 * len(scores) - cut
    settings = {"shortest": shortest, "longest": longest, "gap": gap, "duration": duration}
    chosen = pick(scores, 2.0, number=number, **settings)  # type: ignore[arg-type]
    assert chosen == pick(scores, 2.0, number=number, **settings)  # type: ignore[arg-type]
    assert len(chosen) <= number and not overlapping(chosen)
    for fewer in range(1, number):
        assert pick(scores, 2.0, number=fewer, **settings) == chosen[:fewer]  # type: ignore[arg-type]
    for moment in chosen:
        assert 0 <= moment.start < moment.end <= duration + 1e-9
        assert min(shortest, duration) - 1e-5 <= moment.seconds <= longest + 1e-5
        assert math.isfinite(moment.score)
    falling = [moment.score for moment in chosen]
    assert all(later <= sooner + 2e-6 for sooner, later in pairwise(falling))


def test_a_scene_cut_is_found_at_its_frame_and_motion_is_not_a_cut() -> None:
    rng = np.random.default_rng(0)
    one, two = (rng.integers(0, 255, (32, 48, 3), dtype=np.uint8) for _ in range(2))
    two //= 3
    frames = [np.roll(one, 2 * step, axis=1) for step in range(20)] + [np.roll(two, step, axis=1) for step in range(20)]
    times = np.arange(40) / 25
    result = shots(np.stack(frames), times)
    assert [(edge.kind, edge.time) for edge in result] == [("shot", 20 / 25)]


def test_a_flash_is_not_a_cut() -> None:
    still = np.random.default_rng(1).integers(0, 200, (32, 32, 3), dtype=np.uint8)
    frames = np.stack([still] * 30)
    frames[15] = 255
    assert shots(frames, np.arange(30) / 25) == []


def test_a_pause_in_speech_is_found_in_its_middle() -> None:
    times = np.arange(200) * 0.02
    loudness = np.where((times > 1.0) & (times < 1.4), 0.002, 0.3)
    (pause,) = silences(loudness, times)
    assert pause.kind == "silence" and pause.time == pytest.approx(1.2, abs=0.03)
    assert silences(np.full(200, 0.3), times) == [] and silences(np.zeros(200), times) == []


def test_moments_snap_to_the_nearest_edge_within_reach_and_prefer_cuts() -> None:
    edges = [Edge(9.4, "shot", 1.0), Edge(9.9, "silence", 1.0), Edge(21.5, "silence", 1.0), Edge(40.0, "shot", 1.0)]
    (moment,) = snap([Moment(10, 20, 0.7)], edges, 1.0)
    assert moment == Moment(9.4, 20, 0.7)
    (moment,) = snap([Moment(10, 20, 0.7)], edges, 2.0)
    assert moment == Moment(9.4, 21.5, 0.7)
    assert snap([Moment(10, 20, 0.7)], edges, 0) == [Moment(10, 20, 0.7)]


def test_snapping_keeps_moments_apart_and_of_allowed_length() -> None:
    edges = [Edge(9.0, "shot", 1.0), Edge(11.0, "shot", 1.0), Edge(12.0, "shot", 1.0)]
    chosen = snap([Moment(4, 10, 0.9), Moment(10.5, 14, 0.5)], edges, 2.0, shortest=3.5)
    assert not overlapping(chosen)
    assert all(moment.seconds >= 3.5 for moment in chosen)
    # The better moment moves freely, and the other is shortened.
    assert spans(snap([Moment(4, 10, 0.9), Moment(10.5, 14, 0.5)], [Edge(11.5, "shot", 1.0)], 2.0)) == [
        (4, 11.5),
        (11.5, 14),
    ]
    chosen = snap([Moment(2, 10, 0.9)], edges, 2.0, longest=8.5)
    assert spans(chosen) == [(2, 9)]


def test_a_short_moment_moves_to_a_cut_as_a_whole() -> None:
    cut = [Edge(11.96, "shot", 1.0)]
    assert spans(snap([Moment(10, 14, 0.9)], cut, 2.0, shortest=4)) == [(11.96, 15.96)]
    assert spans(snap([Moment(10, 14, 0.9)], cut, 2.0, shortest=4, duration=15)) == [(10, 14)]  # no room
    assert spans(snap([Moment(10, 13.9, 0.9)], cut, 2.0, shortest=3.9, duration=15)) == [(8.06, 11.96)]
    (moment,) = snap([Moment(10, 14, 0.9)], [*cut, Edge(13.5, "shot", 1.0)], 2.0, shortest=4)
    assert moment.start == 11.96 and moment.seconds >= 4  # the start is already at a cut and stays there


@pytest.mark.parametrize("seed", range(20))
def test_fewer_snapped_moments_are_a_prefix_of_more(seed: int) -> None:
    rng = np.random.default_rng(seed)
    moments = pick(rng.random(60), 2.0, number=12, shortest=4, longest=12, gap=0)
    kinds = rng.choice(["shot", "silence"], 50)
    edges = [Edge(float(time), kind, 1.0) for time, kind in zip(rng.random(50) * 120, kinds, strict=True)]
    chosen = snap(moments, edges, 2.0, shortest=4, longest=12, duration=120)
    assert not overlapping(chosen) and all(3.999 <= moment.seconds <= 12.001 for moment in chosen)
    for number in range(len(moments)):
        fewer = snap(moments[:number], edges, 2.0, shortest=4, longest=12, duration=120)
        assert fewer == chosen[: len(fewer)]
