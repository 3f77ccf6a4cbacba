"""A TCP connection between two launchers. It transports one JSON object per line and detects a peer that is gone.

A killed peer is detected at once, because its connection closes. A cut cable or a frozen machine is detected after
`SILENCE_S` seconds without a message; both sides send a heartbeat every `HEARTBEAT_S` seconds. Time in which this
process was suspended (Ctrl-Z) does not count as silence of the peer: the peer may be a thread of the same process, and
messages from another machine wait in the socket. Any line that is not a JSON object closes the connection, because
port scanners and other programs connect to open ports too.
A peer must have been authenticated before a `Connection` reads its messages (`authentication.py`).
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

from unisono.cluster.awake_clock import AwakeClock
from unisono.cluster.rendezvous.authentication import MARK
from unisono.plain_files import parse_json

HEARTBEAT_S = 2.0
"""Seconds between two heartbeats of a launcher."""

SILENCE_S = 15.0
"""Seconds without a message after which a peer counts as gone; shorter network outages are harmless."""

_MAX_LINE_BYTES = 1 << 20


class Connection:
    """One end of a connection. Any thread may send messages, but only one may read them."""

    def __init__(self, peer: socket.socket, received: bytes = b"") -> None:
        """`received` contains bytes of messages that were already read from the socket."""
        self._socket, self._received = peer, received
        self.wants_secret = False
        """Whether the peer asked this side to prove that it knows the secret, although this side has no secret."""
        self._send_lock = threading.Lock()
        peer.settimeout(SILENCE_S)  # for sending; `messages` polls with a shorter timeout
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, **message: Any) -> bool:
        """Sends a message; returns False if the peer is gone."""
        try:
            with self._send_lock:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
            return True
        except OSError:
            return False

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yields the peer's messages until the peer is gone or silent for too long."""
        rest = b""
        poll_s = SILENCE_S / 20
        clock, last_message_at = AwakeClock(), 0.0
        readable = select.poll()
        try:
            readable.register(self._socket, select.POLLIN)
        except ValueError:  # already closed
            return
        while True:
            try:
                if self._received:
                    data, self._received = self._received, b""
                elif not readable.poll(1000 * poll_s):
                    if clock.advance(poll_s) - last_message_at > SILENCE_S:
                        return
                    continue
                else:
                    data = self._socket.recv(1 << 16)
            except OSError:
                return
            last_message_at = clock.advance(poll_s)
            *lines, rest = (rest + data).split(b"\n")
            if not data or len(rest) > _MAX_LINE_BYTES:
                return
            for text in lines:
                self.wants_secret = self.wants_secret or text.startswith(MARK)
                try:
                    message = parse_json(text)
                except ValueError:
                    return
                if not isinstance(message, dict):
                    return
                yield message

    def close(self) -> None:
        """Closes the connection, which stops the readers on both sides."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
