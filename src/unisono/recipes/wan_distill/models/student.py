"""The student's configuration: the size of a smaller `WanTransformer3DModel`.

A JSON file specifies the size, either with the keys of a student_config or with diffusers' arguments. A student works
in the teacher's latent space and reads the teacher's text embeddings. Its channels, text width and patch size are
therefore the teacher's; its width, depth and heads may differ.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from unisono.config.values import did_you_mean, shown
from unisono.errors import ConfigError
from unisono.recipes.common.model_files import read_json
from unisono.recipes.wan.models.load import build_meta, checked_config

_COUNTS = (
    *("hidden_size", "depth", "num_heads", "num_channels", "image_size", "patch_size", "text_max_length"),
    "text_encoder_output_dim",
)
_KEYS = (*_COUNTS, "model_type", "projection_factor")
_AS_THE_TEACHER = {
    "in_channels": "it works in the teacher's latent space",
    "out_channels": "it works in the teacher's latent space",
    "text_dim": "it reads the teacher's text embeddings",
    "patch_size": "its tokens are those of the teacher",
    "image_dim": "it gets the teacher's inputs",
    "added_kv_proj_dim": "it gets the teacher's inputs",
    "pos_embed_seq_len": "it gets the teacher's inputs",
}
_LARGEST = 2**20
_DEEPEST = 1000
_LARGEST_FACTOR = 1000


@dataclass(frozen=True)
class Student:
    """The student that the settings describe."""

    config: dict[str, Any]
    """Arguments of the student's WanTransformer3DModel."""
    pixels: int | None = None
    """Side length, in pixels, of the square images to train on."""
    text_tokens: int | None = None
    """Prompts are truncated to this number of tokens, then padded with zeros to the teacher's text length."""
    factor: float = 1.0
    """Factor on the weights that are taken from the teacher."""
    remarks: tuple[str, ...] = ()
    """Notes for the user about keys that mean something else in other scripts."""


