"""Starts a run: resolves its settings, and launches ranks or trains in this process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from unisono import tracebacks
from unisono.cluster.environment import World, detect
from unisono.cluster.slurm.commands import address_of
from unisono.config.foreign import foreign_answer
from unisono.config.resolve import Resolved, resolve
from unisono.engine.checks import check_context, check_settings, machines
from unisono.engine.recipe import Recipe
from unisono.engine.start.device_plan import DevicePlan, plan_devices
from unisono.engine.start.registry import check_recipe, importable_name, load_recipe, recipes_with
from unisono.errors import (
    EXIT_DONE,
    EXIT_STOPPED,
    ConfigError,
    TrainingFailed,
    TryAgain,
    TrySmaller,
    UnisonoError,
    UserError,
)
from unisono.mirror.local_folders import working_folder
from unisono.observe.trackers.named import check_own, with_absolute_files
from unisono.settings import Settings, optimizer_presets
from unisono.storage.addresses import check_address, is_address
from unisono.typed_paths import absolute, all_typed, as_typed, for_caller, note_start_folder, note_typed

# Only processes that train import torch, because starting ranks and printing help must be fast.


class LaunchFailed(UnisonoError):
    """Raised if the ranks have failed and already printed the reason; only their exit code remains to be reported."""

    already_printed = True

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"the run ended with exit code {exit_code}; its ranks have printed the reason")
        self.exit_code = exit_code


def train(recipe: type[Recipe] | str, config: Any = None, **settings: Any) -> Any:
    """Trains a recipe and returns a result: the run's folder, its `metrics` as a table, `last` metrics, and `plot()`.

    `recipe` is a class or a reference such as "my_file.py:MyRecipe". `config` is the recipe's Config, a mapping of
    settings, or YAML or JSON files (a path, or a list in which later files win). Keyword settings override `config`.
    """
    try:
        return start(*configured(recipe, config, settings))
    except Exception as error:
        tracebacks.prune(error)  # for a bug in the recipe, drops dozens of the engine's frames from the traceback
        raise


def configured(recipe: type[Recipe] | str, config: Any, settings: Mapping[str, Any]) -> tuple[type[Recipe], Resolved]:
    """Returns the recipe class and its resolved settings, from the arguments of `train`."""
    note_start_folder()
    recipe_class = load_recipe(recipe) if isinstance(recipe, str) else recipe
    check_recipe(recipe_class)
    files = [config] if isinstance(config, str | os.PathLike) else config if isinstance(config, list | tuple) else []
    by_name = {recipe_class.aliases.get(name, name) for name in settings}
    values = _values_of(config, recipe_class)
    from_config = {name: value for name, value in values.items() if recipe_class.aliases.get(name, name) not in by_name}
    resolved = configure(recipe_class, file=[Path(file) for file in files], overrides={**from_config, **settings})
    return recipe_class, resolved


def configure(
    recipe_class: type[Recipe],
    *,
    file: Path | Sequence[Path] | None = None,
    flags: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
) -> Resolved:
    """Resolves all settings of a run of this recipe from config files, flags and, in Python, values by name."""
    resolved = resolve(
        (Settings, recipe_class.Config),
        recipe_defaults=recipe_class.defaults,
        file=file,
        flags=flags,
        overrides=overrides,
        aliases=recipe_class.aliases,
        translate=recipe_class.translate,
        file_keys=recipe_class.file_keys,
        explain=lambda name, settings, prefix: foreign_answer(name, settings, recipes_with, prefix),
    )
    for name in ("output_dir", "resume"):
        if str(resolved.values[name] or "").startswith("~"):
            path = os.path.expanduser(resolved.values[name])
            if path.startswith("~"):
                raise ConfigError(f"{name} {resolved.values[name]}: there is no such user; write the path in full")
            resolved = resolved.with_values(resolved.sources[name], **{name: path})
    presets = {**recipe_class.presets(resolved.values), **optimizer_presets(str(resolved.values["optimizer"]))}
    presets = {name: value for name, value in presets.items() if not resolved.explicit(name)}
    return resolved.with_values("recipe", **presets) if presets else resolved


def _values_of(config: Any, recipe_class: type[Recipe]) -> dict[str, Any]:
    if config is None or isinstance(config, str | os.PathLike | list | tuple):
        return {}
    if isinstance(config, Mapping):
        return dict(config)
    if is_dataclass(config) and isinstance(config, recipe_class.Config):
        return {f.name: getattr(config, f.name) for f in fields(config)}
    raise UserError(
        f"config: expected {recipe_class.__name__}.Config, a mapping, a file or files, got {type(config).__name__}"
    )


def start(recipe_class: type[Recipe], resolved: Resolved) -> Any:
    """Trains in this process if a launcher started it or one process is enough; else launches ranks."""
    world = detect()
    resolved = with_absolute_paths(resolved)
    if world.launcher == "slurm":
        world = replace(world, master_addr=address_of(world.master_addr))
    resolved = _with_launcher_settings(resolved, world)
    check_settings(resolved.build(Settings))
    check_own(resolved.values["track"])
    if world.launcher != "plain":
        return _train_here(recipe_class, resolved, world, None, [])
    plan = plan_devices(resolved)
    resolved = plan.applied_to(resolved)
    if plan.ranks > 1 and machines(resolved.build(Settings).launch)[1] == 1:  # reject before any process starts
        check_context(resolved.values["context_parallel"], plan.ranks)
    reference = importable_name(recipe_class)
    several = plan.ranks > 1 or machines(resolved.build(Settings).launch)[1] > 1
    if several and reference is None:
        plan.remarks.append(_why_one_device(recipe_class))
        several = False
    if several or (resolved.explicit("max_restarts") and resolved.values["max_restarts"] > 0 and reference is not None):
        assert reference is not None
        return launch_recipe(reference, resolved, plan)
    before = {name: os.environ.get(name) for name in plan.environ}
    os.environ.update(plan.environ)  # takes effect only if this process has not used CUDA yet
    try:
        return _train_here(recipe_class, resolved, world, plan.requested_devices, plan.remarks)
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _why_one_device(recipe_class: type[Recipe]) -> str:
    name = recipe_class.__name__
    where, advice = recipe_class.__module__, "move it to a file of its own to use several"
    if "IPython" in sys.modules and where == "__main__":
        where = "a notebook"
        advice = (
            f"to use several, put `%%writefile my_recipe.py` above the cell that defines it and its imports, and call "
            f'unisono.train("my_recipe.py:{name}")'
        )
    return f"{name} is defined in {where}, which other processes cannot import: training on one device; {advice}"


def with_absolute_paths(resolved: Resolved) -> Resolved:
    """Makes the paths in output_dir, resume and track absolute, because a recipe may change the current folder."""
    resolved = _with_storage(resolved)
    for name in ("output_dir", "resume"):
        path = resolved.values[name]
        if path and not (name == "resume" and (path in ("auto", "never") or is_address(path))):
            resolved = resolved.with_values(resolved.sources[name], **{name: absolute(path)})
    track = with_absolute_files(resolved.values["track"])
    return resolved.with_values(resolved.sources["track"], track=track)


def _with_storage(resolved: Resolved) -> Resolved:
    """Replaces an output_dir in object storage by a local folder whose copy is there; checks all addresses."""
    values, sources = resolved.values, resolved.sources
    for name in ("mirror", "resume"):
        if is_address(values[name]):
            resolved = resolved.with_values(sources[name], **{name: check_address(name, values[name])})
    output = values["output_dir"]
    if not is_address(output):
        return resolved
    address = check_address("output_dir", output)
    if resolved.values["mirror"] not in (None, address):
        raise ConfigError(f"output_dir {address} and mirror {resolved.values['mirror']} differ; remove one of them")
    folder = str(working_folder(address))
    note_typed(folder, address)
    return resolved.with_values(sources["output_dir"], output_dir=folder, mirror=address)


def _with_launcher_settings(resolved: Resolved, world: World) -> Resolved:
    """Adopts settings of `accelerate launch` that the user did not set for the run itself."""
    if world.mixed_precision in ("fp16", "bf16", "fp8") and not resolved.explicit("mixed_precision"):
        resolved = resolved.with_values("launcher", mixed_precision=world.mixed_precision)
    sizes = ("gradient_accumulation_steps", "global_batch_size")
    if world.accumulation is not None and not any(resolved.explicit(name) for name in sizes):
        resolved = resolved.with_values("launcher", gradient_accumulation_steps=world.accumulation)
    return resolved


def _train_here(
    recipe_class: type[Recipe], resolved: Resolved, world: World, requested_devices: int | None, remarks: list[str]
) -> Any:
    """Trains in this process, and restarts after a failure if no launcher would do that."""
    from unisono.engine.run_folder.new_folder import lock_folder
    from unisono.engine.start.rank_start import RankStart
    from unisono.engine.start.session import run_session
    from unisono.observe.watch.notebook import shown_in_notebook

    job = os.environ.get("UNISONO_JOB")
    plain = world.launcher == "plain"
    restarts = resolved.values["max_restarts"] if plain else 0
    num_counted = 0
    with ExitStack() as cleanup:
        if plain:  # holds the lock between two attempts too; under a launcher the main rank locks the folder
            resolved, lock = lock_folder(resolved, recipe_class.__qualname__)
            cleanup.callback(lock.release)
            cleanup.enter_context(shown_in_notebook(Path(resolved.values["output_dir"])))
        while True:
            try:
                start = RankStart(world, requested_devices, Path(job) if job else None, remarks, folder_is_locked=plain)
                result = run_session(recipe_class, resolved, start)
                return replace(result, folder=Path(for_caller(result.folder)))
            except SystemExit as error:
                raise TrainingFailed(f"the recipe ended the program itself (sys.exit({error.code}))") from error
            except TryAgain as error:
                is_counted = not isinstance(error, TrySmaller)
                if num_counted >= restarts and (is_counted or restarts == 0):
                    raise
                num_counted += is_counted
                cause, number = str(error), f"{num_counted} of {restarts}" if is_counted else "not counted"
            world = replace(world, restart_count=world.restart_count + 1, started_before=True)
            _start_afresh(cause, world.restart_count, number, Path(resolved.values["output_dir"]))


def _start_afresh(cause: str, attempt: int, number: str, output: Path) -> None:
    """Announces the restart, and frees the GPU memory of the previous attempt (its frames have been released)."""
    import gc

    import torch

    from unisono.observe.folder import append_event

    again = f"restarting from the last checkpoint ({number})"
    print(as_typed(f"unisono: {cause}; {again}"), file=sys.stderr)
    append_event(output, "restart", attempt=attempt, cause=cause)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def launch_recipe(reference: str, resolved: Resolved, plan: DevicePlan, *, has_driver: bool = False) -> Any:
    """Launches the ranks of a recipe, waits for them, and reads the result of the main rank."""
    from unisono.engine.length import Result

    def job(resolved: Resolved) -> Mapping[str, Any]:
        return {"recipe": reference, "resolved": resolved.to_json()}

    outcome = launch_job(job, resolved, plan, reference.rpartition(":")[2], has_driver=has_driver)
    return Result(Path(for_caller(outcome["folder"])), outcome["status"], outcome["step"], outcome["last"])


def launch_job(
    job: Callable[[Resolved], Mapping[str, Any]],
    resolved: Resolved,
    plan: DevicePlan,
    recipe: str,
    *,
    has_driver: bool = False,
) -> Any:
    """Launches ranks that do a job (`unisono.engine.start.rank`), waits for them, and returns the main rank's result.

    `job` describes the job for the final settings; `recipe` names the run folder if the user gave no output_dir.
    `has_driver`: a driver outside of all machines has locked the run folder and runs the rendezvous.
    """
    from unisono.cluster.hangs.diagnosis import Limits
    from unisono.cluster.launch.job_folder import job_folder
    from unisono.cluster.launch.launcher import launch
    from unisono.engine.run_folder.new_folder import lock_folder
    from unisono.observe.folder import LauncherEvents
    from unisono.observe.watch.notebook import shown_in_notebook

    settings = resolved.build(Settings).launch
    with ExitStack() as cleanup:
        if not settings.node_rank and not has_driver:  # this is the main rank's machine
            resolved, lock = lock_folder(resolved, recipe)
            cleanup.callback(lock.release)
        folder, output = cleanup.enter_context(job_folder()), Path(resolved.values["output_dir"])
        cleanup.enter_context(shown_in_notebook(output))
        notes = LauncherEvents(output)
        cleanup.callback(notes.write)
        job_description = {
            **job(resolved),
            "requested_devices": plan.requested_devices,
            "remarks": plan.remarks,
            "typed": all_typed(),
        }
        job_description["folder_is_locked"] = True
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
            join_timeout=settings.join_timeout,
            rendezvous_outside=has_driver,
        )
        if code not in (EXIT_DONE, EXIT_STOPPED):
            raise LaunchFailed(code)
        try:
            return json.loads((folder / "result.json").read_text())
        except FileNotFoundError as error:
            raise TrainingFailed(f"the main rank wrote no result ({error.filename})") from error
