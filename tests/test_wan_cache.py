"""Text embeddings, latents and their cache: as diffusers computes them, computed once, never stale."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import shutil
import signal
import string
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader

from unisono.engine.recipe import Work
from unisono.errors import ConfigError, UserError
from unisono.recipes.common import fingerprint, packs
from unisono.recipes.wan.data.cache import Cache, CacheSettings
from unisono.recipes.wan.data.crop import Crop
from unisono.recipes.wan.data.render import write_video
from unisono.recipes.wan.data.sources import read_sources
from unisono.recipes.wan.data.uncached import SampleSizes
from unisono.recipes.wan.models.text import TextEncoder, check_width, clean, pad
from unisono.recipes.wan.models.vae import Geometry, WanVae, check_channels

LENGTH = 24
CROP = Crop(num_frames=9)


def make_text_encoder(seed: int = 0) -> TextEncoder:
    from transformers import T5TokenizerFast, UMT5Config, UMT5EncoderModel

    torch.manual_seed(seed)
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    vocab += [(letter, -3.0) for letter in string.ascii_letters + string.digits + string.punctuation]
    config = UMT5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4)
    return TextEncoder(T5TokenizerFast(vocab=vocab, extra_ids=0), UMT5EncoderModel(config))


def make_vae(seed: int = 0, **config: Any) -> Any:
    from diffusers import AutoencoderKLWan

    torch.manual_seed(seed)
    tiny = {"base_dim": 3, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    return AutoencoderKLWan(**{**tiny, "temperal_downsample": [False, True, True], **config})


def make_vae_2_2() -> Any:
    several = {"z_dim": 48, "in_channels": 12, "out_channels": 12, "is_residual": True, "patch_size": 2}
    statistics = {"latents_mean": [0.01 * n for n in range(48)], "latents_std": [1 + 0.01 * n for n in range(48)]}
    return make_vae(**several, **statistics, scale_factor_spatial=16, scale_factor_temporal=4)


@pytest.fixture(scope="module")
def text_encoder() -> TextEncoder:
    return make_text_encoder()


@pytest.fixture(scope="module")
def latents() -> WanVae:
    return WanVae(make_vae())


@pytest.fixture(scope="module")
def pipeline(text_encoder: TextEncoder) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel

    transformer = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, text_dim=32, ffn_dim=32, num_layers=1, rope_max_seq_len=32
    )
    return WanPipeline(
        text_encoder.tokenizer, text_encoder.model, make_vae(), FlowMatchEulerDiscreteScheduler(), transformer
    )


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory, text_encoder: TextEncoder, latents: WanVae) -> Path:
    folder = tmp_path_factory.mktemp("model")
    text_encoder.tokenizer.save_pretrained(folder / "tokenizer")
    text_encoder.model.save_pretrained(folder / "text_encoder")
    latents.model.save_pretrained(folder / "vae")
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two images, two videos (9 frames, and 7 of which 5 are used), and four captions, two of them equal."""
    from PIL import Image

    folder = tmp_path / "data"
    folder.mkdir()
    pixels = torch.randint(256, (9, 16, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    for name, frame in (("a", pixels[0]), ("b", pixels[1].transpose(0, 1))):
        Image.fromarray(frame.contiguous().numpy()).save(folder / f"{name}.png")
    write_video(pixels, folder / "c.mp4", 8.0)
    write_video(pixels[:7, :, :16], folder / "d.mp4", 8.0)
    for name, caption in zip("abcd", ("red circle", "blue", "red circle", "a longer caption"), strict=True):
        (folder / f"{name}.txt").write_text(caption)
    return folder


class Counted:
    """Replaces the two models; counts how often each was loaded and what it computed."""

    def __init__(self, text_encoder: TextEncoder, latents: WanVae) -> None:
        self.text_encoder, self.latents = text_encoder, latents
        self.loads: list[str] = []
        self.captions: list[str] = []
        self.frames: list[tuple[int, ...]] = []

    def load_text_encoder(self) -> Any:
        self.loads.append("text")
        return self

    def load_vae(self) -> Any:
        self.loads.append("vae")
        return self

    def to(self, device: str) -> Counted:
        return self

    def encode(self, captions: list[str], length: int) -> list[Tensor]:
        self.captions += captions
        return self.text_encoder.encode(captions, length)

    def encode_frames(self, frames: Tensor) -> Tensor:
        self.frames.append(tuple(frames.shape[1:4]))
        return self.latents.encode_frames(frames)


@pytest.fixture
def models(text_encoder: TextEncoder, latents: WanVae) -> Counted:
    return Counted(text_encoder, latents)


def settings_of(models: Counted, **changes: Any) -> CacheSettings:
    settings = CacheSettings(
        vae=models.latents.fingerprint(),
        text=models.text_encoder.fingerprint(),
        geometry=models.latents.geometry,
        text_width=32,
        text_length=LENGTH,
        crop=CROP,
        text_dtype=torch.float32,
    )
    return replace(settings, **changes)


def filled(folder: Path, data: Path, models: Counted, work: Work | None = None, **changes: Any) -> Cache:
    cache = Cache(folder, read_sources(data), settings_of(models, **changes))
    cache.fill(work or Work(folder), models.load_text_encoder, models.load_vae)
    return cache


# Text


CAPTIONS = [
    "",
    "<b> &amp;amp; </b>",
    "a red circle",
    "x" * 200,
    "caf\u00c3\u00a9 &amp;amp; bar\n\n  \t&lt;b&gt; \u201cquoted\u201d",
    "  padded  ",
]


@pytest.mark.parametrize("caption", CAPTIONS)
def test_text_embeddings_equal_the_pipelines_bit_for_bit(
    text_encoder: TextEncoder, pipeline: Any, caption: str
) -> None:
    [rows] = text_encoder.encode([caption], LENGTH)
    theirs, _ = pipeline.encode_prompt(caption, do_classifier_free_guidance=False, max_sequence_length=LENGTH)
    assert torch.equal(pad(rows, LENGTH), theirs[0])
    assert len(rows) == {"": 1, "x" * 200: LENGTH}.get(caption, len(rows))
    assert rows.abs().sum(1).min() > 0  # true rows only


def test_the_embedding_of_a_caption_does_not_depend_on_other_captions(text_encoder: TextEncoder) -> None:
    with torch.autocast("cpu", torch.bfloat16):  # nor on the precision of the run
        together = text_encoder.encode(CAPTIONS, LENGTH)
    for caption, rows in zip(CAPTIONS, together, strict=True):
        assert torch.equal(text_encoder.encode([caption], LENGTH)[0], rows)


def test_captions_are_cleaned_as_diffusers_does() -> None:
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean

    for caption in (*CAPTIONS, "\u00e2\u20ac\u2122s", "&#38;lt;", "\ud800", "\u3000wide\u3000", "\x00\x07 a"):
        assert clean(caption) == prompt_clean(caption)
    assert clean("caf\u00c3\u00a9 &amp;amp;  x ") == "café & x"


def test_without_ftfy_nothing_is_encoded(text_encoder: TextEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ftfy", None)
    with pytest.raises(ConfigError, match=r"ftfy.*pip install"):
        TextEncoder(text_encoder.tokenizer, text_encoder.model)


def test_text_and_latents_are_the_same_from_disk(
    model_folder: Path, text_encoder: TextEncoder, latents: WanVae
) -> None:
    text_folders = model_folder / "tokenizer", model_folder / "text_encoder"
    reloaded = TextEncoder.load(*text_folders, torch.float32)
    assert torch.equal(reloaded.encode(["a red circle"], 9)[0], text_encoder.encode(["a red circle"], 9)[0])
    assert reloaded.fingerprint() == text_encoder.fingerprint()
    frames = torch.rand(1, 3, 5, 16, 16)
    assert torch.equal(WanVae.load(model_folder / "vae").encode(frames), latents.encode(frames))
    assert TextEncoder.load(*text_folders, torch.bfloat16).encode(["a"], 9)[0].dtype == torch.bfloat16


def test_a_model_that_cannot_be_loaded_gives_a_one_line_error(model_folder: Path, tmp_path: Path) -> None:
    vae = tmp_path / "vae"
    vae.mkdir()
    (vae / "config.json").write_bytes((model_folder / "vae/config.json").read_bytes())
    torch.save({"weight": torch.zeros(1)}, vae / "diffusion_pytorch_model.bin")  # pickles are not accepted as weights
    with pytest.raises(ConfigError, match=r"vae cannot be loaded \(.*complete copy") as refusal:
        WanVae.load(vae)
    assert "\n" not in str(refusal.value)
    whole = (model_folder / "vae/diffusion_pytorch_model.safetensors").read_bytes()
    (vae / "diffusion_pytorch_model.safetensors").write_bytes(whole[:-10])
    with pytest.raises(ConfigError, match="vae cannot be loaded"):
        WanVae.load(vae)


def test_missing_weights_are_not_initialised_randomly(
    model_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    loads: dict[str, Callable[[], object]] = {
        "vae": lambda: WanVae.load(folder / "vae"),
        "text_encoder": lambda: TextEncoder.load(folder / "tokenizer", folder / "text_encoder", torch.bfloat16),
    }
    for part, load in loads.items():
        [file] = (folder / part).glob("*.safetensors")
        tensors = load_file(file)
        name = next(iter(tensors))
        del tensors[name]
        save_file(tensors, file, {"format": "pt"})
        with pytest.raises(ConfigError, match=f"{part} lacks 1 of the weights of .* such as {name};"):
            load()
    assert capfd.readouterr().err == ""  # only the error is printed


# Latents


@pytest.mark.parametrize("make", [make_vae, make_vae_2_2])
@pytest.mark.parametrize("frames", [1, 5, 9])
def test_latents_are_the_normalised_mean_of_the_vae(make: Any, frames: int) -> None:
    vae = make()
    latents = WanVae(vae)
    side = latents.geometry.multiple
    pixels = torch.rand(2, 3, frames, side, 2 * side) * 2 - 1
    mine = latents.encode(pixels)
    assert mine.dtype == torch.float32 and tuple(mine.shape[1:]) == latents.geometry.shape(frames, side, 2 * side)
    mean, std = (torch.tensor(vae.config[name])[:, None, None, None] for name in ("latents_mean", "latents_std"))
    with torch.no_grad():
        assert torch.equal(mine[1], (vae.encode(pixels[1:]).latent_dist.mean[0] - mean) / std)
        back = latents.decode(mine)
        torch.testing.assert_close(back, vae.decode(mine * std + mean).sample)
    assert back.shape == pixels.shape and back.abs().max() <= 1


def test_a_latent_does_not_depend_on_the_others_nor_on_autocast(latents: WanVae) -> None:
    pixels = torch.rand(3, 3, 5, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        together = latents.encode(pixels)
    assert torch.equal(together[1:2], latents.encode(pixels[1:2]))


def test_sizes_must_be_divisible_and_frame_counts_4k_plus_1(latents: WanVae) -> None:
    assert latents.geometry == Geometry(16, 4, 8) and latents.geometry.multiple == 16
    assert WanVae(make_vae_2_2()).geometry == Geometry(48, 4, 16)
    assert latents.geometry.tokens((16, 3, 4, 6)) == 18
    with pytest.raises(ConfigError, match=r"got 8; use 5 or 9"):
        latents.encode(torch.rand(1, 3, 8, 16, 16))
    with pytest.raises(ConfigError, match="width 24: this model needs a multiple of 16; use 16 or 32"):
        latents.encode(torch.rand(1, 3, 5, 16, 24))


def test_a_vae_without_latent_statistics_is_rejected() -> None:
    for changes in ({"latents_mean": [0.0] * 3}, {"latents_std": None}, {"latents_std": [0.0] * 16}):
        with pytest.raises(ConfigError, match=f"{next(iter(changes))}"):
            WanVae(make_vae(**changes))
    with pytest.raises(ConfigError, match=r"scale_factor_spatial 16.*set it to 8"):
        WanVae(make_vae(scale_factor_spatial=16))


def test_transformer_vae_and_text_encoder_must_belong_together() -> None:
    check_channels({"z_dim": 16}, {"in_channels": 16, "out_channels": 16})
    check_width({"d_model": 32}, {"text_dim": 32})
    with pytest.raises(ConfigError, match=r"takes 48 channels.*latents have 16"):
        check_channels({"z_dim": 16}, {"in_channels": 48, "out_channels": 48})
    check_channels({"z_dim": 16}, {"in_channels": 36, "out_channels": 16})
    with pytest.raises(ConfigError, match=r"takes 52 channels, and this VAE's latents give 16 .* or 36 "):
        check_channels({"z_dim": 16}, {"in_channels": 52, "out_channels": 16})
    with pytest.raises(ConfigError, match=r"width 32.*takes 4096"):
        check_width({"d_model": 32}, {})


# The cache


def test_the_cache_holds_what_training_without_it_computes(tmp_path: Path, data: Path, models: Counted) -> None:
    cache = filled(tmp_path / "cache", data, models)
    cached = cache.open()
    measured = SampleSizes(tmp_path / "cache", read_sources(data), CROP, models.latents.geometry)
    measured.fill(Work(tmp_path))
    live = measured.open()
    assert len(cached) == len(live) == 4
    assert [cached.shape(index) for index in range(4)] == [(16, 1, 2, 4), (16, 1, 4, 2), (16, 3, 2, 4), (16, 2, 2, 2)]
    assert [cached.cost(index) for index in range(4)] == [2.0, 2.0, 6.0, 2.0]
    for index in range(4):
        kept, item = cached[index], live[index]
        assert (live.shape(index), live.cost(index)) == (cached.shape(index), cached.cost(index))
        assert item["frames"].dtype == torch.uint8 and kept["latent"].dtype == torch.float32
        assert torch.equal(models.latents.encode_frames(item["frames"][None])[0], kept["latent"])
        assert torch.equal(pad(models.text_encoder.encode([item["caption"]], LENGTH)[0], LENGTH), kept["text"])
        assert kept["index"] == item["index"] == index
    assert torch.equal(cache.text(""), pad(models.text_encoder.encode([""], LENGTH)[0], LENGTH))
    assert cached.remarks == live.remarks == ["1 video is shorter than num_frames and trained on fewer frames: d"]


def test_every_distinct_caption_is_encoded_once_and_the_empty_one_always(
    tmp_path: Path, data: Path, models: Counted
) -> None:
    filled(tmp_path / "cache", data, models)
    assert models.captions == ["", "red circle", "blue", "a longer caption"]
    assert models.frames == [(1, 16, 32), (1, 32, 16), (9, 16, 32), (5, 16, 16)]


def test_a_complete_cache_loads_no_model(tmp_path: Path, data: Path, models: Counted) -> None:
    filled(tmp_path / "cache", data, models)
    assert models.loads == ["text", "vae"]
    filled(tmp_path / "cache", data, models)
    assert models.loads == ["text", "vae"]


def test_only_changed_entries_are_recomputed(tmp_path: Path, data: Path, models: Counted) -> None:
    folder = tmp_path / "cache"
    before = filled(folder, data, models).open()[0]["latent"]

    def again(**changes: Any) -> tuple[list[str], int]:
        models.captions, models.frames = [], []
        cache = filled(folder, data, models, **changes)
        assert len(cache.open()) == 4
        return models.captions, len(models.frames)

    (data / "a.png").write_bytes((data / "b.png").read_bytes())
    assert again() == ([], 1)
    other = Cache(folder, read_sources(data), settings_of(models)).open()
    assert not torch.equal(other[0]["latent"].flatten(), before.flatten())
    os.utime(data / "c.mp4", ns=(1, 1))  # the same length, but perhaps another video
    assert again() == ([], 1)
    (data / "b.txt").write_text("green")
    assert again() == (["green"], 0)
    assert again(crop=replace(CROP, height=16, width=16)) == ([], 4)
    assert again(crop=replace(CROP, num_frames=5)) == ([], 2)  # the two videos; images have no window
    assert again(crop=replace(CROP, start="middle")) == ([], 2)
    assert again(crop=replace(CROP, fps=4.0)) == ([], 2)
    assert again(text_length=12) == (["", "red circle", "green", "a longer caption"], 0)
    with torch.no_grad():
        parameter = next(models.latents.model.parameters())
        before = parameter.clone()
        parameter[-1] += 1e-3
        assert again() == ([], 4)
        parameter.copy_(before)
    # All the other settings are still there.
    assert again(crop=replace(CROP, num_frames=5)) == again(text_length=12) == ([], 0)


def test_a_truncated_pack_is_recomputed(tmp_path: Path, data: Path, models: Counted) -> None:
    folder = tmp_path / "cache"
    whole = filled(folder, data, models).open()[2]["latent"].clone()
    [pack] = (folder / "latents").iterdir()
    os.truncate(pack, pack.stat().st_size - 4)
    with pytest.raises(UserError, match="a is not in the cache"):
        Cache(folder, read_sources(data), settings_of(models)).open()
    models.frames, models.captions = [], []
    cached = filled(folder, data, models).open()
    assert len(models.frames) == 4 and not models.captions
    assert torch.equal(cached[2]["latent"], whole)


def in_two_processes(folder: Path, data: Path, models: Counted, pause: float) -> list[multiprocessing.Process]:
    def fill(rank: int) -> None:
        slow = models.latents.encode_frames
        models.latents.encode_frames = lambda frames: (time.sleep(pause), slow(frames))[1]  # type: ignore[method-assign]
        filled(folder, data, models, Work(folder, rank, 2))

    processes = [multiprocessing.get_context("fork").Process(target=fill, args=(rank,)) for rank in range(2)]
    for process in processes:
        process.start()
    return processes  # type: ignore[return-value]


@pytest.fixture
def many(data: Path) -> Path:
    for number in range(12):
        (data / f"e{number}.png").write_bytes((data / "a.png").read_bytes())
        (data / f"e{number}.txt").write_text(f"number {number}")
    return data


def test_two_processes_share_the_work_and_give_the_cache_of_one(tmp_path: Path, many: Path, models: Counted) -> None:
    for process in in_two_processes(tmp_path / "two", many, models, 0.0):
        process.join()
        assert process.exitcode == 0
    sizes = [
        len(json.loads(pack.read_bytes()[8:].split(b"}}")[0] + b"}}")) for pack in (tmp_path / "two/latents").iterdir()
    ]
    assert sorted(sizes) == [8, 8]
    two = filled(tmp_path / "two", many, models).open()
    assert models.loads == []  # nothing was left to do
    one = filled(tmp_path / "one", many, models).open()
    for index in range(16):
        assert all(torch.equal(one[index][name], two[index][name]) for name in ("latent", "text"))


def test_after_a_kill_only_the_rest_is_computed(
    tmp_path: Path, many: Path, models: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packs, "_MAX_TENSORS", 1)
    folder = tmp_path / "cache"
    processes = in_two_processes(folder, many, models, 0.5)
    deadline = time.monotonic() + 60
    while len(list(folder.glob("latents/*.safetensors"))) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    for process in processes:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    survived = {path: path.stat().st_mtime_ns for path in folder.glob("latents/*.safetensors")}
    assert 5 <= len(survived) < 16
    cached = filled(folder, many, models).open()
    assert len(models.frames) == 16 - len(survived)
    assert survived == {path: path.stat().st_mtime_ns for path in survived}
    alone = filled(tmp_path / "alone", many, models).open()
    assert all(torch.equal(cached[index]["latent"], alone[index]["latent"]) for index in range(16))


def test_a_stop_keeps_the_entries_computed_so_far(tmp_path: Path, many: Path, models: Counted) -> None:
    stopping = Work(tmp_path, _asked_to_stop=lambda: len(models.frames) >= 4)
    with pytest.raises(UserError, match="not in the cache"):
        filled(tmp_path / "cache", many, models, stopping).open()
    assert (len(models.captions), len(models.frames)) == (16, 4)
    models.frames = []
    assert len(filled(tmp_path / "cache", many, models).open()) == 16
    assert len(models.frames) == 12


def test_leftovers_of_a_kill_are_removed_when_they_are_old(tmp_path: Path, data: Path, models: Counted) -> None:
    folder = tmp_path / "cache/latents"
    folder.mkdir(parents=True)
    for name in (".old.part", ".young.part"):
        (folder / name).write_bytes(b"half")
    os.utime(folder / ".old.part", (1, 1))
    assert len(filled(tmp_path / "cache", data, models).open()) == 4
    assert sorted(path.name for path in folder.glob(".*")) == [".young.part"]


# Files of others


def test_bad_files_are_reported_or_skipped(tmp_path: Path, data: Path, models: Counted) -> None:
    (data / "a.png").write_bytes(b"no image")
    os.truncate(data / "c.mp4", 200)
    messages: list[str] = []
    cache = filled(tmp_path / "cache", data, models, Work(tmp_path, _say=messages.append))
    with pytest.raises(ConfigError, match=r"2 of 4 samples.*a\.png.*c\.mp4.*--leave_out_bad") as refusal:
        cache.open()
    assert "\n" not in str(refusal.value)
    assert sum(line.startswith("bad file: ") for line in messages) == 2
    cached = cache.open(leave_out_bad=True)
    assert [source.name for source in cached.sources] == ["b", "d"]
    assert cached[1]["latent"].shape == cached.shape(1) == (16, 2, 2, 2)
    assert "skipping 2 of 4 samples" in cached.remarks[0]
    measured = SampleSizes(tmp_path / "cache", read_sources(data), CROP, models.latents.geometry)
    measured.fill(Work(tmp_path))
    assert [source.name for source in measured.open(leave_out_bad=True).sources] == ["b", "d"]
    # A repaired file is tried again, and so is one that could not be read for another reason.
    (data / "a.png").write_bytes((data / "b.png").read_bytes())
    assert [s.name for s in filled(tmp_path / "cache", data, models).open(leave_out_bad=True).sources] == [
        "a",
        "b",
        "d",
    ]


def test_a_dataset_of_only_bad_files_is_an_error(tmp_path: Path, data: Path, models: Counted) -> None:
    for path in data.iterdir():
        if path.suffix != ".txt":
            path.write_bytes(b"no image")
    with pytest.raises(ConfigError, match="4 of 4 samples cannot be used"):
        filled(tmp_path / "cache", data, models).open(leave_out_bad=True)


def test_precomputed_latents_and_embeddings_replace_encoding(tmp_path: Path, data: Path, models: Counted) -> None:
    latent, rows = torch.randn(1, 16, 2, 4, 4, dtype=torch.float16), torch.randn(3, 32)
    save_file({"latent": latent}, data / "a.latent.safetensors")
    save_file({"embeddings": pad(rows, 512)[None]}, data / "a.safetensors")
    save_file({"latent": latent[0, :, 0].contiguous()}, data / "b.latent.safetensors")
    cached = filled(tmp_path / "cache", data, models).open()
    assert len(models.frames) == 2 and models.captions == ["", "blue", "red circle", "a longer caption"]
    assert torch.equal(cached[0]["latent"], latent[0].float()) and torch.equal(cached[0]["text"], pad(rows, LENGTH))
    assert cached.shape(1) == (16, 1, 4, 4)
    with pytest.raises(ConfigError, match=r"a has its own latent or embedding.*no_cache"):
        SampleSizes(tmp_path, read_sources(data), CROP, models.latents.geometry)


BAD_LATENTS = {
    "a latent of 48 channels, but the model takes 16": torch.randn(48, 1, 2, 2),
    "has a latent of 3 × 2; both sides must be divisible by 2": torch.randn(16, 1, 3, 2),
    "a latent of shape": torch.randn(16, 2),
    "not finite": torch.full((16, 1, 2, 2), torch.nan),
    "torch.int64": torch.ones(16, 1, 2, 2, dtype=torch.int64),
}
BAD_EMBEDDINGS = {
    "expected \\(rows, 32\\)": torch.randn(5, 31),
    "25 rows, but the model takes 24": torch.randn(25, 32),
    "an embedding that contains only zeros": torch.zeros(5, 32),
}


def test_precomputed_files_that_do_not_fit_are_refused_by_name(tmp_path: Path, data: Path, models: Counted) -> None:
    def refused(what: str) -> None:
        with pytest.raises(ConfigError, match=what) as refusal:
            filled(tmp_path / "cache", data, models).open()
        assert f"{data / 'a'}." in str(refusal.value)

    for what, tensor in BAD_LATENTS.items():
        save_file({"latent": tensor}, data / "a.latent.safetensors")
        refused(what)
    save_file({"samples": torch.randn(16, 1, 2, 2)}, data / "a.latent.safetensors")
    refused("contains 'samples'; expected a tensor 'latent'")
    (data / "a.latent.safetensors").write_bytes(pickle.dumps(print))
    refused("cannot be read as safetensors")
    (data / "a.latent.safetensors").unlink()
    for what, tensor in BAD_EMBEDDINGS.items():
        save_file({"embeddings": tensor}, data / "a.safetensors")
        refused(what)


def test_names_in_the_cache_do_not_contain_file_names(tmp_path: Path, data: Path, models: Counted) -> None:
    (data / "a.png").write_bytes(b"no image")
    filled(tmp_path / "cache", data, models)
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert len(files) == 3
    assert all(len(path.stem) == 32 and set(path.stem) <= set(string.hexdigits) for path in files)


def test_a_cache_that_cannot_be_written_is_a_user_error(tmp_path: Path, data: Path, models: Counted) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match=r"cannot be written.*use another folder"):
        filled(tmp_path / "cache", data, models)


# The data set


def test_loader_workers_read_the_same(tmp_path: Path, many: Path, models: Counted) -> None:
    cached = filled(tmp_path / "cache", many, models).open()
    part = cached.subset([15, 2, 0])
    assert [source.name for source in part.sources] == [cached.sources[index].name for index in (15, 2, 0)]
    assert part.shape(1) == cached.shape(2) and torch.equal(part[1]["latent"], cached[2]["latent"])
    assert torch.equal(part[0]["text"], cached[15]["text"]) and len(part) == 3
    for item in DataLoader(cached, batch_size=None, num_workers=2):
        assert torch.equal(item["latent"], cached[item["index"]]["latent"])
        assert torch.equal(item["text"], cached[item["index"]]["text"])
    again = pickle.loads(pickle.dumps(cached))
    assert torch.equal(again[2]["latent"], cached[2]["latent"])


def test_a_random_window_cannot_be_cached(tmp_path: Path, data: Path, models: Counted) -> None:
    crop = replace(CROP, num_frames=1, start="random")
    with pytest.raises(ConfigError, match=r"random window cannot be cached.*no_cache"):
        Cache(tmp_path, read_sources(data), settings_of(models, crop=crop))
    measured = SampleSizes(tmp_path / "cache", read_sources(data), crop, models.latents.geometry)
    measured.fill(Work(tmp_path))
    live, videos = measured.open(), set()
    for seed in range(12):
        torch.manual_seed(seed)
        videos.add(live[2]["frames"].numpy().tobytes())
    assert 1 < len(videos) <= 9


# Fingerprints


def test_a_model_on_disk_is_identified_by_its_content(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vae = shutil.copytree(model_folder / "vae", tmp_path / "vae")
    before = fingerprint.of_folders([model_folder / "vae"])
    os.utime(vae / "config.json", (1, 1))
    (vae / "README.md").write_text("new")
    assert fingerprint.of_folders([vae]) == before != fingerprint.of_folders([vae], "torch.bfloat16")
    # Large files are sampled: whole blocks that differ are found without reading everything.
    monkeypatch.setattr(fingerprint, "_MAX_WHOLE", 1000)
    sampled = fingerprint.of_folders([vae])
    weights = vae / "diffusion_pytorch_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert fingerprint.of_folders([vae]) != sampled
    with pytest.raises(ConfigError, match="contains no model"):
        fingerprint.of_folders([tmp_path])


def test_using_a_tokenizer_does_not_change_its_fingerprint(text_encoder: TextEncoder) -> None:
    other = make_text_encoder()
    before = other.fingerprint()
    other.encode(["x"], 7)
    assert other.fingerprint() == before == text_encoder.fingerprint()
    assert make_text_encoder(seed=1).fingerprint() != before


def test_a_video_with_an_empty_caption_is_a_sample(tmp_path: Path, data: Path, models: Counted) -> None:
    (data / "a.txt").write_text("")
    cache = filled(tmp_path / "cache", data, models)
    assert torch.equal(cache.open()[0]["text"], cache.text(""))


def test_extra_captions_are_cached(tmp_path: Path, data: Path, models: Counted) -> None:
    cache = Cache(tmp_path / "cache", read_sources(data), settings_of(models), ["", "a sample to look at", "blue"])
    cache.fill(Work(tmp_path), models.load_text_encoder, models.load_vae)
    assert sorted(models.captions) == ["", "a longer caption", "a sample to look at", "blue", "red circle"]
    for caption in ("", "a sample to look at", "blue"):
        assert torch.equal(cache.text(caption), pad(models.text_encoder.encode([caption], LENGTH)[0], LENGTH))
    assert len(cache.open()) == 4
