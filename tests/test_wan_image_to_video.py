"""Image to video in wan-flow: the inputs of diffusers' pipeline, real ranks, exports that diffusers samples from."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanImageToVideoPipeline
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

import unisono
from command_line import unisono as command
from many_runs import Outcome, Run, identical, many_runs
from unisono.engine.export import export_run
from unisono.engine.recipe import Work
from unisono.errors import ConfigError, UnisonoError
from unisono.recipes.wan.condition.kind import ConditionKind, kind_of
from unisono.recipes.wan.data.crop import Crop
from unisono.recipes.wan.data.media import Fit, probe, read
from unisono.recipes.wan.models.load import build_meta, describe, transformer_config
from unisono.recipes.wan.models.lora import COMFY_FILE
from unisono.recipes.wan.models.vae import WanVae
from unisono.recipes.wan.models.weights import open_weights
from unisono.recipes.wan.tiny.models import tiny_vae
from unisono.recipes.wan.tiny.motion import first_frame_errors, moves
from unisono.recipes.wan.tiny.shapes import Shapes, directions
from unisono.recipes.wan_flow.recipe import WanFlow
from wan_models import SMALL, save_image_pipelines, save_videos

COMMON: dict[str, Any] = {
    **{"mixed_precision": "no", "compile": False, "num_workers": 0, "log_every": 1, "warmup_steps": 0},
    **{"learning_rate": 1e-2, "fps": 8.0, "num_frames": 9, "tensorboard": False, "ema_decay": 0.9},
    **{"global_batch_size": 4, "batch_size": 4, "preview_steps": 2, "num_previews": 2, "eval_levels": 2},
    **{"max_steps": 3, "save_every": 3, "num_eval": 1, "eval_every": 3, "preview_every": -1},
}
FSDP = {"strategy": "fsdp", "batch_size": 2}
LORA = {"lora_rank": 4, "lora_alpha": 8.0}
# name -> model, ranks, settings
Planned = dict[str, tuple[str, int, dict[str, Any]]]
RUNS: Planned = {
    "i2v": ("i2v", 1, {"preview_every": 3}),
    "i2v, 2 ranks fsdp": ("i2v", 2, FSDP),
    "i2v, uncached": ("i2v", 1, {"no_cache": True}),
    "i2v, lora": ("i2v", 1, LORA),
    "flf2v": ("flf2v", 1, {"preview_every": 3}),
    "experts": ("i2v-a14b", 1, {}),
}
SLOW_RUNS: Planned = {
    "i2v": ("i2v", 1, {}),
    "i2v, 2 ranks ddp": ("i2v", 2, {"strategy": "ddp", "batch_size": 1}),
    "i2v, 3 ranks fsdp": ("i2v", 3, FSDP),
    "i2v, context parallel": ("i2v", 2, {"context_parallel": 2}),
    "i2v, recomputed": ("i2v", 1, {"activation_checkpointing": True}),
    "i2v, lora": ("i2v", 1, LORA),
    "i2v, lora, 2 ranks": ("i2v", 2, FSDP | LORA),
    "i2v, lora, on the host": ("i2v", 1, LORA | {"blocks_on_host": 1}),
    "flf2v": ("flf2v", 1, {}),
    "flf2v, 2 ranks": ("flf2v", 2, FSDP),
    "experts": ("i2v-a14b", 1, {}),
    "experts, 2 ranks": ("i2v-a14b", 2, FSDP),
    "experts, first and last": ("i2v-a14b", 1, {"condition": "first_last"}),
    "experts, lora": ("i2v-a14b", 1, LORA),
    "experts, lora, 2 ranks": ("i2v-a14b", 2, LORA | {"strategy": "ddp", "batch_size": 2}),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models and videos."""
    root = tmp_path_factory.mktemp("i2v")
    save_image_pipelines(root)
    save_videos(root / "data")
    return root


def trained(planned: Planned, root: Path, folder: str) -> dict[str, Outcome]:
    def settings(model: str, changes: dict[str, Any]) -> dict[str, Any]:
        paths = {"model_path": str(root / model), "dataset_path": str(root / "data"), "cache_dir": str(root / "cache")}
        return {**COMMON, **paths, **changes}

    outcomes = many_runs(
        [
            Run(name, f"{folder}/{name}", world, settings(model, changes), recipe="wan-flow")
            for name, (model, world, changes) in planned.items()
        ],
        root,
    )
    for name, outcome in outcomes.items():
        assert "error" not in outcome.main, (name, outcome.main)
    return outcomes


