"""Starts a run: resolves its settings, chooses devices, and launches ranks or trains in this process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from unisono import tracebacks
from unisono.cluster.environment import World, detect
from unisono.cluster.slurm.commands import address_of
from unisono.config.foreign import foreign_answer
from unisono.config.resolve import Resolved, resolve
from unisono.devices import GpuLock, child_environment, choose_and_lock, num_cpu_cores, visible_gpus
from unisono.engine.checks import check_settings, machines
from unisono.engine.recipe import Recipe
from unisono.engine.start.registry import check_recipe, importable_name, load_recipe, recipes_with
from unisono.errors import EXIT_DONE, EXIT_STOPPED, ConfigError, TrainingFailed, TryAgain, UnisonoError, UserError
from unisono.settings import LaunchSettings, Settings
from unisono.typed_paths import absolute, all_typed, as_typed, for_caller, note_start_folder

# Only processes that train import torch: starting ranks and printing help must be fast.


@dataclass(frozen=True)
class DevicePlan:
    """The ranks to start on this machine, and their devices."""

    ranks: int
    environ: dict[str, str]
    requested_devices: int | None  # number of devices that the user asked for on this machine
    remarks: list[str]
    lock: GpuLock | None  # reserves our GPUs while it lives


class LaunchFailed(UnisonoError):
    """The ranks failed and have already printed the reason; only their exit code is left to report."""

    already_printed = True

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"the run ended with exit code {exit_code}; its ranks have printed the reason")
        self.exit_code = exit_code


def train(recipe: type[Recipe] | str, config: Any = None, **settings: Any) -> Any:
    """Trains a recipe and returns a result with the run's folder and last metrics.

    `recipe` is a class or a reference such as "my_file.py:MyRecipe". `config` is the recipe's Config, a mapping of
    settings, or YAML or JSON files (a path, or a list in which later files win). Keyword settings override `config`.
    """
    note_start_folder()
    kind = load_recipe(recipe) if isinstance(recipe, str) else recipe
    check_recipe(kind)
    files = [config] if isinstance(config, str | os.PathLike) else config if isinstance(config, list | tuple) else []
    by_name = {kind.aliases.get(name, name) for name in settings}
    values = _values_of(config, kind)
    from_config = {name: value for name, value in values.items() if kind.aliases.get(name, name) not in by_name}
    try:
        return start(kind, configure(kind, file=[Path(file) for file in files], overrides={**from_config, **settings}))
    except Exception as error:
        tracebacks.prune(error)  # for a bug in the recipe: drops dozens of our frames from the traceback
        raise


def configure(
    kind: type[Recipe],
    *,
    file: Path | Sequence[Path] | None = None,
    flags: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
) -> Resolved:
    """Resolves all settings of a run of this recipe from config files, flags and, in Python, values by name."""
    resolved = resolve(
        (Settings, kind.Config),
        recipe_defaults=kind.defaults,
        file=file,
        flags=flags,
        overrides=overrides,
        aliases=kind.aliases,
        translate=kind.translate,
        file_keys=kind.file_keys,
        explain=lambda name, settings, prefix: foreign_answer(name, settings, recipes_with, prefix),
    )
    for name in ("output_dir", "resume"):
        if str(resolved.values[name] or "").startswith("~"):
            path = os.path.expanduser(resolved.values[name])
            if path.startswith("~"):
                raise ConfigError(f"{name} {resolved.values[name]}: there is no such user; write the path in full")
            resolved = resolved.with_values(resolved.sources[name], **{name: path})
    presets = {name: value for name, value in kind.presets(resolved.values).items() if not resolved.explicit(name)}
    return resolved.with_values("recipe", **presets) if presets else resolved


def _values_of(config: Any, kind: type[Recipe]) -> dict[str, Any]:
    if config is None or isinstance(config, str | os.PathLike | list | tuple):
        return {}
    if isinstance(config, Mapping):
        return dict(config)
    if is_dataclass(config) and isinstance(config, kind.Config):
        return {f.name: getattr(config, f.name) for f in fields(config)}
    raise UserError(f"config: expected {kind.__name__}.Config, a mapping, a file or files, got {type(config).__name__}")


def start(kind: type[Recipe], resolved: Resolved) -> Any:
    """Trains in this process if a launcher started it or one process is enough; else launches ranks."""
    world = detect()
    resolved = with_absolute_paths(resolved)
    if world.launcher == "slurm":
        world = replace(world, master_addr=address_of(world.master_addr))
    resolved = _with_launcher_settings(resolved, world)
    check_settings(resolved.build(Settings))
    if world.launcher != "plain":
        return _here(kind, resolved, world, None, [])
    plan = plan_devices(resolved)
    if not plan.environ.get("CUDA_VISIBLE_DEVICES"):
        resolved = resolved.with_values(resolved.sources["gpus"], gpus="0")
    reference = importable_name(kind)
    several = plan.ranks > 1 or machines(resolved.build(Settings).launch)[1] > 1
    if several and reference is None:
        plan.remarks.append(
            f"{kind.__name__} lives in {kind.__module__}, which other processes cannot import: training on one device; "
            "move it to a file of its own to use several"
        )
        several = False
    if several or (resolved.explicit("max_restarts") and resolved.values["max_restarts"] > 0 and reference is not None):
        assert reference is not None
        return _launch(reference, resolved, plan)
    before = {name: os.environ.get(name) for name in plan.environ}
    os.environ.update(plan.environ)  # takes effect only if this process has not used CUDA yet
    try:
        return _here(kind, resolved, world, plan.requested_devices, plan.remarks)
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def with_absolute_paths(resolved: Resolved) -> Resolved:
    """Makes the paths in output_dir and resume absolute: a recipe may change the current folder."""
    for name in ("output_dir", "resume"):
        path = resolved.values[name]
        if path and not (name == "resume" and path in ("auto", "never")):
            resolved = resolved.with_values(resolved.sources[name], **{name: absolute(path)})
    return resolved


def _with_launcher_settings(resolved: Resolved, world: World) -> Resolved:
    """Adopts settings of `accelerate launch` that the user did not set for the run itself."""
    if world.mixed_precision in ("fp16", "bf16") and not resolved.explicit("mixed_precision"):
        resolved = resolved.with_values("launcher", mixed_precision=world.mixed_precision)
    sizes = ("gradient_accumulation_steps", "global_batch_size")
    if world.accumulation is not None and not any(resolved.explicit(name) for name in sizes):
        resolved = resolved.with_values("launcher", gradient_accumulation_steps=world.accumulation)
    return resolved


def plan_devices(resolved: Resolved) -> DevicePlan:
    """Chooses the devices of this machine by the settings, and reserves them for this run."""
    settings = resolved.build(Settings)
    launch, strategy = settings.launch, settings.parallel.strategy
    _check_ranks(launch)
    if launch.nproc is not None and not resolved.explicit("gpus"):
        ranks = _one_process(strategy, launch.nproc)
        return DevicePlan(ranks, {"CUDA_VISIBLE_DEVICES": ""}, None, _too_few_cores(ranks), None)
    choice, lock = choose_and_lock(launch.gpus, visible_gpus(), min_memory_gb=launch.min_memory_gb)
    remarks = list(choice.warnings)
    ranks = launch.nproc or len(choice.gpus) or 1
    requested: int | None = max(choice.requested, 1)
    if strategy == "single" or launch.nproc is not None:
        requested = None
    if strategy == "single" and len(choice.gpus) > 1:
        remarks.append(f"strategy single uses one GPU of the {len(choice.gpus)} chosen")
    return DevicePlan(_one_process(strategy, ranks), child_environment(choice), requested, remarks, lock)


def _check_ranks(launch: LaunchSettings) -> None:
    """Refuses far more processes than there are cores: each needs some hundred MiB before it trains."""
    cores = num_cpu_cores()
    most = cores * launch.max_ranks_per_core
    if launch.nproc is not None and launch.nproc > most:
        raise ConfigError(
            f"nproc {launch.nproc}: this machine has {cores} core{'s' * (cores > 1)}, which allows at most {most} "
            f"ranks (max_ranks_per_core {launch.max_ranks_per_core}); use --nproc {cores}, or raise the limit with "
            f"--max_ranks_per_core {-(-launch.nproc // cores)}"
        )


def _one_process(strategy: str, ranks: int) -> int:
    return 1 if strategy in ("single", "dp") else ranks


def _too_few_cores(ranks: int) -> list[str]:
    cores = num_cpu_cores()
    return [f"{ranks} CPU ranks on {cores} cores: slower than {cores}"] if ranks > cores else []


def _here(kind: type[Recipe], resolved: Resolved, world: World, requested: int | None, remarks: list[str]) -> Any:
    """Trains in this process, and restarts after a failure if no launcher would do that."""
    from unisono.engine.run_folder.new_folder import hold_folder
    from unisono.engine.start.rank_start import RankStart
    from unisono.engine.start.session import run_session

    job = os.environ.get("UNISONO_JOB")
    plain = world.launcher == "plain"
    restarts = resolved.values["max_restarts"] if plain else 0
    with ExitStack() as held:
        if plain:  # held also between two attempts; under a launcher the main rank holds it
            resolved, lock = hold_folder(resolved, kind.__qualname__)
            held.callback(lock.release)
        while True:
            try:
                start = RankStart(world, requested, Path(job) if job else None, remarks, folder_is_held=plain)
                result = run_session(kind, resolved, start)
                return replace(result, folder=Path(for_caller(result.folder)))
            except SystemExit as error:
                raise TrainingFailed(f"the recipe ended the program itself (sys.exit({error.code}))") from error
            except TryAgain as error:
                if world.restart_count >= restarts:
                    raise
                cause = str(error)
            world = replace(world, restart_count=world.restart_count + 1, started_before=True)
            _start_afresh(cause, world.restart_count, restarts, Path(resolved.values["output_dir"]))


def _start_afresh(cause: str, attempt: int, limit: int, output: Path) -> None:
    """Announces the restart, and frees the GPU memory of the previous attempt (its frames are gone by now)."""
    import gc

    import torch

    from unisono.observe.folder import append_event

    again = f"restarting from the last checkpoint ({attempt} of {limit})"
    print(as_typed(f"unisono: {cause}; {again}"), file=sys.stderr)
    append_event(output, "restart", attempt=attempt, cause=cause)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _launch(reference: str, resolved: Resolved, plan: DevicePlan) -> Any:
    """Launches the ranks of a recipe, waits for them, and reads the result of the main rank."""
    from unisono.engine.length import Result

    def job(resolved: Resolved) -> Mapping[str, Any]:
        return {"recipe": reference, "resolved": resolved.to_json()}

    outcome = launch_job(job, resolved, plan, reference.rpartition(":")[2])
    return Result(Path(for_caller(outcome["folder"])), outcome["status"], outcome["step"], outcome["metrics"])


def launch_job(job: Callable[[Resolved], Mapping[str, Any]], resolved: Resolved, plan: DevicePlan, recipe: str) -> Any:
    """Launches ranks that do a job (`unisono.engine.start.rank`), waits for them, and returns the main rank's result.

    `job` describes the job for the final settings; `recipe` names the run folder if the user gave no output_dir.
    """
    from unisono.cluster.hangs.diagnosis import Limits
    from unisono.cluster.launch.job_folder import job_folder
    from unisono.cluster.launch.launcher import launch
    from unisono.engine.run_folder.new_folder import hold_folder
    from unisono.observe.folder import LauncherEvents

    settings = resolved.build(Settings).launch
    with ExitStack() as held:
        if not settings.node_rank:  # this is the main rank's machine
            resolved, lock = hold_folder(resolved, recipe)
            held.callback(lock.release)
        folder, output = held.enter_context(job_folder()), Path(resolved.values["output_dir"])
        notes = LauncherEvents(output)
        held.callback(notes.write)
        job_description = {
            **job(resolved),
            "requested_devices": plan.requested_devices,
            "remarks": plan.remarks,
            "typed": all_typed(),
        }
        job_description["folder_is_held"] = True
        (folder / "job.json").write_text(json.dumps(job_description))
        code = launch(
            # -P: files in the current folder cannot shadow modules
            [sys.executable, "-P", "-m", "unisono.engine.start.rank"],
            nproc=plan.ranks,
            nnodes=machines(settings),
            node_rank=settings.node_rank,
            rdzv_endpoint=settings.rdzv_endpoint,
            max_restarts=settings.max_restarts,
            environ=plan.environ,
            job_folder=folder,
            record_event=lambda kind, details: notes.add(kind, **details),
            limits=Limits(settings.hang_timeout, settings.start_timeout),
            run_folder=output,
        )
        if code not in (EXIT_DONE, EXIT_STOPPED):
            raise LaunchFailed(code)
        try:
            return json.loads((folder / "result.json").read_text())
        except FileNotFoundError as error:
            raise TrainingFailed(f"the main rank wrote no result ({error.filename})") from error
