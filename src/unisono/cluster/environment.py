"""Who am I: which rank of how many, on which machine, and who started me.

Launchers hand this over in environment variables. Each launcher is one small class that says whether its variables are
there and reads a `World` from them; the first that is there wins: torchrun (accelerate and unisono's own launcher set
the same variables), then a SLURM step, then MPI, then nobody. torchrun inside a SLURM job is torchrun, and an
allocation without a step is nobody (Lightning#20776). Nothing is guessed: half-set variables are refused by name.
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

# The batch script, an `salloc` shell and the external container also carry a SLURM_STEP_ID, near 2^32 (slurm.h).
_FIRST_RESERVED_STEP = 0xFFFFFFF0
_DEFAULT_PORT = 29500

ROUND = "UNISONO_ROUND"
"""Variable in which unisono's launcher counts how often it has started ranks, from 1."""


@dataclass(frozen=True)
class World:
    """All processes of the run and the place of this one among them."""

    launcher: str
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    num_nodes: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    """Port where the ranks meet; 0 means any free one (a single process only)."""
    restart_count: int = 0
    started_before: bool = False
    """Whether the launcher has started ranks of this run before: after a death, or because machines came or went."""
    found: Mapping[str, str] = field(default_factory=dict)
    """The environment variables this was read from."""
    mixed_precision: str | None = None
    """What `accelerate launch` asked for (it always hands over something, "no" by default)."""
    accumulation: int | None = None
    """Micro-batches per step that `accelerate launch` asked for, if more than 1."""

    @property
    def is_main(self) -> bool:
        """Whether this is the one process that talks to the user and writes the shared files."""
        return self.rank == 0

    def describe(self) -> str:
        """One line for the banner: what was detected, and from which variables."""
        variables = " ".join(f"{name}={value}" for name, value in self.found.items())
        if self.launcher != "plain":
            nodes = f" on {self.num_nodes} machines" if self.num_nodes > 1 else ""
            if self.launcher == "unisono":
                return f"unisono's own: rank {self.rank} of {self.size}{nodes}"
            return f"{self.launcher}: rank {self.rank} of {self.size}{nodes}, from {variables}"
        if any(name.startswith("ACCELERATE_") for name in self.found):
            return (
                f"plain: accelerate launch was seen ({variables}) but it gave no ranks (no RANK, no WORLD_SIZE); "
                "for several CPU ranks use --nproc, or accelerate launch --multi_gpu"
            )
        if variables:
            return f"plain: inside SLURM ({variables}) but not in an srun step of several tasks"
        return "plain: one process, no launcher variables found"


class Environment(ABC):
    """One way of being started: recognises its variables and reads the world from them."""

    name: ClassVar[str]

    @abstractmethod
    def detect(self, environ: Mapping[str, str]) -> bool:
        """Whether this launcher started the process."""

    @abstractmethod
    def world(self, environ: Mapping[str, str]) -> World:
        """The world this launcher describes."""


class Torchrun(Environment):
    """torchrun, and what sets the same variables: `accelerate launch` and unisono's own launcher."""

    name = "torchrun"

    def detect(self, environ: Mapping[str, str]) -> bool:
        return "RANK" in environ and "WORLD_SIZE" in environ

    def world(self, environ: Mapping[str, str]) -> World:
        read = _Reader(environ, self.name, "start with torchrun, accelerate launch or unisono train, or set it")
        rank, size = read.rank("RANK", "WORLD_SIZE")
        alone = size == 1
        local_size = read.number("LOCAL_WORLD_SIZE", default=1 if alone else None, at_least=1)
        local_rank = read.number("LOCAL_RANK", default=0 if alone else None)
        launcher = self.name
        if "UNISONO_JOB" in environ:
            launcher = read.note("UNISONO_JOB", "unisono")
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
    """A task of `srun` with several tasks. A step of one task is plain: it may start ranks of its own."""

    name = "slurm"

    def detect(self, environ: Mapping[str, str]) -> bool:
        step = environ.get("SLURM_STEP_ID", "")
        real_step = step.isdecimal() and int(step) < _FIRST_RESERVED_STEP
        # mpirun inside a SLURM job starts its daemons by srun: SLURM_PROCID is then the daemon's, the same for all its
        # ranks. srun itself sets neither of these two.
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
        """A port all tasks know without asking: from the job id, so that two jobs on one machine rarely meet."""
        if "MASTER_PORT" in environ:
            return read.number("MASTER_PORT")
        return 15000 + read.number("SLURM_JOB_ID") % 10000


