"""A real Ray cluster of several nodes on this machine, whose nodes can be killed.

This file is also the program that starts the nodes: in a process of its own, because Ray installs signal handlers, and
because the cluster then ends with the tests, however they end.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from command_line import environment, marked, wait_until
from warm_python import RUN_MARK

# Nodes that are killed are noticed in seconds, instead of a quarter of a minute.
_QUICK = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 6,
}


class NotStarted(Exception):
    """The program that starts the nodes has failed."""


class RayCluster:
    """A head without CPUs, and nodes with one CPU each."""

    def __init__(self, environ: dict[str, str]) -> None:
        self._program = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environ,
            start_new_session=True,
        )
        self._nodes: list[int] = []  # process ids of their raylets
        self.address: str = self._answer()
        self.variables = {**environ, "RAY_ADDRESS": self.address}
        """The environment variables of a driver of this cluster."""

    def make_nodes(self, count: int) -> None:
        """Starts nodes until there are this many."""
        while len(self._nodes) < count:
            assert self._program.stdin is not None
            self._program.stdin.write("add\n")
            self._program.stdin.flush()
            self._nodes.append(self._answer())

    def kill_node_of(self, rank: int) -> None:
        """Sends SIGKILL to the raylet of the node on which this rank runs, and to the raylet's processes."""
        [pid] = ranks(RANK=str(rank))
        above = _ancestors(pid)
        [raylet] = [each for each in self._nodes if each in above]
        self._nodes.remove(raylet)
        for process in [raylet, *_children(raylet)]:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        wait_until(lambda: pid not in ranks(), "the rank ends with its node", 60)

    def stop(self) -> None:
        """Ends all nodes."""
        assert self._program.stdin is not None
        self._program.stdin.close()
        self._program.wait(120)

    def _answer(self) -> Any:
        assert self._program.stdout is not None
        line = self._program.stdout.readline()
        if not line:
            raise NotStarted
        return json.loads(line)


def ranks(**also: str) -> list[int]:
    """The living ranks that these tests have started, on any node."""
    result = []
    for pid in marked({RUN_MARK: os.environ[RUN_MARK]}, **also):
        with suppress(OSError):
            if b"unisono.engine.start.rank" in Path(f"/proc/{pid}/cmdline").read_bytes():
                result.append(pid)
    return result


@contextmanager
def ray_cluster(**variables: str) -> Iterator[RayCluster]:
    """Starts a cluster, whose processes have these environment variables, and ends it."""
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")  # short, because the paths of Unix sockets are limited
    os.mkdir(f"{folder}/ray")
    environ = {
        **environment(),
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    cluster: RayCluster | None = None
    try:
        # Ray gives a node 30 s to start, which is too little on a machine that is very busy.
        for _ in range(5):
            with suppress(NotStarted):
                cluster = RayCluster(environ)
                break
            _kill_all(folder)
        assert cluster is not None, "the cluster does not start"
        yield cluster
        cluster.stop()
        wait_until(lambda: marked({"RAY_TMPDIR": folder}) == [], "all processes of the cluster end", 60)
    finally:
        _kill_all(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _kill_all(folder: str) -> None:
    """Kills every process of the cluster in this folder."""
    while processes := marked({"RAY_TMPDIR": folder}):
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _ancestors(pid: int) -> list[int]:
    result = []
    while pid > 1:
        pid = _parent(pid)
        result.append(pid)
    return result


def _children(parent: int) -> list[int]:
    result = []
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if _parent(int(each.name)) == parent:
                result.append(int(each.name))
    return result


def _until_it_works(start: Callable[[], Any]) -> Any:
    for _ in range(4):
        with suppress(Exception):
            return start()
    return start()


def main() -> None:
    """Starts the head, and a node for each line of stdin; ends them at the end of stdin."""
    from ray.cluster_utils import Cluster

    answers, sys.stdout = sys.stdout, sys.stderr
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": _QUICK}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    print(json.dumps(cluster.address), file=answers, flush=True)
    for _ in sys.stdin:
        node = _until_it_works(lambda: cluster.add_node(wait=False, num_cpus=1))
        print(json.dumps(node.all_processes["raylet"][0].process.pid), file=answers, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
