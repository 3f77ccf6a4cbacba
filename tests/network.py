"""Simulated machines: network namespaces connected by virtual cables that a test can unplug.

Each machine has its own interfaces, addresses and ports, and reaches the others only through its own cable to a switch.
Needs root. Removing the namespaces also ends the processes in them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from command_line import start

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root: run the tests as root")


@dataclass(frozen=True)
class Machine:
    """A network namespace with one cable."""

    name: str
    address: str

    @property
    def files(self) -> Path:
        """The folder whose files `ip netns exec` mounts over /etc in this namespace."""
        return Path("/etc/netns", self.name)

    def run(self, *words: object, cwd: Path, **more: str) -> subprocess.Popen[str]:
        """Starts python with these arguments on this machine."""
        inside = ("ip", "netns", "exec", self.name, sys.executable)
        return start(words, cwd=cwd, program=inside, GLOO_SOCKET_IFNAME="cable", **more)

    def pull_cable(self) -> None:
        """Disconnects the machine: connections stay open, but nothing arrives."""
        self._link("down")

    def plug_cable(self) -> None:
        """Reconnects the machine."""
        self._link("up")

    def kill_all(self) -> None:
        """Kills all processes of the machine at once, as a power failure does."""
        for pid in _ip("netns", "pids", self.name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def _link(self, state: str) -> None:
        _ip("-n", self.name, "link", "set", "cable", state)


@contextmanager
def network(num_machines: int = 2) -> Iterator[list[Machine]]:
    """Machines 10.99.0.1, 10.99.0.2, …, connected by a switch, which is also a namespace."""
    tag = f"unisono-{uuid.uuid4().hex[:6]}"
    switch = f"{tag}-switch"
    machines = [Machine(f"{tag}-{number}", f"10.99.0.{number + 1}") for number in range(num_machines)]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for number, machine in enumerate(machines):
            _ip("netns", "add", machine.name)
            _ip("-n", machine.name, "link", "set", "lo", "up")
            peer = f"port{number}"
            _ip("-n", machine.name, "link", "add", "cable", "type", "veth", "peer", peer, "netns", switch)
            _ip("-n", switch, "link", "set", peer, "master", "switch", "up")
            _ip("-n", machine.name, "address", "add", f"{machine.address}/24", "dev", "cable")
            machine.plug_cable()
            machine.files.mkdir(parents=True)
            (machine.files / "hosts").write_text(_names(machines))
        yield machines
    finally:
        for machine in machines:
            with suppress(subprocess.CalledProcessError):
                machine.kill_all()
                _ip("netns", "delete", machine.name)
            shutil.rmtree(machine.files, ignore_errors=True)
        with suppress(subprocess.CalledProcessError):
            _ip("netns", "delete", switch)


def _names(machines: list[Machine]) -> str:
    """Contents of /etc/hosts: torch looks up the name of each IPv4 and IPv6 address, and warns if there is none."""
    named = [("127.0.0.1", "localhost"), *((each.address, f"machine{i}") for i, each in enumerate(machines))]
    return "::1 localhost\n" + "".join(f"{address} {name}\n::ffff:{address} {name}\n" for address, name in named)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
