"""Loading and exporting Wan transformers: every published format, LoRAs, and folders that diffusers loads."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from safetensors.torch import load_file, save_file
from torch import Tensor

from unisono.errors import UserError
from unisono.recipes.wan.export import write_pipeline
from unisono.recipes.wan.models.load import CONFIGS, build, build_meta, describe, transformer_config
from unisono.recipes.wan.models.lora import SECOND, add_lora, load_lora, lora_state, save_lora
from unisono.recipes.wan.models.weight_names import base_name
from unisono.recipes.wan.models.weights import check_fit, fill, open_weights
from unisono.recipes.wan_distill.recipe import WanDistill
from unisono.recipes.wan_distill.settings import Config as DistillConfig
from unisono.recipes.wan_flow.recipe import WanFlow
from unisono.recipes.wan_flow.settings import Config as FlowConfig
from wan_models import SMALL, model, parts

OF_128 = {**SMALL, "num_attention_heads": 1, "attention_head_dim": 128}  # so that native files can be told apart
IMAGE = {**OF_128, "in_channels": 36, "image_dim": 20, "added_kv_proj_dim": 128, "pos_embed_seq_len": 6}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models saved by diffusers itself."""
    root = tmp_path_factory.mktemp("models")
    wide = {**SMALL, "in_channels": 48, "out_channels": 48}
    pipelines: dict[str, dict[str, Any]] = {
        "2.1": {**parts()._asdict(), "transformer": model()},
        "a14b": {**parts()._asdict(), "transformer": model(), "transformer_2": model(seed=1), "boundary_ratio": 0.875},
        "5b": {**parts(48)._asdict(), "transformer": model(wide), "expand_timesteps": True},
    }
    for name, components in pipelines.items():
        WanPipeline(**components).save_pretrained(root / name)
    return {name: root / name for name in pipelines}


def draw(pipeline: Any, size: int = 16) -> Tensor:
    """The frames that a pipeline generates for a prompt."""
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.Generator().manual_seed(0)
    made = pipeline(
        **{"prompt": "a red ball", "height": size, "width": size, "num_frames": 5, "num_inference_steps": 3},
        **{"max_sequence_length": 24, "generator": noise, "output_type": "pt", "guidance_scale": 2.0},
    )
    frames: Tensor = made.frames
    return frames


def velocity(transformer: Any) -> Tensor:
    """The output of a transformer for a fixed input."""
    drawn = torch.Generator().manual_seed(0)
    config = transformer.config
    noisy = torch.randn(2, config.in_channels, 2, 4, 4, generator=drawn)
    text = torch.randn(2, 5, config.text_dim, generator=drawn)
    with torch.no_grad():
        predicted: Tensor = transformer.eval()(noisy, torch.tensor([300.0, 900.0]), text, return_dict=False)[0]
    return predicted


def refused(action: Callable[[], object], *words: str) -> None:
    """Checks that the action raises a one-line user error that contains these words."""
    with pytest.raises(UserError) as caught:
        action()
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value), caught.value


def equal(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


# The sizes


@pytest.mark.parametrize(
    ("name", "count"),
    [("1.3b", 1_418_996_800), ("14b", 14_288_491_584), ("ti2v-5b", 4_999_787_712), ("a14b", 14_288_491_584)],
)
def test_named_sizes_have_the_parameter_counts_of_the_published_models(name: str, count: int) -> None:
    made = build_meta(transformer_config(None, name))
    assert sum(parameter.numel() for parameter in made.parameters()) == count
    assert all(parameter.is_meta for parameter in made.parameters())


def test_a_model_on_meta_has_the_position_tables_of_one_on_the_cpu() -> None:
    for config in (SMALL, {**SMALL, "attention_head_dim": 24, "rope_max_seq_len": 7}):
        real, empty = dict(build(config).named_buffers()), dict(build_meta(config).named_buffers())
        assert real and equal(real, empty)


def test_building_on_meta_draws_no_random_numbers() -> None:
    torch.manual_seed(3)
    build_meta(SMALL)
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(1), after)


def test_a_model_size_can_be_a_name_or_a_json_file(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps({**SMALL, "_class_name": "WanTransformer3DModel"}))
    assert transformer_config(None, str(tmp_path / "mine.json")) == SMALL
    assert transformer_config(None, "TI2V-5B") == CONFIGS["ti2v-5b"]
    assert transformer_config(None, "tiny")["num_layers"] < 10


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_heads": 2}, "num_heads"),
        ({"num_layers": 0}, "num_layers 0"),
        ({"num_layers": "many"}, "num_layers"),
        ({"ffn_dim": 1.5}, "ffn_dim"),
        ({"attention_head_dim": 13}, "attention_head_dim 13"),
        ({"patch_size": [2, 2]}, "patch_size"),
        ({"in_channels": None}, "in_channels"),
    ],
)
def test_an_invalid_model_config_is_rejected(wrong: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps({**SMALL, **wrong}))
    refused(lambda: transformer_config(None, str(tmp_path / "mine.json")), words)


