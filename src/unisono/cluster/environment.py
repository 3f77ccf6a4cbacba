"""Detects from environment variables the launcher of this process, its rank, and the world size.

Each launcher is one small class that detects its variables and reads a `World` from them. The first match wins:
torchrun (accelerate and unisono's own launcher set the same variables), then a SLURM step, then MPI, then a plain
process. torchrun inside a SLURM job counts as torchrun, and a SLURM allocation without a step counts as a plain process
(Lightning#20776). If a launcher's variables are incomplete, an error names the missing one.
"""

from __future__ import annotations

import itertools
import os
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from unisono.errors import UserError

# The batch script, an `salloc` shell and an external container also have a SLURM_STEP_ID, near 2^32 (slurm.h).
_FIRST_RESERVED_STEP = 0xFFFFFFF0
_DEFAULT_PORT = 29500

ROUND = "UNISONO_ROUND"
"""Environment variable: number of times that unisono's launcher has started the ranks, including this start."""


@dataclass(frozen=True)
class World:
    """The position of this process among all processes of the run."""

    launcher: str
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    num_nodes: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    """Port of the ranks' TCPStore; 0 means any free port (a single process only)."""
    restart_count: int = 0
    started_before: bool = False
    """Whether this is a restart by the launcher, because a rank died or machines joined or left."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """The environment variables that these values were read from."""
    mixed_precision: str | None = None
    """The mixed precision that `accelerate launch` passed (it always passes one, "no" by default)."""
    accumulation: int | None = None
    """Micro-batches per step that `accelerate launch` passed, if more than 1."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the process that prints to the user and writes shared files."""
        return self.rank == 0

    def describe(self) -> str:
        """Describes the launcher for the banner, with the variables from which it was detected."""
        variables = " ".join(f"{name}={value}" for name, value in self.variables.items())
        if self.launcher != "plain":
            nodes = f" on {self.num_nodes} machines" if self.num_nodes > 1 else ""
            if self.launcher == "unisono":
                return f"unisono: rank {self.rank} of {self.size}{nodes}"
            return f"{self.launcher}: rank {self.rank} of {self.size}{nodes}, from {variables}"
        if any(name.startswith("ACCELERATE_") for name in self.variables):
            return (
                f"plain: started by accelerate launch ({variables}), which set no RANK and WORLD_SIZE; "
                "for several CPU ranks use --nproc, or accelerate launch --multi_gpu"
            )
        if variables:
            return f"plain: inside SLURM ({variables}), but not in an srun step with several tasks"
        return "plain: one process, no launcher variables found"


class Environment(ABC):
    """A launcher: detects its environment variables and reads the world from them."""

    name: ClassVar[str]

    @abstractmethod
    def detect(self, environ: Mapping[str, str]) -> bool:
        """Whether this launcher started the process."""

    @abstractmethod
    def world(self, environ: Mapping[str, str]) -> World:
        """Reads the world from this launcher's variables."""


