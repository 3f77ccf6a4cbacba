"""The rendezvous: who takes part in a round, what counts as a restart, and what happens after a lost connection.

Each machine's launcher is a thread here; the connections between them are real.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from command_line import environment, wait_until
from unisono.cluster.rendezvous import client, connection, server
from unisono.cluster.rendezvous.client import RendezvousClient, RendezvousConfig
from unisono.cluster.rendezvous.host import RendezvousHost
from unisono.cluster.rendezvous.server import Round
from unisono.errors import UserError


class Machines:
    """The launchers of several simulated machines."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.made: list[RendezvousClient] = []
        self._threads = ThreadPoolExecutor()

    def make(
        self,
        number: int,
        min_machines: int = 1,
        max_machines: int = 2,
        max_restarts: int = 1,
        outside: bool = False,
    ) -> RendezvousClient:
        config = RendezvousConfig(
            number, number + 1, min_machines, max_machines, "127.0.0.1", self.port, outside=outside
        )
        made = RendezvousClient(config, max_restarts, print)
        self.made.append(made)
        return made

    def join(self, *machines: RendezvousClient) -> list[Round]:
        """All launchers join at once."""
        return [each.result(20) for each in [self.begin(machine) for machine in machines]]

    def begin(self, machine: RendezvousClient) -> Future[Round]:
        def go() -> Round:
            machine.next_rendezvous()
            assert machine.round is not None
            return machine.round

        return self._threads.submit(go)

    def close(self) -> None:
        for machine in self.made:
            machine.shutdown()
        self._threads.shutdown(cancel_futures=True)


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    monkeypatch.setattr(server, "LAST_CALL_FIRST_ROUND_S", 0.5)
    monkeypatch.setattr(server, "LAST_CALL_LATER_ROUNDS_S", 0.1)
    launchers = Machines()
    yield launchers
    launchers.close()


def changed(machine: RendezvousClient) -> Callable[[], bool]:
    return lambda: machine.num_nodes_waiting() > 0


def test_ranks_are_numbered_by_machine(machines: Machines) -> None:
    host = machines.make(0)
    rounds = machines.join(machines.make(1), host)
    assert rounds[0] == rounds[1]
    assert (rounds[0].number, rounds[0].machines, rounds[0].num_restarts) == (1, [[0, 1], [1, 2]], 0)


def test_a_run_begins_with_fewer_machines_than_it_may_have(machines: Machines) -> None:
    [first] = machines.join(machines.make(0, max_machines=4))
    assert first.machines == [[0, 1]]


def test_when_a_machine_joins_the_others_save_first(machines: Machines) -> None:
    host, late = machines.make(0), machines.make(1)
    machines.join(host)
    waiting = machines.begin(late)
    wait_until(lambda: host.wants_checkpoint, "the host has to regroup")
    assert host.num_nodes_waiting() == 0, "not stopped before it has saved"
    [second] = machines.join(host)
    assert waiting.result(20) == second
    assert (second.joined, second.left, second.num_restarts) == ([1], [], 0)
    assert second.describe_change() == "machine 1 joined: continuing from the last checkpoint with 2 machines, 3 ranks"


def test_a_machine_that_leaves_is_detected_at_once_and_does_not_count_as_a_restart(machines: Machines) -> None:
    host, other = machines.make(0, max_restarts=0), machines.make(1)
    machines.join(host, other)
    other.shutdown()
    wait_until(changed(host), "the host has to regroup", seconds=10)
    assert not host.wants_checkpoint
    [second] = machines.join(host)
    assert (second.joined, second.left, second.machines, second.num_restarts) == ([], [1], [[0, 1]], 0)


