"""Each launcher is detected in order of precedence, and an incomplete set of variables is an error that names them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.cluster.environment import World, detect, expand_hosts
from unisono.errors import UserError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "gpu01",
    "MASTER_PORT": "29501",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "4",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[09-11]",
    "SLURM_JOB_NODELIST": "gpu[01-11]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
ACCELERATE = {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_DYNAMO_BACKEND": "NO"}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def test_torchruns_variables_define_rank_and_world_size() -> None:
    world = detect(TORCHRUN)
    assert (world.launcher, world.rank, world.size, world.local_rank, world.local_size) == ("torchrun", 5, 8, 1, 4)
    assert (world.node, world.num_nodes, world.restart_count) == (1, 2, 2)
    assert (world.master_addr, world.master_port) == ("gpu01", 29501)
    assert not world.is_main and world.mixed_precision is None
    assert "torchrun" in world.describe() and "RANK=5" in world.describe() and "MASTER_ADDR=gpu01" in world.describe()


def test_accelerate_and_our_own_launcher_are_distinguished_from_torchrun() -> None:
    accelerate = detect({**TORCHRUN, **ACCELERATE})
    assert accelerate.launcher == "accelerate" and accelerate.mixed_precision == "bf16"
    assert "ACCELERATE_MIXED_PRECISION=bf16" in accelerate.describe() and "DYNAMO" not in accelerate.describe()
    assert detect({**TORCHRUN, "UNISONO_JOB": "abc"}).launcher == "unisono"


def test_torchrun_inside_slurm_is_torchrun() -> None:
    assert detect({**SLURM, **TORCHRUN}).launcher == "torchrun"


def test_one_process_needs_only_rank_and_world_size() -> None:
    world = detect({"RANK": "0", "WORLD_SIZE": "1"})
    assert (world.launcher, world.size, world.local_size, world.num_nodes, world.is_main) == ("torchrun", 1, 1, 1, True)


def test_a_slurm_step_uses_its_first_host_and_a_port_from_the_job_id() -> None:
    world = detect(SLURM)
    assert (world.launcher, world.rank, world.size) == ("slurm", 4, 5)
    assert (world.local_rank, world.local_size, world.node, world.num_nodes) == (0, 1, 2, 3)
    assert (world.master_addr, world.master_port) == ("gpu09", 15000 + 4567)
    assert "SLURM_PROCID=4" in world.describe()
    named = detect({**SLURM, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4000", "SLURM_RESTART_COUNT": "1"})
    assert (named.master_addr, named.master_port, named.restart_count) == ("10.0.0.7", 4000, 1)
    assert detect(without(SLURM, "SLURM_STEP_NODELIST")).master_addr == "gpu01"


@pytest.mark.parametrize("step", [None, "4294967291", "4294967290", "batch"])
def test_a_slurm_allocation_without_a_step_counts_as_no_launcher(step: str | None) -> None:
    environ = without(SLURM, "SLURM_STEP_ID") if step is None else {**SLURM, "SLURM_STEP_ID": step}
    world = detect(environ)
    assert (world.launcher, world.rank, world.size) == ("plain", 0, 1)
    assert "SLURM_JOB_ID=1234567" in world.describe() and "srun" in world.describe()


def test_a_slurm_step_of_one_task_counts_as_no_launcher_and_may_start_its_own_ranks() -> None:
    assert detect({**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}).launcher == "plain"


def test_in_a_slurm_step_world_size_alone_must_match_the_number_of_tasks() -> None:
    assert detect({**SLURM, "WORLD_SIZE": "5"}).launcher == "slurm"
    with pytest.raises(UserError, match=r"WORLD_SIZE=8, but slurm set 5"):
        detect({**SLURM, "WORLD_SIZE": "8"})


def test_slurm_takes_precedence_over_pmi_but_mpirun_inside_slurm_is_mpi() -> None:
    assert detect({**SLURM, "PMI_RANK": "4", "PMI_SIZE": "5"}).launcher == "slurm"
    # Two ranks of one daemon that srun started: SLURM_PROCID belongs to the daemon.
    ranks = [detect({**SLURM, **OPEN_MPI, "OMPI_COMM_WORLD_RANK": str(rank)}).rank for rank in (0, 1)]
    assert ranks == [0, 1]


def test_mpi_needs_an_address_only_on_several_machines() -> None:
    world = detect({**OPEN_MPI, "PMIX_NAMESPACE": "job-17"})
    assert (world.launcher, world.rank, world.size, world.local_rank, world.num_nodes) == ("mpi", 1, 2, 1, 1)
    assert world.master_addr == "127.0.0.1"
    assert world.master_port != detect({**OPEN_MPI, "PMIX_NAMESPACE": "job-18"}).master_port
    intel = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    with pytest.raises(UserError, match="MASTER_ADDR is not set"):
        detect(intel)
    two = detect({**intel, "MASTER_ADDR": "first"})
    assert (two.rank, two.node, two.num_nodes, two.master_addr) == (3, 1, 2, "first")


def test_without_variables_there_is_no_launcher() -> None:
    world = detect({})
    assert world == World(launcher="plain")
    assert world.is_main and "no launcher variables" in world.describe()


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set but RANK is not"),
        ({"RANK": "0"}, "RANK=0 is set but WORLD_SIZE is not"),
        ({**TORCHRUN, "RANK": "8"}, "RANK=8 must be less than WORLD_SIZE=8"),
        ({**TORCHRUN, "RANK": "one"}, "RANK=one is not a whole number"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE=0 .* at least 1"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK=-1"),
        (without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR is not set"),
        (without(TORCHRUN, "MASTER_PORT"), "MASTER_PORT is not set"),
        (without(TORCHRUN, "LOCAL_RANK"), "LOCAL_RANK is not set"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT=http"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "local rank 4 of 4 .*LOCAL_RANK"),
        ({**SLURM, "SLURM_PROCID": "5"}, "SLURM_PROCID=5 must be less than SLURM_NTASKS=5"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "many"}, "SLURM_STEP_TASKS_PER_NODE=many"),
        ({**SLURM, "SLURM_NODEID": "3"}, "SLURM_NODEID=3"),
        ({**SLURM, "SLURM_STEP_NODELIST": "gpu[a-b]"}, "node list"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": ""}, "OMPI_COMM_WORLD_SIZE is not set"),
    ],
)
def test_bad_variables_are_refused_in_one_line_that_names_them(environ: dict[str, str], names: str) -> None:
    with pytest.raises(UserError, match=names) as refusal:
        detect(environ)
    assert "\n" not in str(refusal.value) and ";" in str(refusal.value), "says what happened; what to do"


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("login", ["login"]),
        ("a,b", ["a", "b"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
        ("rack[1-2]n[1,3].site", ["rack1n1.site", "rack1n3.site", "rack2n1.site", "rack2n3.site"]),
    ],
)
def test_slurm_node_lists_are_expanded(nodelist: str, hosts: list[str]) -> None:
    assert expand_hosts(nodelist) == hosts


@given(first=st.integers(0, 9999), count=st.integers(1, 50), width=st.integers(1, 6))
def test_a_range_of_hosts_keeps_leading_zeros(first: int, count: int, width: int) -> None:
    hosts = [f"n{number:0{width}d}" for number in range(first, first + count)]
    assert expand_hosts(f"n[{hosts[0][1:]}-{hosts[-1][1:]}]") == hosts


SAY_WHO = """
import dataclasses, json, sys
from unisono.cluster.environment import detect
world = detect()
with open(f"{sys.argv[1]}/{world.rank}.json", "w") as file:
    json.dump({**dataclasses.asdict(world), "describe": world.describe(), "torch": "torch" in sys.modules}, file)
