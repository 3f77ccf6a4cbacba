"""The mirror set consists of real videos, is deterministic, and no statistic distinguishes highlights from decoys."""

from __future__ import annotations

import re
import time
from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from unisono.engine.recipe import Work
from unisono.errors import ConfigError
from unisono.recipes.clips.data import synthetic
from unisono.recipes.clips.data.labels import read_labels
from unisono.recipes.clips.data.splits import make_mirror
from unisono.recipes.clips.data.statistics import STATS, log_mel, spectra, stats
from unisono.recipes.clips.data.synthetic import CALM, DECOY, HIGHLIGHT, frames_of, make, plan, sound_of
from unisono.recipes.clips.settings import Config
from unisono.recipes.clips.video.clips import clips, facts


def auc(left: NDArray[np.floating], right: NDArray[np.floating]) -> float:
    """The fraction of pairs in which the left value is larger."""
    difference = np.asarray(left, float)[:, None] - np.asarray(right, float)[None]
    return float(((difference > 0) + 0.5 * (difference == 0)).mean())


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mirror") / "set"
    make(folder, 8, seed=3)
    return folder


def table(folder: Path, num_videos: int, seed: int, pattern: str = "motion") -> tuple[NDArray[np.floating], ...]:
    """The statistics of all clips, extracted from the files, and their kinds."""
    rows, kinds = [], []
    for number in range(num_videos):
        for frames, sound in clips(folder / f"train_{number:04d}.mp4", 2.0, 8, (32, 32), 16_000):
            rows.append(stats(frames, sound, spectra(sound, 16_000), 16_000))
        kinds.append(plan(seed, "train", number, pattern=pattern).kinds)
    return np.stack(rows).astype(float), np.concatenate(kinds)


def test_the_files_are_videos_with_sound_and_their_labels_fit(mirror: Path) -> None:
    assert sorted(path.name for path in mirror.iterdir()) == ["labels.csv", *(f"train_{n:04d}.mp4" for n in range(8))]
    properties = facts(mirror / "train_0000.mp4")
    assert (properties.duration, properties.fps, properties.height, properties.width, properties.has_sound) == (
        60.0,
        4.0,
        32,
        32,
        True,
    )
    with av.open(str(mirror / "train_0000.mp4")) as container:
        assert container.streams.video[0].codec_context.name in ("h264", "mpeg4")
        assert container.streams.audio[0].codec_context.name == "aac"
    for number, labelled in enumerate(read_labels(mirror, 2.0)):
        np.testing.assert_array_equal(labelled.scores_for(30), plan(3, "train", number).scores)


@pytest.fixture(scope="module")
def measured(mirror: Path) -> tuple[NDArray[np.floating], ...]:
    return table(mirror, 8, 3)


def test_no_statistic_distinguishes_highlights_from_decoys(measured: tuple[NDArray[np.floating], ...]) -> None:
    values, kinds = measured
    assert (kinds == HIGHLIGHT).sum() == (kinds == DECOY).sum() == 48
    for name in STATS:
        separation = auc(values[kinds == HIGHLIGHT, STATS.index(name)], values[kinds == DECOY, STATS.index(name)])
        room = 0.05 if name in ("luma", "frame_difference", "loudness") else 0.1  # 0.06 is chance with 48 pairs
        assert abs(separation - 0.5) < room, (name, separation)


def test_motion_distinguishes_calm_clips_and_loudness_distinguishes_nothing(
    measured: tuple[NDArray[np.floating], ...],
) -> None:
    # So a scorer by motion is right half of the time, and one by loudness as often as chance.
    values, kinds = measured
    motion, loudness = (values[:, STATS.index(name)] for name in ("frame_difference", "loudness"))
    assert auc(motion[kinds != CALM], motion[kinds == CALM]) > 0.99
    assert 0.38 < auc(loudness[kinds != CALM], loudness[kinds == CALM]) < 0.62


def test_the_direction_of_motion_distinguishes_highlights_from_decoys(mirror: Path) -> None:
    """The pattern can be detected: the rotation angle of the dot, measured in the decoded frames."""
    x, y = np.meshgrid(*[np.arange(32) - 15.5] * 2)
    for number in range(3):
        kinds = plan(3, "train", number).kinds
        video = list(clips(mirror / f"train_{number:04d}.mp4", 2.0, 8, (32, 32), 16_000))
        ground = np.median(np.concatenate([frames for frames, _ in video]).astype(float), axis=0)
        for kind, (frames, _) in zip(kinds, video, strict=True):
            bright = np.abs(frames - ground).sum(-1) ** 3
            across, down = ((bright * side).sum((1, 2)) / bright.sum((1, 2)) for side in (x, y))
            angle = np.unwrap(np.arctan2(down - down.mean(), across - across.mean()))
            if kind != CALM:
                assert (angle[-1] > angle[0]) == (kind == HIGHLIGHT)


