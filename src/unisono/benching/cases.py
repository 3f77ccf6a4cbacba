"""The runs that `unisono bench` starts: one per rank count, with the settings of the user's run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unisono.benching.options import BenchOptions
from unisono.config.resolve import Resolved
from unisono.engine.batch import plan_batch
from unisono.engine.checks import check_context, check_not_in_storage, check_run, check_settings, machines
from unisono.engine.recipe import Recipe
from unisono.engine.start.device_plan import check_ranks
from unisono.errors import ConfigError
from unisono.settings import Settings

UNTIMED = 2
"""Number of untimed steps at the start of each block. The other loop's block leaves the caches cold for this one."""

_QUIET: dict[str, Any] = {
    **{"num_epochs": None, "eval_every": -1, "eval_first": False, "preview_every": -1, "best_metric": None},
    **{"save_every": 0, "track": None, "mirror": None, "resume": "auto", "max_restarts": 0, "output_dir": None},
}
"""Settings of every measured run, with which it only trains and leaves no files behind."""
_REFUSED = {
    "inject": "bench measures runs without faults",
    "resume": "bench trains from the initial weights",
    "max_steps": "bench sets the number of steps itself: use --steps, --warmup and --rounds",
    "num_epochs": "bench sets the number of steps itself: use --steps, --warmup and --rounds",
    "mirror": "bench leaves no checkpoints",
    "track": "bench sends nothing to trackers",
    "node_rank": "bench measures one machine",
}


@dataclass(frozen=True)
class Case:
    """One run to measure."""

    ranks: int
    resolved: Resolved
    global_batch: int


def make_cases(recipe_class: type[Recipe], resolved: Resolved, options: BenchOptions) -> list[Case]:
    """Returns the runs to measure, after checking them as far as possible before anything is started."""
    options.check()
    for name, reason in _REFUSED.items():
        if resolved.sources[name] == "flag" and resolved.values[name] not in (None, "auto"):
            raise ConfigError(f"{name}: {reason}; remove it")
    check_not_in_storage(resolved.with_values("bench", mirror=None), "bench")
    settings = resolved.build(Settings)
    check_settings(settings)
    if machines(settings.launch)[1] > 1:
        raise ConfigError("nnodes: bench measures one machine; remove nnodes")
    if settings.parallel.strategy == "dp":
        raise ConfigError("strategy dp: bench measures one process per device; use --strategy ddp")
    counts, context = options.counts, settings.parallel.context_parallel
    if settings.parallel.strategy == "single" and counts[-1] > 1:
        raise ConfigError(f"strategy single trains on one device, and bench measures {counts[-1]}; remove one of them")
    cases = []
    for ranks in counts:
        check_context(context, ranks)
        batch = _global_batch(resolved, counts, ranks // context, options.scaling)
        launch = {"gpus": str(ranks), "nproc": None} if options.uses_gpus else {"gpus": "0", "nproc": ranks}
        steps = options.warmup + options.rounds * (options.steps + UNTIMED)
        case = resolved.with_values("bench", **_QUIET, **launch)
        case = case.with_values("bench", max_steps=steps, global_batch_size=batch, gradient_accumulation_steps=None)
        check_run(recipe_class, case)
        check_ranks(case.build(Settings).launch)
        cases.append(Case(ranks, case, batch))
    return cases


def _global_batch(resolved: Resolved, counts: Sequence[int], devices: int, scaling: str) -> int:
    """Returns the global batch size of a case with `devices` data-parallel ranks.

    Strong scaling uses the global batch size of the case with the fewest ranks for all cases; weak scaling multiplies
    it by the growth in ranks. The user's `global_batch_size` applies to that case, and `batch_size` to each rank.
    """
    settings = resolved.build(Settings)
    first = counts[0] // settings.parallel.context_parallel
    batch = plan_batch(settings.batch, resolved.explicit, devices=first).global_batch
    if scaling == "strong":
        if batch < devices:
            raise ConfigError(
                f"scaling strong: the global batch of {batch} samples cannot be divided among {devices} ranks; raise "
                "batch_size or global_batch_size"
            )
        return batch
    if batch * devices % first:
        raise ConfigError(
            f"scaling weak: {batch} samples on {first} ranks do not grow to a whole batch on {devices}; use a "
            f"global_batch_size that {first} divides"
        )
    return batch * devices // first
