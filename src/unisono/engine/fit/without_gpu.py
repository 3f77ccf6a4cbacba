"""Chooses settings for a GPU of a given memory size, without training and without a GPU (`--print_config`)."""

from __future__ import annotations

from unisono.config.resolve import Resolved
from unisono.engine.fit.at_start import decide
from unisono.engine.fit.choose import Card, Fitter
from unisono.engine.fit.sample import example_of
from unisono.engine.recipe import Recipe
from unisono.planning.memory.estimate import card_memory
from unisono.settings import Settings


def fit_settings(recipe: Recipe, resolved: Resolved) -> tuple[Resolved, list[str]]:
    """Returns the settings that `fit` chooses for GPUs of `gpu_memory_gb`, if it is set, and notes for the user."""
    settings = resolved.build(Settings)
    setting, gigabytes = settings.memory.fit, settings.memory.gpu_memory_gb
    if setting == "no":
        return resolved, []
    if gigabytes is None:
        return resolved, [f"fit {setting}: pass --gpu_memory_gb to see what it chooses; settings are unchanged"]
    fitter, card = fitter_for(recipe, resolved), Card(card_memory(gigabytes), _num_gpus(settings), is_in_use=True)
    flags, remarks = decide(fitter, card, setting)
    return fitter.applied(flags), remarks


def fitter_for(recipe: Recipe, resolved: Resolved) -> Fitter:
    """Returns a Fitter that predicts memory with an example of the recipe's data."""
    settings = resolved.build(Settings)
    size, gpus = settings.batch.batch_size, _num_gpus(settings)
    share = size * (settings.batch.gradient_accumulation_steps or 1)
    if settings.batch.global_batch_size is not None:
        share = -(-settings.batch.global_batch_size // gpus)
    micro_batch = settings.batch.micro_batch or size
    return Fitter(
        recipe,
        resolved,
        example_of,
        micro_batch=1 if micro_batch == "auto" else min(micro_batch, share),
        share=share,
    )


def _num_gpus(settings: Settings) -> int:
    """Returns the number of ranks if the settings define it, as `gpus 4` or `gpus 0,1` do; otherwise 1."""
    if settings.launch.nproc is not None:
        return settings.launch.nproc
    gpus = settings.launch.gpus
    if "," in gpus:
        return max(len([part for part in gpus.split(",") if part.strip()]), 1)
    return max(int(gpus), 1) if gpus.isdigit() else 1
