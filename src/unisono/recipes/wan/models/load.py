"""Finds and builds a Wan transformer, given a diffusers folder, a hub id, a single file, or the name of a size."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from unisono.config.values import shown
from unisono.errors import ConfigError
from unisono.recipes.common.model_files import read_json
from unisono.recipes.wan.condition.image_encoder import FOLDERS
from unisono.recipes.wan.condition.kind import MASK_CHANNELS, has_condition_channels
from unisono.recipes.wan.models.unsupported import refuse_class
from unisono.recipes.wan.models.weight_names import config_of
from unisono.recipes.wan.models.weights import open_weights, refuse_pickle
from unisono.recipes.wan.settings import TINY_NAMES

_COMMON: dict[str, Any] = {
    **{"patch_size": (1, 2, 2), "attention_head_dim": 128, "text_dim": 4096, "freq_dim": 256},
    **{"cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "eps": 1e-6, "rope_max_seq_len": 1024},
}


def _size(heads: int, layers: int, ffn: int, channels: int) -> dict[str, Any]:
    in_and_out = {"in_channels": channels, "out_channels": channels}
    return {**_COMMON, "num_attention_heads": heads, "num_layers": layers, "ffn_dim": ffn, **in_and_out}


def _with_given_frames(
    size: dict[str, Any], *, image_positions: int | None = None, embedding: bool = True
) -> dict[str, Any]:
    """Returns a size's image-to-video config: input channels for mask and latent, and attention to image embeddings."""
    width = size["num_attention_heads"] * size["attention_head_dim"]
    image = {"image_dim": 1280, "added_kv_proj_dim": width, "pos_embed_seq_len": image_positions} if embedding else {}
    return {**size, "in_channels": 2 * size["out_channels"] + MASK_CHANNELS, **image}


CONFIGS: dict[str, dict[str, Any]] = {
    "1.3b": _size(12, 30, 8960, 16),
    "14b": _size(40, 40, 13824, 16),
    "ti2v-5b": _size(24, 30, 14336, 48),
    "a14b": _size(40, 40, 13824, 16),  # the size of each of its two experts
    "i2v-14b": _with_given_frames(_size(40, 40, 13824, 16)),
    "flf2v-14b": _with_given_frames(_size(40, 40, 13824, 16), image_positions=2 * 257),
    "i2v-a14b": _with_given_frames(_size(40, 40, 13824, 16), embedding=False),
}
BOUNDARIES = {"a14b": 0.875, "i2v-a14b": 0.9}
"""The noise level σ at which a model with two experts switches from the high-noise to the low-noise expert."""
BOUNDARY = BOUNDARIES["a14b"]


def boundary_for(transformer: Mapping[str, Any]) -> float:
    """Returns the boundary between two experts, for models whose published files do not state it."""
    return BOUNDARIES["i2v-a14b" if has_condition_channels(transformer) else "a14b"]


TEXT_LENGTH = 512  # number of text tokens that all published models were trained with
_NUMBERS = (
    *("num_attention_heads", "attention_head_dim", "in_channels", "out_channels", "text_dim", "freq_dim", "ffn_dim"),
    *("num_layers", "rope_max_seq_len"),
)
_NUMBERS_OR_NONE = ("image_dim", "added_kv_proj_dim", "pos_embed_seq_len")
EXPERT_FOLDERS = {
    "transformer": "high_noise_model",
    "transformer_2": "low_noise_model",
}  # diffusers' folder name → the Wan repository's folder name
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PARTS = ("transformer", "transformer_2", "vae", "text_encoder", "tokenizer", "scheduler", *FOLDERS)
_HUB_PARTS = (*_PARTS, *EXPERT_FOLDERS.values())
_HUB_KINDS = ("*.json", "*.safetensors", "*.model", "*.txt")


@dataclass(frozen=True)
class WanFolder:
    """A Wan model on disk."""

    kind: str
    """Kind: pipeline (with model_index.json), transformer (diffusers' folder), native (Wan's own folder), or file."""
    path: Path
    transformers: Mapping[str, Path]
    """The paths of transformer (for A14B the high-noise expert) and transformer_2 (the low-noise expert)."""
    boundary_ratio: float | None = None
    """The noise level σ at which sampling switches to the low-noise expert; None for a single transformer."""
    expand_timesteps: bool = False
    """Whether each token has its own timestep (TI2V)."""
    text_length: int = TEXT_LENGTH
    components: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """The pipeline's parts as listed in model_index.json, each with its library and class."""

    def part(self, name: str) -> Path | None:
        """Returns the folder of another pipeline part (vae, text_encoder, tokenizer, scheduler), or None."""
        folder = self.path / name
        return folder if name in self.components and folder.is_dir() else None


