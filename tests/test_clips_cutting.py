"""A cut has the right start and end, in sync with its sound, for every kind of video."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from unisono.errors import ConfigError, UserError
from unisono.recipes.clips.cutting.crop import Crop, follow, parse_aspect, path
from unisono.recipes.clips.cutting.cut import cut
from unisono.recipes.clips.cutting.edges import edges_around
from unisono.recipes.clips.cutting.moments import Moment
from unisono.recipes.clips.video.footage import Footage
from unisono.recipes.common.bad_files import BadMedia

FPS, RATE = 25, 44_100
FLASH = 5.0


def made(
    to: Path,
    *,
    seconds: float = 8,
    size: tuple[int, int] = (160, 90),
    sound: bool = True,
    sound_from: float = 0.0,
    begin: float = 0.0,
    rotate: int = 0,
    cut_at: float = 1e9,
    pauses: Sequence[tuple[float, float]] = (),
    times: Sequence[float] | None = None,
    codecs: tuple[str, str] = ("libx264", "aac"),
) -> Path:
    """A real video: a square moves from left to right; at FLASH the frame is white and a beep begins."""
    width, height = size
    ground = np.random.default_rng(0).integers(20, 60, (height, width, 3), dtype=np.uint8)
    fast = {
        "libx264": {"g": "50", "bf": "2", "preset": "ultrafast"},
        "libvpx": {"deadline": "realtime", "cpu-used": "8"},
    }
    options = fast.get(codecs[0], {})
    with av.open(str(to), "w") as container:
        film = container.add_stream(codecs[0], rate=FPS, options=options)
        film.width, film.height, film.pix_fmt = width, height, "yuv420p"
        film.codec_context.time_base = Fraction(1, 1000)
        if rotate:
            film.set_display_rotation(rotate)
        track = (
            container.add_stream(codecs[1], rate=RATE if codecs[1] == "aac" else 48_000, layout="stereo")
            if sound
            else None
        )
        for time in times or np.arange(int(seconds * FPS)) / FPS:
            picture = (255 - ground if time >= cut_at else ground).copy()
            left = int((width - 20) * time / seconds)
            picture[height // 3 : height // 3 + 30, left : left + 20] = 140
            if abs(time - FLASH) < 0.5 / FPS:
                picture[:] = 255
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = round((time + begin) * 1000), Fraction(1, 1000)
            container.mux(film.encode(frame))
        container.mux(film.encode(None))
        if track is not None:
            rate = track.codec_context.sample_rate
            at = sound_from + np.arange(int((seconds - sound_from) * rate)) / rate
            tone = 0.1 * np.sin(2 * np.pi * 300 * at) * all_outside(at, pauses) if pauses else np.zeros(len(at))
            tone[(at >= FLASH) & (at < FLASH + 0.1)] += 0.8 * np.sin(
                2 * np.pi * 2000 * at[(at >= FLASH) & (at < FLASH + 0.1)]
            )
            for first in range(0, len(tone), 960):
                part = np.stack([tone[first : first + 960]] * 2).astype(np.float32)
                frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(part), format="fltp", layout="stereo")
                frame.sample_rate, frame.time_base = rate, Fraction(1, rate)
                frame.pts = first + round((sound_from + begin) * rate)
                container.mux(track.encode(frame))
            container.mux(track.encode(None))
    return to


def all_outside(at: np.ndarray, spans: Sequence[tuple[float, float]]) -> np.ndarray:
    return np.all([(at < low) | (at >= high) for low, high in spans], axis=0)


@dataclass
class Seen:
    """The frames and sound that a player decodes from a file."""

    duration: float
    times: list[float]
    flash: float | None
    beep: float | None
    size: tuple[int, int]
    sound_seconds: float
    pictures: list[np.ndarray]


def seen(file: Path) -> Seen:
    with av.open(str(file)) as container:
        film = container.streams.video[0]
        frames = list(container.decode(film))
        duration = container.duration / 1e6
        rotation = round(frames[0].rotation / 90) % 4
        pictures = [np.rot90(frame.to_ndarray(format="gray"), rotation) for frame in frames]
        times = [float(frame.time) for frame in frames]
    flash = next((time for time, picture in zip(times, pictures, strict=True) if picture.mean() > 220), None)
    beep, length = None, 0.0
    with av.open(str(file)) as container:
        if container.streams.audio:
            heard = list(container.decode(audio=0))
            samples = np.concatenate([frame.to_ndarray().mean(axis=0) for frame in heard])
            loud = np.flatnonzero(np.abs(samples) > 0.3)
            length = len(samples) / heard[0].sample_rate
            beep = float(heard[0].time) + loud[0] / heard[0].sample_rate if len(loud) else None
    return Seen(duration, times, flash, beep, pictures[0].shape, length, pictures)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("plain") / "plain.mp4")


MOMENT = Moment(3.53, 6.81, 1.0)


def test_exact_cuts_are_exact_and_in_sync_with_the_sound(plain: Path, tmp_path: Path) -> None:
    done = cut(plain, MOMENT, tmp_path / "a.mp4", exact=True)
    decoded = seen(done.path)
    assert abs(decoded.duration - MOMENT.seconds) < 1 / FPS
    assert decoded.times[0] == 0 and len(decoded.times) == round(MOMENT.seconds * FPS)
    assert abs(done.start - MOMENT.start) <= 0.5 / FPS and done.end - done.start == pytest.approx(MOMENT.seconds)
    assert decoded.flash == pytest.approx(FLASH - done.start, abs=1e-3)
    assert decoded.beep == pytest.approx(decoded.flash, abs=0.003)
    assert decoded.sound_seconds == pytest.approx(MOMENT.seconds, abs=0.03)


def test_a_copy_begins_at_a_key_frame_reports_it_and_is_lossless(plain: Path, tmp_path: Path) -> None:
    done = cut(plain, MOMENT, tmp_path / "a.mp4")
    assert done.start == pytest.approx(2.0)  # every 50th frame is a key frame
    assert MOMENT.end <= done.end < MOMENT.end + 5 / FPS
    result, whole = seen(done.path), seen(plain)
    assert np.diff(result.times) == pytest.approx(1 / FPS, abs=2e-3)  # no frame is missing
    assert result.duration == pytest.approx(done.end - done.start, abs=1 / FPS)
    assert result.flash == pytest.approx(FLASH - 2.0, abs=2e-3) and result.beep == pytest.approx(
        result.flash, abs=0.003
    )
    for number in (0, 1, 40, -1):
        place = number % len(result.times) + 50
        assert (result.pictures[number] == whole.pictures[place]).all()


def test_a_video_whose_timestamps_do_not_begin_at_zero_is_cut_at_the_same_times(tmp_path: Path) -> None:
    video = made(tmp_path / "late.mkv", begin=3.0, sound_from=0.5, seconds=7)
    exact = seen(cut(video, Moment(4.0, 6.0, 1), tmp_path / "exact.mp4", exact=True).path)
    assert exact.flash == pytest.approx(1.0, abs=2e-3) and exact.beep == pytest.approx(exact.flash, abs=0.004)
    copy = cut(video, Moment(4.5, 6.0, 1), tmp_path / "copy.mp4")
    decoded = seen(copy.path)
    assert copy.start == pytest.approx(4.0, abs=2e-3)
    assert decoded.flash == pytest.approx(1.0, abs=3e-3) and decoded.beep == pytest.approx(decoded.flash, abs=0.004)
    first = seen(cut(video, Moment(0.0, 2.0, 1), tmp_path / "first.mp4", exact=True).path)
    assert first.sound_seconds == pytest.approx(2.0, abs=0.03)  # includes the silence before the sound begins


def test_a_variable_frame_rate_keeps_the_times_of_frames(tmp_path: Path) -> None:
    times = [0.0, 0.04, 0.5, 3.0, 3.04, 4.9, FLASH, 5.04, 6.5, 7.5]
    video = made(tmp_path / "uneven.mkv", times=times)
    done = cut(video, Moment(2.0, 7.0, 1), tmp_path / "a.mp4", exact=True)
    decoded = seen(done.path)
    assert done.start == 2.0
    assert decoded.times == pytest.approx(
        [0, 1.0, 1.04, 2.9, 3.0, 3.04, 4.5], abs=1e-3
    )  # the first was on screen before
    assert decoded.duration == pytest.approx(5.0, abs=0.04)
    assert decoded.flash == pytest.approx(3.0, abs=1e-3) and decoded.beep == pytest.approx(3.0, abs=0.004)


def test_phone_videos_are_rotated_upright(tmp_path: Path) -> None:
    video = made(tmp_path / "turned.mp4", rotate=90, seconds=3)
    whole = seen(video)
    assert whole.size == (160, 90)
    for exact in (True, False):
        decoded = seen(cut(video, Moment(0, 1.0, 1), tmp_path / f"{exact}.mp4", exact=exact).path)
        assert decoded.size == (160, 90)
        assert np.abs(decoded.pictures[10].astype(int) - whole.pictures[10]).mean() < 6


def test_a_video_without_sound_gives_clips_without_sound(tmp_path: Path) -> None:
    video = made(tmp_path / "silent.mp4", sound=False, seconds=3)
    for exact in (True, False):
        done = cut(video, Moment(1.0, 2.5, 1), tmp_path / f"{exact}.mp4", exact=exact)
        with av.open(str(done.path)) as container:
            assert not container.streams.audio and len(container.streams.video) == 1
        assert seen(done.path).duration == pytest.approx(done.end - done.start, abs=1 / FPS)


def test_codecs_that_mp4_cannot_contain_are_re_encoded_or_rejected_in_one_line(tmp_path: Path) -> None:
    video = made(tmp_path / "old.avi", codecs=("msmpeg4v2", "mp2"), seconds=3)
    with pytest.raises(UserError, match="use --exact"):
        cut(video, Moment(1.0, 2.0, 1), tmp_path / "a.mp4")
    assert os.listdir(tmp_path) == ["old.avi"]
    assert seen(cut(video, Moment(1.0, 2.0, 1), tmp_path / "a.mp4", exact=True).path).duration == pytest.approx(
        1, abs=0.04
    )


def test_odd_sizes_and_clips_that_end_after_the_video_can_be_cut(tmp_path: Path) -> None:
    video = made(tmp_path / "odd.mkv", size=(161, 91), seconds=3, codecs=("ffv1", "aac"))
    decoded = seen(cut(video, Moment(2.0, 9.0, 1), tmp_path / "a.mp4", exact=True).path)
    assert decoded.size == (90, 160) and decoded.duration == pytest.approx(1.0, abs=1 / FPS)


@pytest.mark.parametrize("exact", [True, False])
def test_nothing_is_overwritten_and_no_incomplete_file_is_left(exact: bool, plain: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.mp4"
    mine.write_text("mine")
    link = tmp_path / "link.mp4"
    link.symlink_to(tmp_path / "elsewhere")
    for taken in (mine, link):
        with pytest.raises(UserError, match="is not overwritten"):
            cut(plain, MOMENT, taken, exact=exact)
    assert mine.read_text() == "mine" and sorted(os.listdir(tmp_path)) == ["link.mp4", "mine.mp4"]
    with pytest.raises(UserError, match="cannot be written"):
        cut(plain, MOMENT, tmp_path / "no" / "a.mp4", exact=exact)
    with pytest.raises(ConfigError, match="is not in it"):
        cut(plain, Moment(9, 10, 1), tmp_path / "a.mp4", exact=exact)


def test_a_file_that_appears_meanwhile_is_not_overwritten(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(footage: Footage, moment: Moment, partial: Path, *_: Any) -> tuple[float, float]:
        partial.write_text("new")
        (tmp_path / "a.mp4").write_text("mine")
        return 0.0, 1.0

    monkeypatch.setattr("unisono.recipes.clips.cutting.cut.encode", slow)
    with pytest.raises(UserError, match="is not overwritten"):
        cut(plain, MOMENT, tmp_path / "a.mp4", exact=True)
    assert (tmp_path / "a.mp4").read_text() == "mine" and os.listdir(tmp_path) == ["a.mp4"]


def test_a_truncated_file_is_cut_up_to_its_end(plain: Path, tmp_path: Path) -> None:
    half = tmp_path / "half.mkv"
    whole = made(tmp_path / "whole.mkv")
    half.write_bytes(whole.read_bytes()[: int(whole.stat().st_size * 0.6)])
    decoded = seen(cut(half, Moment(1.0, 3.0, 1), tmp_path / "a.mp4", exact=True).path)
    assert decoded.duration == pytest.approx(2.0, abs=1 / FPS)
    with pytest.raises(BadMedia):
        cut(tmp_path / "none.mp4", MOMENT, tmp_path / "b.mp4")


def test_edges_are_found_at_their_times_in_the_file(tmp_path: Path) -> None:
    video = made(tmp_path / "edges.mp4", cut_at=2.48, pauses=[(6.0, 6.4)])
    result = edges_around(video, [Moment(2.0, 6.6, 1)], 1.0)
    shot = [edge for edge in result if edge.kind == "shot"]
    pauses = [edge for edge in result if edge.kind == "silence"]
    assert [edge.time for edge in shot] == [pytest.approx(2.48, abs=1e-3)]
    assert [edge.time for edge in pauses] == [pytest.approx(6.2, abs=0.05)]
    assert edges_around(video, [Moment(3.8, 4.2, 1)], 0.5) == []


def test_the_crop_follows_the_motion_smoothly(plain: Path, tmp_path: Path) -> None:
    moment = Moment(1.0, 7.0, 1)
    crop = follow(plain, moment, 9 / 16)
    done = cut(plain, moment, tmp_path / "a.mp4", crop=crop)
    decoded = seen(done.path)
    assert decoded.size == (90, 50) and abs(decoded.duration - 6) < 1 / FPS
    assert decoded.beep == pytest.approx(decoded.flash, abs=0.004)
    for number in range(0, len(decoded.pictures), 10):
        columns = np.flatnonzero((np.abs(decoded.pictures[number][34:56].astype(int) - 140) < 12).mean(axis=0) > 0.8)
        if decoded.pictures[number].mean() < 200:  # not during the flash
            assert len(columns) >= 18  # the square of 20 pixels is in the window
    speed = np.abs(np.diff(crop.centres) / np.diff(crop.times))
    assert speed.max() < 0.4  # fraction of the frame width per second; the square moves at 0.11


def test_the_crop_stays_still_without_motion_and_jumps_only_at_a_cut() -> None:
    still = np.random.default_rng(0).integers(0, 255, (20, 36, 64, 3), dtype=np.uint8)
    still[:] = still[0]
    times = np.arange(20) / 8
    _, centres = path(still, times, 0.3)
    assert centres == pytest.approx(0.5, abs=0.02)
    moving = still.copy()
    for number in range(20):
        left = 4 if number < 10 else 54
        moving[number, 10 + number % 3 * 5 : 20 + number % 3 * 5, left : left + 6] = 255
    found_times, centres = path(moving, times, 0.3, [times[10]])
    before, after = centres[found_times < times[10]], centres[found_times >= times[10]]
    assert before.max() < 0.25 and after.min() > 0.75


def test_crops_have_the_requested_aspect_ratio() -> None:
    nothing = np.zeros(0)
    assert Crop(9 / 16, nothing, nothing).size(1080, 1920) == (1080, 608)
    assert Crop(9 / 16, nothing, nothing).size(1920, 1080) == (1920, 1080)
    assert Crop(1.0, nothing, nothing).size(1920, 1080) == (1080, 1080)
    assert Crop(9 / 16, nothing, nothing).size(480, 720, pixel_aspect=32 / 27) == (480, 228)
    edge = Crop(9 / 16, np.array([0.0]), np.array([1.0]))
    assert edge.corner(5.0, 1080, 1920) == (0, 1920 - 608)
    assert parse_aspect("9:16") == 9 / 16
    for wrong in ("9", "9:0", "a:b", "9:16:3", "1:1000", ""):
        with pytest.raises(ConfigError, match="expected width:height"):
            parse_aspect(wrong)


def test_sound_is_placed_by_its_timestamps(plain: Path) -> None:
    footage = Footage(plain)
    for start in (0.0, 1.234, 4.9):
        samples = np.concatenate([part[0] for part in footage.sound(start, 6.0, RATE, "mono")])
        assert len(samples) == round((6.0 - start) * RATE)
        assert start + np.flatnonzero(np.abs(samples) > 0.3)[0] / RATE == pytest.approx(FLASH, abs=0.003)


def test_the_frame_on_screen_is_found_after_any_seek(plain: Path) -> None:
    footage = Footage(plain)
    for start, first in ((0.0, 0.0), (0.05, 0.04), (3.53, 3.52), (FLASH, FLASH), (7.9, 7.88)):
        times = [time for time, _ in footage.frames(start, min(start + 0.2, 8.0))]
        assert times[0] == pytest.approx(first, abs=1e-3)
        assert np.diff(times) == pytest.approx(0.04, abs=1e-3)
    assert footage.picture_at(FLASH + 0.01, (16, 9)).mean() > 220  # type: ignore[union-attr]
    assert [time for time, _ in footage.frames(20.0, 21.0)] in ([], [pytest.approx(7.96)])