@pytest.fixture(scope="module")
def runs(root: Path) -> dict[str, Outcome]:
    """The runs of RUNS, by name."""
    return trained(RUNS, root, "runs")


@pytest.fixture(scope="module")
def slow_runs(root: Path) -> dict[str, Outcome]:
    """The runs of SLOW_RUNS, by name."""
    return trained(SLOW_RUNS, root, "slow_runs")


def recipe_of(folder: Path, model: Path, data: Path, **changes: Any) -> WanFlow:
    """A recipe whose prepare() has run."""
    settings = {"fps": 8.0, "num_frames": 9, "dataset_path": str(data), "model_path": str(model), **changes}
    recipe = WanFlow(WanFlow.Config(**settings))
    recipe.prepare(Work(folder))
    return recipe


def refused(function: Callable[[], Any], *words: str) -> None:
    with pytest.raises(UnisonoError) as error:
        function()
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words), error.value


# Equal to diffusers


def pipeline_inputs(folder: Path, given: Tensor, caption: str, num_frames: int) -> dict[str, Tensor]:
    """What diffusers' pipeline passes to the transformer in its first step."""
    pipeline: Any = WanImageToVideoPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    inputs: dict[str, Tensor] = {}

    def note(transformer: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        inputs.update({name: value for name, value in keywords.items() if isinstance(value, Tensor)})

    pipeline.transformer.register_forward_pre_hook(note, with_kwargs=True)
    first, *last = (Image.fromarray(picture.numpy()) for picture in given)
    pipeline(
        first,
        caption,
        last_image=last[0] if last else None,
        height=given.shape[1],
        width=given.shape[2],
        num_frames=num_frames,
        num_inference_steps=1,
        guidance_scale=1.0,
        output_type="latent",
        max_sequence_length=pipeline.tokenizer.model_max_length,
    )
    return inputs


@pytest.mark.parametrize(
    ("model", "changes"),
    [("i2v", {}), ("flf2v", {}), ("i2v-a14b", {}), ("i2v-a14b", {"condition": "first_last"})],
    ids=["i2v", "flf2v", "a14b first", "a14b first and last"],
)
@pytest.mark.parametrize("cached", [True, False], ids=["cached", "uncached"])
def test_inputs_equal_those_of_the_pipeline_to_the_bit(
    model: str, changes: dict[str, Any], cached: bool, root: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(tmp_path, root / model, root / "data", **changes, no_cache=not cached, text_dtype="float32")
    recipe.frozen()
    data = recipe.dataset("train")
    for index in (0, 3):  # with a picture next to it, and without; of other sizes and numbers of frames
        frames = Crop(9, max_pixels=480 * 832, fps=8.0).read(
            root / "data" / f"v{index}.mp4", Fit(5 if index == 3 else 9, 32, 32 if index == 3 else 64)
        )
        given = frames[[0, -1][: recipe.setup.condition.num_frames]].clone()
        if index == 0:
            given[0] = torch.from_numpy(np.array(Image.open(root / "data/v0.first.png")))
        expected = pipeline_inputs(root / model, given, f"a red ball {index}", len(frames))
        batch = recipe.collate([data[index]])
        condition = recipe._condition(batch)
        assert condition is not None
        channels, keywords = condition.with_noisy(expected["hidden_states"][:, :16])
        assert torch.equal(channels, expected["hidden_states"])
        assert keywords.keys() == expected.keys() & {"encoder_hidden_states_image"}
        for name, image in keywords.items():
            assert image.shape == expected[name].shape and torch.equal(image, expected[name])
        _, text = recipe._encoded(batch)
        assert torch.equal(text, expected["encoder_hidden_states"])


# Training


def close(some: Outcome, other: Outcome) -> None:
    torch.testing.assert_close(some.losses(), other.losses(), rtol=2e-5, atol=0)


def test_two_ranks_train_like_one(runs: dict[str, Outcome]) -> None:
    close(runs["i2v, 2 ranks fsdp"], runs["i2v"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "alone"),
    [
        ("i2v, 2 ranks ddp", "i2v"),
        ("i2v, 3 ranks fsdp", "i2v"),
        ("i2v, context parallel", "i2v"),
        ("i2v, recomputed", "i2v"),
        ("i2v, lora, 2 ranks", "i2v, lora"),
        ("i2v, lora, on the host", "i2v, lora"),
        ("flf2v, 2 ranks", "flf2v"),
        ("experts, 2 ranks", "experts"),
        ("experts, lora, 2 ranks", "experts, lora"),
    ],
)
def test_every_way_of_execution_trains_like_one_rank(name: str, alone: str, slow_runs: dict[str, Outcome]) -> None:
    close(slow_runs[name], slow_runs[alone])


def test_the_cache_does_not_change_a_run(runs: dict[str, Outcome]) -> None:
    assert identical(runs["i2v"].weights(), runs["i2v, uncached"].weights())


@pytest.mark.slow
def test_the_last_frame_matters(slow_runs: dict[str, Outcome]) -> None:
    assert slow_runs["experts"].losses()[0] != slow_runs["experts, first and last"].losses()[0]


def test_previews_show_the_given_frames_beside_what_follows(runs: dict[str, Outcome]) -> None:
    for name, given in (("i2v", 1), ("flf2v", 2)):
        folder = runs[name].folder / "previews"
        sheet = Image.open(folder / "step_00000003_samples.png")
        video = read(folder / "step_00000003_sample_00.mp4", Fit(9, 1, 1), fps=0.0)
        assert len(video) == 9
        shown = probe(folder / "step_00000003_sample_00.mp4")
        assert shown.width == (1 + given) * 128  # 32 × 64 pixels, enlarged twice, beside as many given frames
        assert sheet.width > (given + 8) * 128


# Export


def test_an_exported_pipeline_samples_from_a_picture(runs: dict[str, Outcome], tmp_path: Path) -> None:
    for name in ("i2v", "flf2v", "experts"):
        export_run(runs[name].folder, tmp_path / name)
        pipeline: Any = WanImageToVideoPipeline.from_pretrained(tmp_path / name)
        pipeline.set_progress_bar_config(disable=True)
        picture = Image.new("RGB", (32, 32), "red")
        last = {"last_image": picture} if name == "flf2v" else {}
        video = pipeline(
            picture, "a ball", height=32, width=32, num_frames=5, num_inference_steps=2, guidance_scale=1.0, **last
        ).frames
        assert video.shape == (1, 5, 32, 32, 3)
        index = json.loads((tmp_path / name / "model_index.json").read_text())
        assert index["_class_name"] == "WanImageToVideoPipeline"
    assert index["boundary_ratio"] == 0.9


def test_a_native_export_of_an_image_model_is_read_again(runs: dict[str, Outcome], tmp_path: Path) -> None:
    export_run(runs["flf2v"].folder, tmp_path / "diffusers")
    export_run(runs["flf2v"].folder, tmp_path / "native", file_format="native")
    assert json.loads((tmp_path / "native/config.json").read_text())["model_type"] == "flf2v"
    state = load_file(tmp_path / "diffusers/transformer/diffusion_pytorch_model.safetensors")
    weights = open_weights(tmp_path / "native")
    assert "condition_embedder.image_embedder.pos_embed" in state and set(weights.names()) == state.keys()
    assert all(torch.equal(weights.tensor(name), tensor) for name, tensor in state.items())
    written = transformer_config(describe(tmp_path / "native"))
    expected = {"in_channels": 36, "image_dim": 32, "added_kv_proj_dim": 24, "pos_embed_seq_len": 10}
    assert expected.items() <= written.items()


def test_experts_are_trained_on_their_sides_of_the_boundary_of_image_to_video(root: Path) -> None:
    for source in ({"model_path": str(root / "i2v-a14b")}, {"model_config": "i2v-a14b"}):
        flow = WanFlow(WanFlow.Config(**source, expert="low")).setup.flow
        assert (flow.low, flow.high) == (0.0, 0.9)
    flow = WanFlow(WanFlow.Config(model_path=str(root / "i2v-a14b/transformer"), expert="high")).setup.flow
    assert (flow.low, flow.high) == (0.9, 1.0)


def test_a_lora_of_the_image_attention_has_comfyuis_names_and_does_the_same_in_a_pipeline(
    runs: dict[str, Outcome], root: Path, tmp_path: Path
) -> None:
    export_run(runs["i2v, lora"].folder, tmp_path / "lora")
    names = load_file(tmp_path / "lora" / COMFY_FILE["transformer"]).keys()
    assert {f"diffusion_model.blocks.0.cross_attn.{part}_img.lora_A.weight" for part in "kv"} <= names
    outputs = []
    for file in ("pytorch_lora_weights.safetensors", COMFY_FILE["transformer"], None):
        pipeline: Any = WanImageToVideoPipeline.from_pretrained(root / "i2v")
        if file:
            pipeline.load_lora_weights(str(tmp_path / "lora"), weight_name=file)
        torch.manual_seed(0)
        noisy, text, image = torch.randn(1, 36, 2, 4, 4), torch.randn(1, 512, 32), torch.randn(1, 5, 32)
        with torch.no_grad():
            outputs.append(pipeline.transformer(noisy, torch.tensor([500.0]), text, image, return_dict=False)[0])
    torch.testing.assert_close(outputs[0], outputs[1])
    assert not torch.allclose(outputs[0], outputs[2], atol=1e-4)


def test_native_weights_of_an_image_model_are_read_by_diffusers_names(root: Path, tmp_path: Path) -> None:
    from test_wan_load import native

    state = load_file(root / "flf2v/transformer/diffusion_pytorch_model.safetensors")
    theirs = native(state)
    assert {"img_emb.emb_pos", "img_emb.proj.0.weight", "blocks.0.cross_attn.norm_k_img.weight"} <= theirs.keys()
    for prefix in ("", "model.diffusion_model."):
        save_file({prefix + name: tensor for name, tensor in theirs.items()}, tmp_path / "model.safetensors")
        assert open_weights(tmp_path / "model.safetensors").shapes() == {
            name: tuple(tensor.shape) for name, tensor in state.items()
        }


# What a model is, and bad input


def test_the_condition_follows_from_the_config() -> None:
    plain, channels = {**SMALL}, {**SMALL, "in_channels": 36}
    embeds = {**channels, "image_dim": 32, "added_kv_proj_dim": 24}
    assert kind_of(plain) == ConditionKind("none")
    assert kind_of(channels) == ConditionKind("first", has_channels=True)
    assert kind_of(channels, "first_last") == ConditionKind("first_last", has_channels=True)
    assert kind_of(embeds) == ConditionKind("first", has_channels=True, has_embedding=True)
    assert kind_of({**embeds, "pos_embed_seq_len": 10}).frames == "first_last"
    assert kind_of({**SMALL, "in_channels": 48, "out_channels": 48}, has_token_times=True).frames == "none"
    for config, wrong in (
        (plain, "first"),
        (channels, "none"),
        (embeds, "first_last"),
        ({**embeds, "pos_embed_seq_len": 10}, "first"),
    ):
        refused(lambda config=config, wrong=wrong: kind_of(config, wrong), f"condition {wrong}", "use --condition")


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        ("i2v", {"condition": "first_last"}, ["condition first_last: this model supports only first"]),
        ("i2v", {"num_frames": 1}, ["num_frames 1", "use 5, 9"]),
        ("i2v", {"first_frame": 0.5}, ["first_frame 0.5", "TI2V"]),
        ("i2v", {"parts_path": "i2v-a14b"}, ["has no image_encoder", "pass --parts_path"]),
    ],
)
def test_a_users_mistake_is_refused_in_one_line(
    model: str, changes: dict[str, Any], words: list[str], root: Path, tmp_path: Path
) -> None:
    if "parts_path" in changes:
        changes = {"parts_path": str(root / changes["parts_path"])}
    refused(lambda: recipe_of(tmp_path, root / model, root / "data", **changes), *words)


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "uncached"])
def test_pictures_that_do_not_fit_are_named(cached: bool, root: Path, tmp_path: Path) -> None:
    def opened(leave_out_bad: bool = False) -> Any:
        changes = {"no_cache": not cached, "leave_out_bad": leave_out_bad}
        return recipe_of(tmp_path / "run", root / "i2v-a14b", tmp_path / "data", **changes).dataset("train")

    shutil.copytree(root / "data", tmp_path / "data")
    Image.new("RGB", (64, 48)).save(tmp_path / "data/v0.first.png")
    refused(opened, "v0.first.png: a picture of 48 × 64 pixels does not fit v0.mp4 of 32 × 64", "same aspect ratio")
    Image.new("RGB", (32, 16)).save(tmp_path / "data/v0.first.png")
    refused(opened, "v0.first.png", "at least 32 × 64")
    assert len(opened(leave_out_bad=True)) == 3
    Image.new("RGB", (128, 64)).save(tmp_path / "data/v0.first.png")
    assert len(opened()) == 4
    Image.new("RGB", (64, 32)).save(tmp_path / "data/still.png")
    (tmp_path / "data/still.txt").write_text("a picture")
    refused(opened, "still.png: an image-to-video model needs videos of at least 5 frames, but this one has 1")


