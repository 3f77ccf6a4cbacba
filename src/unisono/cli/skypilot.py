"""`unisono skypilot RECIPE --nodes 2 --gpus-per-node H100:8`: writes a run as a SkyPilot task."""

from __future__ import annotations

import argparse
import posixpath
import re
import sys
import time
from pathlib import Path

from unisono.cli.arguments import OPTION_FOR, TrainingParser
from unisono.cli.job_files import public_variable, whole_number, write_new
from unisono.cluster.skypilot import SkyPilotTask, folder, storage, task_file
from unisono.config.resolve import Resolved
from unisono.engine.batch import plan_batch
from unisono.engine.checks import check_run
from unisono.engine.recipe import Recipe
from unisono.engine.start.registry import load_recipe
from unisono.engine.start.run import configure
from unisono.errors import EXIT_DONE, ConfigError
from unisono.formatting import format_count
from unisono.settings import Settings

_DESCRIPTION = """Write a run as a task of SkyPilot, to start with `sky jobs launch` on a cloud or on Kubernetes.

On each machine, unisono's launcher starts a rank per GPU. If a spot machine is taken away, SkyPilot starts other
machines, and the run continues from its checkpoint. Every setting of `unisono train` is also a flag here: it is checked
now and written into the task. Paths of data and of the run folder are those on the machines."""

_DEFAULT_MOUNT = "/data"
_SECRETS = "pass --secret NAME, and its value when you launch the job"


def _parser() -> TrainingParser:
    usage = "RECIPE --setup COMMAND --volume NAME --nodes 2 --gpus-per-node H100:8 [options] [settings]"
    parser = TrainingParser("skypilot", usage, _DESCRIPTION)
    add, several = parser.add_option, parser.add_repeatable
    several("--setup", "COMMAND", "shell command that prepares a machine, for instance one that installs unisono")
    add("--image", "IMAGE", "container image with unisono, instead of or before --setup")
    add(
        "--workdir",
        "FOLDER",
        "folder to upload, which contains the recipe and config files (default: the current folder, if one of them is "
        "a file)",
    )
    several(
        "--volume",
        "NAME[:/PATH]",
        f"volume of SkyPilot for the run folder, and where to mount it (default: {_DEFAULT_MOUNT}); the machines must "
        "be able to share it",
    )
    several("--bucket", "s3://NAME[:/PATH]", "bucket, for data or for the run folder of a single machine")
    several("--shared-folder", "/PATH", "folder that all machines share already, for instance by NFS")
    add("--nodes", "N", "number of machines (default: 1)", type=whole_number)
    add(
        "--gpus-per-node", "TYPE:N", "GPUs per machine, for instance H100:8 (default: train on CPUs with --nproc ranks)"
    )
    parser.add_argument("--spot", action="store_true", help="use spot machines, which may be preempted at any time")
    add("--infra", "CLOUD", "cloud[/region[/zone]] or k8s (default: where it is cheapest)")
    add("--cpus", "N", "CPU cores per machine; 16+ for at least 16")
    add("--memory", "GIB", "memory per machine in GiB; 256+ for at least 256")
    add("--disk-size", "GIB", "size of a machine's disk in GiB", type=whole_number)
    several("--env", "NAME=VALUE", "environment variable")
    several("--secret", "NAME", "environment variable whose value you pass to `sky jobs launch --secret NAME`")
    add(
        "--restarts-on-errors",
        "N",
        "number of times that SkyPilot starts the run again after an error; lost machines do not count (default: 0)",
        type=whole_number,
    )
    add("--name", "NAME", "name of the task (default: the recipe's name)")
    add("--output", "FILE", "file to write (default: stdout)")
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    return parser


def main(argv: list[str]) -> int:
    """Runs the command."""
    parser = _parser()
    recipe, config, flags, options = parser.parse_training(argv)
    if options.help:
        parser.print_help()
        return EXIT_DONE
    kind = load_recipe(recipe)
    resolved = configure(kind, file=config, flags=flags)
    _check(kind, resolved, options)
    task = _task(options, resolved, recipe, config, flags)
    ranks_per_node = int((task.gpus_per_node or ":0").rpartition(":")[2]) or resolved.values["nproc"] or 1
    batch = plan_batch(resolved.build(Settings).batch, resolved.explicit, devices=task.nodes * ranks_per_node)
    text = task_file(task)
    if options.output is None:
        print(text, end="")
    else:
        write_new(Path(options.output), text, option="--output", overwrite=options.force)
    _explain(task, resolved, options.output, batch.global_batch)
    return EXIT_DONE


