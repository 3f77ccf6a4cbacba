"""The engine `processes`: Flower's SuperLink and one SuperNode per client, on 127.0.0.1 only.

A federation over several machines runs the same programs, so this engine can test a recipe for such a federation. The
programs end when this process ends.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from unisono.cluster.lifetime import die_with_parent
from unisono.errors import TrainingFailed, UserError
from unisono.federated.plan import ENVIRONMENT, FEDERATION, Federation
from unisono.federated.server_app import RESULT

HOST = "127.0.0.1"
_INSTALL_NOTHING = "--disable-runtime-dependency-installation"
_POLL_S, _START_S, _END_S = 0.2, 300.0, 10.0

_PROJECT = """[project]
name = "unisono-federation"
version = "1.0.0"
description = "A federation of unisono"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "unisono"

[tool.flwr.app.components]
serverapp = "unisono.federated.flower_apps:server"
clientapp = "unisono.federated.flower_apps:client"

[tool.flwr.app.config]
"""
_CONNECTION = """[superlink]
default = "unisono"

[superlink.unisono]
address = "{host}:{port}"
insecure = true
"""


def check_ports(port: int, clients: int = 0) -> None:
    """Raises UserError if a port that SuperLink and SuperNodes need is in use; `port` is the first of these ports."""
    if not 0 <= port <= 65535 - clients:
        raise UserError(f"port {port}: expected a number from 0 to {65535 - clients}")
    for each in range(port, port + clients + 1) if port else []:
        with closing(socket.socket()) as probe:
            try:
                probe.bind((HOST, each))
            except OSError as error:
                raise UserError(
                    f"port {each} on {HOST} cannot be used ({error.strerror}); choose another --port, or 0"
                ) from None


def free_ports(number: int) -> list[int]:
    """Returns free ports on 127.0.0.1."""
    with ExitStack() as probes:
        sockets = [probes.enter_context(closing(socket.socket())) for _ in range(number)]
        for each in sockets:
            each.bind((HOST, 0))
        return [int(each.getsockname()[1]) for each in sockets]


def run_processes(federation: Federation) -> None:
    """Starts a SuperLink and SuperNodes, submits the federation, and waits for its result."""
    options = federation.options
    first, clients = options.port, options.clients
    ports = list(range(first, first + clients + 1)) if first else free_ports(clients + 1)
    home = federation.folder / "flower"
    app = home / "app"
    app.mkdir(parents=True)
    (app / "pyproject.toml").write_text(_PROJECT)
    (home / "config.toml").write_text(_CONNECTION.format(host=HOST, port=ports[0]))
    programs = Path(sys.executable).parent
    environ = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}",  # Flower finds its other programs in PATH
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        ENVIRONMENT: str(federation.folder / FEDERATION),
    }
    with _Programs(programs, environ, home) as started:
        started.start(
            "superlink",
            ["flower-superlink", "--insecure", "--host", HOST, "--port", str(ports[0]), _INSTALL_NOTHING],
        )
        _wait_for_port(ports[0], started)
        for client, port in enumerate(ports[1:]):
            config = f"partition-id={client} num-partitions={clients}"
            words = ["flower-supernode", "--insecure", "--superlink", f"{HOST}:{ports[0]}", "--host", HOST]
            started.start(f"supernode{client}", [*words, "--port", str(port), "--node-config", config])
        started.run("flwr", ["flwr", "run", str(app), "unisono"])
        while not (federation.folder / RESULT).exists():
            started.check()
            time.sleep(_POLL_S)


class _Programs:
    """A context that starts Flower's programs and stops them when it ends."""

    def __init__(self, folder: Path, environ: dict[str, str], logs: Path) -> None:
        self._folder, self._environ, self._logs = folder, environ, logs
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> _Programs:
        return self

    def start(self, name: str, words: list[str]) -> None:
        """Starts a program; its output goes to the file NAME.log."""
        with open(self._logs / f"{name}.log", "ab") as log:
            self._running[name] = subprocess.Popen(
                [str(self._folder / words[0]), *words[1:]],
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def run(self, name: str, words: list[str]) -> None:
        """Runs a program and waits for it; raises TrainingFailed if it fails."""
        self.start(name, words)
        if self._running.pop(name).wait():
            raise TrainingFailed(f"{' '.join(words[:2])} failed: {self._last_line(name)}")

    def check(self) -> None:
        """Raises TrainingFailed if the SuperLink, or every SuperNode, has ended."""
        ended = [name for name, process in self._running.items() if process.poll() is not None]
        nodes = [name for name in self._running if name.startswith("supernode")]
        if "superlink" in ended or (nodes and set(nodes) <= set(ended)):
            raise TrainingFailed(f"{ended[0]} has ended: {self._last_line(ended[0])}")

    def _last_line(self, name: str) -> str:
        log = self._logs / f"{name}.log"
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return f"{lines[-1].strip() if lines else 'it printed nothing'} (see {log})"

    def __exit__(self, *error: object) -> None:
        for process in self._running.values():
            _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + _END_S
        for process in self._running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            _signal(process, signal.SIGKILL)  # the whole session, because Flower's programs start others
            process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        if number == signal.SIGKILL:
            os.killpg(process.pid, number)
        elif process.poll() is None:
            process.send_signal(number)


def _wait_for_port(port: int, started: _Programs) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        started.check()
        with closing(socket.socket()) as probe:
            if probe.connect_ex((HOST, port)) == 0:
                return
        time.sleep(_POLL_S)
    raise TrainingFailed(f"the SuperLink does not answer on port {port}")
