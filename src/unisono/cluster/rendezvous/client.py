"""The client side of the rendezvous, in the form that torch's elastic agent expects (`RendezvousHandler`).

The agent calls three methods. `next_rendezvous` reports to the server that no rank of this machine is running and
blocks until the server sends the next round. `num_nodes_waiting`, which the agent polls ten times per second while its
ranks are healthy, returns a positive number when this machine has to regroup; the agent then kills its ranks and calls
`next_rendezvous` again. `shutdown` disconnects.

One thread reads the server's messages (`_receive`), another sends heartbeats. If the connection is lost, the agent
kills its ranks, and `next_rendezvous` tries to reconnect for up to `RendezvousConfig.join_s` seconds.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from unisono.cluster import alive
from unisono.cluster.awake_clock import AwakeClock
from unisono.cluster.rendezvous.authentication import SECRET, Refused, introduce
from unisono.cluster.rendezvous.connection import HEARTBEAT_S, SILENCE_S, Connection
from unisono.cluster.rendezvous.host import RendezvousHost
from unisono.cluster.rendezvous.server import Round
from unisono.errors import UserError
from unisono.formatting import printable, shorten

_MESSAGE_AFTER_S = 10.0  # after this many seconds, a waiting machine prints what it waits for
_RETRY_S = 0.5
_CONNECT_S = 5.0
_LONGEST_REASON = 2000  # maximum number of characters to print of a message from machine 0


@dataclass(frozen=True)
class RendezvousConfig:
    """The number of this machine, how many machines there may be, and where the server listens."""

    machine: int
    ranks: int  # number of ranks on this machine
    min_machines: int
    max_machines: int
    host: str
    port: int
    join_s: float = 900.0
    """Seconds that a machine waits for the others, at startup and after losing its connection; 0: no limit."""
    secret: bytes | None = field(default=None, repr=False)
    """Secret that only the launchers of this run know; None: every launcher may take part."""
    outside: bool = False
    """Whether a process outside of all machines runs the server, instead of machine 0's launcher."""


