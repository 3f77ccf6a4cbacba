"""From a recipe and settings to a finished run: chooses devices, starts ranks where needed, or trains right here."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from unisono.cluster.environment import World, detect
from unisono.cluster.slurm import address_of
from unisono.config.resolve import Resolved, resolve
from unisono.devices import GpuLock, child_environment, take, visible_gpus
from unisono.engine.checks import check_settings, machines
from unisono.engine.recipe import Recipe
from unisono.engine.registry import check_recipe, load_recipe, words_for
from unisono.errors import EXIT_DONE, EXIT_STOPPED, ConfigError, TrainingFailed, TryAgain, UnisonoError, UserError
from unisono.settings import Settings

# torch is imported by whoever trains, not by whoever starts ranks or reads help.


@dataclass(frozen=True)
class DevicePlan:
    """How many ranks to start on this machine, on what."""

    ranks: int
    environ: dict[str, str]
    asked_devices: int | None  # on this machine
    remarks: list[str]
    lock: GpuLock | None  # keeps other runs off our GPUs while it lives


class LaunchFailed(UnisonoError):
    """Ranks ended with an exit code that says why; they have already told the user."""

    already_told = True

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"the run ended with exit code {exit_code}; its ranks have said why")
        self.exit_code = exit_code


def train(recipe: type[Recipe] | str, config: Any = None, **settings: Any) -> Any:
    """Trains a recipe and returns a result with the run's folder and last metrics.

    `recipe` is a class or words such as "my_file.py:MyRecipe"; `config` is the recipe's Config, a mapping of settings,
    or YAML or JSON files (a path, or a list in which later files win); further settings by name win over it.
    """
    kind = load_recipe(recipe) if isinstance(recipe, str) else recipe
    check_recipe(kind)
    files = [config] if isinstance(config, str | os.PathLike) else config if isinstance(config, list | tuple) else []
    by_name = {kind.aliases.get(name, name) for name in settings}
    given = {name: value for name, value in _given(config, kind).items() if kind.aliases.get(name, name) not in by_name}
    return start(kind, configure(kind, file=[Path(file) for file in files], overrides={**given, **settings}))


def configure(
    kind: type[Recipe],
    *,
    file: Path | Sequence[Path] | None = None,
    flags: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
) -> Resolved:
    """All settings of a run of this recipe, from config files, flags and, in Python, values by name."""
    resolved = resolve(
        (Settings, kind.Config),
        recipe_defaults=kind.defaults,
        file=file,
        flags=flags,
        overrides=overrides,
        aliases=kind.aliases,
        translate=kind.translate,
    )
    for name in ("output_dir", "resume"):
        if str(resolved.values[name] or "").startswith("~"):
            place = os.path.expanduser(resolved.values[name])
            if place.startswith("~"):
                raise ConfigError(f"{name} {resolved.values[name]}: there is no such user; write the path in full")
            resolved = resolved.with_values(resolved.sources[name], **{name: place})
    follow = {name: value for name, value in kind.presets(resolved.values).items() if not resolved.explicit(name)}
    return resolved.with_values("recipe", **follow) if follow else resolved


def _given(config: Any, kind: type[Recipe]) -> dict[str, Any]:
    if config is None or isinstance(config, str | os.PathLike | list | tuple):
        return {}
    if isinstance(config, Mapping):
        return dict(config)
    if is_dataclass(config) and isinstance(config, kind.Config):
        return {f.name: getattr(config, f.name) for f in fields(config)}
    raise UserError(f"config: expected {kind.__name__}.Config, a mapping, a file or files, got {type(config).__name__}")


def start(kind: type[Recipe], resolved: Resolved) -> Any:
    """Trains under the launcher that started this process, or starts ranks, or trains right here."""
    world = detect()
    if world.launcher == "slurm":
        world = replace(world, master_addr=address_of(world.master_addr))
    resolved = _told_by_launcher(resolved, world)
    check_settings(resolved.build(Settings))
    if world.launcher != "plain":
        return _here(kind, resolved, world, None, [])
    plan = plan_devices(resolved)
    if not plan.environ.get("CUDA_VISIBLE_DEVICES"):
        resolved = resolved.with_values(resolved.sources["gpus"], gpus="0")
    words = words_for(kind)
    several = plan.ranks > 1 or machines(resolved.build(Settings).launch)[1] > 1
    if several and words is None:
        plan.remarks.append(
            f"{kind.__name__} lives in {kind.__module__}, which other processes cannot import: training on one device; "
            "put it into a file of its own to use several"
        )
        several = False
    if several or (resolved.explicit("max_restarts") and resolved.values["max_restarts"] > 0 and words is not None):
        assert words is not None
        return _launch(words, resolved, plan)
    before = {name: os.environ.get(name) for name in plan.environ}
    os.environ.update(plan.environ)  # takes effect if CUDA has not been used yet in this process
    try:
        return _here(kind, resolved, world, plan.asked_devices, plan.remarks)
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _told_by_launcher(resolved: Resolved, world: World) -> Resolved:
    """What accelerate was told, where the run was told nothing itself."""
    if world.mixed_precision in ("fp16", "bf16") and not resolved.explicit("mixed_precision"):
        resolved = resolved.with_values("launcher", mixed_precision=world.mixed_precision)
    sizes = ("gradient_accumulation_steps", "global_batch_size")
    if world.accumulation is not None and not any(resolved.explicit(name) for name in sizes):
        resolved = resolved.with_values("launcher", gradient_accumulation_steps=world.accumulation)
    return resolved


def plan_devices(resolved: Resolved) -> DevicePlan:
    """The devices of this machine that the settings ask for, held for this run."""
    settings = resolved.build(Settings)
    launch, strategy = settings.launch, settings.parallel.strategy
    if launch.nproc is not None and not resolved.explicit("gpus"):
        ranks = _one_process(strategy, launch.nproc)
        return DevicePlan(ranks, {"CUDA_VISIBLE_DEVICES": ""}, None, _too_few_cores(ranks), None)
    choice, lock = take(launch.gpus, visible_gpus(), min_memory_gb=launch.min_memory_gb)
    remarks = list(choice.warnings)
    ranks = launch.nproc or len(choice.gpus) or 1
    asked: int | None = max(choice.asked, 1)
    if strategy == "single" or launch.nproc is not None:
        asked = None
    if strategy == "single" and len(choice.gpus) > 1:
        remarks.append(f"strategy single uses one GPU of the {len(choice.gpus)} chosen")
    return DevicePlan(_one_process(strategy, ranks), child_environment(choice), asked, remarks, lock)


def _one_process(strategy: str, ranks: int) -> int:
    return 1 if strategy in ("single", "dp") else ranks


def _too_few_cores(ranks: int) -> list[str]:
    cores = len(os.sched_getaffinity(0))
    return [f"{ranks} CPU ranks on {cores} cores: slower than {cores}"] if ranks > cores else []


def _here(kind: type[Recipe], resolved: Resolved, world: World, asked: int | None, remarks: list[str]) -> Any:
    """Trains in this process; where nobody else would start it again, it starts again by itself."""
    from unisono.engine.folders import default_folder
    from unisono.engine.session import Start, run_session

    job = os.environ.get("UNISONO_JOB")
    restarts = resolved.values["max_restarts"] if world.launcher == "plain" else 0
    if resolved.values["output_dir"] is None and world.launcher == "plain":
        resolved = resolved.with_values(resolved.sources["output_dir"], output_dir=default_folder(kind.__qualname__))
    while True:
        try:
            return run_session(kind, resolved, Start(world, asked, Path(job) if job else None, remarks))
        except SystemExit as error:
            raise TrainingFailed(f"the recipe ended the program itself (sys.exit({error.code}))") from error
        except TryAgain as error:
            if world.restart_count >= restarts:
                raise
            cause = str(error)
        world = replace(world, restart_count=world.restart_count + 1, started_before=True)
        _start_afresh(cause, world.restart_count, restarts, Path(resolved.values["output_dir"]))


def _start_afresh(cause: str, attempt: int, limit: int, output: Path) -> None:
    """Says so, and frees what the attempt before has left on the GPU (its frames are gone by now)."""
    import gc

    import torch

    from unisono.observe.folder import append_event

    print(f"unisono: {cause}; starting again from the last checkpoint ({attempt} of {limit})", file=sys.stderr)
    append_event(output, "restart", attempt=attempt, cause=cause)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _launch(words: str, resolved: Resolved, plan: DevicePlan) -> Any:
    """Starts the ranks of a recipe, waits for them, and reads the result that the main rank left."""
    from unisono.engine.length import Result

    if resolved.values["output_dir"] is None:
        from unisono.engine.folders import default_folder

        name = default_folder(words.rpartition(":")[2])
        resolved = resolved.with_values(resolved.sources["output_dir"], output_dir=name)
    found = launch_job({"recipe": words, "resolved": resolved.to_json()}, resolved, plan)
    return Result(Path(found["folder"]), found["status"], found["step"], found["metrics"])


def launch_job(job: Mapping[str, Any], resolved: Resolved, plan: DevicePlan) -> Any:
    """Starts ranks that do a job (`unisono.engine.rank`), waits for them, and returns what the main one left."""
    from unisono.cluster.hang import Limits
    from unisono.cluster.launch import launch
    from unisono.observe.folder import NotesFromOutside

    output = Path(resolved.values["output_dir"])
    folder = Path(tempfile.mkdtemp(prefix="unisono-"))
    notes = NotesFromOutside(output)
    try:
        written = {**job, "asked_devices": plan.asked_devices, "remarks": plan.remarks}
        (folder / "job.json").write_text(json.dumps(written))
        settings = resolved.build(Settings).launch
        code = launch(
            # -P: no file of the current folder takes a module's place
            [sys.executable, "-P", "-m", "unisono.engine.rank"],
            nproc=plan.ranks,
            nnodes=machines(settings),
            node_rank=settings.node_rank,
            rdzv_endpoint=settings.rdzv_endpoint,
            max_restarts=settings.max_restarts,
            environ=plan.environ,
            job_folder=folder,
            note=lambda kind, details: notes.add(kind, **details),
            limits=Limits(settings.hang_timeout, settings.start_timeout),
            run_folder=output,
        )
        if code not in (EXIT_DONE, EXIT_STOPPED):
            raise LaunchFailed(code)
        return json.loads((folder / "result.json").read_text())
    except FileNotFoundError as error:
        raise TrainingFailed(f"the main rank left no result ({error.filename})") from error
    finally:
        notes.write()
        shutil.rmtree(folder, ignore_errors=True)