class Mpi(Environment):
    """mpirun of Open MPI, MPICH or Intel MPI."""

    name = "mpi"

    def detect(self, environ: Mapping[str, str]) -> bool:
        return "OMPI_COMM_WORLD_RANK" in environ or ("PMI_RANK" in environ and "PMI_SIZE" in environ)

    def world(self, environ: Mapping[str, str]) -> World:
        read = _Reader(environ, self.name, "start with mpirun, or hand it over (mpirun -x NAME, -genv NAME VALUE)")
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
        """From the name of the MPI job where there is one, so that two jobs on one machine rarely meet."""
        job = environ.get(_first(environ, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"))
        return _DEFAULT_PORT if job is None else 15000 + zlib.crc32(job.encode()) % 10000


class Plain(Environment):
    """Started by hand: one process, which may start ranks of its own."""

    name = "plain"

    def detect(self, environ: Mapping[str, str]) -> bool:
        return True

    def world(self, environ: Mapping[str, str]) -> World:
        for given, missing in (("WORLD_SIZE", "RANK"), ("RANK", "WORLD_SIZE")):
            if given in environ and missing not in environ:
                raise UserError(
                    f"{given}={environ[given]} is set but {missing} is not; unset {given}, or start with torchrun, "
                    "which sets both"
                )
        accelerate = _accelerate_variables(environ)
        return World(
            launcher=self.name,
            found=accelerate or _slurm_traces(environ),
            mixed_precision=accelerate.get("ACCELERATE_MIXED_PRECISION"),
            accumulation=_accumulation(accelerate),
        )


ENVIRONMENTS: tuple[Environment, ...] = (Torchrun(), SlurmStep(), Mpi(), Plain())
"""In order of precedence."""


def detect(environ: Mapping[str, str] = os.environ) -> World:
    """The world this process belongs to, from the first launcher whose variables are there."""
    return next(each for each in ENVIRONMENTS if each.detect(environ)).world(environ)


def expand_hosts(nodelist: str) -> list[str]:
    """The host names of a SLURM node list: "gpu[01-03,7],login" is gpu01, gpu02, gpu03, gpu7, login."""
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
    """SLURM's "4(x2),3" is [4, 4, 3]."""
    text = read.text(name)
    counts: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", piece.strip())
        if match is None:
            raise UserError(f"{name}={text} is not a list of task counts; {read.advice}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


class _Reader:
    """Reads variables, remembers which, and refuses bad ones with a line that names them."""

    def __init__(self, environ: Mapping[str, str], launcher: str, advice: str) -> None:
        self.environ = environ
        self.launcher = launcher
        self.advice = advice
        self.found: dict[str, str] = {}

    def text(self, name: str, default: str | None = None) -> str:
        value = self.environ.get(name, "")
        if value:
            self.found[name] = value
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

    def note(self, name: str, value: str) -> str:
        self.found[name] = self.environ[name]
        return value


def _checked(read: _Reader, world: World) -> World:
    """The world with the variables it came from, refused when they contradict each other."""
    if world.local_rank >= world.local_size or world.local_size > world.size:
        names = ", ".join(name for name in read.found if "LOCAL" in name or "TASKS" in name)
        raise UserError(
            f"local rank {world.local_rank} of {world.local_size} on this machine does not fit rank {world.rank} of "
            f"{world.size} ({names}); {read.advice}"
        )
    for name, ours in (("WORLD_SIZE", world.size), ("RANK", world.rank)):
        # sbatch scripts often export WORLD_SIZE alone: harmless when it agrees, a wrong run when it does not.
        if read.environ.get(name, str(ours)) != str(ours):
            raise UserError(f"{name}={read.environ[name]} but {world.launcher} says {ours}; unset {name}")
    accelerate = _accelerate_variables(read.environ)
    return replace(
        world,
        found={**read.found, **accelerate},
        mixed_precision=accelerate.get("ACCELERATE_MIXED_PRECISION"),
        accumulation=_accumulation(accelerate),
    )


def _first(environ: Mapping[str, str], *names: str) -> str:
    """The first of these variables that is set (the last name if none is, for the message)."""
    return next((name for name in names if name in environ), names[-1])


def _accelerate_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What tells that accelerate launched this, less its compiler settings, which it always hands over."""
    ours = (name for name in sorted(environ) if name.startswith("ACCELERATE_"))
    return {name: environ[name] for name in ours if not name.startswith("ACCELERATE_DYNAMO_")}


def _accumulation(accelerate: Mapping[str, str]) -> int | None:
    """What accelerate was told; it hands over 1 where it was told nothing."""
    text = accelerate.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "")
    return int(text) if text.isascii() and text.isdecimal() and int(text) > 1 else None


def _slurm_traces(environ: Mapping[str, str]) -> dict[str, str]:
    return {n: environ[n] for n in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NTASKS") if n in environ}
