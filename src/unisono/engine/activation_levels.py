"""Chooses before step 1 how much each block recomputes, so that activations take at most `--activation_memory_gb`."""

from __future__ import annotations

from collections.abc import Callable

from unisono.engine.training_run import TrainingRun
from unisono.formatting import format_bytes
from unisono.parallel.blocks.mixed import DESCRIPTIONS


def choose_levels(run: TrainingRun, message: Callable[[str], None], try_out: Callable[[], None]) -> None:
    """Measures the blocks in a trial pass and sets their levels; every rank calls it. Does nothing without a limit."""
    components, limit_gb = run.components, run.settings.precision.activation_memory_gb
    mixed = components.mixed_blocks
    if mixed is None or limit_gb is None:
        return
    if not components.strategy.can_try_out:
        message("activation_memory_gb: this run cannot make a trial pass, so all blocks recompute everything")
        return
    with mixed.measuring():
        try_out()
    blocks, stored = mixed.choose(int(limit_gb * 2**30), run.rank.agreement.all_gather(mixed.measured()))
    chosen = ", ".join(f"{DESCRIPTIONS[level]} in {count}" for level, count in blocks.items())
    fits = "" if stored <= limit_gb * 2**30 else ", more than the limit: lower micro_batch"
    message(f"activation_memory_gb {limit_gb:g}: blocks recompute {chosen}; they store {format_bytes(stored)}{fits}")
    run.folder.event("activation_memory", step=components.state.step, blocks=dict(blocks), bytes=stored)