# Contents of model_path


def test_experts_boundary_and_text_length_are_read_from_a_pipeline(folders: dict[str, Path]) -> None:
    plain, both, wide = (describe(folders[name]) for name in ("2.1", "a14b", "5b"))
    assert (plain.kind, list(plain.transformers), plain.boundary_ratio, plain.expand_timesteps, plain.text_length) == (
        *("pipeline", ["transformer"], None, False, 24),
    )
    assert list(both.transformers) == ["transformer", "transformer_2"] and both.boundary_ratio == 0.875
    assert wide.expand_timesteps and wide.boundary_ratio is None
    assert plain.part("vae") == folders["2.1"] / "vae" and plain.part("image_encoder") is None
    assert transformer_config(folders["2.1"]) == transformer_config(describe(folders["2.1"] / "transformer"))
    assert build(transformer_config(plain)).config.num_attention_heads == 2
    refused(lambda: transformer_config(plain, part="transformer_2"), "no transformer_2")


def test_weights_loaded_from_a_folder_equal_those_that_diffusers_loads(folders: dict[str, Path]) -> None:
    theirs = WanTransformer3DModel.from_pretrained(folders["a14b"], subfolder="transformer_2")
    ours = build_meta(transformer_config(folders["a14b"], part="transformer_2"))
    fill(ours, describe(folders["a14b"]).transformers["transformer_2"])
    assert equal(ours.state_dict(), theirs.state_dict())
    assert torch.equal(velocity(ours), velocity(theirs))


def test_tensors_of_shards_can_be_read_by_name_and_by_rows(tmp_path: Path) -> None:
    saved = model()
    saved.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    weights = open_weights(tmp_path)
    assert set(weights.names()) == set(saved.state_dict())
    name = "blocks.1.ffn.net.0.proj.weight"
    whole = saved.state_dict()[name]
    assert weights.shape(name) == tuple(whole.shape)
    assert torch.equal(weights.tensor(name), whole)
    assert torch.equal(weights.rows(name, 5, 9), whole[5:9])
    weights.tensor(name).zero_()
    assert torch.equal(weights.tensor(name), whole), "what is done to a copy is not done to the file"


def test_filled_weights_have_the_dtype_of_the_file_or_of_the_model(tmp_path: Path) -> None:
    saved = model().to(torch.bfloat16)
    saved.save_pretrained(tmp_path)
    as_stored, cast = build_meta(SMALL), build_meta(SMALL)
    fill(as_stored, tmp_path)
    fill(cast, tmp_path, own_dtypes=True)
    assert {parameter.dtype for parameter in cast.parameters()} == {torch.float32}
    assert equal(cast.state_dict(), saved.float().state_dict())
    assert equal(as_stored.state_dict(), saved.bfloat16().state_dict())


def test_weights_of_another_architecture_are_refused_with_both_shapes(tmp_path: Path) -> None:
    model({**SMALL, "num_layers": 3}).save_pretrained(tmp_path / "deep")
    model({**SMALL, "num_attention_heads": 3}).save_pretrained(tmp_path / "wide")
    empty = build_meta(SMALL)
    refused(lambda: fill(empty, tmp_path / "deep"), "another architecture", "it has 3 layers", "the model 2 layers")
    refused(lambda: fill(empty, tmp_path / "wide"), "another architecture", "width 36", "width 24")
    assert all(parameter.is_meta for parameter in empty.parameters()), "nothing was filled"


def test_missing_and_unknown_weights_are_named(tmp_path: Path) -> None:
    state = model().state_dict()
    less = {name: tensor for name, tensor in state.items() if name != "blocks.0.attn1.to_q.bias"}
    save_file(less, tmp_path / "less.safetensors")
    save_file({**state, "blocks.0.extra.weight": torch.zeros(1)}, tmp_path / "more.safetensors")
    refused(lambda: fill(model(), tmp_path / "less.safetensors"), "lacks blocks.0.attn1.to_q.bias")
    refused(lambda: fill(model(), tmp_path / "more.safetensors"), "has blocks.0.extra.weight")


# Native and ComfyUI files


