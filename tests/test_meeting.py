"""Machines meet: who takes part in a round, what counts as a restart, and what happens to those who lose touch.

Each machine's launcher is a thread here; the connections between them are real.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from command_line import wait_until
from unisono.cluster import line, meeting, meeting_point
from unisono.cluster.meeting import Meeting, Place
from unisono.cluster.meeting_point import Round
from unisono.errors import UserError


class Machines:
    """Launchers that meet on this machine."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.made: list[Meeting] = []
        self._threads = ThreadPoolExecutor()

    def make(self, number: int, fewest: int = 1, most: int = 2, max_restarts: int = 1) -> Meeting:
        place = Place(number, ranks=number + 1, fewest=fewest, most=most, host="127.0.0.1", port=self.port)
        made = Meeting(place, max_restarts, print)
        self.made.append(made)
        return made

    def meet(self, *machines: Meeting) -> list[Round]:
        """All of them at once."""
        return [each.result(20) for each in [self.begin(machine) for machine in machines]]

    def begin(self, machine: Meeting) -> Future[Round]:
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
    monkeypatch.setattr(meeting_point, "FIRST_CALL_S", 0.5)
    monkeypatch.setattr(meeting_point, "LAST_CALL_S", 0.1)
    found = Machines()
    yield found
    found.close()


def changed(machine: Meeting) -> Callable[[], bool]:
    return lambda: machine.num_nodes_waiting() > 0


def test_ranks_are_numbered_by_machine(machines: Machines) -> None:
    host = machines.make(0)
    rounds = machines.meet(machines.make(1), host)
    assert rounds[0] == rounds[1]
    assert (rounds[0].number, rounds[0].machines, rounds[0].num_restarts) == (1, [[0, 1], [1, 2]], 0)


def test_a_run_begins_with_fewer_machines_than_it_may_have(machines: Machines) -> None:
    [first] = machines.meet(machines.make(0, most=4))
    assert first.machines == [[0, 1]]


def test_for_a_machine_that_joins_the_others_save_first(machines: Machines) -> None:
    host, late = machines.make(0), machines.make(1)
    machines.meet(host)
    waiting = machines.begin(late)
    wait_until(lambda: host.wants_a_checkpoint, "the host is told")
    assert host.num_nodes_waiting() == 0, "not stopped before it has saved"
    [second] = machines.meet(host)
    assert waiting.result(20) == second
    assert (second.joined, second.left, second.num_restarts) == ([1], [], 0)
    assert second.describe_change() == "machine 1 joined: going on from the last checkpoint with 2 machines, 3 ranks"


def test_a_machine_that_is_gone_is_noticed_at_once_and_is_no_restart(machines: Machines) -> None:
    host, other = machines.make(0, max_restarts=0), machines.make(1)
    machines.meet(host, other)
    other.shutdown()
    wait_until(changed(host), "the host is told", seconds=10)
    assert not host.wants_a_checkpoint
    [second] = machines.meet(host)
    assert (second.joined, second.left, second.machines, second.num_restarts) == ([], [1], [[0, 1]], 0)


def test_a_machine_that_says_nothing_is_gone(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "SILENCE_S", 3.0)
    monkeypatch.setattr(meeting, "BEAT_S", 0.2)
    host = machines.make(0)
    frozen = line.Line(socket.create_connection(("127.0.0.1", machines.port)))
    frozen.send(machine=1, ranks=1)
    frozen.send(ready=None)
    [first] = machines.meet(host)
    assert first.machines == [[0, 1], [1, 1]]
    wait_until(changed(host), "the silent machine is given up", seconds=20)
    frozen.close()
    assert machines.meet(host)[0].left == [1]


def test_a_death_makes_all_machines_meet_and_counts_until_there_were_too_many(machines: Machines) -> None:
    host, other = machines.make(0, max_restarts=1), machines.make(1)
    machines.meet(host, other)
    for _ in range(2):
        other.cause = {"rank": 1, "step": 7, "cause": "rank 1, step 7: killed"}
        again = machines.begin(other)
        wait_until(changed(host), "the host is told")
        if other.round is not None and other.round.num_restarts == 1:
            break
        [second] = machines.meet(host)
        assert again.result(20) == second
        assert (second.num_restarts, second.causes, second.joined, second.left) == (1, [other.cause], [], [])
    for machine in (machines.begin(host), again):
        with pytest.raises(RendezvousClosedError, match="rank 1, step 7: killed"):
            machine.result(20)


def test_when_all_have_finished_nobody_waits(machines: Machines) -> None:
    host, other = machines.make(0), machines.make(1)
    machines.meet(host, other)
    first = threading.Thread(target=other.finish)
    first.start()
    first.join(0.5)
    assert first.is_alive(), "the other machine is still at work"
    host.finish()
    first.join(10)
    assert not first.is_alive()


def test_a_number_can_be_taken_once(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    host, other = machines.make(0), machines.make(1)
    machines.meet(host, other)
    monkeypatch.setattr(meeting, "SILENCE_S", 0.5)
    with pytest.raises(UserError, match=r"node_rank 1 is already taking part .*each machine needs a node_rank of its"):
        machines.begin(machines.make(1)).result(20)
    assert host.num_nodes_waiting() == other.num_nodes_waiting() == 0, "those who train are not disturbed"


def test_the_others_wait_for_machine_0_to_come_back(machines: Machines) -> None:
    host, other = machines.make(0), machines.make(1)
    machines.meet(host, other)
    host.shutdown()
    wait_until(changed(other), "the other machine notices", seconds=10)
    waiting = machines.begin(other)
    [again] = machines.meet(machines.make(0))
    assert waiting.result(20) == again and again.machines == [[0, 1], [1, 2]]


@pytest.mark.parametrize(
    "noise", [b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b"{\n", b'{"machine": 7, "ranks": 1}\n', b"\xff" * 99]
)
def test_strange_visitors_are_sent_away(machines: Machines, noise: bytes) -> None:
    host = machines.make(0)
    with socket.create_connection(("127.0.0.1", machines.port), timeout=10) as visitor:
        visitor.sendall(noise + b"\n")
        assert visitor.recv(100) == b""
    assert machines.meet(host, machines.make(1))[0].machines == [[0, 1], [1, 2]]
