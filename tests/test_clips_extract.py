"""Every video is extracted once and atomically, and unusable files are reported."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from test_clips_video import damaged, film, tone
from unisono.engine.recipe import Work
from unisono.errors import ConfigError, UserError
from unisono.recipes.clips.data import extract
from unisono.recipes.clips.data.extract import Extraction, _Megabytes
from unisono.recipes.clips.data.feature_files import FeatureFile
from unisono.recipes.clips.data.features import ExtractSettings
from unisono.recipes.clips.data.statistics import STATS, _pooled, log_mel, spectra, stats
from unisono.recipes.clips.video.clips import clips

SETTINGS = ExtractSettings()


@dataclass(frozen=True)
class Video:
    name: str
    video: Path | None = None
    features: FeatureFile | None = None


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> list[Video]:
    folder = tmp_path_factory.mktemp("films")
    for number in range(4):
        levels = [(20 + 30 * number + 13 * frame) % 230 for frame in range(20 + 4 * number)]
        film(folder / f"{number}.mp4", levels, sound=tone(len(levels) / 4) if number else None)
    return [Video(path.name, path) for path in sorted(folder.iterdir())]


def filled(folder: Path, videos: Any, settings: ExtractSettings = SETTINGS, **further: Any) -> Extraction:
    extraction = Extraction(folder, videos, settings)
    extraction.fill(Work(folder, _say=further.pop("say", lambda text: None)), **further)
    return extraction


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_stored_arrays_match_the_clips_and_are_memory_mapped(tmp_path: Path, films: list[Video]) -> None:
    for each in filled(tmp_path, films).open():
        target = list(clips(each.source.video, 2.0, 8, (32, 32), 16_000))
        frames, mel, numbers = (each.array(name) for name in ("frames", "mel", "stats"))
        assert isinstance(frames, np.memmap) and each.num_clips == len(target) == len(mel) == len(numbers)
        assert frames.dtype == np.uint8 and mel.dtype == numbers.dtype == np.float16
        assert each.arrays == {"frames": frames.shape, "mel": mel.shape, "stats": numbers.shape}
        np.testing.assert_array_equal(frames, np.stack([clip[0] for clip in target]))
        np.testing.assert_array_equal(
            numbers, np.stack([stats(*clip, spectra(clip[1], 16_000), 16_000) for clip in target])
        )
        if each.has_sound:
            np.testing.assert_array_equal(
                mel, np.stack([log_mel(spectra(clip[1], 16_000), 16_000, 20, 32) for clip in target])
            )
        else:
            assert not mel.any()
        again = pickle.loads(pickle.dumps(each))  # as it is sent to a worker
        np.testing.assert_array_equal(again.array("frames"), frames)


def test_videos_without_sound_work_and_are_reported_once(tmp_path: Path, films: list[Video]) -> None:
    extraction = filled(tmp_path, films)
    assert [each.has_sound for each in extraction.open()] == [False, True, True, True]
    assert extraction.remarks == ["1 of 4 videos have no sound: 0.mp4"]


def test_the_number_of_processes_and_threads_does_not_change_the_written_bytes(
    tmp_path: Path, films: list[Video]
) -> None:
    filled(tmp_path / "one", films)
    filled(tmp_path / "threads", films, workers=3)
    for part in range(3):
        Extraction(tmp_path / "three", films, SETTINGS).fill(Work(tmp_path, part, 3))
        assert len(list((tmp_path / "three").glob("*/facts.json"))) == part + 2  # 4 videos over 3 processes: 2, 1, 1
    assert content(tmp_path / "one") == content(tmp_path / "threads") == content(tmp_path / "three")


def test_a_float64_run_extracts_the_same_features(tmp_path: Path, films: list[Video]) -> None:
    filled(tmp_path / "one", films)
    torch.set_default_dtype(torch.float64)  # as `unisono verify` does
    try:
        filled(tmp_path / "verify", films)
    finally:
        torch.set_default_dtype(torch.float32)
    assert content(tmp_path / "one") == content(tmp_path / "verify")


def test_only_changed_videos_are_extracted_again(tmp_path: Path, films: list[Video]) -> None:
    copies = [Video(each.name, tmp_path / each.name) for each in films[:2]]
    for copy, each in zip(copies, films, strict=False):
        assert copy.video is not None and each.video is not None
        copy.video.write_bytes(each.video.read_bytes())
    cache = tmp_path / "cache"
    filled(cache, copies)
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*.npy")}
    filled(cache, copies)
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.npy")} == before
    assert copies[0].video is not None
    os.utime(copies[0].video, (1, 1))
    filled(cache, copies)
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 3
    filled(cache, copies, ExtractSettings(clip_seconds=1.0))
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 5


def test_a_damaged_folder_is_extracted_again(tmp_path: Path, films: list[Video]) -> None:
    extraction = filled(tmp_path, films)
    whole = content(tmp_path)
    folders = [Path(each.folder) for each in extraction.open()]
    with (folders[0] / "frames.npy").open("r+b") as file:
        file.truncate(1000)
    (folders[1] / "facts.json").write_text('{"arrays": {"../../x": [[1], "uint8"]}}')
    (folders[2] / "mel.npy").unlink()
    with pytest.raises(UserError, match=r"0\.mp4 is not in the cache"):
        extraction.open()
    filled(tmp_path, films)
    assert content(tmp_path) == whole


def extract_until_the_third(folder: Path, films: list[Video], reached: Connection) -> None:
    """Extracts two videos, then waits in the middle of the third."""
    read_blocks = extract.read_blocks

    def slowly(reading: Any, *arguments: Any) -> Any:
        for block in read_blocks(reading, *arguments):
            yield block
            if reading._path == films[2].video:
                reached.send("in the third")
                time.sleep(60)

    extract.read_blocks = slowly
    Extraction(folder, films, SETTINGS).fill(Work(folder))


def test_a_killed_process_leaves_only_complete_videos_and_the_next_one_continues(
    tmp_path: Path, films: list[Video]
) -> None:
    cache = tmp_path / "cache"
    ours, theirs = multiprocessing.Pipe()
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=extract_until_the_third, args=(cache, films, theirs))
    process.start()
    assert ours.recv() == "in the third"
    process.kill()
    process.join()
    partial = list(cache.glob(".*.part"))
    assert len(partial) == 1
    before = {path: path.stat().st_mtime_ns for path in cache.glob("[!.]*/*.npy")}
    assert len({path.parent for path in before}) == 2
    for path in (*partial[0].iterdir(), partial[0]):
        os.utime(path, (1, 1))
    assert len(filled(cache, films).open()) == 4
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert not list(cache.glob(".*.part"))
    filled(tmp_path / "whole", films)
    assert content(cache) == content(tmp_path / "whole")


def test_a_stop_request_takes_effect_between_two_blocks(tmp_path: Path, films: list[Video]) -> None:
    stop_requests = iter([False] * 5 + [True] * 1000)
    Extraction(tmp_path, films, SETTINGS).fill(Work(tmp_path, _asked_to_stop=lambda: next(stop_requests)))
    assert len(list(tmp_path.glob("*/facts.json"))) == 2
    assert not list(tmp_path.glob(".*.part"))


def test_broken_files_are_reported_or_skipped_by_option(tmp_path: Path, films: list[Video]) -> None:
    (tmp_path / "text.mp4").write_text("no video")
    broken = Video("text.mp4", tmp_path / "text.mp4")
    messages: list[str] = []
    extraction = filled(tmp_path / "cache", [films[0], broken, films[1]], say=messages.append)
    assert any("bad file" in line and "text.mp4" in line for line in messages)
    with pytest.raises(ConfigError, match=r"text\.mp4.*--leave_out_bad"):
        extraction.open()
    assert [each.source.name for each in extraction.open(leave_out_bad=True)] == ["0.mp4", "1.mp4"]
    assert "skipping 1 of 3 samples" in extraction.remarks[0] and "text.mp4" in extraction.remarks[0]
    with pytest.raises(ConfigError, match=r"text\.mp4"):
        filled(tmp_path / "cache", [broken]).open(leave_out_bad=True)


def test_a_truncated_video_is_used_and_reported(tmp_path: Path) -> None:
    path = film(tmp_path / "a.mp4", [n * 37 % 200 for n in range(160)], muxer={"movflags": "faststart"})
    path.write_bytes(path.read_bytes()[: int(0.7 * path.stat().st_size)])
    extraction = filled(tmp_path / "cache", [Video("a.mp4", path)])
    (only,) = extraction.open()
    assert only.remark and 0 < only.duration < 39
    assert any("1 of 1 videos are damaged" in remark and "a.mp4" in remark for remark in extraction.remarks)


def test_a_video_with_several_queries_is_extracted_once(tmp_path: Path, films: list[Video]) -> None:
    opened = filled(tmp_path, [films[1], films[1], films[2]]).open()
    assert len(opened) == 3 and opened[0].folder == opened[1].folder != opened[2].folder
    assert len(list(tmp_path.glob("*/facts.json"))) == 2


def test_feature_files_are_stored_as_clips(tmp_path: Path) -> None:
    rows = np.random.RandomState(0).standard_normal((5, 3)).astype(np.float32)
    np.save(tmp_path / "a.npy", rows)
    np.save(tmp_path / "b.npy", rows[:, :2])
    sources = [
        Video("a", features=FeatureFile(tmp_path / "a.npy")),
        Video("b", features=FeatureFile(tmp_path / "b.npy")),
    ]
    (only,) = filled(tmp_path / "cache", sources[:1]).open()
    np.testing.assert_array_equal(only.array("features"), rows)
    assert only.num_clips == 5 and only.duration == 10.0
    with pytest.raises(ConfigError, match="b has features of 2, but a has features of 3"):
        filled(tmp_path / "cache", sources).open()


def test_a_users_function_is_called_with_blocks_of_clips(tmp_path: Path, films: list[Video]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import numpy as np\n"
        "def look(frames, sound, sample_rate):\n"
        "    assert frames.dtype == np.uint8 and frames.shape[1:] == (8, 20, 30, 3), frames.shape\n"
        "    assert sound.shape == (len(frames), 2 * sample_rate)\n"
        "    return np.stack([frames.mean((1, 2, 3, 4)), np.abs(sound).max(1)], axis=1)\n"
        "def wrong(frames, sound, sample_rate):\n"
        "    return np.zeros(3)\n"
        "def broken(frames, sound, sample_rate):\n"
        "    raise KeyError('oh')\n"
        "value = 3\n"
    )
    settings = ExtractSettings(features=f"{file}:look", feature_size=20)
    for each in filled(tmp_path / "cache", films, settings).open():
        seen = each.array("features")
        assert set(each.arrays) == {"features", "mel", "stats"} and seen.shape == (each.num_clips, 2)
        assert (seen[:, 1] > 0.1).any() == each.has_sound
    for name, words in (("wrong", r"shape \(3,\)"), ("broken", "KeyError"), ("value", "not a function"), ("no", "no")):
        with pytest.raises(UserError, match=words):
            filled(tmp_path / "cache", films, ExtractSettings(features=f"{file}:{name}"))
    with pytest.raises(ConfigError, match="expected builtin"):
        filled(tmp_path / "cache", films, ExtractSettings(features="clip"))


def vision_model(folder: Path) -> Path:
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    ViTModel(ViTConfig(**sizes, image_size=16, patch_size=8)).save_pretrained(folder)
    values = {"image_processor_type": "ViTImageProcessor", "do_resize": True, "size": {"height": 16, "width": 16}}
    (folder / "preprocessor_config.json").write_text(json.dumps(values))
    return folder


def test_a_vision_model_of_transformers_sees_each_clip(tmp_path: Path, films: list[Video]) -> None:
    folder = vision_model(tmp_path / "vit")
    settings = ExtractSettings(features=f"transformers:{folder}", feature_size=24)
    first, again = (filled(tmp_path / name, films[:2], settings).open() for name in ("a", "b"))
    for each, other in zip(first, again, strict=True):
        seen = each.array("features")
        assert seen.shape == (each.num_clips, 16) and seen.dtype == np.float16 and np.ptp(seen, axis=0).max() > 0
        np.testing.assert_array_equal(seen, other.array("features"))
    # Weights that can execute code are not loaded.
    weights = next(folder.glob("*.safetensors"))
    torch.save({"x": torch.zeros(1)}, folder / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(ConfigError, match="cannot be loaded"):
        filled(tmp_path / "c", films[:1], settings)
    with pytest.raises(ConfigError, match=r"config\.json"):
        filled(tmp_path / "d", films[:1], ExtractSettings(features=f"transformers:{tmp_path / 'nowhere'}"))


def test_the_columns_of_the_statistics_match_their_names() -> None:
    grey = np.full((8, 32, 32, 3), 100, np.uint8)
    silence = np.zeros(32_000, np.float32)
    none = spectra(silence, 16_000)
    still = stats(grey, silence, none, 16_000)
    assert still.shape == (len(STATS),)
    assert still[STATS.index("frame_difference")] == 0 and still[STATS.index("loudness")] == 0
    assert still[STATS.index("luma")] == pytest.approx(100 / 255, abs=1e-3)
    blinking = grey.copy()
    blinking[::2] = 151
    assert stats(blinking, silence, none, 16_000)[STATS.index("frame_difference")] == pytest.approx(0.2, abs=1e-3)
    red = grey * np.array([2, 1, 0], np.uint8)
    assert stats(red, silence, none, 16_000)[: STATS.index("blue") + 1] == pytest.approx(
        [200 / 255, 100 / 255, 0], abs=1e-3
    )
    wave = np.sin(2 * np.pi * 1000 * np.arange(32_000) / 16_000).astype(np.float32)
    quiet, loud = (
        stats(grey, size * wave, spectra(size * wave, 16_000), 16_000)[STATS.index("loudness")] for size in (0.1, 1.0)
    )
    assert float(loud - quiet) == pytest.approx(20 / 80, abs=2e-3)  # 20 dB of the 80 dB between silence and full scale


def test_a_pure_tone_is_one_band_of_the_log_mel_and_silence_is_the_lowest_value() -> None:
    time_s = np.arange(32_000) / 16_000
    bands = []
    for pitch in (200, 1000, 4000):
        mel = log_mel(spectra(np.sin(2 * np.pi * pitch * time_s).astype(np.float32), 16_000), 16_000, 20, 32)
        assert mel.shape == (20, 32) and mel.dtype == np.float16 and np.ptp(mel.argmax(1)) == 0
        assert -0.15 < mel.max() < 0.05
        bands.append(int(mel.argmax(1)[0]))
    assert bands == sorted(set(bands))
    assert (log_mel(spectra(np.zeros(32_000, np.float32), 16_000), 16_000, 20, 32) == -1).all()
    half = np.where(time_s < 1, np.sin(2 * np.pi * 1000 * time_s), 0).astype(np.float32)
    loud = log_mel(spectra(half, 16_000), 16_000, 20, 32).max(1) > -0.5
    assert loud[:10].all() and not loud[11:].any()


def test_the_spectra_are_those_of_a_short_time_fourier_transform() -> None:
    for number in (32_000, 7_777, 100):
        sound = np.random.default_rng(number).standard_normal(number).astype(np.float32)
        window = torch.hann_window(512, dtype=torch.float64)
        waves = torch.stft(
            torch.from_numpy(sound).double(), 512, 160, window=window, pad_mode="constant", return_complex=True
        )
        expected = (waves.abs() * 2 / window.sum()).square().T.numpy()
        np.testing.assert_allclose(spectra(sound, 16_000), expected, rtol=1e-9, atol=1e-15)
        pooled = functional.adaptive_avg_pool1d(torch.from_numpy(expected).T[None], 20)[0].T.numpy()
        np.testing.assert_allclose(_pooled(expected, 0, 20), pooled, rtol=1e-9, atol=1e-15)


_COUNTED = """
import resource, torch
import numpy as np
from types import SimpleNamespace
from unisono.recipes.clips.data.features import ExtractSettings, read_blocks

