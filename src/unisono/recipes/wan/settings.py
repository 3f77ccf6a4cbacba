"""Choices and defaults that the settings of both Wan recipes share."""

from typing import Any, Literal

SigmaSampling = Literal["logit_normal", "uniform", "mode"]
"""Distributions of the noise levels, before the shift."""

TINY_NAMES = ("tiny", "tiny-i2v")
"""Models that need no download, in the setting model_config."""

Attention = Literal["auto", "cudnn", "flash", "efficient", "math"]
"""Attention kernels to choose from; auto measures them."""

Kind = Literal["lora", "dora", "lokr"]
"""Kinds of adapters."""

GivenFramesName = Literal["none", "first", "first_last"]
"""The frames of a video that an image-to-video model is given."""

TextDtype = Literal["bfloat16", "float32"]
"""Dtypes of the text encoder."""

DEFAULTS: dict[str, Any] = {
    "warmup_steps": 100,
    "mixed_precision": "bf16",
    "compile": True,
    "num_workers": 4,
    "eval_every": 500,
    "save_every": 500,
    "preview_every": 500,
}
"""Defaults of the engine's settings."""

TINY_DEFAULTS: dict[str, Any] = {
    "mixed_precision": "no",
    "compile": False,
    "num_workers": 0,
    "batch_size": 32,
    "learning_rate": 4e-3,
    "lr_schedule": "cosine",
    "warmup_steps": 50,
    "ema_decay": 0.99,
    "shift": 1.0,
    "guidance": 2.0,
    "num_previews": 24,
    "eval_batch_size": 96,
    "log_every": 50,
}
"""Defaults for a tiny model on a CPU."""
