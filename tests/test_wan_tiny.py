"""The tiny Wan: drawings that match their captions, models that are the same everywhere, a reliable classifier."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from unisono.errors import ConfigError
from unisono.recipes.wan.tiny import make_vae
from unisono.recipes.wan.tiny.classifier import recognised, trained_classifier
from unisono.recipes.wan.tiny.models import (
    TEXT_LENGTH,
    VAE_WEIGHTS,
    tiny_pipeline_parts,
    tiny_text_encoder,
    tiny_tokenizer,
    tiny_transformer_config,
    tiny_vae,
)
from unisono.recipes.wan.tiny.shapes import COLOURS, DIRECTIONS, SHAPES, Shapes, labels

PAIRS = len(COLOURS) * len(SHAPES)


def frames_of(drawings: Shapes) -> Tensor:
    return torch.stack([drawings[i]["frames"] for i in range(len(drawings))])


def labels_of(drawings: Shapes) -> tuple[Tensor, Tensor]:
    return labels([drawings.plan(i) for i in range(len(drawings))])


def accuracy(frames: Tensor, drawings: Shapes) -> dict[str, float]:
    return {name: float(hits.float().mean()) for name, hits in recognised(frames, *labels_of(drawings)).items()}


def test_an_item_depends_only_on_seed_split_and_index() -> None:
    first = Shapes(50)[7]
    torch.manual_seed(123)
    again = Shapes(8)[7]
    assert torch.equal(first["frames"], again["frames"]) and first["caption"] == again["caption"]
    for other in (Shapes(50, seed=1)[7], Shapes(50, split="eval")[7], Shapes(50)[7 + PAIRS]):
        assert not torch.equal(first["frames"], other["frames"])


def test_all_pairs_of_colour_and_shape_are_equally_frequent() -> None:
    drawings = Shapes(3 * PAIRS)
    pairs = [(plan.colour, plan.shape) for plan in map(drawings.plan, range(len(drawings)))]
    assert all(pairs.count((colour, shape)) == 3 for colour in COLOURS for shape in SHAPES)


def test_a_drawing_has_its_captions_colour_in_the_middle_and_grey_corners() -> None:
    for num_frames, size in ((1, 16), (1, 32), (5, 48)):
        drawings = Shapes(PAIRS, num_frames, size)
        for item in map(drawings.__getitem__, range(len(drawings))):
            frames = item["frames"]
            assert frames.shape == (3, num_frames, size, size) and frames.min() >= -1 and frames.max() <= 1
            middle = (frames[:, num_frames // 2, size // 2, size // 2] + 1) / 2
            named = min(COLOURS, key=lambda name: float((middle - torch.tensor(COLOURS[name])).norm()))
            assert named in item["caption"].split()
            corner = frames[:, :, 0, 0]
            assert (corner - corner.mean()).abs().max() < 1e-6


def test_a_clip_moves_in_the_direction_that_its_caption_says() -> None:
    drawings = Shapes(2 * PAIRS, num_frames=9)
    steps = torch.arange(drawings.size, dtype=torch.float32)
    directions = set()
    for i in range(len(drawings)):
        item = drawings[i]
        colourful = item["frames"].amax(0) - item["frames"].amin(0)  # [frames, y, x]; 0 for grey
        weight = colourful.sum((1, 2))
        x, y = (colourful.sum(1) * steps).sum(1) / weight, (colourful.sum(2) * steps).sum(1) / weight
        way = torch.stack([x[-1] - x[0], y[-1] - y[0]])
        moved = max(DIRECTIONS, key=lambda name: float(way @ torch.tensor(DIRECTIONS[name], dtype=torch.float32)))
        assert item["caption"].endswith(f" moving {moved}") and way.norm() > 4
        directions.add(moved)
    assert directions == set(DIRECTIONS)


def test_captions_have_several_phrasings() -> None:
    drawings = Shapes(100 * PAIRS)
    wordings = {drawings.plan(i).caption for i in range(0, len(drawings), PAIRS)}
    assert len(wordings) == 4 and all("red" in wording and "circle" in wording for wording in wordings)


@pytest.mark.parametrize("wrong", [{"num_samples": 0}, {"num_frames": 4}, {"num_frames": 0}, {"size": 8}, {"size": 33}])
def test_an_impossible_dataset_is_rejected(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        Shapes(**{"num_samples": 1, **wrong})


def test_an_index_beyond_the_end_raises_an_error() -> None:
    drawings = Shapes(3)
    assert drawings[-1]["caption"] == drawings[2]["caption"]
    with pytest.raises(IndexError):
        drawings[3]


def test_the_tokenizer_has_words_for_the_captions_and_letters_for_other_words() -> None:
    tokenizer = tiny_tokenizer()
    for drawings in (Shapes(4 * PAIRS), Shapes(4 * PAIRS, num_frames=5)):
        for i in range(len(drawings)):
            caption = drawings.plan(i).caption
            ids = tokenizer(caption).input_ids
            assert len(ids) == len(caption.split()) + 1 <= TEXT_LENGTH and tokenizer.unk_token_id not in ids
    assert len({tuple(tokenizer(word).input_ids) for word in (*COLOURS, *SHAPES, *DIRECTIONS)}) == 14
    assert tokenizer("wolf").input_ids != tokenizer("flow").input_ids
    assert tokenizer.unk_token_id not in tokenizer("An old Wolf, 2 m long!").input_ids
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)


def test_the_tokenizer_is_the_same_after_saving(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    for text in ("a red circle moving left", "wolf", ""):
        assert again(text).input_ids == tokenizer(text).input_ids
    assert again.model_max_length == TEXT_LENGTH


def test_the_text_encoders_weights_are_reproducible_and_do_not_advance_the_random_generator() -> None:
    before = torch.get_rng_state()
    encoder = tiny_text_encoder()
    assert torch.equal(before, torch.get_rng_state())
    digest = hashlib.sha256()
    for _, weight in sorted(encoder.named_parameters()):
        assert not weight.requires_grad
        digest.update(weight.numpy().tobytes())
    assert digest.hexdigest()[:16] == "9b778aca0fc20b86"
    assert not encoder.training


def test_different_captions_have_different_embeddings() -> None:
    tokenizer, encoder = tiny_tokenizer(), tiny_text_encoder()
    captions = [f"a {colour} {shape}" for colour in COLOURS for shape in SHAPES]
    rows = encoder(tokenizer(captions, return_tensors="pt").input_ids).last_hidden_state.flatten(1)
    distances = torch.cdist(rows, rows) + 1e9 * torch.eye(len(rows))
    assert distances.min() > 0.2 * rows.norm(dim=1).mean()


def test_the_vae_reconstructs_its_inputs() -> None:
    vae = tiny_vae()
    for num_frames, least in ((1, 27.0), (5, 24.0), (9, 24.0)):
        assert make_vae.psnr(vae, num_frames, num_samples=24) > least


def test_normalised_latents_have_mean_0_and_standard_deviation_1() -> None:
    vae = tiny_vae()
    space, time = vae.config.scale_factor_spatial, vae.config.scale_factor_temporal
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    for num_frames in (1, 5):
        latents = vae.encode(frames_of(Shapes(48, num_frames, split="eval"))).latent_dist.mean
        assert latents.shape[1:] == (vae.config.z_dim, (num_frames - 1) // time + 1, 32 // space, 32 // space)
        normalised = (latents - mean) / std
        assert normalised.mean().abs() < 0.1 and abs(normalised.std() - 1) < 0.15
        assert vae.decode(latents).sample.shape == (48, 3, num_frames, 32, 32)


def test_the_vae_does_not_advance_the_random_generator() -> None:
    before = torch.get_rng_state()
    tiny_vae()
    assert torch.equal(before, torch.get_rng_state())


def test_the_included_weights_are_small() -> None:
    assert VAE_WEIGHTS.stat().st_size < 300_000


@pytest.mark.parametrize("num_frames", [1, 5])
def test_the_classifier_recognises_held_out_drawings_even_after_the_vae(num_frames: int) -> None:
    drawings, vae = Shapes(4 * PAIRS, num_frames, split="eval"), tiny_vae()
    frames = frames_of(drawings)
    reconstructed = vae.decode(vae.encode(frames).latent_dist.mean).sample
    for images in (frames, reconstructed):
        assert min(accuracy(images, drawings).values()) >= 0.98


def test_the_classifier_detects_a_sample_that_does_not_match_its_caption() -> None:
    drawings = Shapes(PAIRS, split="eval")
    colours, shapes = labels_of(drawings)
    hits = recognised(frames_of(drawings), (colours + 1) % len(COLOURS), (shapes + 1) % len(SHAPES))
    assert not hits["colour"].any() and not hits["shape"].any()


def test_the_classifier_ignores_the_runs_autocast() -> None:
    drawings = Shapes(2 * PAIRS, split="eval")
    frames, outside = frames_of(drawings), trained_classifier()
    expected = accuracy(frames, drawings)
    trained_classifier.cache_clear()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        inside = trained_classifier()
        for weight, same in zip(inside.parameters(), outside.parameters(), strict=True):
            assert torch.equal(weight, same)
        dtypes: set[torch.dtype] = set()
        hook = inside.features.register_forward_hook(lambda module, inputs, output: dtypes.add(output.dtype))
        assert accuracy(frames, drawings) == expected
        hook.remove()
    assert dtypes == {torch.float32}


def test_the_classifier_accepts_other_sizes() -> None:
    drawings = Shapes(2 * PAIRS, size=64, split="eval")
    assert min(accuracy(frames_of(drawings), drawings).values()) >= 0.98


def test_a_pipeline_of_the_tiny_parts_generates_frames() -> None:
    from diffusers import WanPipeline, WanTransformer3DModel

    torch.manual_seed(0)
    pipeline = WanPipeline(
        transformer=WanTransformer3DModel(**tiny_transformer_config()), **tiny_pipeline_parts()._asdict()
    )
    pipeline.set_progress_bar_config(disable=True)
    frames = pipeline(
        "a red circle", height=32, width=32, num_frames=5, num_inference_steps=2, max_sequence_length=TEXT_LENGTH
    ).frames
    assert frames.shape == (1, 5, 32, 32, 3)


def test_make_vae_writes_a_file_that_tiny_vae_reads_and_overwrites_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "vae.safetensors"
    monkeypatch.setattr(make_vae, "_NUM_FOR_STATISTICS", 8)
    monkeypatch.setattr(make_vae, "_NUM_FOR_PSNR", 8)
    assert make_vae.main(["--output", str(file), "--steps", "2"]) == 0
    assert re.search(r"PSNR on held-out drawings, frames 1: \d", capsys.readouterr().out)
    written = file.read_bytes()
    tiny_vae(file)
    assert make_vae.main(["--output", str(file), "--steps", "2"]) == 2
    assert "--force" in capsys.readouterr().err and file.read_bytes() == written


def test_weights_of_another_model_are_rejected(tmp_path: Path) -> None:
    file = tmp_path / "vae.safetensors"
    file.write_bytes(b"no weights")
    with pytest.raises(ConfigError, match=r"vae\.safetensors"):
        tiny_vae(file)
