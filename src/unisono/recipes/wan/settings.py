"""Choices that the settings of both Wan recipes have in common."""

from typing import Literal

SigmaSampling = Literal["logit_normal", "uniform", "mode"]
"""How noise levels are sampled, before the shift."""

Attention = Literal["auto", "cudnn", "flash", "efficient", "math"]
"""Attention kernels."""

TextDtype = Literal["bfloat16", "float32"]
"""Dtypes of the text encoder."""