"""


def started_by_accelerate(folder: Path, *flags: str) -> list[dict[str, object]]:
    script = folder / "who.py"
    script.write_text(SAY_WHO)
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI_", "ACCELERATE_", "UNISONO_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    environ["PYTHONPATH"] = str(Path(__file__).parents[1] / "src")
    environ["HF_HOME"] = str(folder)  # no accelerate config file of the user
    launch = [sys.executable, "-m", "accelerate.commands.launch", *flags, str(script), str(folder)]
    subprocess.run(launch, env=environ, check=True, capture_output=True, timeout=120)
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def test_the_real_accelerate_launch_with_ranks_is_recognised(tmp_path: Path) -> None:
    # Each test process has its own port, so that parallel tests do not collide.
    port = str(20000 + os.getpid() % 10000)
    worlds = started_by_accelerate(
        tmp_path, "--multi_gpu", "--num_processes", "2", "--mixed_precision", "bf16", "--main_process_port", port
    )
    assert [(w["launcher"], w["rank"], w["size"], w["local_rank"]) for w in worlds] == [
        ("accelerate", 0, 2, 0),
        ("accelerate", 1, 2, 1),
    ]
    assert {w["mixed_precision"] for w in worlds} == {"bf16"}
    assert not any(w["torch"] for w in worlds), "knowing who one is must not cost a torch import"


def test_accelerate_launch_without_ranks_counts_as_no_launcher_with_a_note(tmp_path: Path) -> None:
    (world,) = started_by_accelerate(tmp_path, "--cpu", "--num_processes", "2", "--mixed_precision", "bf16")
    assert (world["launcher"], world["size"], world["mixed_precision"]) == ("plain", 1, "bf16")
    assert "started by accelerate launch" in str(world["describe"]) and "set no RANK" in str(world["describe"])
