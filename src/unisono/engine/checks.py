"""Rejects settings that cannot work, before anything is started."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import fields, replace

from unisono.config.resolve import Resolved
from unisono.config.values import did_you_mean, shown
from unisono.engine.recipe import Recipe
from unisono.engine.turns.group import check_groups
from unisono.errors import ConfigError, RecipeError
from unisono.faults import parse
from unisono.observe.profile.spec import parse_profile
from unisono.observe.trackers.named import check_track
from unisono.settings import LARGEST_BATCH, LaunchSettings, OptimSettings, PrecisionSettings, Settings
from unisono.storage.addresses import check_address, is_address

_BATCH = ("batch_size", "global_batch_size", "gradient_accumulation_steps", "eval_batch_size", "micro_batch")
_AT_LEAST_ONE = (
    "nproc",
    "context_parallel",
    "max_ranks_per_core",
    "log_every",
    "max_steps",
    "num_epochs",
    "prefetch_factor",
    "lr_scaling_batch",
    "quantize_min_size",
)
_AT_LEAST_ZERO = (
    "num_workers",
    "shuffle_window",
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
    "track_timeout",
    "mirror_timeout",
    "max_bad_samples",
    "epsilon",
    "blocks_on_host",
)
_COMMON_OPTIMIZERS = ("adamw", "adam", "sgd")
_FRACTIONS = ("ema_decay", "min_lr_ratio", "wsd_decay_ratio")


_MOST_WORKERS = 1024  # per rank; each worker is a process, and more would only fill the memory
_LARGEST = 2**40
"""Upper limit for numbers of steps, samples and seconds, so that positions in the sample stream fit into 64 bits."""


def check_run(recipe_class: type[Recipe], resolved: Resolved) -> Recipe:
    """Checks all settings, the engine's and the recipe's, as far as possible before any work is done."""
    settings = resolved.build(Settings)
    check_settings(settings)
    recipe = recipe_class(resolved.build(recipe_class.Config))
    check_with_recipe(recipe, settings, resolved)
    return recipe


def check_with_recipe(recipe: Recipe, settings: Settings, resolved: Resolved) -> None:
    """Rejects settings that the recipe does not support, an unknown optimizer and an unknown best_metric."""
    recipe.check_settings(settings)
    _check_groups(recipe, settings)
    if settings.parallel.context_parallel > 1 and (recipe.coupled or not recipe.supports_context_parallel):
        reason = "compares samples with each other" if recipe.coupled else "does not say how to divide a sample"
        raise ConfigError(
            f"context_parallel {settings.parallel.context_parallel}: {type(recipe).__name__} {reason}; "
            "remove context_parallel (docs/own_model.md shows how a recipe supports it)"
        )
    if settings.precision.base_precision != "auto" and recipe.has_frozen_weights is False:
        raise nothing_frozen(settings.precision.base_precision)
    _check_optimizer(settings.optim)
    best_metric = settings.eval.best_metric
    if best_metric is None:
        return
    if resolved.explicit("best_metric") and settings.eval.eval_every < 0:
        raise ConfigError(f"best_metric {best_metric}: with eval_every -1 nothing is evaluated; remove one of them")
    names = recipe.metric_names()
    if names is not None:
        check_held_out(names or None, settings, resolved)
    if names:
        _check_best_metric(best_metric, names)


def _check_groups(recipe: Recipe, settings: Settings) -> None:
    """Checks the groups of weights that are trained in turn, and the settings of each."""
    groups = check_groups(recipe.groups())
    if groups and recipe.coupled:
        raise RecipeError("groups() does not work with couple() and couple_rows(); write loss(), or remove groups()")
    for group in groups:
        optim = group.optim(settings.optim)
        try:
            check_settings(replace(settings, optim=optim, ema=group.ema(settings.ema)))
            _check_optimizer(optim)
        except ConfigError as error:
            raise ConfigError(f"groups(), {group.name}: {error}") from None


def _check_optimizer(settings: OptimSettings) -> None:
    if settings.optimizer.lower() not in _COMMON_OPTIMIZERS:
        from unisono.engine.step.make_optimizer import named_optimizer  # imported here, because torch takes seconds

        named_optimizer(settings.optimizer)


def nothing_frozen(base_precision: str) -> ConfigError:
    """Returns the error for a base precision in a run that trains all weights."""
    return ConfigError(
        f"base_precision {base_precision}: this run has no frozen linear layers; train a LoRA, freeze weights, or "
        "remove base_precision"
    )


def check_held_out(held_out: object | None, settings: Settings, resolved: Resolved) -> None:
    """Rejects a best_metric that the user set if there is no evaluation data (None) to measure it on."""
    if held_out is None and settings.eval.best_metric is not None and resolved.explicit("best_metric"):
        raise ConfigError(
            f"best_metric {settings.eval.best_metric}: there is no evaluation data; hold out some samples, or "
            "remove the flag"
        )


def check_measured(recipe: Recipe, settings: Settings, metrics: Collection[str]) -> None:
    """Rejects a best_metric that the default evaluate() does not return: it returns the metrics of loss()."""
    if settings.eval.best_metric is not None and type(recipe).evaluate is Recipe.evaluate and not recipe.coupled:
        _check_best_metric(settings.eval.best_metric, metrics)


def _check_best_metric(best_metric: str, names: Collection[str]) -> None:
    """Rejects a best_metric that is not a metric of the evaluation; `names` are without the prefix eval/."""
    metrics = sorted(f"eval/{name}" for name in names)
    if best_metric not in metrics:
        suggestion = did_you_mean(best_metric.removeprefix("eval/"), sorted(names), "eval/", similarity=0.5)
        existing = ", ".join(metrics)
        raise ConfigError(f"best_metric {best_metric} is not a metric of the evaluation ({existing}){suggestion}")


def check_settings(settings: Settings) -> None:
    """Rejects numbers out of range and settings that contradict each other."""
    values = {f.name: getattr(group, f.name) for group in vars(settings).values() for f in fields(group)}
    for names, low, high, expected in (
        (_AT_LEAST_ONE, 1, _LARGEST, f"1 to {_LARGEST:,}"),
        (_BATCH, 1, LARGEST_BATCH, f"1 to {LARGEST_BATCH:,}"),
        (_AT_LEAST_ZERO, 0, _LARGEST, f"0 to {_LARGEST:,}"),
        (("num_workers",), 0, _MOST_WORKERS, f"0 to {_MOST_WORKERS:,}"),
        (("seed",), -(2**63), 2**63 - 1, "a 64-bit number"),
        (("eval_every", "preview_every", "guard_steps"), -1, math.inf, "at least -1"),
        (_FRACTIONS, 0, 1, "from 0 to 1"),
        (("beta1", "beta2"), 0, 1 - 1e-12, "from 0 to less than 1"),
        (("bucket_cap_mb", "gpu_memory_gb"), 1e-3, math.inf, "more than 0"),
        (("activation_memory_gb",), 1e-9, math.inf, "more than 0"),
    ):
        for name in names:
            if values[name] is not None and values[name] != "auto" and not low <= values[name] <= high:
                least = f"at least {low}" if expected.startswith(f"{low} to ") and values[name] < low else expected
                raise ConfigError(f"{name}: expected {least}, got {shown(values[name])}")
    if settings.run.output_dir == "":
        raise ConfigError("output_dir: expected a folder, got an empty text")
    if settings.ema.ema_decay == 1:
        raise ConfigError("ema_decay: with 1 the average would never change; use for instance 0.999")
    if settings.data.shuffle_window and not settings.data.shuffle:
        raise ConfigError("shuffle_window needs shuffle; remove shuffle_window, or set shuffle to true")
    parse(settings.run.inject)
    check_track(settings.observe.track)
    _check_addresses(settings)
    parse_profile(settings.observe.profile)
    _, most = machines(settings.launch)
    if most > 1 and (settings.launch.rdzv_endpoint is None or settings.launch.node_rank is None):
        raise ConfigError("nnodes: several machines also need rdzv_endpoint (host:port) and node_rank")
    if most > 1 and settings.run.output_dir is None:
        raise ConfigError("nnodes: several machines also need output_dir, the same folder on all of them")
    if settings.launch.node_rank is not None and settings.launch.node_rank >= most:
        raise ConfigError(f"node_rank: expected 0 to {most - 1}, got {settings.launch.node_rank}")
    if settings.optim.optimizer.lower() == "schedule_free_adamw":
        if settings.optim.lr_schedule != "constant":
            raise ConfigError(
                "optimizer schedule_free_adamw replaces a schedule; remove lr_schedule (warmup_steps may stay)"
            )
        if settings.ema.ema_decay > 0:
            raise ConfigError("optimizer schedule_free_adamw averages the weights itself; use ema_decay 0")
        if settings.optim.beta1 == 0:
            raise ConfigError("optimizer schedule_free_adamw interpolates with beta1, which must be above 0; use 0.9")
    strategy, shard_size = settings.parallel.strategy, settings.parallel.shard_size
    if isinstance(shard_size, int) and shard_size < 1:
        raise ConfigError(f"shard_size: expected at least 1, or node or all, got {shard_size}")
    if shard_size != "auto" and strategy not in ("auto", "fsdp", "hsdp"):
        raise ConfigError(
            f"shard_size {shard_size} needs fsdp, and strategy {strategy} shards nothing; remove one of them"
        )
    if settings.precision.activation_memory_gb is not None:
        _check_activation_memory(settings)
    if settings.parallel.blocks_on_host != 0:
        _check_blocks_on_host(settings)
    _check_products(settings.precision)
    if strategy in ("fsdp", "hsdp") and settings.parallel.find_unused_parameters:
        raise ConfigError("find_unused_parameters needs ddp; fsdp uses every weight in every step on every rank")
    if settings.parallel.context_parallel > 1:
        _check_context_settings(settings)
    if settings.parallel.static_graph and settings.parallel.find_unused_parameters:
        raise ConfigError("static_graph and find_unused_parameters contradict each other; remove one of them")


def check_not_in_storage(resolved: Resolved, command: str) -> None:
    """Rejects object storage for a command that starts several runs, because an address holds one run."""
    if is_address(resolved.values["output_dir"]):
        raise ConfigError(f"output_dir: {command} writes to a local folder, not to object storage; use a local folder")
    if resolved.values["mirror"] is not None:
        raise ConfigError(f"mirror: {command} starts several runs, and an address holds one run; remove it")


def _check_addresses(settings: Settings) -> None:
    run, mirror = settings.run, settings.save.mirror
    for name, value in (("output_dir", run.output_dir), ("resume", run.resume)):
        if value is not None and is_address(value):
            check_address(name, value)
    if mirror is not None:
        if not is_address(mirror):
            raise ConfigError(f"mirror: expected an address such as s3://BUCKET/FOLDER, got {mirror[:200]}")
        check_address("mirror", mirror)


def _check_activation_memory(settings: Settings) -> None:
    precision = settings.precision
    if precision.activation_checkpointing or precision.recompute_every != 1:
        name = "activation_checkpointing" if precision.activation_checkpointing else "recompute_every"
        raise ConfigError(f"activation_memory_gb decides what to recompute; remove it, or {name}")
    if settings.parallel.blocks_on_host != 0:
        raise ConfigError(
            "activation_memory_gb cannot measure blocks that are stored on the host; remove blocks_on_host, or use "
            "activation_checkpointing instead of activation_memory_gb"
        )
    if settings.parallel.strategy == "dp":
        raise ConfigError("activation_memory_gb works with strategy single, ddp and fsdp, not with dp")


def _check_products(precision: PrecisionSettings) -> None:
    if precision.quantize == "int8" and precision.mixed_precision == "fp8":
        raise ConfigError("mixed_precision fp8 and quantize int8 contradict each other; use mixed_precision bf16")
    if precision.quantize != "no" and precision.mixed_precision == "fp16":
        raise ConfigError(f"quantize {precision.quantize} works with mixed_precision bf16 or no, not with fp16")
    if precision.sparsity != "no":
        other = precision.product_format or (precision.base_precision if precision.base_precision != "auto" else None)
        if other is not None:
            raise ConfigError(f"sparsity {precision.sparsity}: no product is both sparse and {other}; use one of them")
    if precision.quantize_weight_gradient and precision.product_format is None:
        raise ConfigError("quantize_weight_gradient needs mixed_precision fp8, or quantize; add one of them")


def _check_blocks_on_host(settings: Settings) -> None:
    strategy, shard_size = settings.parallel.strategy, settings.parallel.shard_size
    if strategy in ("fsdp", "hsdp", "dp"):
        instead = "" if strategy == "dp" else "; use fsdp_cpu_offload"
        raise ConfigError(f"blocks_on_host works with strategy single and ddp, not with {strategy}{instead}")
    if shard_size != "auto":
        raise ConfigError(f"blocks_on_host does not work with fsdp, and shard_size {shard_size} needs it; remove one")


def _check_context_settings(settings: Settings) -> None:
    size, strategy = settings.parallel.context_parallel, settings.parallel.strategy
    if strategy in ("single", "dp"):
        raise ConfigError(f"context_parallel {size} needs one process per GPU; use --strategy ddp or fsdp, or auto")
    if settings.precision.cuda_graph:
        raise ConfigError(
            f"context_parallel {size}: a forward pass that waits for other ranks cannot be recorded; remove cuda_graph"
        )


def check_context(size: int, ranks: int) -> None:
    """Rejects a context_parallel that does not divide the number of ranks."""
    if ranks % size == 0:
        return
    divisors = [str(number) for number in range(1, ranks + 1) if ranks % number == 0]
    multiples = [str(number) for number in (ranks // size * size, -(-ranks // size) * size) if number]
    raise ConfigError(
        f"context_parallel {size} does not divide {ranks} rank{'s' * (ranks > 1)}; use a context_parallel of "
        f"{' or '.join(divisors)}, or {' or '.join(multiples)} ranks"
    )


def machines(settings: LaunchSettings) -> tuple[int, int]:
    """Returns the minimum and maximum number of machines of a run: nnodes is "2" or "1:4"."""
    fewest, _, most = str(settings.nnodes).partition(":")
    # Limit the number of digits, because Python refuses to convert a text with thousands of digits.
    if not all(re.fullmatch("0*[1-9][0-9]{0,8}", text) for text in (fewest, most or fewest)):
        got = shown(str(settings.nnodes))
        raise ConfigError(f"nnodes: expected a number of machines such as 2, or 1:4 for 1 to 4, got {got}")
    if int(most or fewest) < int(fewest):
        raise ConfigError(f"nnodes: expected MIN:MAX with MIN <= MAX, got {settings.nnodes}")
    return int(fewest), int(most or fewest)