def native(state: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """A diffusers model's weights under the names of the Wan repository, found without our table."""
    pairs = [
        ("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
        ("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
        ("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
        ("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
        ("condition_embedder.time_proj", "time_projection.1"),
        ("condition_embedder.image_embedder.norm1", "img_emb.proj.0"),
        ("condition_embedder.image_embedder.ff.net.0.proj", "img_emb.proj.1"),
        ("condition_embedder.image_embedder.ff.net.2", "img_emb.proj.3"),
        ("condition_embedder.image_embedder.norm2", "img_emb.proj.4"),
        ("condition_embedder.image_embedder.pos_embed", "img_emb.emb_pos"),
        ("ffn.net.0.proj", "ffn.0"),
        *[("ffn.net.2", "ffn.2"), ("proj_out", "head.head"), ("norm2", "norm3"), ("attn1", "self_attn")],
        *[("attn2", "cross_attn"), ("to_out.0", "o"), ("to_q", "q"), ("to_k", "k"), ("to_v", "v")],
        *[("add_k_proj", "k_img"), ("add_v_proj", "v_img"), ("norm_added_k", "norm_k_img")],
    ]
    renamed = {}
    for name, tensor in state.items():
        for ours, theirs in pairs:
            name = name.replace(ours, theirs)
        name = name.replace("scale_shift_table", "modulation" if name.startswith("blocks") else "head.modulation")
        renamed[prefix + name] = tensor.clone()
    return renamed


def public(made: Any) -> list[str]:
    return [name for name in made.config if not name.startswith("_")]


@pytest.mark.parametrize("config", [OF_128, IMAGE], ids=["text", "image"])
def test_native_names_are_converted_like_diffusers_converter_does(config: dict[str, Any], tmp_path: Path) -> None:
    saved = model(config)
    file = tmp_path / "native.safetensors"
    save_file(native(saved.state_dict()), file)
    theirs = convert_wan_transformer_to_diffusers(load_file(file))
    theirs = {
        name.replace("img_emb.emb_pos", "condition_embedder.image_embedder.pos_embed"): it
        for name, it in theirs.items()
    }
    ours = open_weights(file)
    assert equal({name: ours.tensor(name) for name in ours.names()}, theirs)
    folder = describe(file)
    loaded = build_meta({**transformer_config(folder), "rope_max_seq_len": 32})
    assert {name: loaded.config[name] for name in public(saved)} == {name: saved.config[name] for name in public(saved)}
    fill(loaded, folder.transformers["transformer"])
    assert equal(loaded.state_dict(), saved.state_dict())


@pytest.mark.parametrize(
    "prefix", ["model.diffusion_model.", "diffusion_model.", "module.", "_orig_mod.", "module._fsdp_wrapped_module."]
)
@pytest.mark.parametrize("naming", ["native", "diffusers"])
def test_prefixes_of_comfyui_and_of_wrappers_are_removed(prefix: str, naming: str, tmp_path: Path) -> None:
    state = model(OF_128).state_dict()
    names = native(state) if naming == "native" else state
    inside = {name.replace("blocks.1.", "blocks.1._checkpoint_wrapped_module."): it for name, it in names.items()}
    beside = {"vae.decoder.weight": torch.zeros(1)} if "diffusion_model" in prefix else {}
    file = tmp_path / "model.safetensors"
    save_file({**{prefix + name: tensor.clone() for name, tensor in inside.items()}, **beside}, file)
    loaded = build_meta(transformer_config(file))
    fill(loaded, file)
    assert equal(loaded.state_dict(), state)


def test_folders_of_the_wan_repository_are_read(tmp_path: Path) -> None:
    for name, seed in (("high_noise_model", 0), ("low_noise_model", 1)):
        (tmp_path / "a14b" / name).mkdir(parents=True)
        save_file(
            native(model(OF_128, seed).state_dict()), tmp_path / "a14b" / name / "diffusion_pytorch_model.safetensors"
        )
    folder = describe(tmp_path / "a14b")
    assert (folder.kind, folder.boundary_ratio, folder.text_length) == ("native", 0.875, 512)
    low = build_meta(transformer_config(folder, part="transformer_2"))
    fill(low, folder.transformers["transformer_2"])
    assert equal(low.state_dict(), model(OF_128, 1).state_dict())
    place = tmp_path / "a14b" / "low_noise_model"
    (place / "config.json").write_text(json.dumps({"_class_name": "WanModel", "dim": 128}))
    assert describe(place).kind == "native" and describe(place).boundary_ratio is None


def test_files_that_are_not_a_plain_transformer_are_rejected(tmp_path: Path) -> None:
    state = native(model(OF_128).state_dict())
    one = torch.zeros(1)
    cases: dict[str, tuple[dict[str, Tensor], str]] = {
        "vace": ({**state, "vace_blocks.0.before_proj.weight": one}, "is a VACE model (vace_blocks.0.before_proj"),
        "fun": ({**state, "control_adapter.conv.weight": one}, "is a control model (control_adapter.conv.weight) and"),
        "animate": ({**state, "face_adapter.fuser_blocks.0.k.weight": one}, "an Animate model"),
        "s2v": ({**state, "casual_audio_encoder.weights": one}, "a speech-to-video (S2V) model"),
        "lora": ({"diffusion_model.blocks.0.self_attn.q.lora_A.weight": one}, "LoRA"),
        "other": ({"model.layers.0.weight": one}, "not a Wan transformer"),
        "empty": ({}, "not a Wan transformer"),
        "twice": ({**state, "module.head.head.bias": one}, "twice"),
        "half": ({name: it for name, it in state.items() if "patch" not in name}, "not a complete Wan transformer"),
        "narrow": (native(model().state_dict()), "multiple of 128"),
    }
    for name, (tensors, words) in cases.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
        refused(lambda name=name: transformer_config(tmp_path / f"{name}.safetensors"), f"{name}.safetensors", words)


@pytest.mark.parametrize(
    ("kind", "pipeline", "words"),
    [
        ("WanVACETransformer3DModel", "WanVACEPipeline", "is a VACE model (WanVACETransformer3DModel)"),
        ("WanAnimateTransformer3DModel", "WanAnimatePipeline", "is an Animate model"),
        ("VaceWanModel", "WanPipeline", "is a VACE model (VaceWanModel)"),
        ("WanModel_S2V", "WanPipeline", "is a speech-to-video (S2V) model"),
        ("WanControlNet", "WanControlPipeline", "is a control model"),
    ],
)
def test_models_with_other_inputs_than_text_are_rejected_by_name(
    kind: str, pipeline: str, words: str, tmp_path: Path
) -> None:
    expected = "cannot be trained; only text-to-video and image-to-video models"
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "_class_name": kind}))
    refused(lambda: describe(tmp_path), words, expected)
    (tmp_path / "model_index.json").write_text(
        json.dumps({"_class_name": pipeline, "transformer": ["diffusers", kind]})
    )
    refused(lambda: describe(tmp_path), words, expected)


def test_diffusers_vace_weights_are_not_reported_as_a_broken_download(tmp_path: Path) -> None:
    from diffusers import WanVACETransformer3DModel

    sizes = {name: value for name, value in SMALL.items() if name not in ("added_kv_proj_dim", "image_dim")}
    vace = WanVACETransformer3DModel(**sizes, vace_layers=[0], vace_in_channels=16)  # type: ignore[no-untyped-call]
    save_file(vace.state_dict(), tmp_path / "vace.safetensors")
    refused(lambda: describe(tmp_path / "vace.safetensors"), "is a VACE model (vace_", "cannot be trained")


def test_weights_with_unknown_layers_are_reported_as_another_kind_of_model(tmp_path: Path) -> None:
    whole = model()
    save_file({**whole.state_dict(), "something_new.weight": torch.zeros(1)}, tmp_path / "more.safetensors")
    refused(
        lambda: check_fit(whole, open_weights(tmp_path / "more.safetensors")),
        *("has something_new.weight", "it belongs to a kind of model that cannot be trained"),
    )


def test_control_models_are_refused_by_their_channels(tmp_path: Path) -> None:
    save_file(model({**SMALL, "in_channels": 52}).state_dict(), tmp_path / "diffusion_pytorch_model.safetensors")
    config = {**SMALL, "in_channels": 52, "_class_name": "WanTransformer3DModel"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    student = WanDistill(DistillConfig(teacher_path=str(tmp_path), data_path="shapes.txt")).setup
    for look, words in (
        (lambda: WanFlow(FlowConfig(model_path=str(tmp_path))).setup.transformer, "for a control video (Fun, control)"),
        (lambda: student.teacher_config, "for given frames or a control video"),
    ):
        refused(look, str(tmp_path), f"takes 52 channels, 36 of them {words}")


# Bad input


class Trap:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["TRAP"],)


def test_a_pickle_is_refused_and_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAP", str(tmp_path / "sprung"))
    folder = tmp_path / "transformer"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**SMALL, "_class_name": "WanTransformer3DModel"}))
    for place in (tmp_path / "wan.pth", folder / "diffusion_pytorch_model.bin", tmp_path / "lora.pt"):
        place.write_bytes(pickle.dumps(Trap()))
    (tmp_path / "wan.safetensors").write_bytes(pickle.dumps(Trap()))
    refused(lambda: describe(tmp_path / "wan.pth"), "wan.pth is a pickle", "convert it", "weights_only=True")
    refused(lambda: describe(folder), "diffusion_pytorch_model.bin is a pickle")
    refused(lambda: open_weights([tmp_path / "wan.pth"]), "wan.pth is a pickle")
    refused(lambda: load_lora(model(), tmp_path / "lora.pt"), "lora.pt is a pickle")
    refused(lambda: describe(tmp_path / "wan.safetensors"), "cannot be read as safetensors")
    assert not (tmp_path / "sprung").exists()


