"""Writes whole Wan transformers in the Wan repository's layout ("native"), or as files for ComfyUI.

The native layout is a folder with config.json and the weights; for two experts, it has two such folders,
`high_noise_model` and `low_noise_model`. ComfyUI takes one file per transformer in `models/diffusion_models`. Neither
includes a VAE or a text encoder: the published VAE and text encoder are used. Weights are read and written one by one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unisono.errors import ConfigError
from unisono.recipes.common.tensor_writer import ToWrite, write_sharded, write_tensors
from unisono.recipes.wan.models.experts import HIGH, LOW
from unisono.recipes.wan.models.load import EXPERT_FOLDERS, WanFolder, transformer_config
from unisono.recipes.wan.models.weight_names import COMFY, HEAD_WIDTH, native_weight_name
from unisono.recipes.wan.models.weights import Weights, open_weights

COMFY_MODEL = {HIGH: "diffusion_model_high_noise.safetensors", LOW: "diffusion_model_low_noise.safetensors"}
ONE_COMFY_MODEL = "diffusion_model.safetensors"
_STEM = "diffusion_pytorch_model"
_SHARD_BYTES = 5 * 10**9
_TI2V_CHANNELS = 48


def write_native(folder: Path, models: Mapping[str, nn.Module], source: WanFolder | None, text_length: int) -> str:
    """Writes `models`, keyed by diffusers' names, to an empty folder in the Wan repository's layout.

    `source` is the model that training started from; an expert that was not trained is read from it.
    """
    parts = _parts(models, source)
    for name, (config, tensors) in parts.items():
        place = folder if list(parts) == [HIGH] else folder / EXPERT_FOLDERS[name]
        place.mkdir(parents=True, exist_ok=True)
        write_sharded(place, _STEM, tensors, _SHARD_BYTES)
        content = json.dumps(_native_config(config, text_length), indent=2) + "\n"
        (place / "config.json").write_text(content, encoding="utf-8")
    return (
        f"{_described(parts)} with the Wan repository's names; it is used with that repository's VAE and text encoder, "
        f"or here with --model_path {folder} --parts_path FOLDER"
    )


def write_comfyui(folder: Path, models: Mapping[str, nn.Module], source: WanFolder | None) -> str:
    """Writes one file per transformer for ComfyUI's `models/diffusion_models`; see `write_native`."""
    parts = _parts(models, source)
    for config, _ in parts.values():
        if (width := int(config["attention_head_dim"])) != HEAD_WIDTH:
            raise ConfigError(
                f"--format comfyui: this model's attention heads have width {width}, but ComfyUI assumes {HEAD_WIDTH} "
                "for every Wan model and would compute something else; use --format diffusers or native"
            )
    files = []
    folder.mkdir(parents=True, exist_ok=True)
    for name, (_, tensors) in parts.items():
        files.append(folder / (ONE_COMFY_MODEL if list(parts) == [HIGH] else COMFY_MODEL[name]))
        write_tensors(files[-1], {f"model.{COMFY}{theirs}": tensor for theirs, tensor in tensors.items()})
    return f"{_described(parts)} for ComfyUI: copy {' and '.join(map(str, files))} to models/diffusion_models"


def _described(parts: Mapping[str, Any]) -> str:
    return "the transformer" if len(parts) == 1 else "both experts"


def _parts(
    models: Mapping[str, nn.Module], source: WanFolder | None
) -> dict[str, tuple[Mapping[str, Any], dict[str, ToWrite]]]:
    """Returns the configuration and the weights of each transformer, keyed by diffusers' names for transformers."""
    parts: dict[str, tuple[Mapping[str, Any], dict[str, ToWrite]]] = {}
    for name in (HIGH, LOW):
        if name in models:
            model: Any = models[name]
            parts[name] = model.config, _of_module(model)
        elif source is not None and name in source.transformers:
            weights = open_weights(source.transformers[name])
            parts[name] = {"eps": 1e-6, **transformer_config(source, part=name)}, _of_files(weights)
    return parts


def _of_module(model: nn.Module) -> dict[str, ToWrite]:
    return {
        _theirs(name): ToWrite(tuple(tensor.shape), tensor.dtype, partial(_same, tensor))
        for name, tensor in model.named_parameters()
    }


def _same(tensor: Any) -> Any:
    return tensor


def _of_files(weights: Weights) -> dict[str, ToWrite]:
    tensors = {}
    for name in weights.names():
        dtype = weights.dtype(name)
        dtype = (
            torch.bfloat16 if dtype.itemsize == 1 else dtype
        )  # fp8 without scales, which bfloat16 represents exactly
        tensors[_theirs(name)] = ToWrite(weights.shape(name), dtype, partial(weights.tensor, name, dtype))
    return tensors


def _theirs(name: str) -> str:
    theirs = native_weight_name(name)
    if theirs is None:
        raise RuntimeError(f"{name} has no name in the Wan repository")
    return theirs


def _native_config(config: Mapping[str, Any], text_length: int) -> dict[str, Any]:
    """Returns the arguments of the Wan repository's WanModel."""
    heads, width = int(config["num_attention_heads"]), int(config["attention_head_dim"])
    inputs, outputs = int(config["in_channels"]), int(config["out_channels"] or config["in_channels"])
    kind = "t2v"
    if config.get("pos_embed_seq_len"):
        kind = "flf2v"
    elif inputs > outputs:
        kind = "i2v"
    elif inputs == _TI2V_CHANNELS:
        kind = "ti2v"
    return {
        "_class_name": "WanModel",
        "model_type": kind,
        "dim": heads * width,
        "eps": config["eps"],
        "ffn_dim": config["ffn_dim"],
        "freq_dim": config["freq_dim"],
        "in_dim": inputs,
        "num_heads": heads,
        "num_layers": config["num_layers"],
        "out_dim": outputs,
        "text_len": text_length,
    }
