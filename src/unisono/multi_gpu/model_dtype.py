"""Chooses the dtype for training: float64 models stay float64, and 16-bit weights become float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from unisono.multi_gpu.config import MultiGPUConfig


def dtype_settings(model: nn.Module, config: MultiGPUConfig) -> tuple[dict[str, Any], list[str]]:
    """Returns the engine settings for the dtype of the model's weights, and remarks if that dtype changes."""
    types = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
    if torch.float64 in types and "dtype" not in config.settings:
        if config.mixed_precision == "no":
            mixed = len(types) > 1
            return {"dtype": "float64"}, ["some weights are float64, so all are trained as float64"] if mixed else []
        return {}, [f"the weights are float64; mixed_precision {config.mixed_precision} trains them as float32"]
    if short := types & {torch.float16, torch.bfloat16}:
        name = str(min(short, key=str)).removeprefix("torch.")
        better = "bf16" if torch.bfloat16 in short else "fp16"
        remark = f"the weights are {name}; they are trained as float32, because small updates vanish in 16 bit"
        hint = f'; mixed_precision="{better}" computes in {name}' if config.mixed_precision == "no" else ""
        return {}, [remark + hint]
    return {}, []
