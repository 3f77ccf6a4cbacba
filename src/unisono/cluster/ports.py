"""Checks whether a port is free and names the process that uses it."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

from unisono.errors import UserError

_LISTENING = "0A"  # the state column of /proc/net/tcp


def require_free(port: int, setting: str) -> None:
    """Raises if another process listens on the port; the error names the port and, if possible, the process."""
    families = [socket.AF_INET] + ([socket.AF_INET6] if socket.has_ipv6 else [])
    for family in families:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # Set the same option as the TCPStore's server, so that a port counts as free if all of its connections are
            # in TIME_WAIT.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise port_in_use(port, setting) from None
                if error.errno == errno.EACCES:
                    raise UserError(f"port {port} ({setting}) is reserved for root; choose one above 1023") from None
                # Any other error, such as a machine without IPv6 addresses, does not mean that the port is taken.


def port_in_use(port: int, setting: str) -> UserError:
    """Returns the error for a port that is in use; `setting` is the setting or variable that chose the port."""
    process = _listening_process(port)
    by = f" by {process}" if process else ""
    return UserError(f"port {port} ({setting}) is already in use{by}; choose another port or end that process")


def _listening_process(port: int) -> str | None:
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
        except OSError:  # the process has exited in the meantime, or belongs to another user
            continue
    return None
