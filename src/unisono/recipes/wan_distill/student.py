"""What the student is: the sizes of a smaller `WanTransformer3DModel`, in the words people know or in diffusers' own.

A student draws in the teacher's latent space and reads the teacher's text, so channels, text width and patches are the
teacher's; width, depth and heads are its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
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
_KNOWN = (*_COUNTS, "model_type", "projection_factor")
_AS_THE_TEACHER = {
    "in_channels": "it draws in the teacher's latent space, of the same VAE",
    "out_channels": "it draws in the teacher's latent space, of the same VAE",
    "text_dim": "it reads the text encoder of the teacher",
    "patch_size": "its tokens are those of the teacher",
    "image_dim": "it is given what the teacher is given",
    "added_kv_proj_dim": "it is given what the teacher is given",
    "pos_embed_seq_len": "it is given what the teacher is given",
}
_LARGEST = 2**20
_DEEPEST = 1000
_LARGEST_FACTOR = 1000


@dataclass(frozen=True)
class Student:
    """A student as it was asked for."""

    config: dict[str, Any]
    """What to build its WanTransformer3DModel with."""
    pixels: int | None = None
    """The side of the square pictures to train on."""
    text_tokens: int | None = None
    """Prompts are cut to so many tokens; the rows after them are zeros, up to the teacher's text length."""
    factor: float = 1.0
    """What inherited weights are multiplied with."""
    remarks: tuple[str, ...] = ()
    """What the user should be told once: each word that means something else than in the script people know."""