def test_a_path_that_is_not_a_model_is_rejected_with_the_expected_formats(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    refused(lambda: describe(tmp_path / "nowhere"), "no such file or folder", "hub id")
    refused(lambda: describe(tmp_path), "model_index.json")
    (tmp_path / "config.json").write_text('{"_class_name": "FluxTransformer2DModel"}')
    refused(lambda: describe(tmp_path), "FluxTransformer2DModel")
    (tmp_path / "config.json").write_text("[1]")
    refused(lambda: describe(tmp_path), "JSON object")
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline", "transformer": ["diffusers", "Flux"]}')
    refused(lambda: describe(tmp_path), "FluxPipeline", "Flux")
    refused(lambda: transformer_config(None), "model_path", "model_config")
    refused(lambda: transformer_config(None, "2b"), "1.3b")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes((folders["2.1"] / "transformer" / "diffusion_pytorch_model.safetensors").read_bytes()[:-9])
    refused(lambda: describe(cut), "truncated")


def test_an_unreachable_hub_id_gives_a_one_line_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    refused(lambda: describe("nobody/no-such-model"), "nobody/no-such-model", "hub", "pass its folder")


def test_a_hub_id_that_is_in_the_cache_needs_no_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folders: dict[str, Path]
) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--somebody--wan"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folders["2.1"], cached / "snapshots" / ("0" * 40))
    assert describe("somebody/wan").path == cached / "snapshots" / ("0" * 40)


