"""`unisono slurm RECIPE --nodes 2 --gpus-per-node 8`: writes a run's batch script, submits it, shows its progress."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from pathlib import Path

from unisono.cli.arguments import TrainingParser
from unisono.cli.job_files import variable, whole_number, write_new
from unisono.cli.slurm_arguments import add_job_arguments, plain_name
from unisono.cluster.slurm.commands import submit
from unisono.cluster.slurm.script import BatchJob, script
from unisono.config.resolve import Resolved
from unisono.engine.batch import plan_batch
from unisono.engine.checks import check_run
from unisono.engine.recipe import Recipe
from unisono.engine.start.registry import load_recipe
from unisono.engine.start.run import configure
from unisono.errors import EXIT_DONE, ConfigError
from unisono.formatting import format_count
from unisono.observe.stop_time import measured_seconds, seconds_to_stop
from unisono.settings import Settings
from unisono.storage.addresses import is_address

_DESCRIPTION = """Write a batch script for SLURM, and optionally submit it and follow the job.

The script starts one srun task per GPU. It restarts all ranks when one dies (up to --max_restarts times), and requeues
the job when the time limit is near or the job is preempted; the run then continues from its checkpoint. Every setting
of `unisono train` is also a flag here: it is checked now and written into the script.

`unisono slurm tune RECIPE --search ... --array N` writes a job array whose jobs work on one study of `unisono tune`."""

_SRUN_DECIDES = {
    "gpus": "gpus_per_node",
    "nproc": "ntasks_per_node",
    "nnodes": "nodes",
    "node_rank": "nodes",
    "rdzv_endpoint": "nodes",
}


def _parser() -> TrainingParser:
    usage = "RECIPE --nodes 2 --gpus-per-node 8 [options] [--submit [--follow]] [settings]"
    parser = TrainingParser("slurm", usage, _DESCRIPTION)
    add = parser.add_option
    add("--nodes", "N", "number of machines (default: 1)", type=whole_number)
    add("--ntasks-per-node", "N", "CPU ranks per machine, when training without GPUs", type=whole_number)
    add(
        "--total-gpus",
        "N",
        "GPUs of all nodes together, if nodes have different numbers of GPUs; instead of --gpus-per-node",
        type=whole_number,
    )
    add_job_arguments(parser)
    add("--like", "RUN", "folder of a similar run, whose longest step and save determine --signal-before", type=Path)
    parser.add_argument(
        "--follow",
        action="store_true",
        help="after --submit, show the job's state and the run's progress until the job ends; Ctrl-C does not stop the "
        "job",
    )
    return parser


def main(argv: list[str]) -> int:
    """Runs the command; with --follow the exit code is the job's."""
    if argv[:1] == ["tune"]:
        from unisono.cli import slurm_tune

        return slurm_tune.main(argv[1:])
    parser = _parser()
    recipe, config, flags, options = parser.parse_training(argv)
    if options.help:
        parser.print_help()
        return EXIT_DONE
    if options.follow and not options.submit:
        raise ConfigError("--follow: there is no job yet; use --submit --follow")
    kind = load_recipe(recipe)
    resolved = configure(kind, file=config, flags=flags)
    _check(kind, resolved)
    training = [recipe, *(f"--config={file}" for file in config), *flags]
    job = _job(options, resolved, recipe, training)
    batch = plan_batch(resolved.build(Settings).batch, resolved.explicit, devices=job.ranks)
    text = script(job)
    if options.print:
        print(text, end="")
        return EXIT_DONE
    path = Path(options.output_script or f"{plain_name(recipe.rpartition(':')[2] or recipe)}.sbatch")
    write_new(path, text, option="--output-script", overwrite=options.force)
    _explain(job, path, batch.global_batch)
    if not options.submit:
        print(f"Submit it with: sbatch {path}")
        return EXIT_DONE
    number = submit(path)
    print(
        f"Submitted as job {number}; its log is {job.job_name}-{number}.log. To stop it: scancel {number}", flush=True
    )
    if not options.follow:
        return EXIT_DONE
    from unisono.cli.follow import follow

    return follow(number, Path(job.output_dir), resolved.values["max_steps"])