def test_a_latent_without_a_video_needs_pictures(root: Path, tmp_path: Path) -> None:
    def opened() -> Any:
        changes = {"condition": "first_last"}
        return recipe_of(tmp_path / "run", root / "i2v-a14b", tmp_path / "data", **changes).dataset("train")

    (tmp_path / "data").mkdir()
    save_file({"latent": torch.randn(16, 2, 4, 4)}, tmp_path / "data/a.latent.safetensors")
    (tmp_path / "data/a.txt").write_text("a ball")
    Image.new("RGB", (32, 32), "red").save(tmp_path / "data/a.first.png")
    refused(opened, "a.latent.safetensors: the model needs its last frame, but there is no video; put a.last.png")
    Image.new("RGB", (32, 32), "blue").save(tmp_path / "data/a.last.png")
    data = opened()
    assert len(data) == 1 and data[0]["condition"].shape == (20, 2, 4, 4)


def test_a_changed_picture_is_encoded_again(root: Path, tmp_path: Path) -> None:
    def first() -> Tensor:
        data = recipe_of(tmp_path / "run", root / "i2v", tmp_path / "data").dataset("train")
        return torch.cat([data[0]["condition"].flatten(), data[0]["image"].flatten()])

    shutil.copytree(root / "data", tmp_path / "data")
    before = first()
    assert torch.equal(before, first())
    Image.new("RGB", (64, 32), "red").save(tmp_path / "data/v0.first.png")
    assert not torch.equal(before, first())
    (tmp_path / "data/v0.first.png").unlink()
    assert not torch.equal(before, first())