def test_a_decoy_is_the_mirror_image_of_its_highlight() -> None:
    shown = plan(0, "train", 0)
    flat = synthetic.Plan(**{**shown.__dict__, "background": np.full((4, 4, 3), 70.0)})
    frames = frames_of(flat).reshape(30, 8, 32, 32, 3)
    decoys = {frames[clip].tobytes() for clip in np.flatnonzero(shown.kinds == DECOY)}
    for clip in np.flatnonzero(shown.kinds == HIGHLIGHT):
        assert np.ascontiguousarray(frames[clip][:, :, ::-1]).tobytes() in decoys
    for of in (shown.loudness, shown.pitches, shown.sweeps):  # and they sound alike
        assert sorted(of[shown.kinds == HIGHLIGHT]) == sorted(of[shown.kinds == DECOY])


def test_the_same_seed_gives_the_same_set_and_another_one_another(tmp_path: Path) -> None:
    assert make(tmp_path / "a", 2, seed=5).read_text() == make(tmp_path / "b", 2, seed=5).read_text()
    assert make(tmp_path / "c", 2, seed=6).read_text() != (tmp_path / "a" / "labels.csv").read_text()
    same, again = (plan(5, "test", 1) for _ in range(2))
    np.testing.assert_array_equal(frames_of(same), frames_of(again))
    np.testing.assert_array_equal(sound_of(same), sound_of(again))
    assert not np.array_equal(same.kinds, plan(5, "train", 1).kinds)
    assert not np.array_equal(same.kinds, plan(5, "test", 2).kinds)
    # Fixed values: the same on every machine and with every version of numpy.
    assert np.flatnonzero(plan(0, "train", 0).kinds == HIGHLIGHT).tolist() == [0, 13, 14, 19, 25, 29]


def test_with_the_pattern_in_the_sound_only_the_sound_distinguishes(tmp_path: Path) -> None:
    make(tmp_path / "s", 4, seed=2, pattern="sound")
    values, kinds = table(tmp_path / "s", 4, 2, "sound")
    for name in STATS:
        assert (
            0.35 < auc(values[kinds == HIGHLIGHT, STATS.index(name)], values[kinds == DECOY, STATS.index(name)]) < 0.65
        ), name
    rising = []
    for number in range(4):
        for _, sound in clips(tmp_path / "s" / f"train_{number:04d}.mp4", 2.0, 8, (32, 32), 16_000):
            pitch = log_mel(spectra(sound, 16_000), 16_000, 20, 32).argmax(1)
            rising.append(float(pitch[12:19].mean()) - float(pitch[1:8].mean()))
    assert auc(np.array(rising)[kinds == HIGHLIGHT], np.array(rising)[kinds == DECOY]) == 1.0


def test_without_a_pattern_neither_motion_nor_sound_distinguishes() -> None:
    turned, swept = [], []
    for number in range(40):
        shown = plan(0, "train", number, pattern="none")
        highlights, decoys = shown.kinds == HIGHLIGHT, shown.kinds == DECOY
        assert np.abs(shown.turns[highlights | decoys]).min() >= 0.7 > np.abs(shown.turns[shown.kinds == CALM]).max()
        assert sorted(shown.turns[highlights]) == sorted(-shown.turns[decoys])  # highlights mirror decoys
        turned += [*(shown.turns[highlights] > 0)]
        swept += [*(shown.sweeps[highlights] > 0)]
    assert 0.4 < np.mean(turned) < 0.6 and 0.4 < np.mean(swept) < 0.6


def test_noise_hides_the_dot() -> None:
    shown = plan(0, "train", 0)
    clear, light, heavy = (frames_of(shown, noise=noise).astype(float) for noise in (0.0, 0.05, 2.0))
    assert np.std(light - clear) == pytest.approx(7, rel=0.05)  # 0.05 of 140; the dot is unchanged
    ground = np.median(clear, axis=0)
    spread = np.std(heavy - ground)
    assert 25 < spread < 32
    # After averaging over frames with the same content, the contrast of the dot is about a tenth of before.
    dot = clear - ground
    left = float((dot * (heavy - ground)).sum() / (dot * dot).sum())
    assert left == pytest.approx(30 / (2 * 140), abs=0.03)
    np.testing.assert_array_equal(frames_of(shown, noise=2.0), heavy)


def test_generating_videos_shows_progress(tmp_path: Path) -> None:
    lines: list[str] = []
    make_mirror(Config(num_videos=4), tmp_path, Work(tmp_path, _say=lines.append))
    done = [line for line in lines if re.search(r": \d+( of \d+)? in ", line)]
    assert [line.partition(": ")[2].split(" in ")[0] for line in done] == ["4", "1"]
    lines.clear()
    make_mirror(Config(num_videos=4), tmp_path, Work(tmp_path, _say=lines.append))
    assert lines == []  # everything exists


def test_nothing_is_overwritten_and_mistakes_are_reported(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not overwritten"):
        make(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    for wrong in ({"num_videos": 0}, {"num_clips": 2}, {"pattern": "x"}, {"size": 7}, {"noise": -1}):
        with pytest.raises(ConfigError):
            make(tmp_path / "new", **{"num_videos": 1, **wrong})  # type: ignore[arg-type]
        assert not (tmp_path / "new").exists()


def test_a_video_takes_less_than_half_a_second(tmp_path: Path) -> None:
    began = time.process_time()
    make(tmp_path / "a", 4)
    assert (time.process_time() - began) / 4 < 0.5
