"""A SLURM cluster of two nodes on this one machine: munged, slurmctld and two slurmd, in a temporary folder.

    pytest_plugins = ["slurm_cluster"]

    def test_it(slurm: Slurm) -> None:
        slurm.run("srun", "-N2", "hostname")

It needs root (munge and slurmd insist) and Debian's packages slurm-wlm and munge, which it installs where they are
missing. All state lies in the folder; nothing of a real SLURM on the machine is touched.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from command_line import Ended, environment
from debian_packages import install

PACKAGES = ["slurm-wlm", "munge"]
NODES = ("n0", "n1")
# Settings that let it run in a container: processes are followed by their group and not by cgroups, tasks are not
# bound to cores. Nodes have CPUs and GPUs that the machine may not have, which SLURM does not check.
CONF = """
ClusterName=two
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=sched_min_interval=100000
KillWait=10
ReturnToService=2
GresTypes=gpu
NodeName=DEFAULT CPUs=4 RealMemory=1000 Gres=gpu:a100:2 Feature=a100,nvlink
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={n0}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={n1}
PartitionName=all Nodes=n0,n1 Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """The running cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {"SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *words: object, seconds: float = 60) -> Ended:
        """Runs one of SLURM's commands."""
        done = subprocess.run(
            [str(word) for word in words],
            env=environment(**self.environ),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    def state(self, job: int) -> str:
        """PENDING, RUNNING, COMPLETED, …"""
        words = ("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")
        return self.run(*words).out.strip()

    def wait_for(self, job: int, *states: str, seconds: float = 120) -> None:
        """Waits until the job is in one of these states."""
        deadline = time.monotonic() + seconds
        while (state := self.state(job)) not in states:
            assert time.monotonic() < deadline, f"job {job} is {state}, not {states}\n{self.logs()}"
            time.sleep(0.2)

    def start_now(self, job: int) -> None:
        """Starts a requeued job now instead of after SLURM's delay of two minutes."""
        answer = self.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        assert answer.code == 0, answer.err

    def logs(self) -> str:
        """The last lines of the daemons' logs."""
        return "\n".join(
            f"{log.name}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            for log in sorted(self.folder.glob("*.log"))
        )


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """A two-node cluster for the whole session."""
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: a SLURM cluster of our own needs root")
    install("slurmctld", PACKAGES)
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short, because a socket's path has at most 107 characters
    cluster = Slurm(folder)
    try:
        start_daemons(cluster)
        yield cluster
        cluster.run("scancel", "--user=root")
    finally:
        stop_daemons(folder)
        shutil.rmtree(folder, ignore_errors=True)


def start_daemons(cluster: Slurm) -> None:
    folder = cluster.folder
    folder.chmod(0o755)
    for name in ("state", "spool-n0", "spool-n1"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    ports = dict(zip(("ctld", *NODES), free_ports(3), strict=True))
    host = socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(CONF.format(host=host, folder=folder, **ports))
    for name in ("gpu0", "gpu1"):
        (folder / name).touch()
    (folder / "gres.conf").write_text(f"Name=gpu Type=a100 File={folder}/gpu[0-1]\n")
    version = tuple(int(part) for part in said("slurmctld", "-V").split()[-1].split(".")[:2])
    # Newer versions use cgroups unless this disables them; older ones do not know the setting, and v1 changes nothing
    # here.
    plugin = "disabled" if version >= (23, 11) else "cgroup/v1"
    (folder / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n")
    files = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.pid", "log-file": "munged.log"}
    files |= {"seed-file": "munged.seed"}
    begin(cluster, "munged", "--force", *(f"--{option}={folder / name}" for option, name in files.items()))
    begin(cluster, "slurmctld", "-f", folder / "slurm.conf")
    for node in NODES:
        begin(cluster, "slurmd", "-N", node, "-f", folder / "slurm.conf")
    idle = ("sinfo", "--noheader", "--states=idle", "--format=%D")
    deadline = time.monotonic() + 60
    while cluster.run(*idle).out.strip() != "2":
        assert time.monotonic() < deadline, f"no two idle nodes after 60 s\n{cluster.logs()}"
        time.sleep(0.05)


def begin(cluster: Slurm, *words: object) -> None:
    ended = cluster.run(*words)  # a daemon moves to the background once it has started
    assert ended.code == 0, f"{words}: {ended.err}\n{cluster.logs()}"


def said(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def stop_daemons(folder: Path) -> None:
    """Ends the daemons and all jobs of the nodes, found by the folder in their command line or environment."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + 5
        while (alive := of_cluster(folder)) and time.monotonic() < deadline:
            for pid in alive:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(0.2)


def of_cluster(folder: Path) -> list[int]:
    result = []
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) == os.getpid():
            continue
        try:
            command = (process / "cmdline").read_bytes()
            environ = (process / "environ").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in command or f"SLURM_CONF={folder}".encode() in environ:
            result.append(int(process.name))
    return result
