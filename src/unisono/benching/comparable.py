"""Decides whether a hand-written loop can do the same work as a run."""

from __future__ import annotations

from unisono.engine.training_run import TrainingRun


def why_no_loop(run: TrainingRun) -> str | None:
    """Returns the reason why a run cannot be compared with a hand-written loop; None if it can."""
    components, precision = run.components, run.settings.precision
    recipe, strategy = components.recipe, components.strategy
    blocks = components.blocks_on_host
    reasons = {
        f"strategy {strategy.name}": strategy.name not in ("single", "ddp"),
        "context_parallel": strategy.placement.context > 1,
        "the recipe trains groups of weights in turn": bool(components.groups[0].declared),
        "the recipe compares samples with each other": recipe.coupled,
        "the recipe renews its data between steps": recipe.refresh_every > 0,
        f"mixed_precision {precision.mixed_precision}": precision.mixed_precision in ("fp16", "fp8"),
        f"quantize {precision.quantize}": precision.quantize != "no",
        f"sparsity {precision.sparsity}": precision.sparsity != "no",
        "blocks_on_host": bool(blocks.num),
        "activation_memory_gb": components.mixed_blocks is not None,
        "compile": precision.compile,
        "cuda_graph": components.captures,
        "the model is sharded": bool(recipe.sharded()),
    }
    reason = next((reason for reason, applies in reasons.items() if applies), None)
    return None if reason is None else f"the hand-written loop does not support this: {reason}"