def student_of(path: str | None, teacher: Mapping[str, Any], spatial_factor: int) -> Student:
    """Returns the student that a JSON file describes, or by default one with half of the teacher's layers.

    `teacher` is the configuration of the teacher's transformer, `spatial_factor` the side length, in pixels, of one
    latent position.
    """
    teacher = complete_config(teacher)
    if path is None:
        student = Student({**teacher, "num_layers": max(1, teacher["num_layers"] // 2)})
    else:
        file = Path(path).expanduser()
        if not file.is_file():
            raise ConfigError(f"student_config {path}: no such file; expected a JSON file")
        values = {name: value for name, value in read_json(file, dict).items() if not name.startswith("_")}
        has_student_keys = _vocabulary(values, str(file), list(teacher))
        parse = partial(_from_keys, spatial_factor=spatial_factor) if has_student_keys else _from_diffusers
        student = parse(values, str(file), teacher)
    if (weights := num_weights(student.config)) > (teacher_weights := num_weights(teacher)):
        larger = f"the student has {weights:,} weights, more than its teacher's {teacher_weights:,}"
        return Student(student.config, student.pixels, student.text_tokens, student.factor, (*student.remarks, larger))
    return student


def num_weights(config: Mapping[str, Any]) -> int:
    """Counts the weights of a transformer with this configuration, without allocating them."""
    return sum(parameter.numel() for parameter in build_meta(config).parameters())


def complete_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Completes a configuration with the constructor's defaults for missing arguments."""
    from diffusers import WanTransformer3DModel

    parameters = inspect.signature(WanTransformer3DModel.__init__).parameters
    return {name: config.get(name, it.default) for name, it in parameters.items() if name != "self"}


def _vocabulary(values: Mapping[str, Any], where: str, theirs: list[str]) -> bool:
    """Whether the keys are those of a student_config rather than diffusers' arguments; `patch_size` can be either."""
    for name in values:
        if name not in _KEYS and name not in theirs:
            hint = did_you_mean(name, [*_KEYS, *theirs])
            raise ConfigError(
                f"{where}: {shown(name)} is neither a key of a student_config ({', '.join(_KEYS)}) nor an argument of "
                f"WanTransformer3DModel{hint}"
            )
    keys = [name for name in values if name in _KEYS and name != "patch_size"]
    arguments = [name for name in values if name in theirs and name != "patch_size"]
    if keys and arguments:
        raise ConfigError(
            f"{where} mixes {keys[0]}, a key of a student_config, with {arguments[0]}, an argument of "
            "WanTransformer3DModel; use only one kind"
        )
    return bool(keys) or (not arguments and type(values.get("patch_size")) is int)


def _from_diffusers(values: Mapping[str, Any], where: str, teacher: Mapping[str, Any]) -> Student:
    config = checked_config({**teacher, **values}, where)
    for name, why in _AS_THE_TEACHER.items():
        theirs = tuple(teacher[name]) if name == "patch_size" else teacher[name]
        if config[name] != theirs:
            raise ConfigError(
                f"{where}: {name} {shown(config[name])} differs from the teacher's {shown(theirs)}; the student must "
                f"have the same, since {why}: remove it"
            )
    return Student(config)


def _from_keys(values: Mapping[str, Any], where: str, teacher: Mapping[str, Any], spatial_factor: int) -> Student:
    missing = [name for name in _KEYS if name not in values and name != "projection_factor"]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}; only projection_factor is optional")
    for name in _COUNTS:
        if not (type(values[name]) is int and 0 < values[name] < (_DEEPEST if name == "depth" else _LARGEST)):
            raise ConfigError(f"{where}: {name} {shown(values[name])}; expected a whole number above 0")
    factor, kind = values.get("projection_factor", 1.0), values["model_type"]
    if type(factor) not in (int, float) or not 0 < factor <= _LARGEST_FACTOR:
        raise ConfigError(f"{where}: projection_factor {shown(factor)}; expected a number above 0, usually 1")
    if not isinstance(kind, str):
        raise ConfigError(f"{where}: model_type {shown(kind)}; expected a name")
    pixels_per_token = spatial_factor * teacher["patch_size"][1]
    _check_fit(values, where, teacher, pixels_per_token)

    width, heads = values["hidden_size"], values["num_heads"]
    teacher_width = teacher["num_attention_heads"] * teacher["attention_head_dim"]
    sizes = {
        "num_attention_heads": heads,
        "attention_head_dim": width // heads,
        "ffn_dim": max(8, round(teacher["ffn_dim"] * width / teacher_width / 8) * 8),
        "num_layers": values["depth"],
    }
    side, tokens = values["image_size"], values["image_size"] // pixels_per_token
    remarks = [
        f"model_type {shown(kind)[1:-1]}: the student is a WanTransformer3DModel with cross-attention to the text in "
        "every block, so diffusers can load it",
        f"image_size {side}, patch_size {pixels_per_token}: images of {side} × {side} pixels are "
        f"{tokens} × {tokens} tokens",
        f"text_max_length {values['text_max_length']}: prompts are truncated to this many tokens and padded with zeros "
        "to the teacher's text length, as in WanPipeline",
    ]
    if factor != 1:
        remarks.append(f"projection_factor {factor:g}: multiplies all weights taken from the teacher")
    config = checked_config({**teacher, **sizes}, where)
    return Student(config, side, values["text_max_length"], float(factor), tuple(remarks))


def _check_fit(values: Mapping[str, Any], where: str, teacher: Mapping[str, Any], pixels_per_token: int) -> None:
    """Raises ConfigError if keys of a student_config do not fit the teacher or contradict each other."""
    width, heads, channels = values["hidden_size"], values["num_heads"], teacher["out_channels"]
    if width % heads or width // heads < 6 or width // heads % 2:
        like, rest = divmod(width, teacher["attention_head_dim"])
        hint = f"num_heads {like} gives heads as wide as the teacher's" if like and not rest else "change num_heads"
        raise ConfigError(
            f"{where}: hidden_size {width} / num_heads {heads} must be an even whole number of at least 6, since the "
            f"rotary embedding has three axes; {hint}"
        )
    if values["num_channels"] != channels:
        raise ConfigError(
            f"{where}: num_channels {values['num_channels']}, but the teacher's latents have {channels}, and the "
            f"student works in the same latent space; use {channels}"
        )
    if values["text_encoder_output_dim"] != teacher["text_dim"]:
        raise ConfigError(
            f"{where}: text_encoder_output_dim {values['text_encoder_output_dim']}, but the teacher's text encoder, "
            f"which the student uses too, outputs {teacher['text_dim']}; use {teacher['text_dim']}"
        )
    if values["patch_size"] != pixels_per_token:
        raise ConfigError(
            f"{where}: patch_size {values['patch_size']}, but a token of the teacher is {pixels_per_token} pixels wide "
            f"(VAE × transformer); use {pixels_per_token}"
        )
    if values["image_size"] % pixels_per_token:
        below = max(1, values["image_size"] // pixels_per_token) * pixels_per_token
        raise ConfigError(
            f"{where}: image_size {values['image_size']} is not divisible by {pixels_per_token}, the pixels "
            f"per token; use {below} or {below + pixels_per_token}"
        )
