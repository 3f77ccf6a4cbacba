"""Ensures that no test runs inside another launcher's environment, and that no rank outlives the tests."""

from __future__ import annotations

import os
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import CHROMIUM, Browser
from warm_python import RUN_MARK, is_fork

LAUNCHER_VARIABLES = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK"}
LAUNCHER_PREFIXES = ("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "ACCELERATE_")


# Files that take long. A worker that began one of them when the others have finished would work alone for a minute.
FIRST = [
    *("nodes", "hang", "traps", "slurm", "fit", "wan_context", "wan_distill", "wan_flow", "verify", "step", "start_up"),
    *("trained_blocks_on_host", "resume", "same_run", "quantized_training", "report", "wan_tiny", "save_kills", "ray"),
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {f"test_{name}.py": rank for rank, name in enumerate(FIRST)}
    items.sort(key=lambda item: ranks.get(item.path.name, len(FIRST)))


def pytest_configure() -> None:
    # Set before any test module imports torch, which reads OMP_NUM_THREADS only once.
    for name in list(os.environ):
        if name in LAUNCHER_VARIABLES or name.startswith(LAUNCHER_PREFIXES):
            del os.environ[name]
    os.environ["OMP_NUM_THREADS"] = "1"
    # Compiled code is kept from one test run to the next, but not among the user's own.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(tempfile.gettempdir(), f"unisono_tests_compile_{os.getuid()}"))
    # `nohup make test` ignores SIGHUP, and `make test &` in a script ignores SIGINT; every process that a test starts
    # would inherit that.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Every process that a test starts inherits this. Each pytest-xdist worker sets its own.
    os.environ[RUN_MARK] = uuid.uuid4().hex


def ranks_alive() -> dict[int, str]:
    """Living ranks that this test run started: process id and command line."""
    mark = f"{RUN_MARK}={os.environ[RUN_MARK]}".encode()
    alive = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            is_rank = b"unisono.engine.start.rank" in command or is_fork(command, int(process.name))
            if is_rank and mark in (process / "environ").read_bytes().split(b"\0"):
                alive[int(process.name)] = command.replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # the process has ended, or belongs to another user
            continue
    return alive


@pytest.fixture(scope="session", autouse=True)
def no_rank_outlives_the_tests() -> Iterator[None]:
    """Fails the session when a rank that a test started is still alive 15 s after the last test."""
    yield
    deadline = time.monotonic() + 15
    while (alive := ranks_alive()) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    assert not alive, f"ranks outlived the tests (now killed): {alive}"


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A headless Chromium."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    result = Browser(tmp_path_factory.mktemp("chromium"))
    yield result
    result.close()
