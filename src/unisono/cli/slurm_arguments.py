"""The options of `unisono slurm` and `unisono slurm tune`: the resources of a job, and what to do with its script."""

from __future__ import annotations

import re
from typing import Any

from unisono.cli.arguments import StoreOnce, TrainingParser
from unisono.cli.job_files import whole_number

_SIGNAL_BEFORE = (
    "number of seconds before the time limit at which the run saves and stops; 0: never (default: what the run "
    "in --output_dir or --like needed for its longest step and save, otherwise 120)"
)


def add_job_arguments(parser: TrainingParser, signal_before: str = _SIGNAL_BEFORE) -> None:
    """Adds these options to the parser; `signal_before` is the help text of --signal-before."""

    def add(flag: str, metavar: str, help: str, **options: Any) -> None:
        parser.add_argument(flag, metavar=metavar, help=help, **{"action": StoreOnce, **options})

    def switch(flag: str, help: str) -> None:
        parser.add_argument(flag, action="store_true", help=help)

    add("--gpus-per-node", "N", "GPUs per machine, N or type:N")
    add("--cpus-per-task", "N", "CPU cores per rank", type=whole_number)
    add("--mem", "M", "memory per machine, for instance 64G")
    add("--time", "T", "time limit, for instance 24:00:00")
    add("--partition", "P", "SLURM partition")
    add("--account", "A", "SLURM account")
    add("--qos", "Q", "SLURM quality of service")
    add("--constraint", "C", "SLURM node constraint")
    add("--job-name", "J", "job name (default: the recipe's name)")
    add("--module", "M", "run `module load M` before training; repeatable", action="append", default=[])
    add("--env", "NAME=VALUE", "environment variable of the job; repeatable", action="append", default=[])
    add("--container-image", "IMAGE", "run the ranks in this image, with the pyxis plugin; it must contain unisono")
    add(
        "--container-mounts",
        "SRC:DST,...",
        "further folders to mount in the container; the working directory and the run folder are always mounted",
    )
    add(
        "--signal-before",
        "S",
        signal_before,
        type=whole_number,
    )
    switch("--no-requeue", "at the time limit, end with exit code 75 instead of requeueing the job")
    add("--output-script", "FILE", "file to write (default: <recipe>.sbatch)")
    switch("--force", "overwrite an existing script")
    switch("--print", "print the script and exit")
    switch("--submit", "submit the script with sbatch")


def plain_name(name: str) -> str:
    """Replaces all characters that are not allowed in the name of a file or job."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).lstrip("-.") or "run"
