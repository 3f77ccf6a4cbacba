"""`unisono clips` writes clips, a JSON file and a page that works in a browser; a user error is one line."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike

from browser import Browser
from test_clips_cutting import made, seen
from test_clips_video import damaged
from test_report import Page
from unisono.cli import clips
from unisono.cli.main import main
from unisono.engine.start.registry import BUILT_IN
from unisono.errors import ConfigError, UserError
from unisono.formatting import format_clock
from unisono.recipes.clips.calibration import Calibration, calibration_of, without_low
from unisono.recipes.clips.cutting.cut import Cut
from unisono.recipes.clips.cutting.moments import Moment
from unisono.recipes.clips.model import Scorer
from unisono.recipes.clips.page.page import write_page
from unisono.recipes.clips.page.timeline import score_axis
from unisono.recipes.clips.recipe import Clips
from unisono.recipes.clips.scoring import Scored
from unisono.recipes.clips.settings import Config
from unisono.recipes.clips.trained import VideoScorer, load_scorer
from unisono.recipes.clips.video.clips import clips as read_clips
from unisono.recipes.clips.video.damage import Damage
from unisono.recipes.clips.video.footage import Footage

ATTACK = "'\"><img src=x onerror=alert(1)>&lt;#?%2e #t=1"


@dataclass
class Judged:
    scores: np.ndarray
    clip_seconds: float = 2.0
    has_sound: bool = True
    damage: Damage | None = None
    parts: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def duration(self) -> float:
        return len(self.scores) * self.clip_seconds


def judged(scores: ArrayLike, clip_seconds: float = 2.0) -> Scored:
    """Scores of a video, as a trained run gives them."""
    values = np.asarray(scores, np.float64)
    return Scored(values, clip_seconds, len(values) * clip_seconds, has_sound=True)


def scorer(video: Path) -> Judged:
    return Judged(np.array([0.1, 0.2, 0.9, 0.8, 0.1, 0.1, 0.7, 0.75, 0.1, 0.0]))


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("videos") / "a talk.mp4", seconds=20, cut_at=11.6)


@pytest.fixture(scope="module")
def done(video: Path) -> Path:
    """The folder of a video whose clips have been cut."""
    assert clips.main([str(video), "--output-dir", str(video.parent / "out"), "--num-clips=2", "--exact"], scorer) == 0
    return video.parent / "out" / "a talk"


def test_clips_are_the_best_moments_and_end_at_cuts(done: Path) -> None:
    content = json.loads((done / "clips.json").read_text())
    assert content["video"] == "a talk.mp4" and content["duration"] == pytest.approx(20, abs=0.1)
    assert content["scores"] == [0.1, 0.2, 0.9, 0.8, 0.1, 0.1, 0.7, 0.75, 0.1, 0.0]
    first, second = content["clips"]
    assert (first["start"], first["end"]) == (4, 8)
    assert (second["start"], second["end"]) == (11.6, 16)  # the shot changes at 11.6, and the peak begins at 12
    assert sorted(os.listdir(done)) == sorted(["clips.json", "page.html", first["file"], second["file"]])
    assert first["file"] == "01_00h00m04s.mp4"
    for clip in content["clips"]:
        assert seen(done / clip["file"]).duration == pytest.approx(clip["end"] - clip["start"], abs=1 / 25)


def test_the_page_needs_only_the_files_next_to_it(done: Path) -> None:
    page = Page((done / "page.html").read_text())
    links = [a[name] for _, a in page.elements for name in ("src", "href") if name in a]
    outside = [link for link in links if not link.startswith("data:image/jpeg;base64,")]
    assert {(done / unquote(link.split("#")[0])).resolve() for link in outside} == {
        done.parent.parent.joinpath("a talk.mp4").resolve(),
        *(file.resolve() for file in done.glob("*.mp4")),
    }
    assert len(page.all("image")) == 12 and len(page.all("video")) == 3
    assert not {tag for tag, _ in page.elements} & {"link", "iframe", "object", "base", "form"}


def test_names_are_escaped_on_the_page(video: Path, tmp_path: Path) -> None:
    odd = tmp_path / (ATTACK.replace("/", "") + "\n\udcff.mp4")
    shutil.copy(video, odd)
    out = tmp_path / "out"
    assert clips.main([str(odd), "--output_dir", str(out), "--num_clips", "1"], scorer) == 0
    (folder,) = out.iterdir()
    page = Page((folder / "page.html").read_text())
    assert len(page.all("script")) == 1 and not page.all("img")
    assert all(not name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert "onerror=alert(1)" in page.text
    whole = next(a["src"] for a in page.all("video") if a.get("id") == "whole")
    assert whole is not None
    assert os.path.samefile(os.fsencode(folder) + b"/" + unquote_to_bytes(whole), os.fsencode(odd))


def test_a_page_without_clips_or_scores_is_still_a_page(video: Path, tmp_path: Path) -> None:
    text = write_page(tmp_path / "a.html", Footage(video), judged([float("nan")] * 10), []).read_text()
    assert "There are no clips." in text and "nan" not in text.split("<main>")[1].split("<script>")[0]
    with pytest.raises(UserError, match="is not overwritten"):
        write_page(tmp_path / "a.html", Footage(video), judged([0.5] * 10), [])
    many = write_page(tmp_path / "b.html", Footage(video), judged(np.random.default_rng(0).random(20_000), 0.001), [])
    assert len(many.read_text()) < 200_000


def test_a_copy_that_begins_early_is_reported(video: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(video), "--output_dir", str(tmp_path), "--num_clips", "1", "--snap", "0", "--no_page"]
    assert clips.main(words, lambda video: Judged(np.array([0.1, 0.9, 0.9, 0.1, 0.1]), 2.5)) == 0
    output = capsys.readouterr().out
    assert "1 clip, 5 of 12 s, scored in" in output and "1 file starts 0.5 s before the moment" in output
    content = json.loads((tmp_path / "a talk" / "clips.json").read_text())
    assert (content["clips"][0]["start"], content["clips"][0]["file_start"]) == (2.5, 2.0)
    assert not (tmp_path / "a talk" / "page.html").exists()
    cut = Cut(tmp_path / "x.mp4", 2.0, 7.5)
    page = write_page(tmp_path / "p.html", Footage(video), judged([0.5] * 8, 2.5), [(Moment(2.5, 7.5, 0.9), cut)])
    assert "The file is 5.5 s long: it starts at a key frame, 0.5 s before the clip" in page.read_text()
    assert 'src="./x.mp4#t=0.500"' in page.read_text()  # where the player starts


def test_damage_to_a_video_is_printed_stored_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = damaged(tmp_path / "a.mp4")

    def really(video: Path) -> Judged:
        reading = read_clips(video, 2.0, 8, (16, 16), 16_000)
        return Judged(
            np.array([0.9 if number == 4 else 0.1 for number, _ in enumerate(reading)]), damage=reading.damage
        )

    assert clips.main([str(path), "--output_dir", str(tmp_path / "out"), "--num_clips", "1"], really) == 0
    stderr = capsys.readouterr().err
    assert stderr.count("\n") == 1 and "frames and" in stderr and "s of sound cannot be decoded" in stderr
    written = json.loads((tmp_path / "out/a/clips.json").read_text())
    assert written["damage"]["frames_not_decoded"] > 10 and written["damage"]["frames"] == 160
    assert written["damage"]["sound_seconds_not_decoded"] > 5
    assert written["remarks"] == [stderr.removeprefix(f"unisono: {path}: ").rstrip()]
    page = Page((tmp_path / "out/a/page.html").read_text())
    assert "Damaged (" in page.text and f"{written['damage']['frames_not_decoded']} of 160 frames" in page.text


def test_a_video_in_which_nothing_stands_out_is_reported(
    video: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flat = Judged(np.linspace(0.00056, 0.00068, 10))
    words = [str(video), "--output_dir", str(tmp_path)]
    assert clips.main(words, lambda video: flat) == 0
    stderr = capsys.readouterr().err
    assert stderr.count("\n") == 1 and "nothing stands out: all scores lie between 0.0006 and 0.0007" in stderr
    content = json.loads((tmp_path / "a talk/clips.json").read_text())
    assert content["nothing_stands_out"] and content["remarks"] and content["damage"] is None
    text = (tmp_path / "a talk/page.html").read_text()
    assert "Nothing stands out" in text and ">-0.50<" not in text and ">0.00<" in text and "score 0.0006" in text
    assert clips.main([str(video), "--output_dir", str(tmp_path / "other")], scorer) == 0
    assert not json.loads((tmp_path / "other/a talk/clips.json").read_text())["nothing_stands_out"]
    assert capsys.readouterr().err == ""


def test_no_clip_is_cut_that_scores_below_the_lowest_score(
    video: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(video), "--output_dir", str(tmp_path), "--lowest_score", "0.8"]
    assert clips.main(words, scorer) == 0
    content = json.loads((tmp_path / "a talk/clips.json").read_text())
    assert [clip["score"] for clip in content["clips"]] == [0.85]
    printed = capsys.readouterr()
    assert "1 clip, " in printed.out and "below --lowest_score 0.8 (the best of them scores 0.7" in printed.err
    assert clips.main([*words[:2], str(tmp_path / "none"), "--lowest_score", "1"], scorer) == 0
    assert "0 clips, " in capsys.readouterr().out
    assert "There are no clips." in (tmp_path / "none/a talk/page.html").read_text()


def test_a_clip_that_is_the_whole_video_is_explained(
    video: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(video), "--output_dir", str(tmp_path), "--shortest", "100", "--longest", "200", "--no_page"]
    assert clips.main(words, scorer) == 0
    expected = "the video is 20.0 s long, shorter than --shortest 100, so the whole video is one clip"
    assert expected in capsys.readouterr().err


def test_the_axis_of_scores_begins_at_zero() -> None:
    for scores, expected in (
        ([0.0006, 0.0007], (0, 0.1)),
        ([0.2, 0.93], (0, 1)),
        ([0.05, 0.3], (0, 0.3)),
        ([float("nan")], (0, 1)),
        ([-2.0, 3.0], (-2, 3)),
    ):
        assert score_axis(np.array(scores)) == expected


def test_a_crop_is_cut_upright(video: Path, tmp_path: Path) -> None:
    words = [str(video), "--output_dir", str(tmp_path), "--num_clips", "1", "--crop", "9:16", "--no-page"]
    assert clips.main(words, scorer) == 0
    assert seen(next((tmp_path / "a talk").glob("*.mp4"))).size == (160, 90)  # of a 160 × 90 video, scaled up
    for height, size in ((0, (90, 50)), (320, (320, 180))):
        own = [*words[:2], str(tmp_path / str(height)), *words[3:], "--height", str(height)]
        assert clips.main(own, scorer) == 0
        assert seen(next((tmp_path / str(height) / "a talk").glob("*.mp4"))).size == size
    assert clips.main([*words[:2], str(tmp_path / "wide"), *words[3:5], "--height", "45", "--no-page"], scorer) == 0
    assert seen(next((tmp_path / "wide/a talk").glob("*.mp4"))).size == (44, 80)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none.mp4"], "no such file"),
        (["{taken}"], "is a folder; pass video files"),
        (["{video}", "--lowest_score", "2"], "expected a score from 0 to 1"),
        (["{video}", "--lowest_score", "nan"], "expected a score from 0 to 1"),
        (["{video}", "--num_clips", "0"], "num_clips 0"),
        (["{video}", "--shortest", "9", "--longest", "3"], "shortest"),
        (["{video}", "--shortest", "nan"], "shortest"),
        (["{video}", "--gap", "-1"], "gap"),
        (["{video}", "--snap", "inf"], "snap"),
        (["{video}", "--crop", "tall"], "expected width:height"),
        (["{video}", "--height", "7"], "expected 16 to 8640 pixels"),
        (["none.mp4", "{taken}"], "no such file"),
        (["{video}", "--output_dir", "{taken}"], "already exists and is not empty"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    words: list[str], said: str, video: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "taken"
    (taken / "a talk").mkdir(parents=True)
    (taken / "a talk" / "mine.txt").write_text("mine")
    run = tmp_path / "run"
    words = [word.format(video=video, taken=taken) for word in words]
    words += [] if "--output_dir" in words else ["--output_dir", str(tmp_path / "out")]
    assert main(["clips", *words, "--run", str(run)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and said in printed.err
    assert os.listdir(tmp_path) == ["taken"] and os.listdir(taken / "a talk") == ["mine.txt"]


def test_an_unreadable_video_is_reported_and_the_others_are_processed(
    video: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, good = tmp_path / "broken.mp4", tmp_path / "good.mp4"
    broken.write_bytes(b"\0" * 5000)
    shutil.copy(video, good)
    words = [str(broken), str(good), "--output_dir", str(tmp_path / "out"), "--num_clips", "1", "--no_page"]
    assert clips.main(words, scorer) == 2
    assert "broken.mp4" in capsys.readouterr().err
    assert os.listdir(tmp_path / "out") == ["good"]
    with pytest.raises(UserError, match=r"broken\.mp4"):
        clips.main([str(broken), "--output_dir", str(tmp_path / "out")], scorer)


def test_a_missing_video_does_not_stop_the_others(
    video: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["nowhere.mp4", str(video), "--output_dir", str(tmp_path / "out"), "--num_clips", "1", "--no_page"]
    assert clips.main(words, scorer) == 2
    stderr = capsys.readouterr().err
    assert "nowhere.mp4: there is no such file" in stderr and "1 of 2 videos failed" in stderr
    assert os.listdir(tmp_path / "out") == ["a talk"]


def test_videos_with_equal_names_get_separate_folders_and_duplicates_are_used_once(
    video: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, link = tmp_path / "a talk.mp4", tmp_path / "link.mp4"
    shutil.copy(video, other)
    link.symlink_to(other)
    words = [str(video), str(other), str(link), "--output_dir", str(tmp_path / "out"), "--num_clips", "1", "--no_page"]
    assert clips.main(words, scorer) == 0
    stderr = capsys.readouterr().err
    assert f"the clips of {other} go to {tmp_path / 'out' / 'a talk-2'}" in stderr
    assert f"{link} is the same file as {other}" in stderr
    assert sorted(os.listdir(tmp_path / "out")) == ["a talk", "a talk-2"]


def test_a_video_that_mp4_cannot_contain_is_re_encoded_and_reported_before_scoring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    webm = made(tmp_path / "a.webm", codecs=("libvpx", "libopus"), seconds=8)
    words = [str(webm), "--output_dir", str(tmp_path / "out"), "--num_clips", "1", "--no_page"]
    assert clips.main(words, lambda video: Judged(np.array([0.1, 0.9, 0.8, 0.1]))) == 0
    assert "cannot contain its codecs (vp8 and opus), so the clips are re-encoded" in capsys.readouterr().err
    (clip,) = json.loads((tmp_path / "out/a/clips.json").read_text())["clips"]
    assert seen(tmp_path / "out/a" / clip["file"]).duration == pytest.approx(clip["end"] - clip["start"], abs=0.05)


def test_a_long_video_shows_progress(video: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = video.parent / "long.mp4"
    shutil.copy(video, known)

    def slow(video: Path, reached: Any) -> Judged:
        for second in range(0, 20, 4):
            reached(second)
        return scorer(video)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clips, "_LONG_S", 10)
        assert clips.main([str(known), "--output_dir", str(tmp_path), "--num_clips", "1"], VideoScorer(slow)) == 0
    stderr = capsys.readouterr().err
    assert "scoring long.mp4: 20 s of video" in stderr and "cutting long.mp4: 1 clip in" in stderr


def test_low_scoring_moments_are_not_cut(video: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = np.array([0.0026, 0.001, 0.001, 0.001, 0.996, 0.996, 0.001, 0.001, 0.0026, 0.0026])
    words = [str(video), "--output_dir", str(tmp_path), "--no_page", "--snap", "0"]
    assert clips.main(words, lambda video: Judged(scores)) == 0
    (only,) = json.loads((tmp_path / "a talk/clips.json").read_text())["clips"]
    assert only["score"] == 0.996
    stderr = capsys.readouterr().err
    assert "skipped 2 moments scoring 0.003 or less, below 0.10 (a tenth of the best score, 1.00)" in stderr
    assert (
        clips.main([*words[:2], str(tmp_path / "all"), *words[3:], "--lowest_score", "0"], lambda _: Judged(scores))
        == 0
    )
    assert len(json.loads((tmp_path / "all/a talk/clips.json").read_text())["clips"]) == 3


def test_the_floor_follows_the_scores_of_held_out_videos() -> None:
    moments = [Moment(0, 4, 0.6), Moment(10, 14, 0.4), Moment(20, 24, 0.2)]
    kept, why = without_low(moments, Calibration(highlights=0.9, others=0.1))
    assert kept == moments[:2] and "highlights score 0.90 on average and other clips 0.10" in why and "0.30" in why
    assert without_low(moments, Calibration(highlights=0.1, others=0.2)) == (moments, "")  # it knows nothing
    kept, why = without_low(moments[2:], Calibration(highlights=0.9, others=0.1))
    assert kept == moments[2:] and "even the best moment scores 0.20, below 0.30" in why
    assert without_low([], None) == ([], "")


def test_the_calibration_is_that_of_the_step_in_use(tmp_path: Path) -> None:
    lines = [
        {"step": 10, "eval/score_of_highlights": 0.4, "eval/score_of_others": 0.3},
        {"step": 15, "loss": 1.0},
        {"step": 20, "eval/score_of_highlights": 0.9, "eval/score_of_others": 0.1},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"eval/score_of_highlights": 0')
    assert calibration_of(tmp_path) == Calibration(0.9, 0.1) and calibration_of(tmp_path, 19) == Calibration(0.4, 0.3)
    assert calibration_of(tmp_path, 9) is None and calibration_of(tmp_path / "none") is None


def test_the_calibration_of_the_best_checkpoint_is_that_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        {"step": step, "eval/score_of_highlights": highlights, "eval/score_of_others": 0.1}
        for step, highlights in ((10, 0.9), (20, 0.4))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    recipe, model = Clips(Config(data_path="mirror")), Scorer({"stats": (3,)}, 16, 1, 2, 0.0)
    loaded = (recipe, model, "averaged weights of step_00000010")
    monkeypatch.setattr("unisono.engine.export.load_trained", lambda *_, **__: loaded)
    scorer = load_scorer(tmp_path, step="best", weights="auto", recipe_from=None, device=torch.device("cpu"))
    assert scorer.calibration == Calibration(0.9, 0.1)


def test_a_run_of_the_mirror_set_warns_of_other_videos(
    video: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = VideoScorer(
        lambda video, reached: scorer(video), "a run", "the built-in mirror set (120 videos)", mirror_size=32
    )
    words = [str(video), "--output_dir", str(tmp_path / "out"), "--num_clips", "1"]
    assert clips.main(words, judge) == 0
    assert "its scores mean nothing for other videos" in capsys.readouterr().err
    content = json.loads((tmp_path / "out/a talk/clips.json").read_text())
    assert content["trained_on"].startswith("the built-in mirror set") and "mirror set" in content["remarks"][0]
    assert "trained on the built-in mirror set" in (tmp_path / "out/a talk/page.html").read_text()
    own = made(tmp_path / "own.mp4", size=(32, 32), seconds=20)
    assert clips.main([str(own), *words[1:], "--no-page"], judge) == 0
    assert capsys.readouterr().err == ""


def test_a_failure_half_way_leaves_no_files(video: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("unisono.recipes.clips.page.page.write_page", full)
    with pytest.raises(UserError, match="No space left"):
        clips.main([str(video), "--output_dir", str(tmp_path)], scorer)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_not_a_run_is_rejected(
    video: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["clips", str(video), "--run", str(tmp_path), "--output_dir", str(tmp_path / "out")]) == 2
    assert "run.json" in capsys.readouterr().err and not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="--device nonsense"):
        clips.main([str(video), "--run", str(tmp_path), "--output_dir", str(tmp_path / "o"), "--device", "nonsense"])


def test_runs_of_other_recipes_and_missing_steps_are_rejected_by_name(
    video: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["clips", str(video), "--run", str(tmp_path), "--output_dir", str(tmp_path / "out")]
    record = {"id": "1", "recipe": "Seo", "recipe_from": BUILT_IN["seo"], "config": {}, "sources": {}}
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert main(words) == 2
    assert "is a run of seo, which cannot score videos; pass a run of clips" in capsys.readouterr().err
    (tmp_path / "run.json").write_text(json.dumps(record | {"recipe": "Clips", "recipe_from": BUILT_IN["clips"]}))
    for step in (40, 80):
        (tmp_path / f"checkpoints/step_{step:08}").mkdir(parents=True)
    assert main([*words, "--step", "999"]) == 2
    assert "--step 999:" in (stderr := capsys.readouterr().err) and "use 40, 80, newest or best" in stderr


def test_times_are_written_as_on_a_clock() -> None:
    assert [format_clock(seconds) for seconds in (0, 7.4, 59.6, 754, 3723)] == [
        "0:00",
        "0:07",
        "1:00",
        "12:34",
        "1:02:03",
    ]


LOADED = (
    "document.readyState == 'complete' && "
    "[...document.querySelectorAll('video')].filter(v => v.readyState >= 1).length == 3"
)


def test_a_browser_plays_the_clips_and_the_keyboard_reaches_them(browser: Browser, done: Path) -> None:
    address = (done / "page.html").as_uri()
    browser.events.clear()
    browser("Page.navigate", url=address)
    browser.wait(LOADED)
    content = json.loads((done / "clips.json").read_text())
    lengths = browser.ask("[...document.querySelectorAll('.clips video')].map(v => v.duration)")
    assert lengths == pytest.approx([clip["end"] - clip["start"] for clip in content["clips"]], abs=0.04)
    played = browser.ask(
        "(async () => { const v = document.querySelector('.clips video'); v.muted = true; await v.play(); "
        "await new Promise(done => v.addEventListener('timeupdate', () => v.currentTime > 0.2 && done())); v.pause(); "
        "return [v.videoWidth, v.videoHeight, v.error]; })()"
    )
    assert played == [160, 90, None]
    # The player must seek to the position, not play up to it.
    browser.ask("document.getElementById('whole').play = async () => {}; document.getElementById('whole').focus()")
    for _ in range(20):
        browser.press("Tab")
        if browser.ask("document.activeElement.classList.contains('band')"):
            break
    assert browser.ask("document.activeElement.getAttribute('aria-label')").startswith("Clip 1: 0:04 to 0:08")
    browser.press("Enter")
    browser.wait("document.getElementById('whole').currentTime == 4")
    assert browser.ask("location.href") == address  # the player has seeked there
    browser.ask(
        "(() => { const s = document.querySelector('svg'), b = s.getBoundingClientRect(); s.dispatchEvent(new "
        "MouseEvent('click', {clientX: b.left + b.width * 0.5, clientY: b.bottom - 5, bubbles: true})); })()"
    )
    browser.wait("Math.abs(document.getElementById('whole').currentTime - 10) < 0.1")
    urls = [e["params"]["request"]["url"] for e in browser.events if e["method"] == "Network.requestWillBeSent"]
    assert len(urls) > 3 and all(url.startswith((done.parent.parent.as_uri(), "data:")) for url in urls), urls
    wrong = [e["params"]["entry"]["text"] for e in browser.events if e["method"] == "Log.entryAdded"]
    assert not wrong  # the page's content security policy allows all of its content


def test_a_browser_shows_a_copy_from_where_its_moment_begins(browser: Browser, video: Path, tmp_path: Path) -> None:
    words = [str(video), "--output_dir", str(tmp_path), "--num_clips", "1", "--snap", "0"]
    assert clips.main(words, lambda video: Judged(np.array([0.1, 0.9, 0.9, 0.1, 0.1, 0.1, 0.1, 0.1]), 2.5)) == 0
    (clip,) = json.loads((tmp_path / "a talk/clips.json").read_text())["clips"]
    browser("Page.navigate", url=(tmp_path / "a talk/page.html").as_uri())
    browser.wait(LOADED.replace("3", "2"))
    begins = browser.ask("document.querySelector('#clip-1 video').currentTime")
    assert begins == pytest.approx(clip["start"] - clip["file_start"], abs=0.05) and begins > 0.4


def test_the_page_has_a_dark_and_a_light_mode_and_fits_a_phone(browser: Browser, done: Path) -> None:
    browser("Page.navigate", url=(done / "page.html").as_uri())
    browser.wait("document.readyState == 'complete' && !!document.querySelector('.clips')")
    grounds = []
    for scheme in ("light", "dark"):
        browser("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        grounds.append(browser.ask("getComputedStyle(document.body).backgroundColor"))
    assert grounds == ["rgb(246, 247, 249)", "rgb(16, 19, 24)"]
    browser("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=1, mobile=True)
    assert browser.ask("document.documentElement.scrollWidth") <= 360
    letters = browser.ask(
        "[...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height).filter(h => h)"
    )
    assert len(letters) >= 8 and min(letters) >= 12  # as large as on other pages
    ends = browser.ask(
        "[...document.querySelectorAll('.timeline g text')].map(t => t.getBoundingClientRect()).filter(b => b.width)"
        ".map(b => [b.left, b.right])"
    )
    assert all(right < left for (_, right), (left, _) in pairwise(ends))  # none over another
    browser("Emulation.clearDeviceMetricsOverride")


def test_a_server_can_serve_it(browser: Browser, done: Path) -> None:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(done.parent.parent)))
    Thread(target=server.serve_forever, daemon=True).start()
    browser("Page.navigate", url=f"http://127.0.0.1:{server.server_port}/out/a%20talk/page.html")
    browser.wait(f"location.protocol == 'http:' && {LOADED}")
    browser("Page.navigate", url="about:blank")
    server.shutdown()


def test_without_scripts_the_links_lead_into_the_video(done: Path) -> None:
    page = Page((done / "page.html").read_text())
    bands = [a["href"] or "" for a in page.all("a") if a.get("class") == "band"]
    assert [link.split("#")[1] for link in bands] == ["t=4.000,8.000", "t=11.600,16.000"]
    assert {(done / unquote(link.split("#")[0])).resolve().name for link in bands} == {"a talk.mp4"}
    assert next(a for a in page.all("span") if a.get("id") == "how").keys() == {"id", "hidden"}
