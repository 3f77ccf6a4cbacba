"""Videos of every kind give clips with the right frames and sound, with constant memory."""

from __future__ import annotations

import contextlib
import math
import os
import random
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from unisono.recipes.clips.video.clips import Reading, clips, facts, num_clips
from unisono.recipes.common.bad_files import BadMedia

CLOCKWISE = [0, 65536, 0, -65536, 0, 0, 0, 0, 1 << 30]  # the rotation that a phone writes when it is held upright
RATE = 8000


def film(
    path: Path,
    levels: Sequence[int],
    *,
    fps: int = 4,
    times: Sequence[float] | None = None,
    sound: NDArray[np.float32] | None = None,
    sound_at: Sequence[tuple[float, int, int]] = (),
    size: tuple[int, int] = (32, 48),
    matrix: list[int] | None = None,
    muxer: dict[str, str] | None = None,
    codec: str = "libx264",
    sound_codec: str = "aac",
    block: int = 1024,
) -> Path:
    """A video of grey frames with a white upper quarter; `sound_at` lists (time, first, last sample) of the sound."""
    with av.open(str(path), "w", options=muxer or {}) as container:
        stream = container.add_stream(codec, rate=fps, options={"threads": "1", "sc_threshold": "0"})
        stream.height, stream.width = size
        stream.pix_fmt, stream.codec_context.gop_size = "yuv420p", 8
        stream.codec_context.time_base = Fraction(1, 90_000)
        if matrix:
            stream.set_display_matrix(matrix)
        audio = container.add_stream(sound_codec, rate=RATE, layout="mono") if sound is not None else None
        for number, level in enumerate(levels):
            picture = np.full((*size, 3), level, np.uint8)
            picture[: size[0] // 4] = 255
            frame = av.VideoFrame.from_ndarray(picture)
            frame.pts = round(90_000 * (times[number] if times else number / fps))
            frame.time_base = Fraction(1, 90_000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        if audio is not None and sound is not None:
            for begin, first, last in sound_at or [(0.0, 0, len(sound))]:
                for start in range(first, last, block):
                    piece = sound[None, start : min(start + block, last)]
                    form = "fltp" if sound_codec == "aac" else "s16"
                    values = piece if form == "fltp" else (piece * 32767).astype(np.int16)
                    output = av.AudioFrame.from_ndarray(np.ascontiguousarray(values), format=form, layout="mono")
                    output.sample_rate, output.time_base = RATE, Fraction(1, RATE)
                    output.pts = round(begin * RATE) + start - first
                    container.mux(audio.encode(output))
            container.mux(audio.encode(None))
    return path


def damaged(path: Path) -> Path:
    """A video of 40 s with sound, with a part in its middle overwritten, as by a failing disk."""
    levels = [20 + number for number in range(160)]
    noise = np.random.RandomState(0).uniform(-0.5, 0.5, 40 * RATE).astype(np.float32)
    film(path, levels, sound=noise)
    content = bytearray(path.read_bytes())
    # `film` writes each stream contiguously, frames first, so both streams are damaged.
    with av.open(str(path)) as container:
        places = [(packet.stream.type, packet.pos) for packet in container.demux() if packet.pos is not None]
    for kind in ("video", "audio"):
        own = sorted(pos for each, pos in places if each == kind)
        start, stop = own[len(own) // 3], own[2 * len(own) // 3]
        content[start:stop] = random.Random(0).randbytes(stop - start)
    path.write_bytes(content)
    return path


def tone(seconds: float, loud: float = 0.5) -> NDArray[np.float32]:
    return (loud * np.sin(2 * np.pi * 440 * np.arange(round(seconds * RATE)) / RATE)).astype(np.float32)


def read(path: Path, seconds: float = 2.0, frames: int = 8, **settings: Any) -> tuple[Reading, Any, Any]:
    reading = clips(path, seconds, frames, settings.get("size", (16, 16)), settings.get("rate", RATE))
    got = list(reading)
    return reading, np.stack([each[0] for each in got]), np.stack([each[1] for each in got])


def levels_of(frames: NDArray[np.uint8]) -> list[int]:
    """The grey levels of frames [..., H, W, 3], below the white quarter."""
    low = frames[..., frames.shape[-3] // 2 :, :, :].astype(float).mean(axis=(-3, -2, -1))
    return [round(value) for value in low.flatten()]


def near(left: Sequence[int], right: Sequence[int]) -> bool:
    return len(left) == len(right) and all(abs(a - b) <= 3 for a, b in zip(left, right, strict=True))


def test_clips_contain_the_frames_in_order_and_the_last_clip_is_padded(tmp_path: Path) -> None:
    levels = [20 + 8 * number for number in range(20)]  # 5 s
    reading, frames, sound = read(film(tmp_path / "a.mp4", levels))
    assert frames.shape == (3, 8, 16, 16, 3) and frames.dtype == np.uint8
    assert sound.shape == (3, 2 * RATE) and not sound.any()
    assert near(levels_of(frames), [*levels, *[levels[-1]] * 4])
    assert reading.duration == pytest.approx(5.0) and not reading.remark and not reading.has_sound
    assert facts(tmp_path / "a.mp4").has_sound is False


def test_the_number_of_clips_is_the_duration_in_clips_rounded_up() -> None:
    assert [num_clips(seconds, 2.0) for seconds in (0.01, 1.9, 2.0, 2.0005, 2.1, 150, 3600)] == [
        1,
        1,
        1,
        1,
        2,
        75,
        1800,
    ]


def test_a_fast_video_gives_the_frame_on_screen_at_each_time(tmp_path: Path) -> None:
    levels = [20 + number * 37 % 200 for number in range(120)]
    _, frames, _ = read(film(tmp_path / "a.mp4", levels, fps=30), seconds=1.0, frames=4)
    # After 0, 7.5, 15 and 22.5 frames of each second; halfway through a frame, that frame is still on screen.
    assert near(levels_of(frames), [levels[30 * clip + place] for clip in range(4) for place in (0, 7, 15, 22)])


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
def test_with_a_variable_frame_rate_a_frame_stays_until_the_next_one(tmp_path: Path, name: str) -> None:
    times = [0.0, 0.1, 0.2, 1.6, 1.7, 3.9, 4.4, 4.5]
    levels = [20, 40, 60, 80, 100, 120, 140, 160]
    reading, frames, _ = read(film(tmp_path / name, levels, times=times))
    expected = [levels[max(i for i, time in enumerate(times) if time <= 0.25 * n + 0.01)] for n in range(24)]
    assert near(levels_of(frames), expected)
    assert 4.5 < reading.duration < 6


def test_a_phone_held_upright_gives_upright_frames(tmp_path: Path) -> None:
    path = film(tmp_path / "a.mp4", [60] * 8, matrix=CLOCKWISE)
    properties = facts(path)
    assert (properties.height, properties.width) == (48, 32)
    _, frames, _ = read(path, size=(24, 16))
    assert frames.shape[2:4] == (24, 16)
    # The white upper quarter is on the right after rotating the frame clockwise.
    assert frames[0, 0, :, -3:].mean() > 220 and frames[0, 0, :, :8].mean() < 90


def test_a_single_size_preserves_the_aspect_ratio(tmp_path: Path) -> None:
    _, frames, _ = read(film(tmp_path / "a.mp4", [60] * 8), size=20)
    assert frames.shape[2:4] == (20, 30)


def test_flash_and_beep_are_in_sync(tmp_path: Path) -> None:
    levels, sound = [30] * 48, np.zeros(6 * RATE, np.float32)
    for at in (1.0, 3.5, 4.875):
        levels[round(at * 8)] = 230
        sound[round(at * RATE) : round((at + 0.1) * RATE)] = tone(0.1)
    for name, muxer in (("a.mp4", {}), ("a.mkv", {}), ("a.ts", {}), ("b.mp4", {"movflags": "faststart"})):
        path = film(tmp_path / name, levels, fps=8, sound=sound, muxer=muxer)
        reading, frames, heard = read(path, frames=16, rate=16_000)
        assert reading.has_sound and len(frames) == 3  # also for a .ts file, whose timestamps begin at 1.4 s
        flashes = [number / 8 for number, level in enumerate(levels_of(frames)) if level > 150]
        loud = np.abs(heard.reshape(-1)).reshape(-1, 160).max(1) > 0.2  # of 10 ms each
        beeps = [number / 100 for number in range(1, len(loud)) if loud[number] and not loud[number - 1]]
        assert flashes == [1.0, 3.5, 4.875]
        assert len(beeps) == 3 and all(abs(a - b) < 0.03 for a, b in zip(flashes, beeps, strict=True)), (name, beeps)


def test_gaps_in_the_sound_are_silent_and_late_sound_keeps_its_time(tmp_path: Path) -> None:
    parts = [(1.0, 0, RATE), (4.0, RATE, 2 * RATE)]
    path = film(tmp_path / "a.mkv", [60] * 24, sound=tone(2.0), sound_at=parts, sound_codec="pcm_s16le")
    _, _, heard = read(path, seconds=1.0)
    assert [bool(np.abs(clip).max() > 0.1) for clip in heard] == [False, True, False, False, True, False]


def test_rounded_timestamps_cause_no_gaps_in_the_sound(tmp_path: Path) -> None:
    # Blocks of 127.6 ms, whose timestamps such a file rounds.
    path = film(tmp_path / "a.mkv", [60] * 16, sound=tone(4.0), sound_codec="pcm_s16le", block=1021)
    _, _, heard = read(path)
    assert np.abs(heard.reshape(-1) - tone(4.0)).max() < 1e-3
    quiet = np.abs(heard.reshape(-1)).reshape(-1, 16).max(1) < 0.05  # 16 samples contain most of a wave
    assert not quiet[2:-2].any()


def test_sound_after_the_last_frame_is_not_damage(tmp_path: Path) -> None:
    path = film(tmp_path / "a.mkv", [60] * 16, sound=tone(9.0), sound_codec="pcm_s16le")
    reading, frames, _ = read(path)
    assert len(frames) == 2 and not reading.remark


def test_a_file_with_sound_only_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=RATE, layout="mono")
        frame = av.AudioFrame.from_ndarray(tone(1.0)[None, :1024], format="fltp", layout="mono")
        frame.sample_rate = RATE
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    assert facts(path).has_video is False and facts(path).has_sound
    with pytest.raises(BadMedia, match="only sound"):
        clips(path, 2.0, 8, (16, 16), RATE)


def test_a_file_that_is_not_a_video_is_reported_in_one_line(tmp_path: Path) -> None:
    film(tmp_path / "real.mp4", [60] * 8)
    (tmp_path / "empty.mp4").write_bytes(b"")
    (tmp_path / "text.mp4").write_text("hello")
    (tmp_path / "list.mp4").write_text("ffconcat version 1.0\nfile real.mp4\n")
    (tmp_path / "play.mp4").write_text(f"#EXTM3U\n#EXTINF:1,\nfile://{tmp_path}/real.mp4\n#EXT-X-ENDLIST\n")
    for name in ("empty.mp4", "text.mp4", "list.mp4", "play.mp4", "missing.mp4"):
        with pytest.raises(BadMedia, match=name) as caught:
            clips(tmp_path / name, 2.0, 8, (16, 16), RATE)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
def test_the_readable_part_of_a_truncated_file_is_used_and_reported(tmp_path: Path, name: str) -> None:
    levels = [20 + number for number in range(160)]  # 40 s
    noise = np.random.RandomState(0).uniform(-0.5, 0.5, 40 * RATE).astype(np.float32)
    muxer = {"movflags": "faststart"} if name.endswith("mp4") else {}
    path = film(tmp_path / name, levels, sound=noise, muxer=muxer)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    reading, frames, _ = read(path)
    assert 5 < reading.duration < 35
    assert len(frames) == num_clips(reading.duration, 2.0)
    assert str(path) in reading.remark and "are used" in reading.remark
    shown = math.floor(reading.duration) * 4
    assert near(levels_of(frames)[: shown - 4], levels[: shown - 4])


def test_damage_in_one_place_does_not_affect_the_rest(tmp_path: Path) -> None:
    levels = [20 + number for number in range(160)]
    path = film(tmp_path / "a.mkv", levels)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 30] = bytes(30)
    path.write_bytes(content)
    reading, frames, _ = read(path)
    assert reading.duration == pytest.approx(40, abs=0.5) and len(frames) == 20
    assert near(levels_of(frames)[-16:], levels[-16:])


def test_undecodable_frames_and_sound_are_counted(tmp_path: Path) -> None:
    path = damaged(tmp_path / "a.mp4")
    reading, frames, heard = read(path)
    assert len(frames) == 20 and reading.duration == pytest.approx(40, abs=0.5)
    damage = reading.damage
    assert damage is not None and damage.num_frames == 160
    with av.open(str(path)) as container:  # by hand
        missing = 160
        for packet in container.demux(container.streams.video[0]):
            with contextlib.suppress(av.error.FFmpegError):
                missing -= len(packet.decode())
    assert damage.frames_missing == missing > 10
    assert 5 < damage.sound_seconds_missing < 20 and damage.sound_seconds == pytest.approx(40, abs=0.5)
    assert reading.has_sound and np.abs(heard[-1]).max() > 0.1  # the sound after the damage is decoded
    assert f"{missing} of 160 frames and {damage.sound_seconds_missing:.1f} of" in reading.remark
    assert str(path) in reading.remark and reading.remark.endswith("the rest is used")


def test_a_single_undecodable_frame_is_counted_once(tmp_path: Path) -> None:
    path = film(tmp_path / "a.mkv", [20 + number for number in range(160)])
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 30] = bytes(30)
    path.write_bytes(content)
    assert "1 frame cannot be decoded" in read(path)[0].remark


def test_a_file_without_its_index_is_reported_as_incomplete(tmp_path: Path) -> None:
    path = film(tmp_path / "a.mp4", [60] * 160)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(BadMedia, match=r"its index \(moov\).*the file is truncated; copy or record it again"):
        facts(path)
    (tmp_path / "text.mp4").write_text("hello")
    with pytest.raises(BadMedia) as caught:
        facts(tmp_path / "text.mp4")
    assert "moov" not in str(caught.value)
    os.mkfifo(tmp_path / "pipe.mp4")
    with pytest.raises(BadMedia, match="no such file"):
        facts(tmp_path / "pipe.mp4")


def test_hostile_bytes_end_in_bad_media_or_in_clips(tmp_path: Path) -> None:
    good = film(tmp_path / "good.mp4", [60] * 8, sound=tone(2.0)).read_bytes()
    draw = random.Random(3)
    for attempt in range(40):
        content = bytearray(good)
        for _ in range(draw.choice([1, 10, 200])):
            content[draw.randrange(len(content))] = draw.randrange(256)
        path = tmp_path / f"{attempt}.mp4"
        path.write_bytes(content[: draw.choice([len(content), draw.randrange(len(content))])])
        try:
            for number, (frames, sound) in enumerate(clips(path, 2.0, 4, (16, 16), RATE)):
                assert frames.shape == (4, 16, 16, 3) and np.isfinite(sound).all()
                if number > 2000:
                    break
        except BadMedia:
            pass


def _memory() -> float:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024


def test_an_hour_takes_no_more_memory_than_a_minute(tmp_path: Path) -> None:
    noise = np.random.RandomState(0).uniform(-0.5, 0.5, 3600 * RATE).astype(np.float32)
    path = film(tmp_path / "a.mkv", [20 + n % 200 for n in range(3600)], fps=1, sound=noise, sound_codec="pcm_s16le")
    seen = []
    for number, _ in enumerate(clips(path, 2.0, 8, (32, 32), RATE)):
        if number % 30 == 29:
            seen.append(_memory())
    assert number == 1799
    assert max(seen) - seen[0] < 10, seen
