"""Writes a job array whose jobs share one study of `unisono tune`.

The jobs find trials in the folder of the study, so they are identical and need no index. A job that is requeued, or
that its script restarts after a kill, continues with any trial that remains.
"""

from __future__ import annotations

import re
import shlex

from unisono.cluster.slurm.script import BatchJob, directives, preparation, requeue, step_options
from unisono.errors import ConfigError

_ARRAY = re.compile(r"([1-9]\d{0,6})(?:%([1-9]\d{0,6}))?")
_KILLED = 128  # the shell adds this to the number of the signal


def size_of(text: str) -> tuple[int, int]:
    """Parses N or N%M: the number of jobs, and how many of them may run at a time."""
    match = _ARRAY.fullmatch(text)
    if match is None:
        raise ConfigError(f"array: expected a number of jobs such as 8, or 8%4 to run 4 at a time, got {text!r}")
    return int(match[1]), min(int(match[2] or match[1]), int(match[1]))


def array_script(job: BatchJob, array: str) -> str:
    """Returns the text of the batch script; `job.train` are the arguments of `unisono tune`."""
    jobs, at_once = size_of(array)
    if job.nodes != 1 or job.total_gpus is not None:
        raise ConfigError("nodes: a trial runs on one machine; use a larger --array")
    layout: list[tuple[str, object]] = [
        ("array", f"0-{jobs - 1}%{at_once}"),
        ("nodes", 1),
        ("ntasks", 1),
        ("gpus-per-node", job.gpus_per_node if job.gpus else None),
    ]
    options = " ".join(f"{flag}={value}" for flag, value in [("--ntasks", 1), *step_options(job)])
    program = "python3" if job.container_image is not None else '"$python"'
    lines = ["#!/bin/bash", "# Written by `unisono slurm tune`: each job of the array works on trials of one study."]
    lines += [*directives(job, layout, log=f"{job.job_name}-%A_%a.log"), "", *preparation(job)]
    lines += [
        f"python={shlex.quote(job.python)}",
        f"tune=(tune {' '.join(map(shlex.quote, job.train))} --join)",
        "",
        "for ((restarts = 0; ; restarts++)); do",
        f'    srun {options} {program} -P -m unisono "${{tune[@]}}"',
        "    outcome=$?",
        "    # A signal killed it: its trials continue from their checkpoints, here or in another job of the array.",
        f"    [ $outcome -gt {_KILLED} ] && [ $restarts -lt {job.max_restarts} ] || break",
        "done",
        "",
        *requeue(job),
    ]
    return "\n".join([*lines, "exit $outcome", ""])
