"""The rendezvous server, in the launcher of machine 0: it decides which machines take part in each round of a run.

A round is the time in which one set of machines trains together. A new round begins when a rank died, or when a machine
joined, left or came back. Each launcher keeps one connection to the server and sends

    {"machine": 1, "ranks": 8}      first message: which machine this is, and how many ranks it runs
    {"ready": cause or null}        none of its ranks is running; it waits for the next round (cause: why, if known)
    {"finished": true}              all of its ranks ended well
    {"closed": text}                the run cannot continue, for the given reason
    {"heartbeat": true}             the launcher is alive

and receives

    {"regroup": "save"}             machines want to join while all ranks are healthy: save a checkpoint and stop
    {"regroup": "now"}              a machine is gone or a rank has died: kill the ranks and report ready
    {"round": {...}}                the new round (`Round`): start the ranks
    {"closed": text}                the run is over
    {"rejected": text}              another machine uses the same number
    {"heartbeat": true}             the server is alive

After `kill -9` of a rank on machine 1, that machine's launcher kills its other ranks and reports ready with the cause.
`_decide` then sends `regroup: now` to all other machines. Their launchers kill their ranks and report ready too. When
all connected machines are ready, `_begin_round` counts a restart and sends the same `Round` to each.

Each launcher first proves that it knows the secret of the run, if there is one (`authentication.py`). A connection that
fails to do so, or that sends no valid first message, is closed after a few seconds. The number of such connections is
limited.

The server decides alone, so clocks of different machines are never compared, unlike in torch's c10d rendezvous. Ranks
are numbered by machine, so rank 0 always runs on machine 0. A machine that lost its connection may return at once.

A process outside of all machines may run the server instead (`RendezvousHost` with `outside`), as the driver of a run
on Ray does. Then no machine is special: rank 0 runs on the first machine of the round.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from unisono.cluster.rendezvous.authentication import Refused, dismiss, receive_first
from unisono.cluster.rendezvous.connection import HEARTBEAT_S, Connection
from unisono.formatting import format_count

LAST_CALL_FIRST_ROUND_S = 30.0
"""Seconds that the first round, which determines the effective batch, waits for machines beyond the minimum."""

LAST_CALL_LATER_ROUNDS_S = 2.0
"""Seconds that later rounds wait for more machines. It is short, as a late machine only leads to another round."""

MOST_STRANGERS = 256
"""Connections that may be open before their launcher has been admitted; more are closed at once."""

_MOST_RANKS = 2**16  # maximum number of ranks of a machine
_MOST_LINES = 20  # maximum number of lines to print about refused connections


@dataclass(frozen=True)
class Round:
    """The machines that train together, and what changed since the previous round."""

    number: int  # from 1
    name: str  # unique; prefixes the keys of this round in the ranks' store
    machines: list[list[int]]  # [machine, number of ranks], in the order of their ranks
    store_port: int  # port of the ranks' TCPStore on machine 0
    num_restarts: int  # restarts so far, without those after running out of memory, or because machines joined or left
    joined: list[int]
    left: list[int]
    causes: list[dict[str, Any]]  # rank, step and cause of failures, from each machine that reported one

    @classmethod
    def from_message(cls, message: Any) -> Round | None:
        """Returns the round in a message from the server; None if the message contains no valid round."""
        try:
            new = cls(**message)
        except TypeError:
            return None
        lists = (new.machines, new.joined, new.left, new.causes)
        if not all(isinstance(each, list) for each in lists) or not new.machines or not isinstance(new.name, str):
            return None
        pairs = all(isinstance(pair, list) and len(pair) == 2 for pair in new.machines)
        numbers = [new.number, new.store_port, new.num_restarts, *new.joined, *new.left]
        numbers += [number for pair in new.machines for number in pair] if pairs else []
        causes = all(isinstance(cause, dict) and isinstance(cause.get("cause"), str) for cause in new.causes)
        return new if pairs and causes and all(type(number) is int for number in numbers) else None

    def describe_change(self) -> str:
        """Describes in one line which machines joined, left or came back, and how many continue."""
        joined, left = set(self.joined), set(self.left)
        changes = {"came back": joined & left, "joined": joined - left, "left": left - joined}
        parts = [
            f"machine{'s' * (len(machines) > 1)} {', '.join(map(str, sorted(machines)))} {change}"
            for change, machines in changes.items()
            if machines
        ]
        ranks = format_count(sum(ranks for _, ranks in self.machines), "rank")
        now = f"{format_count(len(self.machines), 'machine')}, {ranks}"
        return f"{'; '.join(parts)}: continuing from the last checkpoint with {now}"


@dataclass(eq=False)
class _Member:
    """A connected machine. A machine that reconnects becomes a new member."""

    machine: int
    ranks: int
    address: str
    connection: Connection
    last_message_at: float
    ready: bool = False  # none of its ranks is running
    regroup_sent: str = ""  # the last `regroup` message sent to this machine in this round
    cause: dict[str, Any] | None = None  # why the machine wants a new round


class RendezvousServer:
    """The rendezvous server. Any thread may call its methods."""

    def __init__(
        self,
        port: int,
        store_port: int,
        min_machines: int,
        max_machines: int,
        max_restarts: int,
        *,
        outside: bool = False,
        secret: bytes | None = None,
        print_line: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Listens on `port` (0: any free port), and on all interfaces unless this is the only machine.

        Only launchers that know `secret` take part; `print_line` reports refused connections.
        """
        self._secret, self._print_line = secret, print_line
        self._strangers = threading.BoundedSemaphore(MOST_STRANGERS)
        self._refused: set[tuple[str, str]] = set()
        self._min_machines, self._max_machines = min_machines, max_machines
        self._max_restarts, self._store_port = max_restarts, store_port
        self._outside = outside  # no machine runs this server, so a round needs no machine 0
        self._server = _listen(port, all_interfaces=outside or max_machines > 1)
        self.port: int = self._server.getsockname()[1]
        self._lock = threading.RLock()
        self._connected: dict[int, _Member] = {}
        self._participants: dict[int, _Member] = {}  # machines of the current round
        self._finished: set[int] = set()  # machines of the current round whose ranks have all succeeded
        self._round = 0
        self._num_restarts = 0
        self._last_call_ends: float | None = None
        self._closed_because: str | None = None
        self._shut_down = threading.Event()
        for target in (self._accept, self._poll_last_call):
            threading.Thread(target=target, name="rendezvous-server", daemon=True).start()

    def end_run(self, reason: str) -> None:
        """Ends the run for all machines."""
        with self._lock:
            if self._closed_because is None:
                self._closed_because = reason
            for member in self._connected.values():
                member.connection.send(closed=self._closed_because)

    def shut_down(self) -> None:
        """Stops listening and closes all connections."""
        self._shut_down.set()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # otherwise the port stays in use while `accept` blocks
        self._server.close()
        with self._lock:
            for member in self._connected.values():
                member.connection.close()

    def _accept(self) -> None:
        while not self._shut_down.is_set():
            try:
                peer, address = self._server.accept()
            except OSError:
                if self._shut_down.wait(0.1):  # if not shut down, the error is temporary, such as too many open files
                    return
                continue
            if self._strangers.acquire(blocking=False):
                threading.Thread(target=self._meet, args=(peer, address[0]), daemon=True).start()
            else:
                peer.close()

    def _meet(self, peer: socket.socket, address: str) -> None:
        """Handles a new connection."""
        try:
            received = receive_first(peer, self._secret)
        except (Refused, OSError) as error:
            self._strangers.release()
            if isinstance(error, Refused):
                self._report(address, str(error))
            return dismiss(peer)
        self._strangers.release()
        self._serve(Connection(peer, received), address)

    def _report(self, address: str, reason: str) -> None:
        with self._lock:
            is_new = (address, reason) not in self._refused and len(self._refused) < _MOST_LINES
            self._refused.add((address, reason)) if is_new else None
        if is_new:
            self._print_line(f"refused a connection from {address}: the launcher there {reason}")

    def _serve(self, connection: Connection, address: str) -> None:
        """Handles the messages of one machine until it is gone."""
        member: _Member | None = None
        for message in connection.messages():
            with self._lock:
                if member is None:
                    member = self._admit(connection, address, message)
                    if member is None:
                        break
                else:
                    member.last_message_at = time.monotonic()
                    self._handle(member, message)
                self._decide()
        connection.close()
        with self._lock:
            if member is not None and self._connected.get(member.machine) is member:
                del self._connected[member.machine]
                self._decide()

    def _admit(self, connection: Connection, address: str, message: dict[str, Any]) -> _Member | None:
        machine, ranks = message.get("machine"), message.get("ranks")
        if type(machine) is not int or type(ranks) is not int:
            return None
        if not 0 <= machine < self._max_machines or not 1 <= ranks <= _MOST_RANKS:
            return None
        if self._closed_because is not None or self._shut_down.is_set():
            connection.send(closed=self._closed_because or "")
            return None
        before = self._connected.get(machine)
        if before is not None:
            if time.monotonic() - before.last_message_at < 3 * HEARTBEAT_S:
                connection.send(rejected=f"node_rank {machine} is already taking part (from {before.address})")
                return None
            before.connection.close()  # the machine lost its connection before this side noticed
        member = self._connected[machine] = _Member(machine, ranks, address, connection, time.monotonic())
        return member

    def _handle(self, member: _Member, message: dict[str, Any]) -> None:
        if "heartbeat" in message:
            member.connection.send(heartbeat=True)
        elif "ready" in message:
            member.ready, member.cause = True, _cause_in(message["ready"])
        elif "finished" in message:
            self._finished.add(member.machine)
        elif "closed" in message:
            self.end_run(str(message["closed"]))

    def _decide(self) -> None:
        """Ends the run, asks machines to regroup, or begins a new round. Called after every change."""
        if self._closed_because is not None:
            return
        ready = [member for member in self._connected.values() if member.ready]
        if self._finished:
            # The run has reached its last step. A machine that failed after that has nothing left to continue.
            participants = self._participants.items()
            if all(m in self._finished for m, member in participants if self._connected.get(m) is member):
                self.end_run("")
            for member in ready:
                member.connection.send(closed="the run has ended on the other machines")
            return
        someone_left = any(self._connected.get(machine) is not each for machine, each in self._participants.items())
        if not ready and not someone_left:
            return
        rank_died = any(member.ready for member in self._participants.values())
        # If all ranks are healthy and a machine only wants to join, the ranks save first, so that no step is lost.
        request = "now" if someone_left or rank_died else "save"
        for member in self._participants.values():
            if not member.ready and member.regroup_sent not in (request, "now"):
                member.regroup_sent = request
                member.connection.send(regroup=request)
        has_store = self._outside or 0 in self._connected
        if len(ready) < max(self._min_machines, len(self._connected)) or not has_store:
            self._last_call_ends = None
            return
        if self._last_call_ends is None:
            last_call_s = LAST_CALL_LATER_ROUNDS_S if self._round else LAST_CALL_FIRST_ROUND_S
            self._last_call_ends = time.monotonic() + last_call_s
        if len(ready) == self._max_machines or time.monotonic() >= self._last_call_ends:
            self._begin_round()

    def _begin_round(self) -> None:
        before, self._participants = self._participants, dict(sorted(self._connected.items()))
        joined = [machine for machine, member in self._participants.items() if before.get(machine) is not member]
        left = [machine for machine, member in before.items() if self._participants.get(machine) is not member]
        causes = [member.cause for member in self._participants.values() if member.cause]
        is_counted = not causes or any(cause.get("counted", True) for cause in causes)
        if not joined and not left and is_counted:
            self._num_restarts += 1
            if self._num_restarts > self._max_restarts:
                return self.end_run(causes[0]["cause"] if causes else "the machines repeatedly lost their connections")
        self._round += 1
        self._last_call_ends = None
        self._finished.clear()
        new_round = Round(
            number=self._round,
            name=uuid.uuid4().hex,
            machines=[[member.machine, member.ranks] for member in self._participants.values()],
            store_port=self._store_port,
            num_restarts=self._num_restarts,
            joined=joined if before else [],
            left=left,
            causes=causes,
        )
        for member in self._participants.values():
            member.ready, member.regroup_sent, member.cause = False, "", None
            member.connection.send(round=asdict(new_round))

    def _poll_last_call(self) -> None:
        while not self._shut_down.wait(0.1):
            with self._lock:
                if self._last_call_ends is not None:
                    self._decide()


def _cause_in(message: Any) -> dict[str, Any] | None:
    return message if isinstance(message, dict) and isinstance(message.get("cause"), str) else None


def _listen(port: int, *, all_interfaces: bool) -> socket.socket:
    if not all_interfaces:
        return socket.create_server(("127.0.0.1", port))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
