"""Fits a run into memory when it starts, before its weights are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unisono.config.resolve import Resolved
from unisono.engine.batch import BatchPlan, with_micro_batch
from unisono.engine.build.gpu_memory import free_gpu_memory
from unisono.engine.fit.choose import Card, Fitter, advice_of, cannot_fit, remarks_on
from unisono.engine.fit.sample import largest_sample
from unisono.engine.rank_context import RankContext
from unisono.engine.recipe import Recipe
from unisono.engine.run_folder.enter import EnteredRun
from unisono.errors import ConfigError
from unisono.formatting import format_bytes
from unisono.parallel.strategy import Placement
from unisono.planning.memory.ladder import Flags
from unisono.planning.memory.trace import CannotTrace
from unisono.quantize.products import has_fp8_products
from unisono.settings import Settings


@dataclass(frozen=True)
class FittedRun:
    """A run with the settings that fit."""

    entered: EnteredRun
    batch: BatchPlan
    advice: Advice
    remarks: Sequence[str] = field(default_factory=list)


@dataclass(frozen=True)
class Advice:
    """Finds settings with which a run would fit, for the error message of a run that does not fit."""

    fitter: Fitter
    card: Card | None  # None on the CPU

    def flags(self) -> str | None:
        """Returns the flags and their predicted memory; None on the CPU, or if no flags are known to help."""
        if self.card is None:
            return None
        try:
            return advice_of(self.fitter.choose(replace(self.card, is_in_use=False), allows_lossy=True))
        except CannotTrace:
            return None


def fit_run(
    recipe: Recipe, dataset: Any, entered: EnteredRun, batch: BatchPlan, placement: Placement, rank: RankContext
) -> FittedRun:
    """Changes settings according to `--fit`, the same on every rank; rejects a run that cannot fit."""
    settings, device = entered.settings, placement.device
    on_gpu = device.type == "cuda"
    fitter = Fitter(
        recipe,
        entered.resolved,
        lambda copy: largest_sample(dataset),
        micro_batch=1 if settings.batch.micro_batch == "auto" else batch.micro_batch,
        share=batch.share,
        earlier_sources=None if entered.origin is None else entered.origin.get("sources", {}),
        fp8_products=has_fp8_products(device),
    )
    setting = settings.memory.fit
    if not on_gpu:
        remarks = [] if setting == "no" else [f"fit {setting}: this run computes on the CPU; settings are unchanged"]
        return FittedRun(entered, batch, Advice(fitter, None), remarks)
    free = min(rank.agreement.all_gather(free_gpu_memory(device)))  # the fullest GPU decides for all
    card = Card(free, placement.world, is_in_use=True)
    advice = Advice(fitter, card)
    if setting == "no":
        rank.main_decides(lambda: check_least(fitter, settings, card, advice))
        return FittedRun(entered, batch, advice)
    flags, remarks = rank.main_decides(lambda: decide(fitter, card, setting))
    resolved = fitter.applied(flags)
    return FittedRun(*_applied(entered, resolved, batch), advice, remarks)


def decide(fitter: Fitter, card: Card, setting: str) -> tuple[Flags, list[str]]:
    """Returns the settings to change, and notes for the user. Raises ConfigError if nothing fits."""
    try:
        choice = fitter.choose(card, allows_lossy=setting == "auto")
        elsewhere = choice if choice.fits else fitter.choose(replace(card, is_in_use=False), allows_lossy=False)
    except CannotTrace as error:
        return {}, [cannot_fit(setting, error)]
    if elsewhere.fits and not choice.fits:
        raise ConfigError(
            f"fit {setting}: the run fits into {format_bytes(card.room)} only with settings that a run cannot "
            f"change after its start; pass {elsewhere.command} (predicted {elsewhere.estimate})"
        )
    return choice.flags, remarks_on(choice, setting)


def check_least(fitter: Fitter, settings: Settings, card: Card, advice: Advice) -> None:
    """Rejects a run whose weights, gradients and optimizer state alone exceed the memory of a GPU."""
    parallel = settings.parallel
    may_shard = parallel.strategy in ("fsdp", "hsdp") or (parallel.strategy == "auto" and card.ranks > 1)
    if may_shard or parallel.blocks_on_host != 0 or not fitter.memory.builds_on_meta:
        return
    try:
        least = fitter.least()
    except CannotTrace:
        return
    if least <= card.memory:
        return
    flags = advice.flags()
    remedy = f"; {flags}" if flags else "; use fewer trained weights, or strategy fsdp on several GPUs"
    raise ConfigError(
        f"weights, gradients, optimizer state and average take {format_bytes(least)}, and {format_bytes(card.memory)} "
        f"of GPU memory are available{remedy}"
    )


def _applied(entered: EnteredRun, resolved: Resolved, batch: BatchPlan) -> tuple[EnteredRun, BatchPlan]:
    settings = resolved.build(Settings)
    if isinstance(settings.batch.micro_batch, int):
        batch = with_micro_batch(batch, settings.batch.micro_batch, batch.micro_batch, on_gpu=True)
    return replace(entered, resolved=resolved, settings=settings), batch