def describe(model_path: str | Path, setting: str = "model_path") -> WanFolder:
    """Inspects a model_path; downloads a hub id first, unless it is cached.

    `setting` is the name of the user's setting, for messages.
    """
    path = _local(model_path, setting)
    if path.is_file():
        return _described_by_weights("file", path, {"transformer": path})
    if (path / "model_index.json").is_file():
        return _pipeline(path, setting)
    experts = {name: path / theirs for name, theirs in EXPERT_FOLDERS.items() if (path / theirs).is_dir()}
    if experts:
        return _described_by_weights("native", path, experts)
    config = read_json(path / "config.json", dict) if (path / "config.json").is_file() else {}
    kind = {"WanTransformer3DModel": "transformer", "WanModel": "native"}.get(str(config.get("_class_name")))
    if kind is None:
        refuse_class(str(config.get("_class_name")), f"{setting} {path}")
        what = f"a {shown(config['_class_name'])}" if "_class_name" in config else "it has no model_index.json"
        raise ConfigError(
            f"{setting} {path} is not a Wan transformer ({what}); expected a diffusers folder, its transformer "
            "folder, a checkpoint folder in Wan's original format or a .safetensors file"
        )
    return _described_by_weights(kind, path, {"transformer": path})


def _local(model_path: str | Path, setting: str) -> Path:
    path = Path(model_path).expanduser()
    if path.exists():
        if path.is_file():
            refuse_pickle(path)
        return path
    if not _HUB_ID.fullmatch(str(model_path)):
        raise ConfigError(
            f"{setting} {model_path}: no such file or folder; pass one, or a hub id such as "
            "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
        )
    from huggingface_hub import snapshot_download

    patterns = ["model_index.json", "config.json", "diffusion_pytorch_model*.safetensors*"]
    patterns += [f"{part}/{kind}" for part in _HUB_PARTS for kind in _HUB_KINDS]
    try:
        return Path(snapshot_download(str(model_path), allow_patterns=patterns))
    except Exception as error:  # network failures raise exceptions from many libraries
        why = str(error).strip().split("\n")[0] or type(error).__name__
        raise ConfigError(
            f"{setting} {model_path}: no such folder, and the download from the hub failed ({why}); check the name and "
            "the network, log in if the model requires it, or download it elsewhere and pass its folder"
        ) from None


def _pipeline(path: Path, setting: str) -> WanFolder:
    index = read_json(path / "model_index.json", dict)
    listed = {
        name: (str(value[0]), str(value[1]))
        for name, value in index.items()
        if isinstance(value, list) and len(value) == 2 and all(value)
    }
    kinds = {listed[name][1] for name in EXPERT_FOLDERS if name in listed}
    if kinds != {"WanTransformer3DModel"}:
        for name in (*sorted(kinds), str(index.get("_class_name"))):
            refuse_class(name, f"{setting} {path}")
        raise ConfigError(
            f"{setting} {path} is a {shown(index.get('_class_name'))} with "
            f"{', '.join(sorted(kinds)) or 'no transformer'}; expected a Wan pipeline with a WanTransformer3DModel"
        )
    transformers = {name: path / name for name in EXPERT_FOLDERS if name in listed}
    for name, folder in transformers.items():
        if not folder.is_dir():
            raise ConfigError(f"{setting} {path} lists {name}, but has no such folder; copy or download it again")
    boundary = index.get("boundary_ratio")
    if boundary is not None and not (isinstance(boundary, int | float) and 0 <= boundary <= 1):
        raise ConfigError(
            f"{path / 'model_index.json'}: boundary_ratio {shown(boundary)}; expected a number from 0 to 1"
        )
    if len(transformers) > 1 and (boundary is None or boundary is True or not 0 < boundary < 1):
        raise ConfigError(
            f"{path / 'model_index.json'}: two transformers, and boundary_ratio {shown(boundary)}; expected the noise "
            f"level at which one hands over to the other, such as {BOUNDARY}"
        )
    return WanFolder(
        "pipeline", path, transformers, boundary, bool(index.get("expand_timesteps")), _text_length(path), listed
    )


def _described_by_weights(kind: str, path: Path, transformers: Mapping[str, Path]) -> WanFolder:
    """Describes a model by its number of channels, because the Wan repository states its properties only in code."""
    shapes = open_weights(next(iter(transformers.values()))).shapes()
    channels = (*shapes.get("patch_embedding.weight", ()), 0, 0)[1]
    boundary = BOUNDARIES["a14b" if channels == 16 else "i2v-a14b"] if len(transformers) > 1 else None
    return WanFolder(kind, path, transformers, boundary, expand_timesteps=channels == 48)


