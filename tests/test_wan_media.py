"""Images and videos of every kind are read as the requested frames; bad files are reported by name."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import zlib
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from av.stream import Disposition
from PIL import Image

from unisono.errors import ConfigError
from unisono.recipes.common.bad_files import BadMedia
from unisono.recipes.wan.data.decode import MediaFacts, opened
from unisono.recipes.wan.data.media import Fit, fit, from_unit, probe, read, to_unit, window
from unisono.recipes.wan.data.render import grid, labelled, write_video

CLOCKWISE = [0, 65536, 0, -65536, 0, 0, 0, 0, 1 << 30]  # the rotation that a phone writes when it is held upright


def video(
    path: Path,
    frames: int = 20,
    *,
    fps: int = 16,
    codec: str = "libx264",
    pixels: str = "yuv420p",
    size: tuple[int, int] = (32, 48),
    gop: int = 8,
    step: int = 4,
    times: list[int] | None = None,
    muxer: dict[str, str] | None = None,
    **stream_settings: Any,
) -> Path:
    """A video whose frame i has the grey level 10 + step × i and a white upper quarter; `times` are in 1/90000 s."""
    with av.open(str(path), "w", options=muxer or {}) as container:
        stream = container.add_stream(codec, rate=fps, options={"threads": "1", "sc_threshold": "0"})
        stream.height, stream.width = size
        stream.pix_fmt, stream.codec_context.gop_size = pixels, gop
        if times:
            stream.codec_context.time_base = Fraction(1, 90_000)
        if "matrix" in stream_settings:
            stream.set_display_matrix(stream_settings.pop("matrix"))
        for name, value in stream_settings.items():
            setattr(stream.codec_context, name, value)
        for number in range(frames):
            image = np.full((*size, 3), 10 + step * number, np.uint8)
            image[: size[0] // 4] = 255
            frame = av.VideoFrame.from_ndarray(image)
            if times:
                frame.pts, frame.time_base = times[number], Fraction(1, 90_000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def numbers(frames: torch.Tensor, step: int = 4) -> list[int]:
    """The numbers of these frames in `video`."""
    low = frames[:, frames.shape[1] // 2 :].float().mean(dim=(1, 2, 3))
    return [round((value - 10) / step) for value in low.tolist()]


def everything(path: Path) -> Fit:
    facts = probe(path)
    return Fit(facts.frames, facts.height, facts.width)


# ---- size and window of a sample


def test_windows_have_4k_plus_1_frames_and_at_least_one() -> None:
    assert [window(frames, 81) for frames in (0, 1, 4, 5, 8, 9, 80, 81, 500)] == [1, 1, 1, 5, 5, 9, 77, 81, 81]
    assert [window(500, wanted) for wanted in (1, 3, 16, 17, 81)] == [1, 1, 13, 17, 81]


def cut(facts: MediaFacts, **settings: Any) -> Fit:
    return fit(
        facts, **{"num_frames": 81, "height": 0, "width": 0, "max_pixels": 0, "multiple": 16, "fps": 0.0} | settings
    )


@pytest.mark.parametrize(
    ("height", "width", "max_pixels", "expected"),
    [
        (480, 832, 0, (480, 832)),
        (490, 847, 0, (480, 832)),  # rounded down
        (960, 1664, 480 * 832, (480, 832)),
        (2464, 7392, 672 * 2016, (672, 2016)),  # the square root is not exact
        (100, 160, 1000, (16, 32)),
        (1080, 1920, 480 * 832, (464, 832)),
        (300, 200, 480 * 832, (288, 192)),  # never enlarged
        (10, 300, 0, (16, 288)),  # except for one multiple
        (10, 100_000, 16 * 64, (16, 64)),  # and no longer than allowed
        (160, 1600, 16 * 160, (16, 160)),
    ],
)
def test_resizing_preserves_the_aspect_ratio_within_max_pixels(
    height: int, width: int, max_pixels: int, expected: tuple[int, int]
) -> None:
    assert cut(MediaFacts(1, height, width, 0), max_pixels=max_pixels) == Fit(1, *expected)
    assert cut(MediaFacts(1, width, height, 0), max_pixels=max_pixels) == Fit(1, *reversed(expected))


def test_an_explicit_size_is_used_exactly_or_rejected_with_the_nearest() -> None:
    facts = MediaFacts(100, 50, 50, 16)
    assert cut(facts, height=480, width=832) == Fit(81, 480, 832)
    for settings, expected in (
        ({"height": 480, "width": 840}, "width 840: this model needs a multiple of 16; use 832 or 848"),
        ({"height": 10, "width": 16}, "use 16"),
        ({"height": 480}, "width 0: this model needs a multiple of 16; use 16"),
        ({"height": -16, "width": 16}, "height -16: this model needs a multiple of 16; use 16"),
        ({"max_pixels": 255}, "16×16"),
        ({"num_frames": 0}, "num_frames"),
        ({"fps": -1.0}, "fps"),
        ({"fps": float("nan")}, "fps"),
    ):
        with pytest.raises(ConfigError, match=expected):
            cut(facts, **settings)


def test_the_number_of_frames_follows_from_fps() -> None:
    facts = MediaFacts(81, 16, 16, 30.0)  # 2.7 s are 43 frames at 16 fps
    assert [cut(facts, fps=fps).frames for fps in (0, 16, 29.97, 30, 60)] == [81, 41, 81, 81, 81]
    assert cut(facts, fps=60, num_frames=500).frames == 161
    assert cut(facts, fps=0.1).frames == 1
    assert cut(MediaFacts(1, 16, 16, 0), fps=16).frames == 1


# ---- videos


@pytest.mark.parametrize(
    ("name", "codec", "pixels", "muxer"),
    [
        ("a.mp4", "libx264", "yuv420p", {}),
        ("a.MOV", "prores_ks", "yuv422p10le", {}),
        ("a.mkv", "libx264", "yuv444p", {}),
        ("a.avi", "mpeg4", "yuv420p", {}),
        ("a.avi", "mjpeg", "yuvj420p", {}),
        ("a.webm", "libvpx-vp9", "yuv420p", {}),
        ("in pieces.mp4", "libx264", "yuv420p", {"movflags": "frag_keyframe+empty_moov"}),
        ("live.mkv", "libx264", "yuv420p", {"live": "1"}),  # the header contains no length
        ("http:a.mp4", "libx264", "yuv420p", {}),
    ],
)
def test_all_frames_of_videos_in_every_format_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, codec: str, pixels: str, muxer: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    video(tmp_path / f"x{path.suffix}", codec=codec, pixels=pixels, muxer=muxer, step=12).rename(path)
    facts = probe(Path(name))
    assert (facts.frames, facts.height, facts.width, round(facts.fps, 3)) == (20, 32, 48, 16)
    frames = read(Path(name), everything(path), fps=0)
    assert frames.shape == (20, 32, 48, 3) and frames.dtype == torch.uint8
    assert numbers(frames, 12) == list(range(20))
    assert frames[3, :6].min() > 240 and (frames[3, 12:].float() - 46).abs().max() < 8
    assert numbers(read(Path(name), Fit(5, 32, 48), fps=4), 12) == [0, 4, 8, 12, 16]


def test_videos_of_odd_sizes_are_read(tmp_path: Path) -> None:
    path = video(tmp_path / "a.mkv", 2, pixels="yuv444p", size=(31, 47))
    assert probe(path) == MediaFacts(2, 31, 47, 16)
    assert read(path, Fit(1, 16, 32), fps=0).shape == (1, 16, 32, 3)


def test_a_video_of_one_frame_is_a_sample_of_one_frame(tmp_path: Path) -> None:
    path = video(tmp_path / "a.mp4", 1)
    assert probe(path).frames == 1
    assert numbers(read(path, Fit(1, 16, 16), fps=24, start="random")) == [0]


def test_a_rotated_video_is_read_upright(tmp_path: Path) -> None:
    path = video(tmp_path / "a.mp4", 3, matrix=CLOCKWISE)
    assert probe(path) == MediaFacts(3, 48, 32, 16)
    frame = read(path, Fit(1, 48, 32), fps=0)[0].float()
    assert frame[:, -6:].min() > 245 and frame[:, :-12].max() < 20  # the white top is now the right side


def test_non_square_pixels_are_resampled_to_square_ones(tmp_path: Path) -> None:
    path = video(tmp_path / "a.mp4", 1, sample_aspect_ratio=Fraction(2, 1))
    assert probe(path) == MediaFacts(1, 32, 96, 16)
    frame = read(path, Fit(1, 16, 96), fps=0)[0]  # covers the width; half of the height is cropped
    assert frame.shape == (16, 96, 3) and frame[:2].max() < 20
    path = video(tmp_path / "b.mp4", 1, sample_aspect_ratio=Fraction(2, 1), matrix=CLOCKWISE)
    assert probe(path) == MediaFacts(1, 48, 16, 16)
    frame = read(path, Fit(1, 24, 16), fps=0)[0]
    assert frame[:, -3:].min() > 240 and frame[:, :-6].max() < 20  # the width is not cropped


def test_large_videos_are_decoded_with_the_colour_standard_of_their_size(tmp_path: Path) -> None:
    red = torch.tensor([200, 30, 30], dtype=torch.uint8).expand(1, 32, 32, 3)
    write_video(red, tmp_path / "a.mp4", 16)
    assert (read(tmp_path / "a.mp4", Fit(1, 32, 32), fps=0).int() - red.int()).abs().max() <= 4
    with av.open(str(tmp_path / "a.mp4")) as container:
        assert next(container.decode(video=0)).colorspace == 1  # BT.709


@pytest.mark.parametrize("gop", [1, 12, 100])
def test_a_window_in_the_middle_equals_one_read_without_seeking(tmp_path: Path, gop: int) -> None:
    path = video(tmp_path / "a.mp4", 60, gop=gop)  # the middle is 27 frames from the start, more than a second
    assert numbers(read(path, Fit(5, 32, 48), fps=0, start="middle")) == [27, 28, 29, 30, 31]
    assert numbers(read(path, Fit(5, 32, 48), fps=8, start="middle")) == [24, 26, 28, 30, 32]
    assert numbers(read(path, Fit(5, 32, 48), fps=0)) == [0, 1, 2, 3, 4]
    # Decoding begins at the last key frame before.
    assert round(next(opened(path).frames(27 / 16)).time * 16) == 27 // gop * gop


def test_a_random_window_follows_torchs_generator_and_reaches_both_ends(tmp_path: Path) -> None:
    path = video(tmp_path / "a.mkv", 8)
    starts = []
    for seed in range(20):
        torch.manual_seed(seed)
        starts.append(numbers(read(path, Fit(5, 32, 48), fps=0, start="random"))[0])
        torch.manual_seed(seed)
        assert numbers(read(path, Fit(5, 32, 48), fps=0, start="random"))[0] == starts[-1]
    assert set(starts) == {0, 1, 2, 3}
    with pytest.raises(ConfigError, match="head, middle, random"):
        read(path, Fit(5, 32, 48), fps=0, start="tail")


def test_a_higher_fps_repeats_frames(tmp_path: Path) -> None:
    path = video(tmp_path / "a.mp4", 5, fps=8)
    assert fit(probe(path), num_frames=81, height=32, width=48, max_pixels=0, multiple=16, fps=16).frames == 9
    assert numbers(read(path, Fit(9, 32, 48), fps=16)) == [0, 0, 1, 1, 2, 2, 3, 3, 4]


def test_a_video_with_variable_frame_rate_is_resampled_by_time(tmp_path: Path) -> None:
    # Ten frames within a second, then ten in the last tenth of another one.
    times = [9_000 * number for number in range(10)] + [171_000 + 900 * number for number in range(10)]
    path = video(tmp_path / "a.mp4", 20, times=times)
    facts = probe(path)
    assert facts.frames == 20 and facts.fps == pytest.approx(19 / (179_100 / 90_000), rel=0.02)
    assert numbers(read(path, Fit(9, 32, 48), fps=5)) == [0, 2, 4, 6, 8, 9, 9, 9, 9]
    assert numbers(read(path, Fit(21, 32, 48), fps=10))[-3:] == [9, 13, 19]
    assert numbers(read(path, Fit(17, 32, 48), fps=0)) == list(range(17))
    assert len(read(path, Fit(13, 32, 48), fps=0, start="middle")) == 13


@pytest.mark.parametrize("late", [0, 90_000])  # by how much the last five frames come late
@pytest.mark.parametrize(("kept_from", "shown"), [(10, range(14, 30)), (11, range(20, 30))])
def test_a_video_cut_without_re_encoding_has_only_its_visible_frames(
    tmp_path: Path, kept_from: int, shown: range, late: int
) -> None:
    times = [5_625 * number + (late if number >= 25 else 0) for number in range(30)]
    whole, part = video(tmp_path / "whole.mp4", 30, gop=10, times=times), tmp_path / "part.mp4"
    with av.open(str(whole)) as source, av.open(str(part), "w") as target:
        copy = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            # Displayed from frame 14 on. Frame 10 is a key frame, which the following frames need; so is frame 20.
            if packet.dts is not None and packet.pts >= times[kept_from]:
                packet.stream, packet.pts, packet.dts = copy, packet.pts - times[14], packet.dts - times[14]
                target.mux(packet)
    with av.open(str(part)) as container:
        assert container.streams.video[0].frames == 30 - kept_from  # what the header says
    assert probe(part).frames == len(shown)
    assert late or probe(part).fps == 16
    assert numbers(read(part, everything(part), fps=0)) == list(shown)
    assert numbers(read(part, Fit(3, 32, 48), fps=8)) == list(shown)[:6:2]


# ---- images


def saved_image(path: Path, image: Image.Image, **settings: Any) -> torch.Tensor:
    image.save(path, **settings)
    facts = probe(path)
    assert (facts.frames, facts.fps) == (1, 0)
    return read(path, Fit(1, facts.height, facts.width), fps=16, start="random")[0]


@pytest.mark.parametrize("kind", ["png", "jpg", "jpeg", "webp", "bmp", "gif", "PNG"])
def test_images_of_every_format_are_read(tmp_path: Path, kind: str) -> None:
    path = saved_image(tmp_path / f"a.{kind}", Image.new("RGB", (20, 10), (200, 30, 30)))
    assert path.shape == (10, 20, 3)
    assert (path.int() - torch.tensor([200, 30, 30])).abs().max() <= 6


def test_every_pixel_format_is_converted_to_8_bit_rgb(tmp_path: Path) -> None:
    def colour(name: str, image: Image.Image, **settings: Any) -> list[int]:
        return saved_image(tmp_path / name, image, **settings)[0, 0].tolist()

    assert colour("grey.png", Image.new("L", (4, 4), 77)) == [77, 77, 77]
    assert colour("bits.png", Image.new("1", (4, 4), 1)) == [255, 255, 255]
    assert colour("16.png", Image.fromarray(np.full((4, 4), 128 * 257, np.uint16))) == [128, 128, 128]
    assert colour("half.png", Image.new("RGBA", (4, 4), (0, 0, 0, 128))) == [127, 127, 127]
    assert colour("clear.png", Image.new("LA", (4, 4), (0, 0))) == [255, 255, 255]
    assert colour("palette.png", Image.new("L", (4, 4), 3).convert("P"), transparency=3) == [255, 255, 255]
    assert colour("clear.webp", Image.new("RGBA", (4, 4), (9, 9, 9, 0)), lossless=True) == [255, 255, 255]
    assert colour("inks.jpg", Image.new("CMYK", (8, 8), (0, 255, 255, 0))) == pytest.approx([255, 0, 0], abs=3)
    Image.new("RGB", (4, 4), (1, 2, 3)).save(tmp_path / "named.png")
    (tmp_path / "named.png").rename(tmp_path / "named.jpg")  # many images of the web have the wrong name
    assert read(tmp_path / "named.jpg", Fit(1, 4, 4), fps=0)[0, 0, 0].tolist() == [1, 2, 3]


def test_the_exif_orientation_of_a_photo_is_applied(tmp_path: Path) -> None:
    pixels = np.zeros((8, 16, 3), np.uint8)
    pixels[:, :8] = 255  # white on the left; orientation 6 means rotate clockwise
    exif = Image.Exif()
    exif[0x0112] = 6
    path = saved_image(tmp_path / "a.png", Image.fromarray(pixels), exif=exif)
    assert path.shape == (16, 8, 3) and path[:8].min() == 255 and path[8:].max() == 0


@pytest.mark.parametrize("kind", ["gif", "webp"])
def test_an_animation_is_read_as_a_video(tmp_path: Path, kind: str) -> None:
    images = [Image.new("RGB", (20, 12), (10 + 4 * number,) * 3) for number in range(6)]
    # Lossless, because otherwise equal neighbours would be merged.
    settings = {"lossless": True} if kind == "webp" else {}
    path = tmp_path / f"a.{kind}"
    images[0].save(path, save_all=True, append_images=images[1:], duration=[100, 100, 300, 100, 100, 100], **settings)
    assert probe(path) == MediaFacts(6, 12, 20, pytest.approx(7.5))
    assert numbers(read(path, Fit(5, 12, 20), fps=0)) == [0, 1, 2, 3, 4]
    assert numbers(read(path, Fit(5, 12, 20), fps=0, start="middle")) == [0, 1, 2, 3, 4]
    assert numbers(read(path, Fit(8, 12, 20), fps=10)) == [0, 1, 2, 2, 2, 3, 4, 5]


def test_the_centre_is_cropped_and_downscaled_without_aliasing(tmp_path: Path) -> None:
    pixels = np.zeros((60, 180, 3), np.uint8)
    pixels[:, :60, 0] = pixels[:, 60:120, 1] = pixels[:, 120:, 2] = 200
    pixels[::4, 60:120, 1] = pixels[3::4, 60:120, 1] = 100  # lines too fine for an image of a quarter of the size
    Image.fromarray(pixels).save(tmp_path / "a.png")
    pixels_read = read(tmp_path / "a.png", Fit(1, 15, 15), fps=0)[0, 2:-2, 2:-2].int()
    assert (pixels_read - torch.tensor([0, 150, 0])).abs().max() <= 6
    assert torch.equal(  # the same size is not touched at all
        read(tmp_path / "a.png", Fit(1, 60, 180), fps=0)[0], torch.from_numpy(pixels)
    )
    assert torch.equal(read(tmp_path / "a.png", Fit(1, 60, 21), fps=0)[0], torch.from_numpy(pixels[:, 79:100]))


# ---- bad files


def refused(path: Path, *parts: str, fit: Fit | None = None) -> None:
    with pytest.raises(BadMedia) as bad:
        read(path, fit or Fit(1, 16, 16), fps=0)
    message = str(bad.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize("kind", ["mp4", "avi", "mov", "mkv", "webm", "gif", "png", "jpg", "jpeg", "webp", "bmp"])
def test_files_that_are_neither_images_nor_videos_are_reported(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    refused(path, "there is no such file")
    path.write_bytes(b"")
    refused(path, "the file is empty")
    for content in (random.Random(0).randbytes(100_000), b"\0" * 1000, b"<html>404 not found</html>"):
        path.write_bytes(content)
        refused(path, "cannot be read as a")


def test_a_file_of_another_kind_is_rejected_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.mp3").write_bytes(b"x")
    refused(tmp_path / "a.mp3", ".mp4")
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    (tmp_path / "a.png").rename(tmp_path / "a.mp4")
    refused(tmp_path / "a.mp4", "cannot be read as a video")
    (tmp_path / "b.mp4").mkdir()
    refused(tmp_path / "b.mp4", "no such file")


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    for name, muxer in (("late.mp4", {}), ("early.mp4", {"movflags": "faststart"})):
        path = video(tmp_path / name, muxer=muxer)
        path.write_bytes(path.read_bytes()[:-300])
        refused(path)
    Image.effect_noise((64, 64), 50).save(tmp_path / "a.png")
    (tmp_path / "a.png").write_bytes((tmp_path / "a.png").read_bytes()[:-500])
    refused(tmp_path / "a.png", "cannot be read as an image")
    # A truncated file of a format without an index has fewer frames, which are used.
    path = video(tmp_path / "a.mkv", 20, codec="mjpeg", pixels="yuvj420p")
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    left = probe(path).frames
    assert 5 < left < 20
    assert numbers(read(path, everything(path), fps=0)) == list(range(left))


def test_a_video_that_changed_since_it_was_listed_is_reported(tmp_path: Path) -> None:
    refused(video(tmp_path / "a.mp4", 5), "has 5 frames, 9 were expected", fit=Fit(9, 32, 48))


@pytest.mark.parametrize("with_cover", [False, True])
def test_a_file_with_only_sound_is_rejected_by_name(tmp_path: Path, with_cover: bool) -> None:
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=8000)
        if with_cover:
            cover = container.add_stream("mjpeg", rate=1)
            cover.height, cover.width, cover.pix_fmt = 16, 16, "yuvj420p"
            cover.disposition = Disposition.attached_pic
            container.mux(cover.encode(av.VideoFrame(16, 16, "yuvj420p")))
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    refused(tmp_path / "a.mp4", "has no video stream")


def test_a_small_file_cannot_exhaust_memory(tmp_path: Path) -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    for side in (12_000, 100_000):
        header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
        body = chunk(b"IDAT", zlib.compress(bytes(1_000_000))) + chunk(b"IEND", b"")
        (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + header + body)
        refused(tmp_path / "a.png", "pixels")
    images = [Image.new("L", (16, 16), number) for number in range(100)]
    images[0].save(tmp_path / "a.gif", save_all=True, append_images=images[1:])
    content = (tmp_path / "a.gif").read_bytes()
    (tmp_path / "a.gif").write_bytes(content[:6] + struct.pack("<HH", 8192, 8192) + content[10:])
    refused(tmp_path / "a.gif", "is too long; convert it to a video")
    path = video(tmp_path / "a.mkv", 2, codec="mjpeg", pixels="yuvj420p")
    content = path.read_bytes()
    at = content.index(b"\xff\xc0\x00\x11\x08") + 5  # the size of a frame in the frame itself
    path.write_bytes(content[:at] + struct.pack(">HH", 15_000, 15_000) + content[at + 4 :])
    refused(path)


@pytest.mark.parametrize("kind", ["mp4", "mkv", "avi"])
def test_a_playlist_with_a_video_suffix_opens_no_other_file(tmp_path: Path, kind: str) -> None:
    secret = video(tmp_path / "secret.ts", 5, codec="mpeg2video")
    for content in (
        f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{secret}\n#EXT-X-ENDLIST\n",
        f"ffconcat version 1.0\nfile {secret}\n",
    ):
        (tmp_path / f"a.{kind}").write_text(content)
        refused(tmp_path / f"a.{kind}", "cannot be read as a video")


def test_damaged_bytes_give_frames_or_a_bad_file_error(tmp_path: Path) -> None:
    chance = random.Random(1)
    Image.effect_noise((32, 32), 50).convert("P").save(
        tmp_path / "a.gif", save_all=True, append_images=[Image.effect_noise((32, 32), 50).convert("P")] * 3
    )
    Image.effect_noise((32, 32), 50).convert("RGB").save(tmp_path / "a.webp")
    paths = [video(tmp_path / "a.mp4", 6), video(tmp_path / "a.mkv", 6), tmp_path / "a.gif", tmp_path / "a.webp"]
    outcomes = set()
    for path in paths:
        whole = path.read_bytes()
        for _ in range(25):
            content = bytearray(whole)
            for _ in range(chance.choice([1, 5, 50])):
                content[chance.randrange(len(content))] = chance.randrange(256)
            path.write_bytes(bytes(content))
            try:
                wanted = fit(probe(path), num_frames=5, height=16, width=16, max_pixels=0, multiple=16, fps=8)
                assert read(path, wanted, fps=8, start="middle").shape == (wanted.frames, 16, 16, 3)
                outcomes.add("frames")
            except BadMedia:
                outcomes.add("bad")
    assert outcomes == {"frames", "bad"}


def test_a_bad_file_error_can_be_sent_between_processes() -> None:
    error = pickle.loads(pickle.dumps(BadMedia(Path("a\n\x1b.mp4"), "is empty")))
    assert isinstance(error, BadMedia) and str(error) == r"a\n\x1b.mp4: is empty" and error.path == Path("a\n\x1b.mp4")


# ---- numbers and images to look at


def test_frames_are_scaled_to_minus_one_to_one_and_back() -> None:
    frames = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16, 1).expand(2, 16, 16, 3)
    unit = to_unit(frames)
    assert unit.shape == (3, 2, 16, 16) and unit.dtype == torch.float32 and unit.is_contiguous()
    assert unit.min() == -1 and unit.max() == 1
    assert torch.equal(from_unit(unit), frames)
    assert torch.equal(from_unit(unit.bfloat16() * 9)[0, 0, 0], torch.tensor([0, 0, 0], dtype=torch.uint8))


def test_a_written_video_can_be_read_and_is_never_overwritten(tmp_path: Path) -> None:
    frames = torch.stack([torch.full((33, 31, 3), 10 + 20 * number, dtype=torch.uint8) for number in range(9)])
    write_video(frames, tmp_path / "a.mp4", 24)
    assert probe(tmp_path / "a.mp4") == MediaFacts(9, 34, 32, 24)
    assert (read(tmp_path / "a.mp4", Fit(9, 33, 31), fps=0).int() - frames.int()).abs().max() <= 4
    with pytest.raises(FileExistsError):
        write_video(frames, tmp_path / "a.mp4", 24)
    held = io.BytesIO()
    write_video(frames, held, 23.976)
    (tmp_path / "b.mp4").write_bytes(held.getvalue())
    assert probe(tmp_path / "b.mp4").fps == pytest.approx(23.976, abs=1e-3)


def test_a_preview_grid_shows_images_in_a_square_and_videos_in_rows() -> None:
    still = torch.full((1, 10, 20, 3), 100, dtype=torch.uint8)
    assert grid([still] * 4).size == (42, 22)
    assert grid([still] * 3, columns=3).size == (64, 10)
    long = torch.arange(81, dtype=torch.uint8).reshape(81, 1, 1, 1).expand(81, 10, 20, 3)
    sheet = grid([long, still])
    assert sheet.size == (8 * 22 - 2, 22)
    assert [sheet.getpixel((22 * number, 0))[0] for number in range(8)] == [0, 11, 23, 34, 46, 57, 69, 80]


def test_captions_are_drawn_below_their_samples_and_labels_above() -> None:
    still = torch.full((1, 30, 120, 3), 100, dtype=torch.uint8)
    sheet = grid([still] * 4, captions=["a red circle", "", "a very long caption " * 20, "teacher: a ball"])
    assert sheet.size == (242, 2 * (30 + 3 * 14 + 2) - 2), "three lines at most"

    def dark(left: int, top: int) -> int:  # pixels of text in the strip below a sample
        strip = sheet.crop((left, top, left + 120, top + 42)).convert("L")
        return sum(value < 128 for value in strip.getdata())

    assert dark(0, 30) > 30 and dark(122, 30) == 0 and dark(0, 104) > 3 * dark(0, 30) and dark(122, 104) > 30
    video = still.expand(3, -1, -1, -1)
    assert grid([video, video], captions=["a red circle"] * 2).size == (3 * 122 - 2, 2 * (30 + 14 + 2) - 2)
    both = torch.cat([labelled(video, "teacher"), labelled(video, "student")], dim=2)
    assert both.shape == (3, 44, 240, 3) and (both[:, 14:] == 100).all()
    assert all((side < 128).any() and not torch.equal(side, both[:, :14, 120:]) for side in [both[:, :14, :120]])


def test_importing_the_readers_does_not_import_a_decoder() -> None:
    import subprocess
    import sys

    code = "import sys; from unisono.recipes.wan.data import media, sources; print({'av', 'PIL'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    assert result.stdout.strip() == "set()"