def test_a_picture_with_a_caption_of_its_own_is_a_sample(root: Path, tmp_path: Path) -> None:
    from unisono.recipes.wan.data.sources import read_sources

    shutil.copytree(root / "data", tmp_path / "data")
    named = {source.name: source for source in read_sources(tmp_path / "data")}
    assert named["v0"].first == tmp_path / "data/v0.first.png" and named["v1"].first is None
    assert "v0.first" not in named
    (tmp_path / "data/v0.first.txt").write_text("a caption")
    assert "v0.first" in {source.name for source in read_sources(tmp_path / "data")}


def test_a_text_to_video_model_ignores_pictures_and_has_no_condition(root: Path, tmp_path: Path) -> None:
    from wan_models import save_pipelines

    recipe = recipe_of(tmp_path / "run", save_pipelines(tmp_path / "models")["2.1"], root / "data")
    assert recipe.dataset("train")[0].keys() == {"latent", "text", "index"}


def test_a_teacher_that_is_given_frames_is_refused(root: Path) -> None:
    from unisono.recipes.wan_distill.recipe import WanDistill
    from unisono.recipes.wan_distill.settings import Config

    setup = WanDistill(Config(teacher_path=str(root / "i2v-a14b"), data_path="prompts.txt")).setup
    with pytest.raises(ConfigError, match="20 of them for given frames or a control video, and prompts alone"):
        _ = setup.teacher_config


