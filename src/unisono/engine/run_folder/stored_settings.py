"""The settings stored in a run folder. A resumed run adopts these settings, and may change only some of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from unisono.checkpoint.find import list_steps
from unisono.checkpoint.manifest import CheckpointError, read_manifest
from unisono.config.resolve import Resolved
from unisono.engine.length import BY_LENGTH
from unisono.errors import ConfigError, UnisonoError, UserError
from unisono.observe.folder import EVENTS, RunFolder
from unisono.observe.json_lines import JsonLines
from unisono.observe.lock import is_held
from unisono.observe.redaction import is_redacted
from unisono.observe.report.timeline import Timeline
from unisono.settings import LARGEST_BATCH, LaunchSettings, ParallelSettings

# How and where a run executes may change whenever it is resumed.
_PER_START = {f.name for group in (LaunchSettings, ParallelSettings) for f in fields(group)}
_PER_START -= {"sync_batch_norm", "find_unused_parameters"}  # these settings affect the model
_PER_START |= {"output_dir", "resume", "inject", "num_workers", "prefetch_factor", "pin_memory"}
_PER_START |= {"batch_size", "gradient_accumulation_steps", "global_batch_size", "micro_batch", "guard_steps"}
_PER_START |= {"gpu_memory_gb", "track_offline", "track_timeout", "profile", "mirror_timeout"}

FIXED = ("shuffle", "shuffle_window", "optimizer", "base_precision", "sparsity")
"""Engine settings that cannot change within a run, because the order of samples, the meaning of the optimizer's saved
state or the frozen weights of a LoRA depend on them. The seed and the effective batch cannot change either, but have
their own checks. A recipe lists its own settings in `Recipe.fixed`."""

_MOST_RUNS = 20  # number of recent runs to compare with


def record_of(resume: str, folder: Path, recipe: str) -> Mapping[str, Any] | None:
    """Returns the record of the run to resume if its run.json is missing; None for a new run.

    With `--resume PATH` it is the run at that path; otherwise the run whose checkpoints are in the run folder.
    """
    path = Path(resume)
    if resume == "auto":
        return _record_of_checkpoints(folder / "checkpoints", recipe)
    if resume == "never" or not path.is_dir():
        return None
    record = RunFolder.read(path) or RunFolder.read(path.resolve().parent.parent)
    if record is not None:
        return record
    try:  # a checkpoint outside of its run folder contains the most important settings
        return {"config": {}, "sources": {}, **read_manifest(path).identity}
    except CheckpointError:
        return None  # find_checkpoint reports the reason


def _record_of_checkpoints(checkpoints: Path, recipe: str) -> Mapping[str, Any] | None:
    """Returns the record of a run according to its newest checkpoint."""
    for _, path in reversed(list_steps(checkpoints)):
        with suppress(CheckpointError):
            identity = read_manifest(path).identity
            if identity.get("recipe") == recipe and "seed" in identity:
                return {"config": {}, "sources": {}, **identity}
    return None


def continue_run(
    resolved: Resolved,
    record: Mapping[str, Any] | None,
    recipe: str,
    classes: Sequence[type],
    where: str,
    fixed: Sequence[str] = (),
) -> Resolved:
    """Returns the settings of a resumed run. `record` is its run.json, read from `where`.

    Settings that the user does not pass keep the run's values. Recipe, seed and the settings in FIXED and `fixed`
    cannot change: otherwise samples that were trained on could count as held out, or weights could change their
    meaning.
    """
    if record is None:
        return resolved
    _check_record(record, recipe, where)
    other_run = "remove --resume" if where.startswith("resume ") else "use a new output_dir"
    seed = resolved.values["seed"]
    if resolved.explicit("seed") and seed != record["seed"]:
        raise UserError(f"seed {seed} differs from this run's {record['seed']}; remove the flag, or {other_run}")
    try:
        before = settings_in(record, classes)
    except ConfigError as error:
        raise UserError(
            f"{where}: its run.json cannot be used ({error}); restore it, or choose another folder"
        ) from None
    for name in (*FIXED, *fixed):
        # Skip settings with no stored value to compare: run.json may be lost, and it does not store secrets.
        if name in record["config"] and not is_redacted(record["config"][name]):
            _check_fixed(name, resolved, before.values[name], other_run)
    stored_values = {
        name: before.values[name]
        for name, stored in record["config"].items()
        if not (resolved.explicit(name) or name in _PER_START or is_redacted(stored))
    }
    return resolved.with_values("run", **{**stored_values, "seed": record["seed"]})


def settings_in(record: Mapping[str, Any], classes: Sequence[type]) -> Resolved:
    """Returns the settings that a run.json stores."""
    return Resolved.from_json(classes, {"values": record["config"], "sources": record["sources"]})


def _check_record(record: Mapping[str, Any], recipe: str, where: str) -> None:
    """Rejects a run.json that is damaged or belongs to another recipe."""
    is_complete = all(key in record for key in ("config", "sources", "seed"))
    batch = record.get("global_batch", 1)
    has_valid_batch = isinstance(batch, int) and 1 <= batch <= LARGEST_BATCH
    if not has_valid_batch or (record.get("recipe") == recipe and not is_complete):
        raise UserError(f"{where}: its run.json is damaged; restore it, or choose another folder")
    if record.get("recipe") != recipe:
        raise UserError(f"{where} holds a run of {record.get('recipe')}, not {recipe}; choose another folder")


def _check_fixed(name: str, resolved: Resolved, before: Any, other_run: str) -> None:
    """Rejects a new value for a setting that cannot change within a run."""
    now, is_from_file = resolved.values[name], resolved.sources[name] == "file"
    if not resolved.explicit(name) or _is_same(now, before):
        return
    if name == "optimizer" and now.lower() == before.lower():
        return
    remedy = f"pass --{name} {before}" if is_from_file else "remove the flag"
    if _is_gone(before):
        remedy = f"if the data was moved, pass a path that ends in {_last_part(before)}"
    raise UserError(
        f"{name} {now}{' (config file)' * is_from_file} differs from this run's {before}, and it cannot change within "
        f"a run; {remedy}, or {other_run}"
    )


def _is_same(now: Any, before: Any) -> bool:
    """Whether two values of a setting are equal, or are two paths to the same data.

    Data may have moved, or a relative path may start from another folder: if the stored path does not exist here, an
    existing path that ends in the same name counts as the same data.
    """
    if now == before or not (isinstance(now, str) and isinstance(before, str)):
        return bool(now == before)
    path, old_path = os.path.expanduser(now), os.path.expanduser(before)
    with suppress(OSError, ValueError):  # no such file, or not a valid file name
        if os.path.exists(old_path):
            return os.sep in now + before and os.path.samefile(path, old_path)
        return _is_gone(before) and os.path.exists(path) and _last_part(path) == _last_part(old_path)
    return False


def _is_gone(path: Any) -> bool:
    """Whether a value is a path that does not exist here; a bare word may name a built-in dataset."""
    is_path = isinstance(path, str) and (os.sep in path or "." in path)
    return is_path and not os.path.exists(os.path.expanduser(path))


def _last_part(path: str) -> str:
    return os.path.basename(os.path.normpath(path))


def changed_settings(
    resolved: Resolved, record: Mapping[str, Any] | None, classes: Sequence[type]
) -> dict[str, list[Any]]:
    """Returns the settings that have changed since the run's last start: name -> [old value, new value]."""
    if record is None:
        return {}
    before = settings_in(record, classes).to_json()["values"]
    now = resolved.to_json()["values"]
    # Settings that depend on the run's length are derived again, unless the user sets them now.
    by_length = {name for name, source in record["sources"].items() if source == BY_LENGTH}
    by_length = {name for name in by_length if not resolved.explicit(name)}
    unknown = {name for name, stored in record["config"].items() if is_redacted(stored)}
    comparable = [name for name in record["config"] if name not in _PER_START | by_length | unknown]
    return {name: [before[name], now[name]] for name in comparable if name in now and before[name] != now[name]}