def student_of(told: str | None, teacher: Mapping[str, Any], space: int) -> Student:
    """The student that a JSON file describes, or half of the teacher's layers.

    `teacher` is the configuration of the teacher's transformer, `space` the pixels along a side of one latent place.
    """
    teacher = whole_config(teacher)
    if told is None:
        student = Student({**teacher, "num_layers": max(1, teacher["num_layers"] // 2)})
    else:
        file = Path(told).expanduser()
        if not file.is_file():
            raise ConfigError(f"student_config {told}: there is no such file; expected a JSON file")
        values = {name: value for name, value in read_json(file, dict).items() if not name.startswith("_")}
        in_known_words = _vocabulary(values, str(file), list(teacher))
        student = _known(values, str(file), teacher, space) if in_known_words else _own(values, str(file), teacher)
    if (weights := num_weights(student.config)) > (of := num_weights(teacher)):
        larger = f"the student has {weights:,} weights and its teacher {of:,}: it is larger than what it learns from"
        return Student(student.config, student.pixels, student.text_tokens, student.factor, (*student.remarks, larger))
    return student


def num_weights(config: Mapping[str, Any]) -> int:
    """How many weights a transformer of this configuration has; none of them is made."""
    return sum(parameter.numel() for parameter in build_meta(config).parameters())


def whole_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """With the constructor's own values for what a config.json leaves out."""
    from diffusers import WanTransformer3DModel

    known = inspect.signature(WanTransformer3DModel.__init__).parameters
    return {name: config.get(name, it.default) for name, it in known.items() if name != "self"}


def _vocabulary(values: Mapping[str, Any], where: str, theirs: list[str]) -> bool:
    """Whether the keys are the known ones (else they are diffusers'); `patch_size` is a word of both."""
    for name in values:
        if name not in _KNOWN and name not in theirs:
            hint = did_you_mean(name, [*_KNOWN, *theirs])
            raise ConfigError(
                f"{where}: {shown(name)} is neither a key of a student_config ({', '.join(_KNOWN)}) nor a setting of "
                f"WanTransformer3DModel{hint}"
            )
    known = [name for name in values if name in _KNOWN and name != "patch_size"]
    own = [name for name in values if name in theirs and name != "patch_size"]
    if known and own:
        raise ConfigError(
            f"{where}: {known[0]} and {own[0]} are words of two vocabularies; use the keys of a student_config only, "
            "or the settings of WanTransformer3DModel only"
        )
    return bool(known) or (not own and type(values.get("patch_size")) is int)


def _own(values: Mapping[str, Any], where: str, teacher: Mapping[str, Any]) -> Student:
    config = checked_config({**teacher, **values}, where)
    for name, why in _AS_THE_TEACHER.items():
        theirs = tuple(teacher[name]) if name == "patch_size" else teacher[name]
        if config[name] != theirs:
            raise ConfigError(
                f"{where}: {name} {shown(config[name])}, and the teacher has {shown(theirs)}; a student has the same, "
                f"since {why}: leave it out"
            )
    return Student(config)


def _known(values: Mapping[str, Any], where: str, teacher: Mapping[str, Any], space: int) -> Student:
    missing = [name for name in _KNOWN if name not in values and name != "projection_factor"]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}; only projection_factor may be left out")
    for name in _COUNTS:
        if not (type(values[name]) is int and 0 < values[name] < (_DEEPEST if name == "depth" else _LARGEST)):
            raise ConfigError(f"{where}: {name} {shown(values[name])}; expected a whole number above 0")
    factor, kind = values.get("projection_factor", 1.0), values["model_type"]
    if type(factor) not in (int, float) or not 0 < factor <= _LARGEST_FACTOR:
        raise ConfigError(f"{where}: projection_factor {shown(factor)}; expected a number above 0, usually 1")
    if not isinstance(kind, str):
        raise ConfigError(f"{where}: model_type {shown(kind)}; expected a name")
    pixels_per_token = space * teacher["patch_size"][1]
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
        f"model_type {shown(kind)[1:-1]}: the student is a WanTransformer3DModel, with text in every block, so that "
        "diffusers loads it",
        f"image_size {side}, patch_size {pixels_per_token}: pictures of {side} × {side} pixels, which are "
        f"{tokens} × {tokens} tokens",
        f"text_max_length {values['text_max_length']}: prompts are cut to so many tokens; zero rows follow them up to "
        "the teacher's text length, as in WanPipeline",
    ]
    if factor != 1:
        remarks.append(f"projection_factor {factor:g}: all weights inherited from the teacher are multiplied with it")
    config = checked_config({**teacher, **sizes}, where)
    return Student(config, side, values["text_max_length"], float(factor), tuple(remarks))


def _check_fit(values: Mapping[str, Any], where: str, teacher: Mapping[str, Any], pixels_per_token: int) -> None:
    """Says (ConfigError) what of the known keys does not go with the teacher, or not together."""
    width, heads, channels = values["hidden_size"], values["num_heads"], teacher["out_channels"]
    if width % heads or width // heads < 6 or width // heads % 2:
        like, rest = divmod(width, teacher["attention_head_dim"])
        hint = f"num_heads {like} gives heads as wide as the teacher's" if like and not rest else "use another number"
        raise ConfigError(
            f"{where}: hidden_size {width} / num_heads {heads} must be an even whole number of at least 6, since heads "
            f"are turned along three axes; {hint}"
        )
    if values["num_channels"] != channels:
        raise ConfigError(
            f"{where}: num_channels {values['num_channels']}, and the teacher's latents have {channels}; a student "
            f"draws in the same latent space, of the same VAE: use {channels}"
        )
    if values["text_encoder_output_dim"] != teacher["text_dim"]:
        raise ConfigError(
            f"{where}: text_encoder_output_dim {values['text_encoder_output_dim']}, and the teacher's text encoder "
            f"gives {teacher['text_dim']}; a student reads the same text: use {teacher['text_dim']}"
        )
    if values["patch_size"] != pixels_per_token:
        raise ConfigError(
            f"{where}: patch_size {values['patch_size']}, and a token of the teacher is {pixels_per_token} pixels wide "
            f"(VAE × transformer); use {pixels_per_token}"
        )
    if values["image_size"] % pixels_per_token:
        below = max(1, values["image_size"] // pixels_per_token) * pixels_per_token
        raise ConfigError(
            f"{where}: image_size {values['image_size']} is not divisible by {pixels_per_token}, the pixels of a "
            f"token; use {below} or {below + pixels_per_token}"
        )