def _text_length(path: Path) -> int:
    config = path / "tokenizer" / "tokenizer_config.json"
    length = read_json(config, dict).get("model_max_length") if config.is_file() else None
    # A tokenizer without a limit has a model_max_length of about 10^30.
    return length if type(length) is int and 0 < length < TEXT_LENGTH else TEXT_LENGTH


def transformer_config(
    model_path: str | Path | WanFolder | None, model_config: str | None = None, part: str = "transformer"
) -> dict[str, Any]:
    """Returns the arguments of WanTransformer3DModel, from model_config (a size or a JSON file) or from the model."""
    if model_config is not None:
        return _named_config(model_config)
    if model_path is None:
        raise ConfigError(
            f"no model: pass model_path, or model_config to train from scratch ({', '.join((*TINY_NAMES, *CONFIGS))})"
        )
    folder = model_path if isinstance(model_path, WanFolder) else describe(model_path)
    if part not in folder.transformers:
        raise ConfigError(f"model_path {folder.path} has no {part}; it has {', '.join(folder.transformers)}")
    path = folder.transformers[part]
    if folder.kind in ("pipeline", "transformer"):
        return checked_config(read_json(path / "config.json", dict), str(path / "config.json"), strict=False)
    weights = open_weights(path)
    config = path / "config.json"
    num_heads = read_json(config, dict).get("num_heads", 0) if path.is_dir() and config.is_file() else 0
    if num_heads and not _is_count(num_heads):
        raise ConfigError(f"{config}: num_heads {shown(num_heads)}; expected a whole number above 0")
    return checked_config(config_of(weights.shapes(), weights.label, num_heads), weights.label)


def _named_config(model_config: str) -> dict[str, Any]:
    name = model_config.lower()
    if name in TINY_NAMES:
        from unisono.recipes.wan.tiny.models import tiny_transformer_config

        return tiny_transformer_config(given_frames=name == "tiny-i2v")
    if name in CONFIGS:
        return dict(CONFIGS[name])
    path = Path(model_config).expanduser()
    if not path.is_file():
        raise ConfigError(f"model_config {model_config}: expected {', '.join((*TINY_NAMES, *CONFIGS))} or a JSON file")
    return checked_config(read_json(path, dict), str(path))


def checked_config(values: Mapping[str, Any], where: str, strict: bool = True) -> dict[str, Any]:
    """Checks `values`, and returns those that are arguments of WanTransformer3DModel's constructor."""
    from diffusers import WanTransformer3DModel

    arguments = inspect.signature(WanTransformer3DModel.__init__).parameters.keys() - {"self"}
    unknown = [name for name in values if name not in arguments and not name.startswith("_")]
    if strict and unknown:
        raise ConfigError(f"{where}: {shown(unknown[0])} is not an argument of WanTransformer3DModel")
    config = {name: value for name, value in values.items() if name in arguments}
    patch = config.get("patch_size", (1, 2, 2))
    if not (isinstance(patch, list | tuple) and len(patch) == 3 and all(_is_count(side) for side in patch)):
        raise ConfigError(f"{where}: patch_size {shown(patch)}; expected three numbers, as in [1, 2, 2]")
    for name in (*_NUMBERS, *_NUMBERS_OR_NONE):
        value = config.get(name, 1)
        if not _is_count(value) and not (value is None and name in _NUMBERS_OR_NONE):
            raise ConfigError(f"{where}: {name} {shown(value)}; expected a whole number above 0")
    eps = config.get("eps", 1e-6)
    if not (isinstance(eps, int | float) and 0 < eps < 1):
        raise ConfigError(f"{where}: eps {shown(eps)}; expected a small number above 0")
    head = config.get("attention_head_dim", 128)
    if head < 6 or head % 2:
        raise ConfigError(
            f"{where}: attention_head_dim {head} does not fit a rotary embedding of three axes; use 12, 24, 64 or 128"
        )
    return {**config, "patch_size": tuple(patch)}


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**20


def build(config: Mapping[str, Any]) -> Any:
    """Creates a randomly initialised WanTransformer3DModel on the CPU."""
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(**config)  # type: ignore[no-untyped-call]


def build_meta(config: Mapping[str, Any]) -> Any:
    """Creates a WanTransformer3DModel on the meta device, with its position tables on the CPU."""
    with torch.device("meta"):
        model = build(config)
    # The position tables must be on the CPU: no file contains them, only the constructor creates them.
    with torch.device("cpu"):
        rope = model.rope
        model.rope = type(rope)(rope.attention_head_dim, rope.patch_size, rope.max_seq_len)
    lost = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if lost:
        raise RuntimeError(f"WanTransformer3DModel has unknown buffers, which cannot be created: {', '.join(lost)}")
    return model
