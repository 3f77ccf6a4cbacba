"""Writes the batch script of a run under SLURM.

The script takes the role of the launcher. One srun task is one rank. When a rank dies, srun kills the others, and the
script restarts all of them from the last checkpoint. Near the time limit SLURM signals the ranks, they save and stop,
and the script requeues the job. srun's exit code cannot distinguish these cases: it is the highest exit code of all
tasks, including those that srun killed itself. So each rank writes its outcome to a file, and
`python -m unisono.engine.start.srun` decides from these files what the script does next.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unisono.errors import EXIT_STOPPED, ConfigError

EXIT_AGAIN = 76
"""Exit code with which `python -m unisono.engine.start.srun` asks the script to restart all ranks."""
EXIT_SMALLER = 77
"""Like EXIT_AGAIN, but the restart does not count, because a rank ran out of memory and the next attempt needs less."""

OUTCOMES = "UNISONO_OUTCOMES"
"""Environment variable: the folder to which the ranks of one attempt write their outcomes."""

_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+:-]*")
_FORMATS: dict[str, tuple[re.Pattern[str], str]] = {
    "gpus_per_node": (re.compile(r"(?:[A-Za-z0-9_.-]+:)?\d+"), "a number such as 8, or type:number such as a100:8"),
    "time": (_TIME, "minutes, hours:minutes:seconds or days-hours, for instance 24:00:00"),
    "partition": (re.compile(r"[A-Za-z0-9_.,-]+"), "comma-separated names of partitions"),
    "account": (_WORD, "the name of an account"),
    "qos": (_WORD, "the name of a quality of service"),
    "constraint": (re.compile(r"[A-Za-z0-9_.,:&|*()\[\]-]+"), "features of nodes, for instance a100&nvlink"),
    "mem": (re.compile(r"\d+[KMGT]?"), "memory per node such as 64G; 0 is all of it"),
    "container_image": (
        re.compile(r"[A-Za-z0-9/.][^\s\"'`$\\;&|<>()]*"),
        "an image such as repo/name:tag or /path/image.sqsh",
    ),
    "job_name": (re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*"), "letters, digits, dots, - and _"),
}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MODULE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+-]*")
_MOUNT = re.compile(r"/[^\s:,]*:/[^\s:,]*(:[a-z+]+)?")


@dataclass(frozen=True)
class BatchJob:
    """The resources to request from SLURM and the command to run. The constructor checks all fields."""

    job_name: str
    folder: str
    """The working directory of the job, where it also writes its log; relative paths in `train` start here."""
    output_dir: str
    python: str
    train: Sequence[str]
    """The arguments after `unisono train`, including output_dir."""
    nodes: int = 1
    gpus_per_node: str | None = None
    ntasks_per_node: int | None = None
    total_gpus: int | None = None
    """Number of GPUs of all nodes together, for nodes with different numbers of GPUs."""
    container_image: str | None = None
    """Image in which the ranks run, with the pyxis plugin."""
    container_mounts: Sequence[str] = ()
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    cpus_per_task: int | None = None
    mem: str | None = None
    modules: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    signal_before: int = 120
    requeue: bool = True
    max_restarts: int = 3

    def __post_init__(self) -> None:
        for name, (pattern, expected) in _FORMATS.items():
            value = getattr(self, name)
            if value is not None and pattern.fullmatch(value) is None:
                raise ConfigError(f"{name}: expected {expected}, got {value!r}")
        for name in ("nodes", "ntasks_per_node", "cpus_per_task", "total_gpus"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: expected at least 1, got {value}")
        self._check_tasks()
        self._check_container()
        limit = None if self.time is None else seconds_of(self.time)
        if self.signal_before < 0 or (limit is not None and self.signal_before >= limit):
            raise ConfigError(
                f"signal_before: expected 0 to less than the time limit ({limit} s), got {self.signal_before}"
                if limit is not None
                else f"signal_before: expected at least 0, got {self.signal_before}"
            )
        for module in self.modules:
            if _MODULE.fullmatch(module) is None:
                raise ConfigError(f"module: expected a name such as cuda/12.4, got {module!r}")
        for name in self.environ:
            if _VARIABLE.fullmatch(name) is None:
                raise ConfigError(f"env: expected NAME=VALUE, got {name!r} as the name")
        for text in (self.folder, self.output_dir, self.python, *self.train, *self.environ.values()):
            if not text.isprintable():
                raise ConfigError(
                    f"{text!r} contains unprintable characters, which a script cannot contain; remove them"
                )

    def _check_tasks(self) -> None:
        if self.total_gpus is not None:
            if self.gpus or self.ntasks_per_node is not None:
                raise ConfigError("total_gpus: it replaces gpus_per_node and ntasks_per_node; remove those")
            if self.total_gpus < self.nodes:
                raise ConfigError(
                    f"total_gpus: expected at least one GPU per node ({self.nodes}), got {self.total_gpus}"
                )
            return
        if self.gpus == 0 and self.ntasks_per_node is None:
            raise ConfigError(
                "gpus_per_node: set the number of GPUs per node, or ntasks_per_node to train without GPUs"
            )
        if self.gpus and self.ntasks_per_node not in (None, self.gpus):
            raise ConfigError(
                f"ntasks_per_node {self.ntasks_per_node}: a node has one task per GPU ({self.gpus}); do not set it"
            )

    def _check_container(self) -> None:
        if self.container_mounts and self.container_image is None:
            raise ConfigError("container_mounts: there is no container; pass --container-image too")
        if self.container_image is None:
            return
        for mount in self.mounts:
            if _MOUNT.fullmatch(mount) is None:
                raise ConfigError(
                    f"container_mounts: expected /PATH:/PATH without spaces, commas and further colons, got {mount!r}"
                )

    @property
    def mounts(self) -> list[str]:
        """The folders to mount in the container: the working directory, the run folder and the user's folders."""
        run_folder = os.path.normpath(os.path.join(self.folder, self.output_dir))
        folders = [self.folder]
        if os.path.commonpath([run_folder, self.folder]) != self.folder:
            folders.append(run_folder)
        return [*(f"{each}:{each}" for each in folders), *self.container_mounts]

    @property
    def gpus(self) -> int:
        """Number of GPUs per node."""
        return int((self.gpus_per_node or "0").rpartition(":")[2])

    @property
    def tasks_per_node(self) -> int:
        """Number of ranks per node."""
        return self.gpus or self.ntasks_per_node or 1

    @property
    def ranks(self) -> int:
        """Number of ranks of the run."""
        return self.total_gpus or self.nodes * self.tasks_per_node