def test_a_shard_index_cannot_name_files_outside_its_folder(tmp_path: Path) -> None:
    save_file(model().state_dict(), tmp_path / "outside.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))
    refused(lambda: open_weights(folder), "outside of its folder")
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    refused(lambda: open_weights(folder), "lacks gone.safetensors")
    index.write_text("{")
    refused(lambda: open_weights(folder), "damaged")


# LoRA


def trained_lora(config: Mapping[str, Any] = SMALL, alpha: float | None = None, seed: int = 0) -> Any:
    made = model(config, seed)
    add_lora(made, rank=4, alpha=alpha)
    drawn = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=drawn) / 4)
    return made


def test_a_new_lora_leaves_the_outputs_unchanged_and_only_its_weights_train() -> None:
    plain, made = model(), model()
    add_lora(made, rank=4)
    assert torch.equal(velocity(made), velocity(plain))
    trainable = {name for name, parameter in made.named_parameters() if parameter.requires_grad}
    assert trainable == {name for name, _ in made.named_parameters() if ".lora_" in name}
    layers = 2 * (4 + 4 + 2)  # per block: two attentions and the feed-forward layers
    assert len(trainable) == 2 * layers
    assert "blocks.0.attn1.to_q.lora_A.default.weight" in trainable
    assert {reported for name, _ in made.named_parameters() if (reported := base_name(name))} == set(plain.state_dict())


def test_a_lora_is_the_same_on_meta_on_the_cpu_and_on_half_precision_weights() -> None:
    states = []
    for made in (model(), build_meta(SMALL), model(seed=9).to(torch.bfloat16)):
        torch.manual_seed(7)
        add_lora(made, rank=4)
        states.append(lora_state(made))
        assert {tensor.dtype for tensor in states[-1].values()} == {torch.float32}
    assert equal(states[0], states[1]) and equal(states[0], states[2])
    assert all((it != 0).all() if ".lora_A." in name else (it == 0).all() for name, it in states[0].items())
    query, key = (states[0][f"blocks.0.attn1.to_{it}.lora_A.weight"] for it in "qk")
    assert not torch.equal(query, key), "each layer has directions of its own"
    torch.manual_seed(8)
    add_lora(other := build_meta(SMALL), rank=4)
    assert not torch.equal(lora_state(other)["blocks.0.attn1.to_q.lora_A.weight"], query), "and each seed"


def test_base_weights_can_be_loaded_after_a_lora_was_added(tmp_path: Path) -> None:
    saved = model(seed=2)
    saved.save_pretrained(tmp_path)
    made = build_meta(SMALL)
    add_lora(made, rank=4)
    fill(made, tmp_path)
    assert not any(parameter.is_meta for parameter in made.parameters())
    assert {name for name, it in made.named_parameters() if it.requires_grad} and torch.equal(
        velocity(made), velocity(saved)
    )
    assert all(".lora_" in name for name, it in made.named_parameters() if it.requires_grad)


