"""The learning rate of each optimizer step: warm-up, decay, and scaling with the batch size."""

from __future__ import annotations

import math

from unisono.settings import OptimSettings


def learning_rate_factor(step: int, total_steps: int | None, settings: OptimSettings) -> float:
    """Returns the learning rate of optimizer step `step` (from 0), as a fraction of its peak."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if settings.lr_schedule == "constant" or total_steps is None:
        return 1.0
    decay = total_steps - settings.warmup_steps
    if settings.lr_schedule == "wsd":
        decay = max(1, round(total_steps * settings.wsd_decay_ratio))
    left = min(1.0, max(0.0, (total_steps - step) / max(1, decay)))  # 1 at the start of the decay, 0 at the end
    if settings.lr_schedule == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * (1 - left)))
    return settings.min_lr_ratio + (1 - settings.min_lr_ratio) * left


def learning_rate_scale(global_batch: int, settings: OptimSettings) -> float:
    """Returns the factor by which lr_scaling multiplies the learning rate."""
    ratio = global_batch / settings.lr_scaling_batch
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[settings.lr_scaling]