def test_the_example_for_predictions_is_like_a_sample(root: Path, tmp_path: Path) -> None:
    for name in ("i2v", "flf2v", "i2v-a14b"):
        recipe = recipe_of(tmp_path / name, root / name, root / "data", height=32, width=64)
        sample = next(it for it in recipe.dataset("train") if it["latent"].shape[1] == 3)
        shapes = {key: value.shape for key, value in sample.items() if isinstance(value, Tensor)}
        assert {key: value.shape for key, value in recipe.example().items()} == shapes


def test_named_image_models_have_as_many_weights_as_the_published_ones() -> None:
    for name, count in (("i2v-14b", 16_394_878_784), ("i2v-a14b", 14_288_901_184)):
        built = build_meta(transformer_config(None, name))
        assert sum(weight.numel() for weight in built.parameters()) == count


# The tiny model


def test_the_measure_of_motion_knows_where_shapes_move() -> None:
    shapes, vae = Shapes(48, 5, split="eval"), WanVae(tiny_vae())
    clips = torch.stack([shapes[index]["frames"] for index in range(48)])
    named = directions([shapes.plan(index) for index in range(48)])
    decoded = vae.decode(vae.encode(clips))
    assert moves(decoded, named).all() and not moves(decoded.flip(2), named).any()
    assert not moves(decoded, (named + 1) % 4).any()
    assert not moves(decoded[:, :, :1].expand_as(decoded), named).any()
    given = ((clips[:, :, 0] + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1)[:, None]
    errors, of_vae = first_frame_errors(vae, decoded, given)
    assert (errors - of_vae).mean().abs() < 1e-3  # the given frame has 8 bits per value
    errors, _ = first_frame_errors(vae, decoded.roll(1, 0), given)
    assert errors.mean() > 3 * of_vae.mean()


SAMPLE = """
import sys
from diffusers import WanImageToVideoPipeline
from PIL import Image
pipeline = WanImageToVideoPipeline.from_pretrained(sys.argv[1])
picture = Image.new("RGB", (32, 32), "red")
last = {"last_image": picture} if sys.argv[2] == "first_last" else {}
video = pipeline(picture, "a red square moving left", height=32, width=32, num_frames=5, num_inference_steps=2,
                 guidance_scale=1.0, max_sequence_length=16, **last).frames
assert video.shape == (1, 5, 32, 32, 3) and "unisono" not in sys.modules
"""


@pytest.mark.parametrize("condition", ["first", "first_last"])
def test_the_tiny_model_loads_in_a_process_without_unisono(condition: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 1, "num_shapes": 8, "eval_every": -1, "preview_every": -1, "batch_size": 8}
    result = unisono.train(
        "wan-flow",
        **{"model_config": "tiny-i2v", "condition": condition, "output_dir": str(tmp_path / "run"), **settings},
    )
    export_run(result.folder, tmp_path / "exported")
    ended = subprocess.run(
        [sys.executable, "-c", SAMPLE, str(tmp_path / "exported"), condition], capture_output=True, text=True
    )
    assert not ended.returncode, ended.stderr


@pytest.mark.slow
def test_the_tiny_model_keeps_its_first_frame_and_moves_as_the_caption_says(tmp_path: Path) -> None:
    words = ["train", "wan-flow", "--model_config", "tiny-i2v", "--nproc", 2, "--max_steps", 300, "--eval_every", 300]
    ended = command(*words, "--preview_every", -1, cwd=tmp_path, seconds=3600)
    assert not ended.code, ended.err
    (metrics,) = tmp_path.glob("runs/*/metrics.jsonl")
    last = [json.loads(line) for line in metrics.read_text().splitlines() if "eval/moves" in line][-1]
    assert last["eval/moves"] >= 0.75
    assert last["eval/first_frame_error"] <= 1.5 * last["eval/first_frame_error_of_vae"]


@pytest.mark.slow
def test_the_tiny_model_trains_the_same_on_one_two_and_three_ranks(tmp_path: Path) -> None:
    words = ["verify", "wan-flow", "--model_config", "tiny-i2v", "--num_shapes", 96, "--ranks", "1,2,3", "--steps", 2]
    ended = command(*words, cwd=tmp_path, seconds=3600)
    assert not ended.code and "same" in ended.out, ended