def seconds_of(time: str) -> int:
    """Converts SLURM's "30", "30:00", "24:00:00", "2-12" or "2-12:00:00" to seconds."""
    match = _TIME.fullmatch(time)
    if match is None:
        raise ConfigError(f"time: expected {_FORMATS['time'][1]}, got {time!r}")
    days, *rest = match.groups()
    numbers = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(numbers) == 3:
        return (numbers[0] * 60 + numbers[1]) * 60 + numbers[2]
    return numbers[0] * 60 + (numbers[1] if len(numbers) == 2 else 0)


def script(job: BatchJob) -> str:
    """Returns the text of the batch script."""
    tasks = " ".join(f"{flag}={value}" for flag, value in step_options(job))
    # The image has its own Python; the script itself runs outside of the container.
    program = "python3" if job.container_image is not None else '"$python"'
    lines = ["#!/bin/bash", "# Written by `unisono slurm`: one srun task per rank."]
    lines += [*directives(job, _layout(job), log=f"{job.job_name}-%j.log"), "", *preparation(job)]
    lines += [
        f"python={shlex.quote(job.python)}",
        f"run={shlex.quote(job.output_dir)}",
        f"max_restarts={job.max_restarts}",
        f"train=(train {' '.join(map(shlex.quote, job.train))})",
        "",
        "restarts=0",
        "for ((attempt = 0; ; attempt++)); do",
        "    # Each rank writes its outcome here; the folder is on the file system that all nodes share.",
        f'    export {OUTCOMES}="$run/.slurm/$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}.$attempt"',
        f'    mkdir -p "${OUTCOMES}" || exit 2',
        f'    srun {tasks} {program} -P -m unisono "${{train[@]}}"',
        f'    "$python" -P -m unisono.engine.start.srun "${OUTCOMES}" "$run" $? "$restarts" "$max_restarts"',
        "    outcome=$?",
        f"    # {EXIT_AGAIN}: a rank died; restart all of them from the last checkpoint.",
        f"    # {EXIT_SMALLER}: a rank ran out of memory; restart with a smaller micro-batch.",
        f"    [ $outcome -eq {EXIT_AGAIN} ] && restarts=$((restarts + 1)) && continue",
        f"    [ $outcome -eq {EXIT_SMALLER} ] || break",
        "done",
        "",
    ]
    return "\n".join([*lines, *requeue(job), "exit $outcome", ""])


