"""The built-in scorer finds planted moments without a run, explains its scores, and always gives the same ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from drawn_face import picture_with_faces
from test_clips_cutting import made
from unisono.cli.main import main
from unisono.recipes.clips.cutting.moments import Moment
from unisono.recipes.clips.metrics.baselines import scores as baseline
from unisono.recipes.clips.metrics.highlights import of_video
from unisono.recipes.clips.scoring import Scored
from unisono.recipes.clips.untrained import faces
from unisono.recipes.clips.untrained.combine import contributions, shares_of
from unisono.recipes.clips.untrained.parts import PARTS
from unisono.recipes.clips.untrained.picture import Pictures
from unisono.recipes.clips.untrained.scorer import score
from unisono.recipes.clips.untrained.sound import SAMPLE_RATE, SoundOfClip, measure

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import clips_talk as talks  # noqa: E402

NUM_CLIPS = 30


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, talks.Talk]:
    plan = talks.plan(3, 0, NUM_CLIPS)
    path = tmp_path_factory.mktemp("talk") / "talk.mp4"
    talks.write(path, plan, 3)
    return path, plan


def measured(kind: str, seed: int = 0) -> SoundOfClip:
    random = np.random.default_rng(seed)
    time = np.arange(2 * SAMPLE_RATE) / SAMPLE_RATE
    sounds = {
        "speech": lambda: 0.5 * talks.syllables(random, 2.0),
        "laughter": lambda: 0.6 * talks.laughter(random, 2.0),
        "applause": lambda: 0.6 * talks.applause(random, 2.0),
        "tone": lambda: 0.3 * np.sin(2 * np.pi * 300 * time),
        "hiss": lambda: 0.002 * random.standard_normal(len(time)),
        "silence": lambda: np.zeros(len(time)),
    }
    return measure(np.asarray(sounds[kind](), np.float32))


def test_speech_is_told_from_tones_noise_and_silence() -> None:
    speech = [measured("speech", seed).speech for seed in range(5)]
    others = [measured(kind, seed).speech for kind in ("tone", "hiss", "silence", "applause") for seed in range(5)]
    assert min(speech) > 0.25 > 0.15 > max(others)


def test_laughter_and_applause_are_told_from_speech_and_noise() -> None:
    loud = [measured(kind, seed).laughter for kind in ("laughter", "applause") for seed in range(5)]
    others = [measured(kind, seed).laughter for kind in ("tone", "hiss", "silence") for seed in range(5)]
    speech = [measured("speech", seed).laughter for seed in range(9)]
    assert min(loud) > 0.3 and max(others) < 0.1 and np.median(speech) < 0.15


def test_a_new_slide_a_cut_and_motion_are_different_measurements() -> None:
    random = np.random.default_rng(0)
    one, two = (random.integers(0, 255, (60, 107, 3)).astype(np.uint8) for _ in range(2))
    still = np.stack([one] * 8)
    moving = np.stack([np.roll(one, 4 * step, axis=1) for step in range(8)])
    pictures = Pictures()
    first, again = pictures.measure(still), pictures.measure(still)
    assert (first.motion, first.num_cuts, first.screen) == (again.motion, again.num_cuts, again.screen) == (0, 0, 0)
    slide = pictures.measure(np.stack([two] * 8))
    assert slide.screen > 0.5 and slide.motion < 0.01
    assert pictures.measure(np.stack([two] * 8)).screen == 0
    moved = pictures.measure(moving)
    assert moved.motion > 0.1 and moved.screen < 0.05


def test_faces_are_found_and_an_empty_scene_has_none() -> None:
    assert faces.available()  # OpenCV belongs to the environment of the tests
    picture = picture_with_faces((320, 180), [(90, 90, 40), (230, 90, 50)])
    found = faces.faces(picture)
    assert len(found) == 2
    centres = sorted(left + width / 2 for left, _, width, _ in found)
    assert centres == pytest.approx([90, 230], abs=12)
    assert faces.presence(picture) > 0.5
    assert faces.presence(picture_with_faces((320, 180), [])) == 0


def test_the_score_is_the_sum_of_its_parts_and_lies_between_0_and_1() -> None:
    random = np.random.default_rng(0)
    measurements = {part.name: random.exponential(size=50) * 100 * part.least_spread for part in PARTS}
    parts = contributions(measurements)
    total = np.sum(list(parts.values()), axis=0)
    assert total.min() >= 0 and total.max() <= 1
    assert sum(part.weight for part in PARTS) == pytest.approx(1)
    without_sound = contributions({name: measurements[name] for name in ("motion", "scenes", "screen")})
    assert max(map(float, without_sound["motion"])) > max(map(float, parts["motion"]))  # the rest shares the weight
    scored = Scored(total, 2.0, 100.0, has_sound=True, parts=parts)
    shares = shares_of(Moment(11.0, 15.0, 0.5), scored)
    assert sum(shares.values()) == pytest.approx(1) and list(shares.values()) == sorted(shares.values(), reverse=True)
    expected = float(parts["speech"][5] + 2 * parts["speech"][6] + parts["speech"][7])
    assert shares["speech"] == pytest.approx(expected / float(total[5] + 2 * total[6] + total[7]))


def test_measurements_that_hardly_vary_do_not_stand_out() -> None:
    random = np.random.default_rng(0)
    parts = contributions({part.name: part.least_spread / 20 * random.random(50) for part in PARTS})
    assert np.sum(list(parts.values()), axis=0).max() < 0.03


def test_moments_of_two_events_score_higher_than_single_events(talk: tuple[Path, talks.Talk]) -> None:
    path, plan = talk
    scored = score(path)
    assert len(scored.scores) == NUM_CLIPS and scored.has_sound
    found = of_video(plan.scores, scored.scores)
    random = of_video(plan.scores, baseline("random", scored.scores[:, None], (), video="talk"))
    assert found["mAP"] > 0.75 and found["mAP"] > random["mAP"] + 0.3, (found, random)


def test_the_score_depends_on_the_file_alone(talk: tuple[Path, talks.Talk]) -> None:
    first, second = score(talk[0]), score(talk[0])
    assert np.array_equal(first.scores, second.scores)
    assert first.parts.keys() == second.parts.keys() == {part.name for part in PARTS}


def test_clips_works_without_a_run_and_explains_its_scores(
    talk: tuple[Path, talks.Talk], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["clips", str(talk[0]), "--output_dir", str(tmp_path / "out"), "--num_clips", "2"]) == 0
    assert "scored by the built-in scorer" in capsys.readouterr().err
    content = json.loads((tmp_path / "out" / "talk" / "clips.json").read_text())
    assert content["judged_by"] == "the built-in scorer" and len(content["clips"]) == 2
    parts = np.array(list(content["parts"].values()))
    assert parts.sum(axis=0) == pytest.approx(np.array(content["scores"]), abs=1e-4)
    for clip in content["clips"]:
        assert sum(clip["shares"].values()) == pytest.approx(1, abs=0.01)
        assert (tmp_path / "out" / "talk" / clip["file"]).stat().st_size > 1000
    page = (tmp_path / "out" / "talk" / "page.html").read_text()
    assert "Score: " in page and "scored by the built-in scorer" in page


def test_a_video_without_sound_is_scored_by_its_frames(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    video = made(tmp_path / "silent.mp4", seconds=8, sound=False)
    assert main(["clips", str(video), "--output_dir", str(tmp_path / "out"), "--no_page"]) == 0
    assert "no sound found" in capsys.readouterr().err
    content = json.loads((tmp_path / "out" / "silent" / "clips.json").read_text())
    assert set(content["parts"]) == {"motion", "scenes", "screen", "faces"}


def test_flags_of_a_run_need_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    video = made(tmp_path / "a.mp4", seconds=4)
    assert main(["clips", str(video), "--step", "best", "--output_dir", str(tmp_path / "out")]) == 2
    assert "--step selects a part of a trained run" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