class RendezvousClient(RendezvousHandler):
    """Connects this machine's launcher to the server; on machine 0 it also starts the server and the ranks' store."""

    def __init__(self, config: RendezvousConfig, max_restarts: int, print_line: Callable[[str], None]) -> None:
        self._config, self._print_line = config, print_line
        self._host: RendezvousHost | None = None
        self._port = config.port
        # On one machine, client and server are in this process, and no other program may take part.
        is_alone = config.max_machines == 1 and not config.outside
        self._secret = config.secret or (secrets.token_bytes(32) if is_alone else None)
        if config.machine == 0 and not config.outside:
            self._host = RendezvousHost(
                config.port,
                config.min_machines,
                config.max_machines,
                max_restarts,
                secret=self._secret,
                print_line=print_line,
            )
            self._port = self._host.port
        self.cause: dict[str, Any] | None = None
        """The failure on this machine that makes a new round necessary, if there was one."""
        self.round: Round | None = None
        self._last_attempt_at = 0.0
        self._changed = threading.Condition()
        # State that the receiving thread updates, guarded by _changed:
        self._connection: Connection | None = None
        self._next_round: Round | None = None
        self._regroup = ""  # "save" or "now" once the server has sent `regroup`
        self._closed_because: str | None = None
        self._rejected_because = ""
        self._refused_because = ""  # the secrets of the two sides differ, so another attempt is useless

    # ---- called by torch's elastic agent ----

    def get_backend(self) -> str:
        """Returns a name for this kind of rendezvous, which torch requires."""
        return "unisono"

    def get_run_id(self) -> str:
        """Returns an id of the run, which torch requires."""
        return "unisono"

    @property
    def use_agent_store(self) -> bool:
        """True: the launcher of machine 0 hosts the ranks' store, so the store survives the death of any rank."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Reports this machine as ready and blocks until a round begins in which it takes part."""
        self.round = self._wait_for_round()
        machines = [machine for machine, _ in self.round.machines]
        is_local = self._config.max_machines == 1 and not self._config.outside
        host = "localhost" if is_local else self._config.host
        store_info = RendezvousStoreInfo(host, self.round.store_port)
        # The first argument is a store for the agent itself, which unisono's agent does not use.
        return RendezvousInfo(HashStore(), machines.index(self._config.machine), len(machines), store_info)

    def num_nodes_waiting(self) -> int:
        """Returns 1 if this machine has to regroup or is disconnected. The agent then kills its ranks and rejoins."""
        with self._changed:
            return int(self._regroup == "now" or self._connection is None or self._closed_because is not None)

    def is_closed(self) -> bool:
        """Whether the run is over."""
        return self._closed_because is not None

    def set_closed(self) -> None:
        """Ends the run for all machines."""
        self.end_run("the run was ended")

    def shutdown(self) -> bool:
        """Disconnects; on machine 0 it also stops the server."""
        with self._changed:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if self._host is not None:
            self._host.shut_down()
        return True

    # ---- called by unisono's agent ----

    @property
    def wants_checkpoint(self) -> bool:
        """Whether the ranks should save a checkpoint and stop, because machines wait to join while all are healthy."""
        with self._changed:
            return self._regroup == "save"

    def leave_round(self) -> None:
        """Makes `num_nodes_waiting` positive, after all ranks have saved and stopped so that machines can join."""
        with self._changed:
            self._regroup = "now"

    def finish(self) -> None:
        """Reports that all ranks of this machine ended well; blocks until the other machines have finished or left."""
        with self._changed:
            if self._connection is not None and self._connection.send(finished=True):
                while self._connection is not None and self._closed_because is None:
                    alive.beat()
                    self._changed.wait(1.0)

    def end_run(self, reason: str) -> None:
        """Ends the run for all machines, because another round would end the same way."""
        with self._changed:
            if self._connection is not None:
                self._connection.send(closed=reason)

    # ---- the connection to the server ----

    def _wait_for_round(self) -> Round:
        clock = AwakeClock()
        user_knows = self._config.max_machines == 1
        reported_on: Connection | None = None  # the connection over which this machine has reported ready
        while True:
            alive.beat()
            with self._changed:
                if self._closed_because is not None:
                    raise RendezvousClosedError(self._closed_because)
                connection = self._connection
                if reported_on is not None and connection is reported_on and self._next_round is not None:
                    new_round, self._next_round = self._next_round, None
                    return new_round
                if connection is not None and connection is not reported_on:
                    self._next_round = None  # a round that the previous connection has announced
                    connection.send(ready=self.cause)
                    reported_on = connection
                elif connection is not None:
                    self._changed.wait(0.2)
            if connection is None:
                self._connect(clock.now)
            waited_s = clock.advance(_CONNECT_S + _RETRY_S)
            address = f"{self._config.host}:{self._port}"
            if not user_knows and waited_s > _MESSAGE_AFTER_S:
                user_knows = True
                self._print_line(f"waiting for the other machines at {address}")
            if 0 < self._config.join_s < waited_s:
                within = f"{self._config.join_s:.0f} s (--join_timeout)"
                raise RendezvousTimeoutError(f"no other machine joined at {address} within {within}")

    def _connect(self, waited_s: float) -> None:
        """Tries once to connect; `waited_s` is how long this machine has been trying."""
        if self._refused_because:
            raise UserError(f"the launcher at {self._config.host}:{self._port} {self._refused_because}")
        # After a network failure, the server may still have this machine's old connection and reject the new one.
        if self._rejected_because and waited_s > 2 * SILENCE_S:
            raise UserError(f"{self._rejected_because}; give each machine a different node_rank")
        time.sleep(max(0.0, self._last_attempt_at + _RETRY_S - time.monotonic()))
        self._last_attempt_at = time.monotonic()
        host = "127.0.0.1" if self._host is not None else self._config.host
        connection: Connection | None = None
        with contextlib.suppress(OSError):
            connection = self._authenticated(socket.create_connection((host, self._port), timeout=_CONNECT_S))
        if connection is not None and connection.send(machine=self._config.machine, ranks=self._config.ranks):
            with self._changed:
                self._connection, self._regroup = connection, ""
            for target in (self._receive, self._send_heartbeats):
                threading.Thread(target=target, args=(connection,), name="rendezvous", daemon=True).start()

    def _authenticated(self, peer: socket.socket) -> Connection | None:
        try:
            return Connection(peer, introduce(peer, self._secret) if self._secret is not None else b"")
        except Refused as refused:
            self._refused_because = str(refused)
            peer.close()
            return None
        except OSError:
            peer.close()
            raise

    def _receive(self, connection: Connection) -> None:
        for message in connection.messages():
            with self._changed:
                is_valid = self._handle(message)
                self._changed.notify_all()
            if not is_valid:
                break
        connection.close()
        with self._changed:
            if connection.wants_secret:
                self._refused_because = f"asks for a secret; set {SECRET} to the same secret on all machines"
            if self._connection is connection:
                self._connection = None
            self._changed.notify_all()

    def _handle(self, message: dict[str, Any]) -> bool:
        """Handles a message; returns False if it is not a rendezvous server's message."""
        if "round" in message:
            new = Round.from_message(message["round"])
            if new is None or self._config.machine not in (machine for machine, _ in new.machines):
                return False
            self._next_round, self._regroup, self._rejected_because = new, "", ""
        elif "regroup" in message:
            self._regroup = str(message["regroup"])
        elif "closed" in message:
            self._closed_because = shorten(printable(str(message["closed"])), _LONGEST_REASON)
        elif "rejected" in message:
            self._rejected_because = shorten(printable(str(message["rejected"])), _LONGEST_REASON)
        return True

    def _send_heartbeats(self, connection: Connection) -> None:
        while connection.send(heartbeat=True):
            time.sleep(HEARTBEAT_S)