def preparation(job: BatchJob) -> list[str]:
    """Returns the lines that load modules and set variables."""
    lines = [f"module load {module}" for module in job.modules]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in job.environ.items()]
    return [*lines, ""] if lines else []


def requeue(job: BatchJob) -> list[str]:
    """Returns the lines that requeue a job after its command was stopped."""
    if not job.requeue:
        return []
    return [
        f"# {EXIT_STOPPED}: stopped by a signal, with a checkpoint; requeue the job to continue from there.",
        f'[ $outcome -eq {EXIT_STOPPED} ] && scontrol requeue "$SLURM_JOB_ID" && sleep 60',
    ]


def _layout(job: BatchJob) -> list[tuple[str, object]]:
    return [
        ("nodes", job.nodes),
        ("ntasks", job.total_gpus),
        ("gpus-per-task", None if job.total_gpus is None else 1),
        ("ntasks-per-node", job.tasks_per_node if job.total_gpus is None else None),
        ("gpus-per-node", job.gpus_per_node if job.gpus else None),
    ]


def directives(job: BatchJob, layout: Sequence[tuple[str, object]], *, log: str) -> list[str]:
    """Returns the comments that sbatch reads; `layout` contains the options for machines, tasks and GPUs."""
    options: list[tuple[str, object]] = [
        ("job-name", job.job_name),
        ("chdir", shlex.quote(job.folder)),
        ("output", log),
        ("open-mode", "append"),
        *layout,
        ("cpus-per-task", job.cpus_per_task),
        ("mem", job.mem),
        ("time", job.time),
        ("partition", job.partition),
        ("account", job.account),
        ("qos", job.qos),
        ("constraint", None if job.constraint is None else shlex.quote(job.constraint)),
        ("signal", f"USR1@{job.signal_before}" if job.signal_before else None),
    ]
    lines = [f"#SBATCH --{name}={value}" for name, value in options if value is not None]
    return [*lines, "#SBATCH --requeue" if job.requeue else "#SBATCH --no-requeue"]


def step_options(job: BatchJob) -> list[tuple[str, object]]:
    """Returns the options of srun."""
    # Without kill-on-bad-exit, the other ranks would wait for a dead one. Since SLURM 22.05, srun does not inherit
    # cpus-per-task from the job.
    options: list[tuple[str, object]] = [("--kill-on-bad-exit", 1)]
    if job.cpus_per_task is not None:
        options.append(("--cpus-per-task", job.cpus_per_task))
    if job.total_gpus is not None:
        options.append(
            ("--gpu-bind", "none")
        )  # each rank sees all GPUs of its node and takes the GPU of its local rank
    if job.container_image is not None:
        options += [
            ("--container-image", shlex.quote(job.container_image)),
            ("--container-mounts", shlex.quote(",".join(job.mounts))),
            ("--container-workdir", shlex.quote(job.folder)),
        ]
    return options
