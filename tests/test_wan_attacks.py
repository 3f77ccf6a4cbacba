"""Hostile or careless inputs of wan-flow give one clear line and do no harm."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import T5TokenizerFast

import unisono
from unisono.errors import ConfigError, UnisonoError
from unisono.recipes.common.bad_files import BadFiles
from unisono.recipes.common.packs import Packs
from unisono.recipes.wan.checks import check_positions
from unisono.recipes.wan.models.encoders import FolderEncoders
from unisono.recipes.wan.models.load import describe, transformer_config
from unisono.recipes.wan.models.text import TextEncoder
from unisono.recipes.wan.models.vae import WanVae
from unisono.recipes.wan_flow.checks import check_config
from unisono.recipes.wan_flow.settings import Config
from wan_models import parts, save_data, save_pipelines

RUN: dict[str, Any] = {
    **{"mixed_precision": "no", "compile": False, "num_workers": 0, "log_every": 1, "warmup_steps": 0, "max_steps": 1},
    **{"learning_rate": 1e-3, "fps": 8.0, "num_frames": 5, "tensorboard": False, "global_batch_size": 8},
    **{"batch_size": 8, "preview_every": -1},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models and data."""
    root = tmp_path_factory.mktemp("wan")
    save_pipelines(root)
    save_data(root / "data")
    return root


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    """A copy of a model for the test to damage."""
    return Path(shutil.copytree(saved / "2.1", tmp_path / "model"))


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    "bad, words",
    [
        ({"height": 10**12, "width": 16}, "height: expected at most 16384"),
        ({"height": 16384, "width": 16384}, "pixels per sample; expected at most"),
        ({"fps": 1e308}, "fps: expected at most 1000"),
        ({"lora_rank": 10**9}, "lora_rank: expected at most 16384"),
        ({"lora_rank": 4, "lora_alpha": float("nan")}, "lora_alpha: expected a number above 0"),
        ({"num_shapes": 10**12}, "num_shapes: expected at most 1000000"),
        ({"dataset_path": "a\0b"}, "is not a valid path"),
        ({"cache_dir": "\ud800"}, "is not a valid path"),
        ({"model_path": "a" * 5000}, "is not a valid path"),
        ({"lora_rank": 1, "lora_path": "a\x1b[31m"}, "is not a valid path"),
        ({"parts_path": "~nobody-of-this-name/x"}, "is not a valid path"),
        ({"dataset_path": ""}, "dataset_path is empty; expected a folder"),
        ({"preview_prompts": "/dev/no such file.txt"}, "no such file"),
        ({"preview_prompts": "\ud800"}, "is not valid Unicode"),
    ],
)
def test_extreme_settings_are_refused_before_any_work(bad: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(Config(**{"model_path": "model", "num_frames": 81} | bad))
    assert words in str(caught.value) and str(caught.value).isprintable()


def test_a_sample_beyond_the_positions_of_the_model_is_refused() -> None:
    check_positions([(16, 1, 64, 64)], {"rope_max_seq_len": 32, "patch_size": (1, 2, 2)}, 8)
    with pytest.raises(ConfigError, match="too large for this model's rotary embedding"):
        check_positions([(16, 1, 64, 66)], {"rope_max_seq_len": 32, "patch_size": (1, 2, 2)}, 8)


# Models


@pytest.mark.parametrize(
    "config, words",
    [
        ({"_attn_implementation": "somebody/kernel"}, "can load code from the hub"),
        ({"attn_implementation": "somebody/kernel"}, "can load code from the hub"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "is quantized"),
    ],
)
def test_a_text_encoder_that_would_load_code_is_refused(model: Path, config: dict[str, Any], words: str) -> None:
    edit(model / "text_encoder/config.json", **config)
    with pytest.raises(ConfigError, match=words):
        TextEncoder.load(model / "tokenizer", model / "text_encoder", torch.bfloat16)


def test_an_adapter_in_the_text_encoders_folder_is_rejected(model: Path) -> None:
    (model / "text_encoder/adapter_config.json").write_text(
        '{"peft_type": "LORA", "base_model_name_or_path": "/other"}'
    )
    with pytest.raises(ConfigError, match="an adapter can load code and other models"):
        TextEncoder.load(model / "tokenizer", model / "text_encoder", torch.bfloat16)


def test_code_in_a_tokenizers_folder_is_never_run(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer/evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    edit(model / "tokenizer/tokenizer_config.json", auto_map={"AutoTokenizer": [None, "evil.T"]}, tokenizer_class="T")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        TextEncoder.load(model / "tokenizer", model / "text_encoder", torch.bfloat16)
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_with_more_tokens_than_the_text_encoder_knows_is_refused() -> None:
    pieces = [(piece, -1.0) for piece in ("<pad>", "</s>", "<unk>", *map(str, range(100)))]
    with pytest.raises(ConfigError, match="the tokenizer has 103 tokens"):
        TextEncoder(T5TokenizerFast(vocab=pieces, extra_ids=0), parts().text_encoder)


@pytest.mark.parametrize(
    "part, config, words",
    [
        ("text_encoder", {"d_model": "x"}, "d_model 'x'; expected a whole number"),
        ("vae", {"z_dim": "x"}, "z_dim 'x'; expected a whole number"),
        ("vae", {"patch_size": 0}, "patch_size 0; expected a whole number"),
        ("vae", {"dim_mult": 5}, "dim_mult 5; expected a list"),
        ("transformer", {"eps": "x"}, "eps 'x'; expected a small number"),
    ],
)
def test_an_invalid_config_is_named(model: Path, part: str, config: dict[str, Any], words: str) -> None:
    edit(model / part / "config.json", **config)
    with pytest.raises(ConfigError, match=words):
        FolderEncoders(describe(model), transformer_config(model))


@pytest.mark.parametrize("values", [["a"] * 16, 1.0])
def test_statistics_that_are_not_numbers_are_refused(model: Path, values: Any) -> None:
    edit(model / "vae/config.json", latents_mean=values)
    with pytest.raises(ConfigError, match=r"latents_mean|cannot be loaded"):
        WanVae.load(model / "vae")


@pytest.mark.parametrize("boundary", [None, 0, 1, True])
def test_two_experts_without_a_boundary_are_refused(saved: Path, tmp_path: Path, boundary: Any) -> None:
    (tmp_path / "a14b").mkdir()
    for part in ("transformer", "transformer_2"):
        (tmp_path / "a14b" / part).symlink_to(saved / "a14b" / part)
    shutil.copy(saved / "a14b/model_index.json", tmp_path / "a14b")
    edit(tmp_path / "a14b/model_index.json", boundary_ratio=boundary)
    with pytest.raises(ConfigError, match="two transformers, and boundary_ratio"):
        describe(tmp_path / "a14b")


@pytest.mark.parametrize(
    "config", [{"_class_name": "UNet2DModel"}, {"_class_name": "DDIMScheduler"}, {"flow_shift": "x"}]
)
def test_a_broken_scheduler_is_replaced_by_euler(model: Path, config: dict[str, Any]) -> None:
    edit(model / "scheduler/scheduler_config.json", **config)
    scheduler = FolderEncoders(describe(model), transformer_config(model)).scheduler(3.0)
    assert type(scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"


@pytest.mark.parametrize("name", ["config.json", "diffusion_pytorch_model.safetensors"])
def test_a_pipe_in_a_model_is_refused_without_blocking(model: Path, name: str) -> None:
    (model / "transformer" / name).unlink()
    os.mkfifo(model / "transformer" / name)
    with pytest.raises(ConfigError):
        transformer_config(model)
        from unisono.recipes.wan.models.weights import open_weights

        open_weights(model / "transformer")


# The cache


def test_foreign_entries_in_the_cache_are_recomputed(saved: Path, tmp_path: Path) -> None:
    paths = {"model_path": saved / "2.1", "dataset_path": saved / "data", "cache_dir": tmp_path / "cache"}
    settings = RUN | {name: str(path) for name, path in paths.items()}
    first = unisono.train("wan-flow", **settings, output_dir=str(tmp_path / "first"))
    spoil = {"latents": lambda it: it[:3], "text": lambda it: it.repeat(100, 1)}
    for kind, change in spoil.items():
        for pack in (tmp_path / "cache" / kind).glob("*.safetensors"):
            save_file({key: change(tensor).contiguous() for key, tensor in load_file(pack).items()}, pack)
        os.mkfifo(tmp_path / "cache" / kind / "zz.safetensors")
    again = unisono.train("wan-flow", **settings, output_dir=str(tmp_path / "again"))
    assert again.last["loss"] == first.last["loss"]


@pytest.mark.parametrize(
    "entry", [{"shape": [-1, -1], "data_offsets": [-4, 0]}, {"shape": [0], "data_offsets": [0, 0]}]
)
def test_a_pack_with_an_inconsistent_header_is_ignored(tmp_path: Path, entry: dict[str, Any]) -> None:
    header = json.dumps({"key": {"dtype": "F32", **entry}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    Packs(tmp_path).write({"good": torch.ones(2)})
    assert set(Packs(tmp_path).find()) == {"good"}


def test_text_in_the_cache_cannot_send_escape_sequences_to_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "key.json").write_text(json.dumps({"why": "\x1b[31m\ntwo lines"}))
    why = BadFiles(tmp_path).reason("key")
    assert why is not None and why.isprintable()


def test_a_file_at_the_path_of_the_cache_is_reported_and_kept(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("precious")
    paths = {"model_path": saved / "2.1", "dataset_path": saved / "data", "cache_dir": tmp_path / "cache"}
    with pytest.raises(UnisonoError, match="cannot be written"):
        unisono.train("wan-flow", **RUN, **{k: str(v) for k, v in paths.items()}, output_dir=str(tmp_path / "run"))
    assert (tmp_path / "cache").read_text() == "precious"