def sources_of(resolved: Resolved, record: Mapping[str, Any] | None) -> dict[str, str]:
    """Returns the source of each setting; settings that a resumed run adopted from run.json keep their source."""
    before = (record or {}).get("sources")
    original = before if isinstance(before, Mapping) else {}
    return {
        name: str(original.get(name, source)) if source == "run" else source
        for name, source in resolved.sources.items()
    }


def unfinished(resolved: Resolved, recipe: str, classes: Sequence[type]) -> list[str]:
    """Returns a hint on how to continue the newest unfinished run with the same settings; none if output_dir is set."""
    if resolved.explicit("output_dir") or resolved.explicit("resume"):
        return []
    with suppress(OSError, UnisonoError, ValueError, KeyError, TypeError):  # a mere hint must never fail
        others = sorted(Path(resolved.values["output_dir"]).parent.glob(f"{recipe.lower()}-*"), reverse=True)
        for other in others[:_MOST_RUNS]:
            record = RunFolder.read(other)
            if record is None or record["recipe"] != recipe or changed_settings(resolved, record, classes):
                continue
            if not _has_ended(other) and list_steps(other / "checkpoints"):
                return [f"{other} is an unfinished run with the same settings; to continue it: --output_dir {other}"]
            break
    return []


def _has_ended(folder: Path) -> bool:
    """Whether the run in a folder is done or still running."""
    timeline = Timeline()
    for event in JsonLines(folder / EVENTS):
        timeline.add(event)
    return is_held(folder) or timeline.status == "done"
