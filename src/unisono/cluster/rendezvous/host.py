"""Runs the rendezvous server and the ranks' store in this process."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from unisono.cluster.rendezvous.server import RendezvousServer


class RendezvousHost:
    """The rendezvous server and the ranks' store, in the launcher of machine 0 or in a process outside of all machines.

    Both survive the death of any rank.
    """

    def __init__(
        self,
        port: int,
        min_machines: int,
        max_machines: int,
        max_restarts: int,
        *,
        outside: bool = False,
        secret: bytes | None = None,
        print_line: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Listens on `port` (0: any free port). `outside`: this process is not the launcher of machine 0.

        Only launchers that know `secret` take part; `print_line` reports refused connections.
        """
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # binds to all interfaces
        self._server = RendezvousServer(
            port,
            self._store.port,
            min_machines,
            max_machines,
            max_restarts,
            outside=outside,
            secret=secret,
            print_line=print_line,
        )
        self.port: int = self._server.port

    def end_run(self, reason: str) -> None:
        """Ends the run for all machines, because another round would end the same way."""
        self._server.end_run(reason)

    def shut_down(self) -> None:
        """Stops listening and closes all connections."""
        self._server.shut_down()
