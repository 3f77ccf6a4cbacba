"""Where the machines of a run meet: a small server in the launcher of machine 0.

Machines come, go and come back; each time the group changes or a rank has died, all of them meet here for a new round
of the run. Machine 0 decides alone who takes part: no clocks are compared between machines (torch's own rendezvous
does), ranks are numbered by machine, so that rank 0 is on machine 0, and nobody has to wait for the dead to be
forgotten when they come back.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from typing import Any

from unisono.cluster.line import BEAT_S, Line

FIRST_CALL_S = 30.0
"""How long a new run with enough machines waits for more: the effective batch follows from those at its first start."""

LAST_CALL_S = 2.0
"""The same for later rounds, where a late machine costs one more round and nothing else."""


@dataclass(frozen=True)
class Round:
    """Who takes part from here on, and why there is a new round."""

    number: int  # from 1
    name: str  # of its own, to tell the traces of one round from another's
    machines: list[list[int]]  # number and ranks of each, in the order of their ranks
    store_port: int  # on machine 0, where the ranks find each other
    num_restarts: int  # rounds that began because a rank died, and not because machines came or went
    joined: list[int]
    left: list[int]
    causes: list[dict[str, Any]]  # rank, step and cause, of each machine that knows one

    def describe_change(self) -> str:
        """One line: who came, who went, how many go on."""
        back = sorted(set(self.joined) & set(self.left))
        parts = [(back, "came back"), ([m for m in self.joined if m not in back], "joined")]
        parts.append(([m for m in self.left if m not in back], "left"))
        news = [f"machine{'s' * (len(who) > 1)} {', '.join(map(str, who))} {what}" for who, what in parts if who]
        ranks = sum(ranks for _, ranks in self.machines)
        now = f"{len(self.machines)} machine{'s' * (len(self.machines) > 1)}, {ranks} rank{'s' * (ranks > 1)}"
        return f"{'; '.join(news)}: going on from the last checkpoint with {now}"


@dataclass(eq=False)
class _Guest:
    """A machine that is connected."""

    machine: int
    ranks: int
    address: str
    line: Line
    heard: float
    ready: bool = False  # for a new round: none of its ranks is running
    told: str = ""  # what it was told about the change to come
    cause: dict[str, Any] | None = None  # why it wants a new round


class MeetingPoint:
    """The server. Its methods may be called from any thread."""

    def __init__(self, port: int, store_port: int, fewest: int, most: int, max_restarts: int) -> None:
        """Listens on `port` (0: any free one), on all interfaces if there can be several machines."""
        self._fewest, self._most, self._max_restarts, self._store_port = fewest, most, max_restarts, store_port
        self._server = _listen(port, everywhere=most > 1)
        self.port: int = self._server.getsockname()[1]
        self._lock = threading.RLock()
        self._guests: dict[int, _Guest] = {}
        self._group: dict[int, _Guest] = {}  # of the current round
        self._finished: set[int] = set()  # machines of the current round whose ranks have all ended well
        self._round = 0
        self._num_restarts = 0
        self._call_ends: float | None = None
        self._over: str | None = None
        self._closed = threading.Event()
        for target in (self._accept, self._watch_the_clock):
            threading.Thread(target=target, name="meeting-point", daemon=True).start()

    def end(self, text: str) -> None:
        """The run is over for all machines."""
        with self._lock:
            if self._over is None:
                self._over = text
            for guest in self._guests.values():
                guest.line.send(over=self._over)

    def close(self) -> None:
        """Nobody can meet here any more."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # or the port stays taken while a thread waits for visitors
        self._server.close()
        with self._lock:
            for guest in self._guests.values():
                guest.line.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, address = self._server.accept()
            except OSError:
                if self._closed.wait(0.1):  # otherwise for instance too many open files: others will close theirs
                    return
                continue
            threading.Thread(target=self._serve, args=(Line(connection), address[0]), daemon=True).start()

    def _serve(self, line: Line, address: str) -> None:
        """Listens to one machine until it is gone."""
        guest: _Guest | None = None
        for message in line.messages():
            with self._lock:
                if guest is None:
                    guest = self._welcome(line, address, message)
                    if guest is None:
                        break
                else:
                    guest.heard = time.monotonic()
                    self._hear(guest, message)
                self._decide()
        line.close()
        with self._lock:
            if guest is not None and self._guests.get(guest.machine) is guest:
                del self._guests[guest.machine]
                self._decide()

    def _welcome(self, line: Line, address: str, message: dict[str, Any]) -> _Guest | None:
        machine, ranks = message.get("machine"), message.get("ranks")
        if not isinstance(machine, int) or not isinstance(ranks, int) or not 0 <= machine < self._most or ranks < 1:
            return None
        if self._over is not None or self._closed.is_set():
            line.send(over=self._over or "")
            return None
        before = self._guests.get(machine)
        if before is not None:
            if time.monotonic() - before.heard < 3 * BEAT_S:
                line.send(taken=f"node_rank {machine} is already taking part (from {before.address})")
                return None
            before.line.close()  # it lost us before we noticed
        guest = self._guests[machine] = _Guest(machine, ranks, address, line, time.monotonic())
        return guest

    def _hear(self, guest: _Guest, message: dict[str, Any]) -> None:
        if "beat" in message:
            guest.line.send(beat=True)
        elif "ready" in message:
            guest.ready, guest.cause = True, _cause_in(message["ready"])
        elif "finished" in message:
            self._finished.add(guest.machine)
        elif "over" in message:
            self.end(str(message["over"]))

    def _decide(self) -> None:
        """Something has changed: who has to be told, and can a new round begin?"""
        if self._over is not None:
            return
        ready = [guest for guest in self._guests.values() if guest.ready]
        if self._finished:
            # The run has reached its end: there is nothing to go on with for whoever stumbled there.
            if all(m in self._finished for m, guest in self._group.items() if self._guests.get(m) is guest):
                self.end("")
            for guest in ready:
                guest.line.send(over="the run has ended on the other machines")
            return
        missing = any(self._guests.get(machine) is not guest for machine, guest in self._group.items())
        if not ready and not missing:
            return
        died = missing or any(guest.ready for guest in self._group.values())
        news = "now" if died else "save"  # while all ranks are well, they save before they are stopped
        for guest in self._group.values():
            if not guest.ready and guest.told not in (news, "now"):
                guest.told = news
                guest.line.send(change=news)
        if len(ready) < max(self._fewest, len(self._guests)) or 0 not in self._guests:
            self._call_ends = None
            return
        if self._call_ends is None:
            self._call_ends = time.monotonic() + (LAST_CALL_S if self._round else FIRST_CALL_S)
        if len(ready) == self._most or time.monotonic() >= self._call_ends:
            self._begin_round()

    def _begin_round(self) -> None:
        before, self._group = self._group, dict(sorted(self._guests.items()))
        joined = [machine for machine, guest in self._group.items() if before.get(machine) is not guest]
        left = [machine for machine, guest in before.items() if self._group.get(machine) is not guest]
        causes = [guest.cause for guest in self._group.values() if guest.cause]
        if not joined and not left:
            self._num_restarts += 1
            if self._num_restarts > self._max_restarts:
                return self.end(causes[0]["cause"] if causes else "the machines keep losing each other")
        self._round += 1
        self._call_ends = None
        self._finished.clear()
        machines = [[guest.machine, guest.ranks] for guest in self._group.values()]
        news = Round(
            self._round,
            uuid.uuid4().hex,
            machines,
            self._store_port,
            self._num_restarts,
            joined if before else [],
            left,
            causes,
        )
        for guest in self._group.values():
            guest.ready, guest.told, guest.cause = False, "", None
            guest.line.send(round=asdict(news))

    def _watch_the_clock(self) -> None:
        while not self._closed.wait(0.1):
            with self._lock:
                if self._call_ends is not None:
                    self._decide()


def _cause_in(message: Any) -> dict[str, Any] | None:
    return message if isinstance(message, dict) and isinstance(message.get("cause"), str) else None


def _listen(port: int, *, everywhere: bool) -> socket.socket:
    if not everywhere:
        return socket.create_server(("127.0.0.1", port))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