draw = np.random.default_rng(0)
clip = (draw.integers(0, 255, (8, 32, 32, 3), dtype=np.uint8), draw.standard_normal(32_000).astype(np.float32))

class Video:
    facts = SimpleNamespace(has_sound=True)
    def __init__(self):
        self.clips = iter([clip] * 300)
    def __iter__(self):
        return self.clips

for threads in (1, 4):
    torch.set_num_threads(threads)
    torch.ones(300, 300) @ torch.ones(300, 300)
    begun = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    for block in read_blocks(Video(), ExtractSettings(), None):
        pass
    print(resource.getrusage(resource.RUSAGE_SELF).ru_utime - begun)
"""


def test_extraction_starts_no_threads_that_wait_for_each_other() -> None:
    """The CPU time of all threads is the same with four threads as with one, even on shared cores."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    words = [sys.executable, "-c", _COUNTED]
    output = subprocess.run(words, capture_output=True, text=True, check=True, env=environment).stdout
    one_thread, four_threads = map(float, output.split())
    assert four_threads < 2 * one_thread + 0.5, output


def test_progress_shows_the_total_and_the_duration(tmp_path: Path, films: list[Video]) -> None:
    messages: list[str] = []
    filled(tmp_path, films, say=messages.append)
    assert messages[0] == "extracting features: 1 MB" and messages[-1].startswith("extracting features: 1 MB in ")


def test_progress_counts_the_megabytes_of_unfinished_videos() -> None:
    read = _Megabytes({"a": 3_000_000, "b": 5_000_000, "c": 1}, ["a", "b"])
    read.reached("a", 1.0)
    read.reached("b", 0.5)
    assert (read.done, read.total) == (6, 8)


def test_damage_to_a_video_is_reported_before_training(tmp_path: Path) -> None:
    path = damaged(tmp_path / "a.mp4")
    extraction = filled(tmp_path / "cache", [Video("a.mp4", path)])
    (only,) = extraction.open()
    assert only.duration == pytest.approx(40, abs=0.5)
    (text,) = extraction.remarks
    assert re.search(r"[1-9]\d* of 160 frames and \d+\.\d of 40\.\d s of sound cannot be decoded", text), text
    assert "40.0 s can be read" not in text
