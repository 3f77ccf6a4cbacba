"""A run that is started again: its folder says what it is, and what may not change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from unisono.checkpoint.find import list_steps
from unisono.checkpoint.manifest import CheckpointError, read_manifest
from unisono.config.resolve import Resolved
from unisono.errors import UnisonoError, UserError
from unisono.observe.folder import EVENTS, RunFolder, is_held
from unisono.observe.report.lines import JsonLines
from unisono.observe.report.timeline import Timeline
from unisono.settings import LaunchSettings, ParallelSettings

# Where and how a run is carried out belongs to a start, not to the run.
_OF_THE_START = {f.name for group in (LaunchSettings, ParallelSettings) for f in fields(group)}
_OF_THE_START -= {"sync_batch_norm", "find_unused_parameters"}  # these belong to the model
_OF_THE_START |= {"output_dir", "resume", "batch_size", "gradient_accumulation_steps", "global_batch_size"}
_OF_THE_START |= {"micro_batch", "guard_steps", "inject"}
_OF_THE_START |= {"num_workers", "prefetch_factor", "pin_memory"}

_LOOKED_AT = 20  # runs


def record_of(resume: str) -> Mapping[str, Any] | None:
    """What is known of the run that an explicit `--resume PATH` comes from; None for auto and never."""
    path = Path(resume)
    if resume in ("auto", "never") or not path.is_dir():
        return None
    record = RunFolder.read(path) or RunFolder.read(path.resolve().parent.parent)
    if record is not None:
        return record
    try:  # a checkpoint that was taken out of its run still knows the essentials
        return {"config": {}, "sources": {}, **read_manifest(path).identity}
    except CheckpointError:
        return None  # resume says more about it


def continue_run(
    resolved: Resolved,
    record: Mapping[str, Any] | None,
    recipe: str,
    classes: Sequence[type],
    where: str,
    fixed: Sequence[str] = (),
) -> Resolved:
    """The config of a start that goes on with the run whose run.json is `record`, found at `where`.

    What this start does not set is as it was when the run began; recipe, seed and settings in `fixed` cannot change.
    """
    if record is None:
        return resolved
    broken = [key for key in ("config", "sources", "seed") if key not in record]
    if not isinstance(record.get("global_batch", 1), int) or (record.get("recipe") == recipe and broken):
        raise UserError(f"{where}: its run.json is damaged; restore it, or choose another folder")
    if record.get("recipe") != recipe:
        raise UserError(f"{where} holds a run of {record.get('recipe')}, not {recipe}; choose another folder")
    seed = resolved.values["seed"]
    if resolved.explicit("seed") and seed != record.get("seed"):
        raise UserError(
            f"seed {seed} differs from this run's {record.get('seed')}; leave the flag out, or start a new output_dir"
        )
    before = Resolved.from_json(classes, {"values": record["config"], "sources": record["sources"]})
    for name in fixed:
        if resolved.explicit(name) and resolved.values[name] != before.values[name]:
            raise UserError(
                f"{name} {resolved.values[name]} differs from this run's {before.values[name]}, and another one would "
                "make another run of it; leave the flag out, or start a new output_dir"
            )
    kept = {
        name: before.values[name]
        for name in record["config"]
        if not resolved.explicit(name) and name not in _OF_THE_START
    }
    return resolved.with_values("run", **{**kept, "seed": record["seed"]})


def changed(resolved: Resolved, record: Mapping[str, Any] | None, classes: Sequence[type]) -> dict[str, list[Any]]:
    """Settings of the run that are others than at its last start, by name: what they were, and what they are."""
    if record is None:
        return {}
    before = Resolved.from_json(classes, {"values": record["config"], "sources": record["sources"]}).to_json()["values"]
    now = resolved.to_json()["values"]
    known = [name for name in record["config"] if name not in _OF_THE_START]
    return {name: [before[name], now[name]] for name in known if name in now and before[name] != now[name]}


def unfinished(resolved: Resolved, recipe: str, classes: Sequence[type]) -> list[str]:
    """Where a start has chosen its folder by itself: a remark, if the newest run of the same settings is unfinished."""
    if resolved.explicit("output_dir") or resolved.explicit("resume"):
        return []
    with suppress(OSError, UnisonoError, ValueError, KeyError, TypeError):  # nobody has asked for it
        others = sorted(Path(resolved.values["output_dir"]).parent.glob(f"{recipe.lower()}-*"), reverse=True)
        for other in others[:_LOOKED_AT]:
            record = RunFolder.read(other)
            if record is None or record["recipe"] != recipe or changed(resolved, record, classes):
                continue
            if not _has_ended(other) and list_steps(other / "checkpoints"):
                return [f"{other} is the same run, unfinished; to go on with it: --output_dir {other}"]
            break
    return []


def _has_ended(folder: Path) -> bool:
    """Whether the run in a folder is done, or under way."""
    timeline = Timeline()
    for event in JsonLines(folder / EVENTS):
        timeline.add(event)
    return is_held(folder) or timeline.status == "done"