class Torchrun(Environment):
    """torchrun, and launchers that set the same variables: `accelerate launch` and unisono's own."""

    name = "torchrun"

    def detect(self, environ: Mapping[str, str]) -> bool:
        return "RANK" in environ and "WORLD_SIZE" in environ

    def world(self, environ: Mapping[str, str]) -> World:
        read = _Reader(
            environ, self.name, "start with torchrun, accelerate launch or unisono train, or set the variable"
        )
        rank, size = read.rank("RANK", "WORLD_SIZE")
        alone = size == 1
        local_size = read.number("LOCAL_WORLD_SIZE", default=1 if alone else None, at_least=1)
        local_rank = read.number("LOCAL_RANK", default=0 if alone else None)
        launcher = self.name
        if "UNISONO_JOB" in environ:
            read.text("UNISONO_JOB")
            launcher = "unisono"
        elif _accelerate_variables(environ):
            launcher = "accelerate"
        return _checked(
            read,
            World(
                launcher=launcher,
                rank=rank,
                size=size,
                local_rank=local_rank,
                local_size=local_size,
                node=read.number("GROUP_RANK", default=rank // local_size),
                num_nodes=read.number("GROUP_WORLD_SIZE", default=-(-size // local_size), at_least=1),
                master_addr=read.text("MASTER_ADDR", default="127.0.0.1" if alone else None),
                master_port=read.number("MASTER_PORT", default=0 if alone else None),
                restart_count=(restarts := read.number("TORCHELASTIC_RESTART_COUNT", default=0)),
                started_before=restarts > 0 or environ.get(ROUND, "1") != "1",
            ),
        )


class SlurmStep(Environment):
    """A task of an `srun` step with several tasks. A step with one task counts as plain and may start ranks itself."""

    name = "slurm"

    def detect(self, environ: Mapping[str, str]) -> bool:
        step = environ.get("SLURM_STEP_ID", "")
        real_step = step.isdecimal() and int(step) < _FIRST_RESERVED_STEP
        # mpirun inside a SLURM job starts its daemons with srun. All ranks of a daemon then have the daemon's
        # SLURM_PROCID. srun itself sets neither of the two MPI variables below.
        by_mpirun = "OMPI_COMM_WORLD_RANK" in environ or "MPI_LOCALRANKID" in environ
        several = environ.get(self._tasks(environ)) != "1"
        return real_step and "SLURM_PROCID" in environ and several and not by_mpirun

    def world(self, environ: Mapping[str, str]) -> World:
        read = _Reader(environ, self.name, "start the tasks with srun")
        read.number("SLURM_STEP_ID")
        rank, size = read.rank("SLURM_PROCID", self._tasks(environ))
        node = read.number("SLURM_NODEID")
        per_node_name = _first(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
        per_node = _tasks_per_node(read, per_node_name)
        if node >= len(per_node):
            raise UserError(f"SLURM_NODEID={node} but {per_node_name} lists {len(per_node)} nodes; {read.advice}")
        return _checked(
            read,
            World(
                launcher=self.name,
                rank=rank,
                size=size,
                local_rank=read.number("SLURM_LOCALID"),
                local_size=per_node[node],
                node=node,
                num_nodes=len(per_node),
                master_addr=self._master_addr(read, environ),
                master_port=self._master_port(read, environ),
                restart_count=read.number("SLURM_RESTART_COUNT", default=0),
            ),
        )

    @staticmethod
    def _tasks(environ: Mapping[str, str]) -> str:
        return _first(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")

    @staticmethod
    def _master_addr(read: _Reader, environ: Mapping[str, str]) -> str:
        if "MASTER_ADDR" in environ:
            return read.text("MASTER_ADDR")
        name = _first(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
        return expand_hosts(read.text(name))[0]

    @staticmethod
    def _master_port(read: _Reader, environ: Mapping[str, str]) -> int:
        """Derives a port from the job id. All tasks of a job get the same port; ports of two jobs rarely collide."""
        if "MASTER_PORT" in environ:
            return read.number("MASTER_PORT")
        return 15000 + read.number("SLURM_JOB_ID") % 10000


class Mpi(Environment):
    """mpirun of Open MPI, MPICH or Intel MPI."""

    name = "mpi"

    def detect(self, environ: Mapping[str, str]) -> bool:
        return "OMPI_COMM_WORLD_RANK" in environ or ("PMI_RANK" in environ and "PMI_SIZE" in environ)

    def world(self, environ: Mapping[str, str]) -> World:
        read = _Reader(
            environ,
            self.name,
            "start with mpirun, or pass the variable to the ranks (mpirun -x NAME, -genv NAME VALUE)",
        )
        if "OMPI_COMM_WORLD_RANK" in environ:
            rank, size = read.rank("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
            local_rank = read.number("OMPI_COMM_WORLD_LOCAL_RANK")
            local_size = read.number("OMPI_COMM_WORLD_LOCAL_SIZE", at_least=1)
        else:
            rank, size = read.rank("PMI_RANK", "PMI_SIZE")
            local_rank = read.number("MPI_LOCALRANKID", default=rank)
            local_size = read.number("MPI_LOCALNRANKS", default=size, at_least=1)
        one_machine = local_size == size
        return _checked(
            read,
            World(
                launcher=self.name,
                rank=rank,
                size=size,
                local_rank=local_rank,
                local_size=local_size,
                node=rank // local_size,
                num_nodes=-(-size // local_size),
                master_addr=read.text("MASTER_ADDR", default="127.0.0.1" if one_machine else None),
                master_port=read.number("MASTER_PORT", default=self._port(environ)),
            ),
        )

    @staticmethod
    def _port(environ: Mapping[str, str]) -> int:
        """Derives the port from the name of the MPI job, if any, so that two jobs on one machine rarely collide."""
        job = environ.get(_first(environ, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"))
        return _DEFAULT_PORT if job is None else 15000 + zlib.crc32(job.encode()) % 10000


class Plain(Environment):
    """No launcher: one process that the user started, which may launch ranks itself."""

    name = "plain"

    def detect(self, environ: Mapping[str, str]) -> bool:
        return True

    def world(self, environ: Mapping[str, str]) -> World:
        for present, missing in (("WORLD_SIZE", "RANK"), ("RANK", "WORLD_SIZE")):
            if present in environ and missing not in environ:
                raise UserError(
                    f"{present}={environ[present]} is set but {missing} is not; unset {present}, or start with "
                    "torchrun, which sets both"
                )
        accelerate = _accelerate_variables(environ)
        return World(
            launcher=self.name,
            variables=accelerate or _slurm_variables(environ),
            mixed_precision=accelerate.get("ACCELERATE_MIXED_PRECISION"),
            accumulation=_accumulation(accelerate),
        )


ENVIRONMENTS: tuple[Environment, ...] = (Torchrun(), SlurmStep(), Mpi(), Plain())
"""All launchers, in order of precedence."""


def detect(environ: Mapping[str, str] = os.environ) -> World:
    """Returns the world this process belongs to, from the first launcher whose variables are set."""
    return next(each for each in ENVIRONMENTS if each.detect(environ)).world(environ)


def expand_hosts(nodelist: str) -> list[str]:
    """Expands a SLURM node list: "gpu[01-03,7],login" becomes gpu01, gpu02, gpu03, gpu7, login."""
    hosts: list[str] = []
    for entry in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist.strip()):
        parts = re.split(r"\[([^\]]*)\]", entry)
        choices = [[part] if i % 2 == 0 else list(_expand_range(part)) for i, part in enumerate(parts)]
        hosts.extend("".join(combination) for combination in itertools.product(*choices))
    if not hosts or any("[" in host or "]" in host for host in hosts):
        raise UserError(f"cannot read the SLURM node list {nodelist!r}; set MASTER_ADDR to the first host's name")
    return hosts


def _expand_range(text: str) -> Iterator[str]:
    for piece in text.split(","):
        first, _, last = piece.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            raise UserError(f"cannot read [{text}] in the SLURM node list; set MASTER_ADDR to the first host's name")
        for number in range(int(first), int(last or first) + 1):
            yield str(number).zfill(len(first))


def _tasks_per_node(read: _Reader, name: str) -> list[int]:
    """Expands SLURM's "4(x2),3" to [4, 4, 3]."""
    text = read.text(name)
    counts: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", piece.strip())
        if match is None:
            raise UserError(f"{name}={text} is not a list of task counts; {read.advice}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


class _Reader:
    """Reads environment variables and remembers which ones it read. An invalid value raises an error that names it."""

    def __init__(self, environ: Mapping[str, str], launcher: str, advice: str) -> None:
        self.environ = environ
        self.launcher = launcher
        self.advice = advice
        self.variables: dict[str, str] = {}

    def text(self, name: str, default: str | None = None) -> str:
        value = self.environ.get(name, "")
        if value:
            self.variables[name] = value
            return value
        if default is None:
            raise UserError(f"{name} is not set, but the other variables of {self.launcher} are; {self.advice}")
        return default

    def number(self, name: str, default: int | None = None, at_least: int = 0) -> int:
        text = self.text(name, None if default is None else str(default))
        if not (text.isascii() and text.isdecimal() and int(text) >= at_least):
            raise UserError(f"{name}={text} is not a whole number of at least {at_least}; {self.advice}")
        return int(text)

    def rank(self, rank_name: str, size_name: str) -> tuple[int, int]:
        rank, size = self.number(rank_name), self.number(size_name, at_least=1)
        if rank >= size:
            raise UserError(f"{rank_name}={rank} must be less than {size_name}={size}; {self.advice}")
        return rank, size


def _checked(read: _Reader, world: World) -> World:
    """Adds the variables that the world was read from; raises if they contradict each other."""
    if world.local_rank >= world.local_size or world.local_size > world.size:
        names = ", ".join(name for name in read.variables if "LOCAL" in name or "TASKS" in name)
        raise UserError(
            f"local rank {world.local_rank} of {world.local_size} on this machine does not fit rank {world.rank} of "
            f"{world.size} ({names}); {read.advice}"
        )
    for name, value in (("WORLD_SIZE", world.size), ("RANK", world.rank)):
        # sbatch scripts often export WORLD_SIZE alone. A wrong value would lead to a wrong run.
        if read.environ.get(name, str(value)) != str(value):
            raise UserError(f"{name}={read.environ[name]}, but {world.launcher} set {value}; unset {name}")
    accelerate = _accelerate_variables(read.environ)
    return replace(
        world,
        variables={**read.variables, **accelerate},
        mixed_precision=accelerate.get("ACCELERATE_MIXED_PRECISION"),
        accumulation=_accumulation(accelerate),
    )


def _first(environ: Mapping[str, str], *names: str) -> str:
    """Returns the first of these variables that is set, or the last name if none is (for the error message)."""
    return next((name for name in names if name in environ), names[-1])


def _accelerate_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns accelerate's variables, without those for its compiler settings, which accelerate always sets."""
    names = (name for name in sorted(environ) if name.startswith("ACCELERATE_"))
    return {name: environ[name] for name in names if not name.startswith("ACCELERATE_DYNAMO_")}


def _accumulation(accelerate: Mapping[str, str]) -> int | None:
    """Returns the accumulation that the user passed to accelerate; accelerate sets 1 if the user passed none."""
    text = accelerate.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "")
    return int(text) if text.isascii() and text.isdecimal() and int(text) > 1 else None


def _slurm_variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {n: environ[n] for n in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NTASKS") if n in environ}