def test_a_silent_machine_counts_as_gone(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SILENCE_S", 3.0)
    monkeypatch.setattr(client, "HEARTBEAT_S", 0.2)
    host = machines.make(0)
    frozen = connection.Connection(socket.create_connection(("127.0.0.1", machines.port)))
    frozen.send(machine=1, ranks=1)
    frozen.send(ready=None)
    [first] = machines.join(host)
    assert first.machines == [[0, 1], [1, 1]]
    wait_until(changed(host), "the silent machine is given up", seconds=20)
    frozen.close()
    assert machines.join(host)[0].left == [1]


STOPPED_LAUNCHER = """
from unisono.cluster.rendezvous import client
from unisono.cluster.rendezvous import connection
connection.SILENCE_S, client.HEARTBEAT_S = 1.5, 0.1
config = client.RendezvousConfig(0, ranks=1, min_machines=1, max_machines=1, host="localhost", port=0)
machine = client.RendezvousClient(config, 0, print)
machine.next_rendezvous()
print("met", flush=True)
while input():
    print(machine.num_nodes_waiting(), flush=True)
"""


@pytest.mark.slow
def test_a_launcher_suspended_longer_than_the_silence_limit_continues() -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", STOPPED_LAUNCHER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert launcher.stdin is not None and launcher.stdout is not None

    def group_changed() -> int:
        print("changed?", file=launcher.stdin, flush=True)
        assert launcher.stdout is not None
        return int(launcher.stdout.readline())

    try:
        assert launcher.stdout.readline() == "met\n"
        time.sleep(1.0)  # both ends of the connection wait for the other's next message
        os.kill(launcher.pid, signal.SIGSTOP)
        time.sleep(3.0)
        os.kill(launcher.pid, signal.SIGCONT)
        requests = []
        while len(requests) < 20:  # also for the length of the silence limit from now on
            requests.append(group_changed())
            time.sleep(0.1)
        assert not any(requests), "it took its own pause for the other side's silence"
    finally:
        launcher.kill()
        launcher.wait()


def test_a_death_makes_all_machines_regroup_until_no_restart_is_left(machines: Machines) -> None:
    host, other = machines.make(0, max_restarts=1), machines.make(1)
    machines.join(host, other)
    for _ in range(2):
        other.cause = {"rank": 1, "step": 7, "cause": "rank 1, step 7: killed"}
        again = machines.begin(other)
        wait_until(changed(host), "the host has to regroup")
        if other.round is not None and other.round.num_restarts == 1:
            break
        [second] = machines.join(host)
        assert again.result(20) == second
        assert (second.num_restarts, second.causes, second.joined, second.left) == (1, [other.cause], [], [])
    for machine in (machines.begin(host), again):
        with pytest.raises(RendezvousClosedError, match="rank 1, step 7: killed"):
            machine.result(20)


def test_no_machine_waits_after_all_have_finished(machines: Machines) -> None:
    host, other = machines.make(0), machines.make(1)
    machines.join(host, other)
    first = threading.Thread(target=other.finish)
    first.start()
    first.join(0.5)
    assert first.is_alive(), "the other machine is still at work"
    host.finish()
    first.join(10)
    assert not first.is_alive()


def test_a_machine_number_can_be_used_once(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    host, other = machines.make(0), machines.make(1)
    machines.join(host, other)
    monkeypatch.setattr(client, "SILENCE_S", 0.5)
    with pytest.raises(
        UserError, match=r"node_rank 1 is already taking part .*give each machine a different node_rank"
    ):
        machines.begin(machines.make(1)).result(20)
    assert host.num_nodes_waiting() == other.num_nodes_waiting() == 0, "those who train are not disturbed"


def test_the_others_wait_for_machine_0_to_come_back(machines: Machines) -> None:
    host, other = machines.make(0), machines.make(1)
    machines.join(host, other)
    host.shutdown()
    wait_until(changed(other), "the other machine notices", seconds=10)
    waiting = machines.begin(other)
    [again] = machines.join(machines.make(0))
    assert waiting.result(20) == again and again.machines == [[0, 1], [1, 2]]


def test_with_a_server_outside_of_all_machines_the_others_go_on_without_machine_0(machines: Machines) -> None:
    host = RendezvousHost(machines.port, 1, 2, 0, outside=True)
    try:
        first, second = (machines.make(number, max_restarts=0, outside=True) for number in (0, 1))
        machines.join(first, second)
        first.shutdown()
        wait_until(changed(second), "machine 1 has to regroup", seconds=10)
        [later] = machines.join(second)
        assert (later.left, later.machines, later.num_restarts) == ([0], [[1, 2]], 0)
        again = machines.make(0, max_restarts=0, outside=True)
        waiting = machines.begin(again)
        wait_until(lambda: second.wants_checkpoint, "machine 1 saves for machine 0")
        [last] = machines.join(second)
        assert waiting.result(20) == last and last.machines == [[0, 1], [1, 2]]
    finally:
        host.shut_down()


@pytest.mark.parametrize(
    "noise", [b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b"{\n", b'{"machine": 7, "ranks": 1}\n', b"\xff" * 99]
)
def test_unknown_clients_are_disconnected(machines: Machines, noise: bytes) -> None:
    host = machines.make(0)
    with socket.create_connection(("127.0.0.1", machines.port), timeout=10) as visitor:
        visitor.sendall(noise + b"\n")
        assert visitor.recv(100) == b""
    assert machines.join(host, machines.make(1))[0].machines == [[0, 1], [1, 2]]


def test_endlessly_nested_json_closes_the_connection_but_does_not_end_the_thread() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    stranger = socket.create_connection(listener.getsockname())
    ours, _ = listener.accept()
    stranger.sendall(b'{"machine":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n")
    assert list(connection.Connection(ours).messages()) == []
    stranger.close()
    listener.close()
