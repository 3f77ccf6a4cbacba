"""How the launcher of one machine meets those of the others: torch's agent asks it for each new round of the run.

It keeps a connection to the meeting point on machine 0. When that is lost, the machine is cut off: its ranks are
stopped and it tries to come back for as long as anybody may wait for it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from unisono.cluster.line import BEAT_S, SILENCE_S, Line
from unisono.cluster.meeting_point import MeetingPoint, Round
from unisono.errors import UserError

JOIN_S = 900.0
"""How long a machine waits for the others, at the start and after it lost them."""

_TELL_AFTER_S = 10.0
_TRY_EVERY_S = 0.5


@dataclass(frozen=True)
class Place:
    """Which machine this is, of how many, and where they meet."""

    machine: int
    ranks: int
    fewest: int
    most: int
    host: str
    port: int


class Meeting(RendezvousHandler):
    """One machine's side of the meeting; machine 0 is also the host."""

    def __init__(self, place: Place, max_restarts: int, say: Callable[[str], None]) -> None:
        self._place, self._say = place, say
        self._store: TCPStore | None = None
        self._point: MeetingPoint | None = None
        self._port = place.port
        if place.machine == 0:
            self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            self._point = MeetingPoint(place.port, self._store.port, place.fewest, place.most, max_restarts)
            self._port = self._point.port
        self.cause: dict[str, Any] | None = None
        """Why this machine wants a new round, where it is its own fault."""
        self.round: Round | None = None
        self._tried = 0.0
        self._news = threading.Condition()
        # What the thread that listens has heard, under _news:
        self._line: Line | None = None
        self._next: Round | None = None
        self._change = ""
        self._over: str | None = None
        self._taken = ""

    # ---- what the agent asks ----

    def get_backend(self) -> str:
        """A name, as torch wants one."""
        return "unisono"

    def get_run_id(self) -> str:
        """A name, as torch wants one."""
        return "unisono"

    @property
    def use_agent_store(self) -> bool:
        """The launcher of machine 0 hosts the store of the ranks, whoever of them dies."""
        return True

    @property
    def is_host(self) -> bool:
        """Whether the machines meet on this one."""
        return self._point is not None

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits for the next round. Returns when this machine takes part in one."""
        began = time.monotonic()
        self.round = self._wait_for_round(began, began + JOIN_S)
        numbers = [machine for machine, _ in self.round.machines]
        host = "localhost" if self._place.most == 1 else self._place.host
        store_info = RendezvousStoreInfo(host, self.round.store_port)
        # The first part is the agent's own store, which ours does not need.
        return RendezvousInfo(HashStore(), numbers.index(self._place.machine), len(numbers), store_info)

    def num_nodes_waiting(self) -> int:
        """Whether the group has changed, or this machine is cut off: then the agent stops its ranks and meets again."""
        with self._news:
            return int(self._change == "now" or self._line is None or self._over is not None)

    @property
    def wants_a_checkpoint(self) -> bool:
        """Whether machines are waiting to join while all ranks are well: time for the ranks to save and stop."""
        with self._news:
            return self._change == "save"

    def leave_round(self) -> None:
        """All ranks have saved and stopped so that others can join: time to meet."""
        with self._news:
            self._change = "now"

    def finish(self) -> None:
        """All ranks of this machine have ended well: waits until those of the others have, or the machines are gone."""
        with self._news:
            if self._line is not None and self._line.send(finished=True):
                while self._line is not None and self._over is None:
                    self._news.wait(1.0)

    def end(self, text: str) -> None:
        """Another round would end the same way: says so to all machines."""
        with self._news:
            if self._line is not None:
                self._line.send(over=text)

    def is_closed(self) -> bool:
        """Whether the run is over."""
        return self._over is not None

    def set_closed(self) -> None:
        """Ends the run for all machines."""
        self.end("the run was ended")

    def shutdown(self) -> bool:
        """Leaves; the host takes the meeting point with it."""
        with self._news:
            line, self._line = self._line, None
        if line is not None:
            line.close()
        if self._point is not None:
            self._point.close()
        return True

    # ---- how it keeps in touch ----

    def _wait_for_round(self, began: float, deadline: float) -> Round:
        told = self._place.most == 1
        asked: Line | None = None
        while True:
            with self._news:
                if self._over is not None:
                    raise RendezvousClosedError(self._over)
                if asked is not None and self._line is asked and self._next is not None:
                    found, self._next = self._next, None
                    return found
                line = self._line
                if line is not None and line is not asked:
                    self._next = None  # of a round that this machine has left already
                    line.send(ready=self.cause)
                    asked = line
                elif line is not None:
                    self._news.wait(0.2)
            if line is None:
                self._connect(began)
            now = time.monotonic()
            if not told and now - began > _TELL_AFTER_S:
                told = True
                self._say(f"waiting for the other machines at {self._place.host}:{self._port}")
            if now > deadline:
                raise RendezvousTimeoutError(f"nobody was met at {self._place.host}:{self._port} for {JOIN_S:.0f} s")

    def _connect(self, began: float) -> None:
        """Tries once to reach the meeting point."""
        # A number that is taken may be our own from before a cut, until the meeting point has noticed.
        if self._taken and time.monotonic() - began > 2 * SILENCE_S:
            raise UserError(f"{self._taken}; each machine needs a node_rank of its own")
        time.sleep(max(0.0, self._tried + _TRY_EVERY_S - time.monotonic()))
        self._tried = time.monotonic()
        host = "127.0.0.1" if self._point is not None else self._place.host
        line: Line | None = None
        with contextlib.suppress(OSError):
            line = Line(socket.create_connection((host, self._port), timeout=5.0))
        if line is not None and line.send(machine=self._place.machine, ranks=self._place.ranks):
            with self._news:
                self._line, self._change = line, ""
            for target in (self._listen, self._beat):
                threading.Thread(target=target, args=(line,), name="meeting", daemon=True).start()

    def _listen(self, line: Line) -> None:
        for message in line.messages():
            with self._news:
                self._hear(message)
                self._news.notify_all()
        line.close()
        with self._news:
            if self._line is line:
                self._line = None
            self._news.notify_all()

    def _hear(self, message: dict[str, Any]) -> None:
        if "round" in message:
            self._next, self._change, self._taken = Round(**message["round"]), "", ""
        elif "change" in message:
            self._change = str(message["change"])
        elif "over" in message:
            self._over = str(message["over"])
        elif "taken" in message:
            self._taken = str(message["taken"])

    def _beat(self, line: Line) -> None:
        while line.send(beat=True):
            time.sleep(BEAT_S)
