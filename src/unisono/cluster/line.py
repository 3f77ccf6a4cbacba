"""A connection between two machines that carries one JSON object per line, and knows when the other side is gone.

A killed process is noticed at once (its connection closes), a cut cable or a frozen machine after `SILENCE_S` (both
sides say something every `BEAT_S`). Whatever is no JSON object ends the connection: ports get all kinds of visitors.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

BEAT_S = 2.0
"""How often a machine says that it is there."""

SILENCE_S = 15.0
"""A machine that has said nothing for so long is gone; a shorter disturbance of the network does no harm."""

_LONGEST_LINE = 1 << 20


class Line:
    """One end of the connection. Any thread may send; one thread reads."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        connection.settimeout(SILENCE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, **message: Any) -> bool:
        """Sends a message; False when the other side is gone."""
        try:
            with self._sending:
                self._connection.sendall(json.dumps(message).encode() + b"\n")
            return True
        except OSError:
            return False

    def messages(self) -> Iterator[dict[str, Any]]:
        """What the other side says, until it is gone or silent for too long."""
        rest = b""
        while True:
            try:
                data = self._connection.recv(1 << 16)
            except OSError:  # a timeout too
                return
            *lines, rest = (rest + data).split(b"\n")
            if not data or len(rest) > _LONGEST_LINE:
                return
            for text in lines:
                try:
                    message = json.loads(text)
                except ValueError:
                    return
                if not isinstance(message, dict):
                    return
                yield message

    def close(self) -> None:
        """Ends the connection; who reads from it, on either side, stops."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
