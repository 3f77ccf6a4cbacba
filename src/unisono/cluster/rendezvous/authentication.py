"""Lets two launchers prove to each other that they know the same secret, before they parse anything else.

With a secret, both sides first send `unisono-auth-1 NONCE`. Then the client sends the HMAC of its role and both nonces,
the server checks it, and answers with its own:

    server   unisono-auth-1 <64 hexadecimal digits>          on connection
    client   unisono-auth-1 <64 hexadecimal digits>
    client   unisono-auth-1 <HMAC-SHA256(secret, "client", nonces)>
    server   unisono-auth-1 <HMAC-SHA256(secret, "server", nonces)>, or "wrong", or "none" if it has no secret

The secret itself is never sent, and a recorded exchange cannot be replayed. Later messages are neither encrypted nor
signed. Without a secret, the first line is the first message.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from unisono.errors import UserError
from unisono.plain_files import open_regular

SECRET, SECRET_FILE = "UNISONO_SECRET", "UNISONO_SECRET_FILE"
"""Environment variables with the secret, or with the path of a file that contains it."""

LIMIT_S = 10.0
"""Seconds after which a connection is closed if it has not sent its proof or, without a secret, its first message."""

MARK = b"unisono-auth-1 "
_WRONG, _NONE = MARK + b"wrong", MARK + b"none"
_LONGEST_LINE = 4096  # bytes in a line of a peer that has not been admitted
_SHORTEST, _LONGEST = 16, 4096  # characters of a secret
_PROOF = re.compile(rb"[0-9a-f]{64}")


class Refused(Exception):
    """The peer did not prove that it knows the secret; the message says why, in words that follow "the launcher"."""


def secret_of(environ: Mapping[str, str]) -> bytes | None:
    """Returns the secret from the environment, if any; raises UserError if it cannot be used. Never prints it."""
    text, file = environ.get(SECRET), environ.get(SECRET_FILE)
    if text is not None and file is not None:
        raise UserError(f"{SECRET} and {SECRET_FILE} are both set; unset one of them")
    name = SECRET
    if file is not None:
        name, text = f"{SECRET_FILE} {file}", _read(Path(file))
    if text is None:
        return None
    secret = text.strip().encode("utf-8", "surrogateescape")
    if not _SHORTEST <= len(secret) <= _LONGEST:
        raise UserError(
            f"{name}: the secret has {len(secret)} characters, expected {_SHORTEST} to {_LONGEST}; "
            "make one with: openssl rand -hex 32"
        )
    return secret


def _read(file: Path) -> str:
    try:
        with open_regular(file) as opened:
            if os.fstat(opened.fileno()).st_mode & 0o007:
                raise UserError(f"{SECRET_FILE} {file}: other users may read or change it; run: chmod 600 {file}")
            return opened.read(_LONGEST + 2).decode("utf-8", "surrogateescape")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{SECRET_FILE} {file} cannot be read ({reason})") from None


def receive_first(peer: socket.socket, secret: bytes | None) -> bytes:
    """Authenticates a client, as a server; returns the bytes of its messages that have arrived already."""
    until = time.monotonic() + LIMIT_S
    if secret is None:
        line, rest = _line(peer, b"", until)
        if line.startswith(MARK):
            _say(peer, _NONE)
            raise Refused(f"has a secret, but this launcher has none; set {SECRET} on all machines or on none")
        return line + b"\n" + rest
    ours = secrets.token_hex(32).encode()
    _say(peer, MARK + ours)
    line, rest = _line(peer, b"", until)
    theirs = _value(line)
    if theirs is None:
        raise Refused(f"has no secret; set {SECRET} to the same secret on all machines")
    line, rest = _line(peer, rest, until)
    if not hmac.compare_digest(_value(line) or b"", _proof(secret, b"client", ours, theirs)):
        _say(peer, _WRONG)
        raise Refused(f"has another secret; set {SECRET} to the same secret on all machines")
    _say(peer, MARK + _proof(secret, b"server", ours, theirs))
    return rest


def introduce(peer: socket.socket, secret: bytes) -> bytes:
    """Authenticates a server, as a client; returns the bytes of its messages that have arrived already."""
    until = time.monotonic() + LIMIT_S
    ours = secrets.token_hex(32).encode()
    _say(peer, MARK + ours)
    line, rest = _line(peer, b"", until)
    if line == _NONE:
        raise Refused(f"has no secret; set {SECRET} on all machines or on none")
    theirs = _value(line)
    if theirs is None or theirs == ours:
        raise Refused(f"does not ask for the secret; set {SECRET} to the same secret on all machines")
    _say(peer, MARK + _proof(secret, b"client", theirs, ours))
    line, rest = _line(peer, rest, until)
    if not hmac.compare_digest(_value(line) or b"", _proof(secret, b"server", theirs, ours)):
        raise Refused(f"has another secret; set {SECRET} to the same secret on all machines")
    return rest


def dismiss(peer: socket.socket) -> None:
    """Closes a connection so that the peer can still read what was sent to it."""
    with contextlib.suppress(OSError):
        peer.shutdown(socket.SHUT_WR)
        until = time.monotonic() + 1.0
        for _ in range(16):
            peer.settimeout(max(0.01, until - time.monotonic()))
            if time.monotonic() > until or not peer.recv(1 << 12):
                break
    peer.close()


def _proof(secret: bytes, role: bytes, of_server: bytes, of_client: bytes) -> bytes:
    text = b" ".join((MARK.strip(), role, of_server, of_client))
    return hmac.new(secret, text, hashlib.sha256).hexdigest().encode()


def _value(line: bytes) -> bytes | None:
    value = line.removeprefix(MARK)
    return value if line.startswith(MARK) and _PROOF.fullmatch(value) else None


def _say(peer: socket.socket, line: bytes) -> None:
    peer.settimeout(LIMIT_S)
    peer.sendall(line + b"\n")


def _line(peer: socket.socket, rest: bytes, until: float) -> tuple[bytes, bytes]:
    """Reads a line; raises OSError if it is too long, or does not arrive in time."""
    while b"\n" not in rest:
        left = until - time.monotonic()
        if len(rest) > _LONGEST_LINE or left <= 0:
            raise OSError("no line arrived")
        peer.settimeout(left)
        data = peer.recv(_LONGEST_LINE)
        if not data:
            raise OSError("the peer closed the connection")
        rest += data
    line, _, rest = rest.partition(b"\n")
    return line, rest