def _check(kind: type[Recipe], resolved: Resolved) -> None:
    settings = resolved.build(Settings)
    for name, instead in _SRUN_DECIDES.items():
        if resolved.explicit(name):
            raise ConfigError(f"{name}: under SLURM srun starts the ranks; use --{instead.replace('_', '-')} instead")
    check_run(kind, resolved)  # report bad settings now, before the job waits hours in a queue
    if is_address(settings.run.output_dir):
        raise ConfigError("output_dir: all machines of a job need one folder; use --output_dir FOLDER --mirror ADDRESS")
    if settings.run.resume == "never":
        raise ConfigError(
            "resume: never would prevent the job from continuing after a requeue; remove it and use a new output_dir"
        )


def _job(options: argparse.Namespace, resolved: Resolved, recipe: str, training: list[str]) -> BatchJob:
    resources = {
        field.name: value
        for field in dataclasses.fields(BatchJob)
        if (value := getattr(options, field.name, None)) is not None
    }
    if "container_mounts" in resources:
        resources["container_mounts"] = resources["container_mounts"].split(",")
    if "signal_before" not in resources and (measured := _measured_lead(options.like, resolved)) is not None:
        resources["signal_before"] = measured
    job_name = resources.pop("job_name", "") or plain_name(recipe.rpartition(":")[2] or recipe).lower()
    # The script contains the run folder, so that a requeued job, or the same script submitted again, continues the run.
    output = resolved.values["output_dir"] or f"runs/{job_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    output_flag = () if resolved.explicit("output_dir") else (f"--output_dir={output}",)
    job = BatchJob(
        job_name=job_name,
        folder=os.getcwd(),
        output_dir=output,
        python=sys.executable,
        train=(*training, *output_flag),
        modules=options.module,
        environ=dict(variable(text) for text in options.env),
        requeue=not options.no_requeue,
        max_restarts=resolved.values["max_restarts"],
        **resources,
    )
    strategy = resolved.values["strategy"]
    if strategy in ("single", "dp") and job.ranks > 1:
        raise ConfigError(
            f"strategy {strategy} is for one process, but this job has {job.ranks} ranks; use ddp, fsdp or auto"
        )
    return job


def _measured_lead(like: Path | None, resolved: Resolved) -> int | None:
    """Returns how many seconds the run in output_dir, or the similar run `like`, takes to stop; None if unknown."""
    if like is not None:
        return measured_seconds(like)
    output = resolved.values["output_dir"]
    return seconds_to_stop(Path(output)) if output else None


def _explain(job: BatchJob, path: Path, global_batch: int) -> None:
    per_node = format_count(job.tasks_per_node, "GPU" if job.gpus else "CPU rank")
    size = f"{format_count(job.nodes, 'node')} with {per_node} each, {format_count(job.ranks, 'rank')}"
    if job.total_gpus is not None:
        size = f"{format_count(job.nodes, 'node')} with {format_count(job.total_gpus, 'GPU')} in total"
    print(f"{path}: {size}, {global_batch} samples per step")
    print(f"  run folder     {job.output_dir} (must be on a file system that all nodes share)")
    if job.signal_before:
        after_stop = "the job is requeued to continue from there" if job.requeue else "the job ends with exit code 75"
        print(f"  time limit     {job.signal_before} s before it, the run saves a checkpoint and stops; {after_stop}")
    print(f"  dead rank      the script restarts all ranks from the last checkpoint, up to {job.max_restarts} times")
    if job.environ or job.modules:
        print(f"  environment    {', '.join([*(f'module {m}' for m in job.modules), *job.environ])}")