def _check(kind: type[Recipe], resolved: Resolved, options: argparse.Namespace) -> None:
    for name, instead in OPTION_FOR.items():
        if resolved.explicit(name):
            raise ConfigError(f"{name}: the task sets it on each machine; use --{instead} instead")
    if options.gpus_per_node and resolved.explicit("nproc"):
        raise ConfigError(f"nproc: a machine has one rank per GPU ({options.gpus_per_node}); remove it")
    check_run(kind, resolved)  # report bad settings now, before machines are rented
    if resolved.values["resume"] == "never":
        raise ConfigError("resume: never would prevent new machines from continuing; use a new output_dir instead")


def _task(
    options: argparse.Namespace, resolved: Resolved, recipe: str, config: list[Path], flags: list[str]
) -> SkyPilotTask:
    name = options.name or _plain(recipe.rpartition(":")[2] or recipe)
    volumes = [storage("volume", text, _DEFAULT_MOUNT) for text in options.volume]
    buckets = [storage("bucket", text, _DEFAULT_MOUNT) for text in options.bucket]
    shared = [folder("shared_folder", text) for text in options.shared_folder]
    first = next(iter([*(each.path for each in (*volumes, *buckets)), *shared]), _DEFAULT_MOUNT)
    file, colon, kind = recipe.rpartition(":")
    is_file = bool(colon) and file.endswith(".py")
    workdir = options.workdir or ("." if is_file or config else None)
    if workdir is not None and not Path(workdir).is_dir():
        raise ConfigError(f"workdir {workdir}: there is no such folder")
    training = [f"{_inside(workdir, file)}:{kind}" if is_file else recipe]
    training += [f"--config={_inside(workdir, str(each))}" for each in config]
    # The task contains the run folder, so that new machines, or the same task launched again, continue the run.
    output = resolved.values["output_dir"] or posixpath.join(first, "runs", f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    # An explicit max_restarts also starts the launcher for a single rank.
    own = {"output_dir": output, "max_restarts": resolved.values["max_restarts"]}
    optional = ("image", "nodes", "gpus_per_node", "cpus", "memory", "disk_size", "infra", "restarts_on_errors")
    return SkyPilotTask(
        name=name,
        train=(*training, *flags, *(f"--{flag}={value}" for flag, value in own.items() if not resolved.explicit(flag))),
        output_dir=output,
        volumes=volumes,
        buckets=buckets,
        shared_folders=shared,
        workdir=workdir,
        setup=options.setup,
        spot=options.spot,
        environ=dict(public_variable(text, _SECRETS) for text in options.env),
        secrets=options.secret,
        **{each: value for each in optional if (value := getattr(options, each)) is not None},
    )


def _inside(workdir: str | None, file: str) -> str:
    """Returns the path of a local file on the machines, relative to the uploaded folder."""
    root = Path(workdir or ".").resolve()
    path = Path(file).resolve()
    if not path.is_relative_to(root):
        raise ConfigError(
            f"{file} is not in {workdir}, the folder that is uploaded; pass --workdir with a folder that contains it"
        )
    return path.relative_to(root).as_posix()


def _plain(name: str) -> str:
    """Replaces all characters that are not allowed in the name of a task."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "run"


def _explain(task: SkyPilotTask, resolved: Resolved, output: str | None, global_batch: int) -> None:
    """Describes the task on stderr, because stdout may be the task itself."""
    per_node = task.gpus_per_node or format_count(resolved.values["nproc"] or 1, "CPU rank")
    spot = " spot" if task.spot else ""
    every = resolved.values["save_every"]
    lost = (
        f"at most {format_count(every, 'step')} since the last save are repeated"
        if every
        else ("there is no save before the end; set --save_every")
    )
    lines = [
        f"{output or 'task'}: {task.name}, {task.nodes}{spot} machine{'s' * (task.nodes > 1)} with {per_node} each, "
        f"{global_batch} samples per step",
        f"  run folder     {task.output_dir}",
        f"  uploaded       {task.workdir or 'nothing'}",
        f"  lost machine   SkyPilot starts new ones, and the run continues; {lost}",
    ]
    if output is not None:
        secrets = "".join(f" --secret {name}" for name in task.secrets)
        lines.append(f"Start it with: sky jobs launch{secrets} {output}")
    print("\n".join(lines), file=sys.stderr)
