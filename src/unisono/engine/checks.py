"""Settings that no run can be made of, found before anything is started."""

from __future__ import annotations

import math
from dataclasses import fields

from unisono.errors import ConfigError
from unisono.faults import parse
from unisono.settings import LaunchSettings, Settings

_AT_LEAST_ONE = (
    "batch_size",
    "global_batch_size",
    "gradient_accumulation_steps",
    "nproc",
    "log_every",
    "max_steps",
    "num_epochs",
    "eval_batch_size",
    "prefetch_factor",
    "lr_scaling_batch",
)
_AT_LEAST_ZERO = (
    "num_workers",
    "keep_last",
    "save_every",
    "max_restarts",
    "warmup_steps",
    "max_skipped_steps",
    "grad_clip",
    "learning_rate",
    "weight_decay",
    "min_memory_gb",
    "node_rank",
    "hang_timeout",
    "start_timeout",
    "max_bad_samples",
    "epsilon",
)
_PART_OF_ONE = ("ema_decay", "min_lr_ratio", "wsd_decay_ratio")


def check_settings(settings: Settings) -> None:
    """Refuses numbers out of range and settings that contradict each other."""
    values = {f.name: getattr(group, f.name) for group in vars(settings).values() for f in fields(group)}
    for names, low, high, expected in (
        (_AT_LEAST_ONE, 1, 2**40, "at least 1"),
        (_AT_LEAST_ZERO, 0, 2**40, "at least 0, and finite"),
        (("seed",), -(2**63), 2**63 - 1, "a 64-bit number"),
        (("eval_every", "preview_every", "guard_steps"), -1, math.inf, "at least -1"),
        (_PART_OF_ONE, 0, 1, "from 0 to 1"),
        (("beta1", "beta2"), 0, 1 - 1e-12, "from 0 to less than 1"),
        (("bucket_cap_mb",), 1e-3, math.inf, "more than 0"),
    ):
        for name in names:
            if values[name] is not None and not low <= values[name] <= high:
                raise ConfigError(f"{name}: expected {expected}, got {values[name]}")
    if settings.run.output_dir == "":
        raise ConfigError("output_dir: expected a folder, got nothing")
    if settings.ema.ema_decay == 1:
        raise ConfigError("ema_decay: 1 would never move; use for instance 0.999")
    parse(settings.run.inject)
    _, most = machines(settings.launch)
    if most > 1 and (settings.launch.rdzv_endpoint is None or settings.launch.node_rank is None):
        raise ConfigError("nnodes: several machines also need rdzv_endpoint (host:port) and node_rank")
    if most > 1 and settings.run.output_dir is None:
        raise ConfigError("nnodes: several machines also need output_dir, the same folder on all of them")
    if settings.launch.node_rank is not None and settings.launch.node_rank >= most:
        raise ConfigError(f"node_rank: expected 0 to {most - 1}, got {settings.launch.node_rank}")
    micro_batch = settings.batch.micro_batch
    if isinstance(micro_batch, int) and micro_batch < 1:
        raise ConfigError(f"micro_batch: expected at least 1, or auto, got {micro_batch}")
    if settings.parallel.strategy == "fsdp" and settings.parallel.find_unused_parameters:
        raise ConfigError("find_unused_parameters is ddp's; fsdp needs every weight in every step on every rank")
    if settings.parallel.static_graph and settings.parallel.find_unused_parameters:
        raise ConfigError("static_graph and find_unused_parameters contradict each other; leave one of them out")


def machines(settings: LaunchSettings) -> tuple[int, int]:
    """The fewest and the most machines of a run: nnodes is "2" or "1:4"."""
    fewest, _, most = str(settings.nnodes).partition(":")
    if not all(text.isascii() and text.isdecimal() and int(text) >= 1 for text in (fewest, most or fewest)):
        raise ConfigError(f"nnodes: expected a number of machines such as 2, or 1:4 for 1 to 4, got {settings.nnodes}")
    if int(most or fewest) < int(fewest):
        raise ConfigError(f"nnodes: expected fewest:most, got {settings.nnodes}")
    return int(fewest), int(most or fewest)
