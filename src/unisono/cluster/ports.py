"""Ports that are taken, and by whom."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

from unisono.errors import UserError

_LISTENING = "0A"  # the state column of /proc/net/tcp


def require_free(port: int, setting: str) -> None:
    """Refuses a port that another process already listens on, naming the port and, where it can, the process."""
    families = [socket.AF_INET] + ([socket.AF_INET6] if socket.has_ipv6 else [])
    for family in families:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As the store's server does: a port that only waits out old connections is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise port_in_use(port, setting) from None
                if error.errno == errno.EACCES:
                    raise UserError(f"port {port} ({setting}) is reserved for root; take one above 1023") from None
                # A machine without IPv6 addresses is no reason to refuse.


def port_in_use(port: int, setting: str) -> UserError:
    """The error for a port that is taken."""
    holder = _holder(port)
    by = f" by {holder}" if holder else ""
    return UserError(f"port {port} ({setting}) is already in use{by}; choose another port or end that process")


def _holder(port: int) -> str | None:
    inodes = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for columns in map(str.split, lines):
            if columns[3] == _LISTENING and int(columns[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{columns[9]}]")
    if not inodes:
        return None
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(link.readlink()) in inodes for link in (process / "fd").iterdir()):
                return f"process {process.name} ({(process / 'comm').read_text().strip()})"
        except OSError:  # it ended while we looked, or belongs to somebody else
            continue
    return None
