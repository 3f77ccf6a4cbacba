"""A run that is started again: its folder says what it is, and what may not change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from unisono.config.resolve import Resolved
from unisono.errors import UserError
from unisono.settings import LaunchSettings, ParallelSettings

# Where and how a run is carried out belongs to a start, not to the run.
_OF_THE_START = {f.name for group in (LaunchSettings, ParallelSettings) for f in fields(group)} | {
    "output_dir",
    "resume",
    "batch_size",
    "gradient_accumulation_steps",
    "global_batch_size",
    "num_workers",
    "prefetch_factor",
    "pin_memory",
}


def continue_run(
    resolved: Resolved, record: Mapping[str, Any] | None, recipe: str, classes: Sequence[type]
) -> Resolved:
    """The config of a start in a folder whose run.json is `record`.

    What this start does not set is as it was when the run began; recipe and seed cannot change.
    """
    if record is None:
        return resolved
    folder = resolved.values["output_dir"]
    if record.get("recipe") != recipe:
        raise UserError(
            f"output_dir {folder} holds a run of {record.get('recipe')}, not {recipe}; choose another folder"
        )
    seed = resolved.values["seed"]
    if resolved.explicit("seed") and seed != record.get("seed"):
        raise UserError(
            f"seed {seed} differs from this run's {record.get('seed')}; leave the flag out, or start a new output_dir"
        )
    before = Resolved.from_json(classes, {"values": record["config"], "sources": record["sources"]})
    kept = {
        name: value
        for name, value in before.values.items()
        if name in resolved.values and not resolved.explicit(name) and name not in _OF_THE_START
    }
    return resolved.with_values("run", **kept)