def test_invalid_lora_settings_are_rejected() -> None:
    refused(lambda: add_lora(model(), rank=0), "lora_rank")
    refused(lambda: add_lora(model(), rank=4, alpha=0.0), "lora_alpha")
    refused(lambda: add_lora(model(), rank=4, targets=["to_q", "to_x"]), "to_x", "to_q")
    refused(lambda: add_lora(model(), rank=4, targets=[]), "empty")


@pytest.mark.parametrize("alpha", [None, 12.0])
def test_a_saved_lora_has_the_same_effect_in_a_pipeline_as_in_training(
    alpha: float | None, folders: dict[str, Path], tmp_path: Path
) -> None:
    made = trained_lora(alpha=alpha)
    save_lora(tmp_path, lora_state(made))
    pipeline = WanPipeline.from_pretrained(folders["2.1"])
    before = velocity(pipeline.transformer)
    pipeline.load_lora_weights(tmp_path)
    assert (velocity(pipeline.transformer) - before).abs().max() > 0.01
    torch.testing.assert_close(velocity(pipeline.transformer), velocity(made), rtol=1e-5, atol=1e-5)
    refused(lambda: save_lora(tmp_path, lora_state(made)), "is not overwritten")


def test_loras_of_both_experts_are_loaded_into_their_transformers(folders: dict[str, Path], tmp_path: Path) -> None:
    high, low = trained_lora(seed=0), trained_lora(seed=1)
    description = save_lora(tmp_path, lora_state(high), lora_state(low))
    assert "load_into_transformer_2=True" in description
    pipeline = WanPipeline.from_pretrained(folders["a14b"])
    pipeline.load_lora_weights(str(tmp_path))
    pipeline.load_lora_weights(str(tmp_path / SECOND), load_into_transformer_2=True)
    torch.testing.assert_close(velocity(pipeline.transformer), velocity(high), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(velocity(pipeline.transformer_2), velocity(low), rtol=1e-5, atol=1e-5)
    again = model(seed=1)
    load_lora(again, tmp_path, part="transformer_2")
    torch.testing.assert_close(velocity(again), velocity(low), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("alpha", [None, 1.0])
def test_training_continues_from_a_lora_file(alpha: float | None, tmp_path: Path) -> None:
    made = trained_lora(alpha=12.0)
    save_lora(tmp_path, lora_state(made))
    again = model()
    load_lora(again, tmp_path, alpha)
    torch.testing.assert_close(velocity(again), velocity(made), rtol=1e-5, atol=1e-5)
    assert {name for name, it in again.named_parameters() if it.requires_grad} == {
        name for name, _ in again.named_parameters() if ".lora_" in name
    }


def test_training_continues_from_loras_of_other_programs(tmp_path: Path) -> None:
    made = trained_lora()
    state = lora_state(made)
    comfy, musubi = {}, {}
    for name, tensor in native(state).items():
        layer, _, half = name.removesuffix(".weight").rpartition(".lora_")
        comfy[f"diffusion_model.{name}"] = tensor
        flat = f"lora_unet_{layer.replace('.', '_')}"
        # Half of the strength is in alpha: 2 for a rank of 4.
        musubi[f"{flat}.lora_{'down' if half == 'A' else 'up'}.weight"] = tensor * (1 if half == "A" else 2)
        musubi[f"{flat}.alpha"] = torch.tensor(2.0)
    # A different rank for one layer, as in extracted LoRAs.
    narrow = {name: it[:2] if "lora_A" in name else it[:, :2] for name, it in state.items() if ".1.ffn.net.2." in name}
    mixed = {**{name: it for name, it in state.items() if name not in narrow}, **narrow}
    forms = {"comfy": comfy, "musubi": musubi, "peft": {f"base_model.model.{name}": it for name, it in state.items()}}
    for form, tensors in forms.items():
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / f"{form}.safetensors")
        again = model()
        load_lora(again, tmp_path / f"{form}.safetensors")
        torch.testing.assert_close(velocity(again), velocity(made), rtol=1e-5, atol=1e-5, msg=form)
    save_file({name: tensor.contiguous() for name, tensor in mixed.items()}, tmp_path / "mixed.safetensors")
    again = model()
    load_lora(again, tmp_path / "mixed.safetensors")
    back = lora_state(again)
    products = {name: back[f"{name}.lora_B.weight"] @ back[f"{name}.lora_A.weight"] for name in layers_of(mixed)}
    for name, product in products.items():
        torch.testing.assert_close(product, mixed[f"{name}.lora_B.weight"] @ mixed[f"{name}.lora_A.weight"])


def layers_of(state: Mapping[str, Tensor]) -> set[str]:
    return {name.rpartition(".lora_")[0] for name in state}


def test_only_alpha_is_read_from_diffusers_lora_metadata(tmp_path: Path) -> None:
    made = trained_lora(alpha=12.0)
    made.save_lora_adapter(tmp_path)
    again = model()
    load_lora(again, tmp_path)
    torch.testing.assert_close(velocity(again), velocity(made), rtol=1e-5, atol=1e-5)
    state = {f"transformer.{name}": tensor for name, tensor in lora_state(made).items()}
    notes = {"transformer.r": 4, "transformer.lora_alpha": 4, "transformer.megatron_config": {"a": 1}}
    notes["transformer.megatron_core"] = "this"  # peft would import it
    save_file(state, tmp_path / "noted.safetensors", metadata={"lora_adapter_metadata": json.dumps(notes)})
    third = model()
    load_lora(third, tmp_path / "noted.safetensors")
    torch.testing.assert_close(velocity(third), velocity(made), rtol=1e-5, atol=1e-5)


def test_files_that_are_not_a_lora_of_this_model_are_rejected(tmp_path: Path) -> None:
    save_lora(tmp_path, lora_state(trained_lora({**SMALL, "num_attention_heads": 3})))
    refused(lambda: load_lora(model(), tmp_path), "another architecture", "blocks.0.attn1.to_k")
    refused(lambda: load_lora(model(), tmp_path / "none"), "no such LoRA")
    (tmp_path / "empty").mkdir()
    refused(lambda: load_lora(model(), tmp_path / "empty"), "pytorch_lora_weights.safetensors")
    state = {f"transformer.{name}": it for name, it in lora_state(trained_lora()).items()}
    cases: dict[str, dict[str, Tensor]] = {
        "biased": {**state, "transformer.blocks.0.attn1.to_q.lora_B.bias": torch.zeros(24)},
        "unpaired": {name: it for name, it in state.items() if "to_q.lora_A" not in name},
        "model": model().state_dict(),
        "strange": {"lora_unet_nothing.lora_down.weight": torch.zeros(1)},
    }
    for name, tensors in cases.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
        refused(lambda name=name: load_lora(model(), tmp_path / f"{name}.safetensors"), f"{name}.safetensors")


# Pipelines


def test_an_exported_pipeline_samples_like_the_trained_weights(folders: dict[str, Path], tmp_path: Path) -> None:
    trained = model(seed=3)
    description = write_pipeline(tmp_path / "out", trained, source=describe(folders["2.1"]))
    assert "WanPipeline.from_pretrained" in description
    trained.save_pretrained(tmp_path / "alone")
    expected = WanPipeline.from_pretrained(
        folders["2.1"], transformer=WanTransformer3DModel.from_pretrained(tmp_path / "alone")
    )
    exported = WanPipeline.from_pretrained(tmp_path / "out")
    assert torch.equal(draw(exported), draw(expected))
    assert not torch.equal(draw(exported), draw(WanPipeline.from_pretrained(folders["2.1"])))
    assert describe(tmp_path / "out").text_length == 24


def test_a_pipeline_can_be_written_from_parts_in_memory(tmp_path: Path) -> None:
    trained = model(seed=3)
    write_pipeline(tmp_path / "out", trained, source=parts())
    exported = WanPipeline.from_pretrained(tmp_path / "out")
    assert equal(exported.transformer.state_dict(), trained.state_dict())
    assert draw(exported).isfinite().all()
    assert exported.config.boundary_ratio is None and exported.config.expand_timesteps is False


def test_an_untrained_expert_is_copied_from_the_source(folders: dict[str, Path], tmp_path: Path) -> None:
    trained = model(seed=3)
    source = describe(folders["a14b"])
    write_pipeline(tmp_path / "high", trained, source=source)
    write_pipeline(tmp_path / "low", None, trained, source=source)
    write_pipeline(tmp_path / "both", trained, model(seed=4), source=source, boundary_ratio=0.5)
    high, low, both = (WanPipeline.from_pretrained(tmp_path / name) for name in ("high", "low", "both"))
    assert equal(high.transformer.state_dict(), trained.state_dict())
    assert equal(high.transformer_2.state_dict(), model(seed=1).state_dict())
    assert equal(low.transformer.state_dict(), model(seed=0).state_dict())
    assert equal(low.transformer_2.state_dict(), trained.state_dict())
    assert (high.config.boundary_ratio, both.config.boundary_ratio) == (0.875, 0.5)
    write_pipeline(tmp_path / "grown", trained, model(seed=4), source=describe(folders["2.1"]), boundary_ratio=0.5)
    assert equal(both.transformer_2.state_dict(), model(seed=4).state_dict())
    grown = WanPipeline.from_pretrained(tmp_path / "grown").transformer_2
    assert grown is not None and equal(grown.state_dict(), model(seed=4).state_dict())
    images = [draw(pipeline) for pipeline in (high, low, both)]
    assert not torch.equal(images[0], images[1]) and not torch.equal(images[0], images[2])


def test_an_exported_5b_pipeline_still_uses_timesteps_per_token(folders: dict[str, Path], tmp_path: Path) -> None:
    source = describe(folders["5b"])
    trained = model(transformer_config(source), seed=3)
    write_pipeline(tmp_path / "out", trained, source=source)
    exported = WanPipeline.from_pretrained(tmp_path / "out")
    assert exported.config.expand_timesteps is True
    expected = WanPipeline.from_pretrained(folders["5b"], transformer=exported.transformer)
    assert torch.equal(draw(exported, 32), draw(expected, 32))


def test_exporting_does_not_change_the_source(folders: dict[str, Path], tmp_path: Path) -> None:
    before = {file: file.read_bytes() for file in sorted(folders["2.1"].rglob("*")) if file.is_file()}
    links = tmp_path / "cache"  # as in the hub's cache: links to files elsewhere
    for file in before:
        place = links / file.relative_to(folders["2.1"])
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(file)
    (links / "vae" / "code.py").write_text("raise SystemExit")
    out = tmp_path / "out"
    write_pipeline(out, model(seed=3), source=describe(links))
    assert not any(file.is_symlink() for file in out.rglob("*"))
    assert not (out / "vae" / "code.py").exists()
    for file in out.rglob("*"):
        if file.is_file():
            with file.open("r+b") as opened:  # overwritten in place, as some programs do
                opened.truncate(1)
    assert {file: file.read_bytes() for file in before} == before
    WanPipeline.from_pretrained(links)


def test_without_other_parts_only_the_transformer_is_exported_with_a_note(tmp_path: Path) -> None:
    save_file(native(model(OF_128).state_dict()), tmp_path / "native.safetensors")
    trained = model(OF_128, seed=3)
    description = write_pipeline(tmp_path / "out", trained, source=describe(tmp_path / "native.safetensors"))
    assert "only transformer" in description and "native.safetensors" in description
    assert [place.name for place in (tmp_path / "out").iterdir()] == ["transformer"]
    again = WanTransformer3DModel.from_pretrained(tmp_path / "out" / "transformer")
    assert equal(again.state_dict(), trained.state_dict())
    assert "only transformer" in write_pipeline(tmp_path / "bare", trained)


def test_the_other_expert_of_a_native_model_is_exported_with_diffusers_names(tmp_path: Path) -> None:
    for name, seed in (("high_noise_model", 0), ("low_noise_model", 1)):
        (tmp_path / name).mkdir()
        save_file(native(model(OF_128, seed).state_dict()), tmp_path / name / "diffusion_pytorch_model.safetensors")
    write_pipeline(tmp_path / "out", model(OF_128, seed=3), source=describe(tmp_path))
    low = WanTransformer3DModel.from_pretrained(tmp_path / "out" / "transformer_2")
    assert equal(low.state_dict(), model(OF_128, 1).state_dict())


def test_exporting_overwrites_nothing_and_copies_no_code_or_pickles(folders: dict[str, Path], tmp_path: Path) -> None:
    source = describe(folders["2.1"])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    refused(lambda: write_pipeline(tmp_path / "mine", model(), source=source), "not an empty folder")
    assert [place.name for place in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    odd = tmp_path / "odd"
    WanPipeline.from_pretrained(folders["2.1"]).save_pretrained(odd)
    index = json.loads((odd / "model_index.json").read_text())
    (odd / "model_index.json").write_text(json.dumps({**index, "../mine": ["diffusers", "AutoencoderKLWan"]}))
    refused(lambda: write_pipeline(tmp_path / "a", model(), source=describe(odd)), "../mine")
    (odd / "model_index.json").write_text(json.dumps({**index, "vae": ["my_code", "Vae"]}))
    refused(lambda: write_pipeline(tmp_path / "b", model(), source=describe(odd)), "my_code")
    (odd / "model_index.json").write_text(json.dumps(index))
    (odd / "vae" / "diffusion_pytorch_model.safetensors").rename(odd / "vae" / "diffusion_pytorch_model.bin")
    refused(lambda: write_pipeline(tmp_path / "c", model(), source=describe(odd)), "bin is a pickle")
