"""Reads weights that are stored in fp8 with scales: the "scaled fp8" of ComfyUI and musubi-tuner.

The weight is the fp8 tensor times its scales. A scale applies to the whole weight, to a row, or to a block of a row:

| tensor next to `X.weight` | what it is | written by |
|---|---|---|
| `X.scale_weight` | scale: one number, [rows, 1], or [rows, blocks, 1] | ComfyUI, musubi-tuner |
| `X.scale_weight_tensor` | a second scale, one number | musubi-tuner, with blocks |
| `X.weight_scale` | scale: one number, [rows] or [rows, 1] | newer versions of ComfyUI |
| `X.comfy_quant` | the format, as JSON; formats other than fp8 are rejected | newer versions of ComfyUI |
| `scaled_fp8`, `X.scale_input`, `X.input_scale` | a marker; scales of activations. Not used | ComfyUI |
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from unisono.checkpoint.tensor_file import TensorFile
from unisono.config.values import shown
from unisono.errors import ConfigError
from unisono.plain_files import parse_json

_SCALES = (".scale_weight", ".scale_weight_tensor", ".weight_scale")
_UNUSED = (".scale_input", ".input_scale", ".comfy_quant", "scaled_fp8")
_UNKNOWN = (".weight_scale_2", ".pre_quant_scale")  # suffixes of scales in unsupported formats, such as 4-bit formats
_FORMATS = ("float8_e4m3fn", "float8_e5m2")
_LONGEST = 4096  # maximum size in bytes of a layer's JSON


def split_names(names: Collection[str], label: str) -> tuple[list[str], dict[str, list[str]]]:
    """Returns the names of a file's weights, and the names of each scaled weight's scales; `label` names the file."""
    weights, scales = [], dict[str, list[str]]()
    for name in names:
        if name.endswith(_UNKNOWN):
            raise _unreadable(label, f"{name} belongs to a format that unisono cannot read")
        ending = next((ending for ending in _SCALES if name.endswith(ending)), None)
        if ending is not None:
            weight = f"{name.removesuffix(ending)}.weight"
            if weight not in names:
                raise ConfigError(f"{label} has {name}, but no {weight}; copy or download it again")
            scales.setdefault(weight, []).append(name)
        elif not name.endswith(_UNUSED):
            weights.append(name)
    return weights, scales


def check_formats(file: TensorFile, label: str) -> None:
    """Raises ConfigError if the file declares a format other than fp8 for a layer."""
    layers = {}
    for name, entry in file.entries.items():
        if name.endswith(".comfy_quant"):
            is_short = entry.num_bytes <= _LONGEST
            text = file.tensor(name).reshape(-1).view(torch.uint8).numpy().tobytes() if is_short else b""
            layers[name.removesuffix(".comfy_quant")] = _parsed(text)
    whole = _parsed(file.metadata.get("_quantization_metadata", "{}"))
    listed = whole.get("layers") if isinstance(whole, dict) else None
    layers |= listed if isinstance(listed, dict) else {}
    for layer, values in layers.items():
        kind = values.get("format") if isinstance(values, dict) else None
        if kind not in _FORMATS:
            raise _unreadable(label, f"{layer} has the format {shown(kind)}, which unisono cannot read")


def _parsed(text: bytes | str) -> object:
    try:
        return parse_json(text)
    except ValueError:
        return None


def _unreadable(label: str, why: str) -> ConfigError:
    return ConfigError(f"{label} is quantised: {why}; pass the bf16, fp16, fp32 or scaled fp8 file")


def num_per_row(weight: Sequence[int], scale: Sequence[int], where: str) -> int:
    """Returns the number of scales per row of a weight, from both shapes; 0 if one scale is for the whole weight."""
    if math.prod(scale) == 1:
        return 0
    per_row = math.prod(scale[1:])
    is_by_rows = len(weight) == 2 and len(scale) > 0 and scale[0] == weight[0]
    if not is_by_rows or per_row < 1 or weight[1] % per_row:
        raise ConfigError(
            f"{where} has shape {tuple(scale)} for a weight of shape {tuple(weight)}; expected one scale for the "
            "weight, for each row, or for blocks of equal size in each row"
        )
    return per_row


def scaled(values: Tensor, scale: Tensor, per_row: int) -> Tensor:
    """Multiplies rows of a weight by their scales, in float32."""
    wide, factors = values.float(), scale.float()
    if not per_row:
        return wide * factors.reshape(())
    return (wide.view(len(wide), per_row, -1) * factors.reshape(len(wide), per_row, 1)).view_as(wide)
