"""`unisono slurm tune RECIPE --search … --array 8`: writes a job array whose jobs share one study."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from pathlib import Path

from unisono.cli.arguments import StoreOnce, TrainingParser
from unisono.cli.job_files import variable, write_new
from unisono.cli.slurm_arguments import add_job_arguments, plain_name
from unisono.cli.tune import add_search_arguments, search_of
from unisono.cluster.slurm.array import array_script, size_of
from unisono.cluster.slurm.commands import submit
from unisono.cluster.slurm.script import BatchJob
from unisono.engine.start.registry import load_recipe
from unisono.engine.start.settings_source import SettingsSource
from unisono.errors import EXIT_DONE, ConfigError
from unisono.formatting import format_count
from unisono.tuning.plan import StudyOptions, plan_study
from unisono.typed_paths import note_start_folder

_DESCRIPTION = """Write a job array for SLURM whose jobs work on one study of `unisono tune`, and optionally submit it.

Each job of the array runs on one machine and takes the next trial as soon as it has finished one. When the time limit
is near or the job is preempted, its trials save a checkpoint, and the job is requeued. Trials of a job that was killed
are continued by the others or by the requeued job. All options of `unisono tune` and all settings of `unisono train`
are flags here too: they are checked now and written into the script."""


def _parser() -> TrainingParser:
    usage = "RECIPE --search NAME=VALUES --array 8 --gpus-per-node 1 [options] [--submit] [settings]"
    parser = TrainingParser("slurm tune", usage, _DESCRIPTION)
    parser.add_argument(
        "--array", metavar="N[%M]", action=StoreOnce, help="number of jobs; with %%M, at most M of them run at a time"
    )
    add_search_arguments(parser)
    lead = "number of seconds before the time limit at which trials save and stop; 0: never (default: 120)"
    add_job_arguments(parser, lead)
    return parser


def main(argv: list[str]) -> int:
    """Runs the command."""
    note_start_folder()
    parser = _parser()
    recipe, config, flags, options = parser.parse_training(argv)
    if options.help:
        parser.print_help()
        return EXIT_DONE
    if options.array is None:
        raise ConfigError("array: pass --array with the number of jobs, for instance --array 8")
    array = size_of(options.array)
    search, study = search_of(options)
    plan = plan_study(
        load_recipe(recipe), recipe, search, study, SettingsSource(tuple(config), tuple(flags))
    )  # report bad settings now, before the jobs wait hours in a queue
    if plan.base.explicit("gpus"):
        raise ConfigError("gpus: a job uses the GPUs that SLURM gives to it; use --gpus-per-node instead")
    if options.gpus_per_node is not None and plan.base.explicit("nproc"):
        raise ConfigError("nproc: trials run on the GPUs of --gpus-per-node; remove one of the two")
    searching = [f"--search={flag}" for flag in options.search]
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(StudyOptions)}
    searching += [f"--{name}={value}" for name, value in given.items() if value is not None]
    job_name = options.job_name or f"tune-{plain_name(recipe.rpartition(':')[2] or recipe).lower()}"
    output = plan.base.values["output_dir"] or f"runs/{job_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    output_flag = [] if plan.base.explicit("output_dir") else [f"--output_dir={output}"]
    files = [f"--config={file}" for file in config]
    job = _job(options, job_name, output, [recipe, *files, *flags, *searching, *output_flag])
    text = array_script(job, options.array)
    if options.print:
        print(text, end="")
        return EXIT_DONE
    path = Path(options.output_script or f"{job_name}.sbatch")
    write_new(path, text, option="--output-script", overwrite=options.force)
    _explain(job, path, array, study)
    if not options.submit:
        print(f"Submit it with: sbatch {path}")
        return EXIT_DONE
    number = submit(path)
    print(
        f"Submitted as job {number}; its logs are {job_name}-{number}_*.log. To stop it: scancel {number}", flush=True
    )
    return EXIT_DONE


def _job(options: argparse.Namespace, job_name: str, output: str, words: list[str]) -> BatchJob:
    names = {field.name for field in dataclasses.fields(BatchJob)} - {"job_name", "container_mounts"}
    resources = {name: value for name in names if (value := getattr(options, name, None)) is not None}
    if options.gpus_per_node is None:
        resources["ntasks_per_node"] = 1
    return BatchJob(
        job_name=job_name,
        folder=os.getcwd(),
        output_dir=output,
        python=sys.executable,
        train=words,
        modules=options.module,
        environ=dict(variable(text) for text in options.env),
        requeue=not options.no_requeue,
        container_mounts=options.container_mounts.split(",") if options.container_mounts else (),
        **resources,
    )


def _explain(job: BatchJob, path: Path, array: tuple[int, int], study: StudyOptions) -> None:
    jobs, at_once = array
    devices = format_count(job.gpus, "GPU") if job.gpus else "CPU ranks"
    print(
        f"{path}: {format_count(jobs, 'job')}, {at_once} at a time, with {devices} each; {study.trials} trials in all"
    )
    print(f"  study          {job.output_dir} (must be on a file system that all nodes share)")
    if job.signal_before:
        after_stop = "the job is requeued to continue them" if job.requeue else "the job ends with exit code 75"
        print(f"  time limit     {job.signal_before} s before it, trials save a checkpoint and stop; {after_stop}")
    print(f"  killed job     other jobs continue its trials; the script starts it again up to {job.max_restarts} times")
