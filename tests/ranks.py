"""Runs a function of a test module as real ranks: separate processes with the variables torchrun would set.

    def both_say_hello(greeting):            # in the test module, runs in each rank
        return f"{greeting} from {os.environ['RANK']}"

    def test_hello():
        assert run_ranks("both_say_hello", __file__, 2, {"greeting": "hi"}) == ["hi from 0", "hi from 1"]

Arguments and results travel as JSON. The calling process hosts the store, as torchrun's agent does, so no port is
guessed and runs side by side do not disturb each other.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from command_line import popen_of

TESTS = Path(__file__).resolve().parent
SOURCES = TESTS.parent / "src"
LAST_WORDS_S = 2.0  # seconds for the other ranks to report their errors after the first failure


class RanksFailed(AssertionError):
    """A rank raised, died or took too long; the message contains the stderr of all ranks."""


def run_ranks(
    function_name: str,
    module_file: str | Path,
    nproc: int,
    args: Mapping[str, Any] | None = None,
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
) -> list[Any]:
    """Calls `function_name(**args)` of the module in `nproc` processes at once and returns their results by rank."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="ranks_") as scratch:
        folder = Path(scratch)
        command = [sys.executable, __file__, str(folder)]
        (folder / "call.json").write_text(json.dumps([function_name, str(module_file), dict(args or {})]))
        processes: list[subprocess.Popen[str]] = []
        try:
            for rank in range(nproc):
                with (folder / f"{rank}.err").open("wb") as stderr:
                    processes.append(
                        popen_of(command, variables := rank_variables(rank, nproc, store.port) | dict(env or {}))(
                            command,
                            env=variables,
                            stdin=subprocess.DEVNULL,
                            stdout=stderr,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
            _wait(processes, folder, timeout_s)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(nproc)]


def rank_variables(rank: int, nproc: int, port: int) -> dict[str, str]:
    """The environment of one rank, as torchrun on one machine would set it."""
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("UNISONO_JOB")}
    inherited.setdefault("OMP_NUM_THREADS", "1")
    return inherited | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(SOURCES), str(TESTS), os.environ.get("PYTHONPATH")])),
        "RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "tests",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "UNISONO_LAUNCHER_PID": str(os.getpid()),
    }


def _wait(processes: list[subprocess.Popen[str]], folder: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    failed = False
    while any(process.poll() is None for process in processes):
        if not failed and any(process.poll() for process in processes):
            failed, deadline = True, min(deadline, time.monotonic() + LAST_WORDS_S)
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    status = [process.poll() for process in processes]
    if any(code != 0 for code in status):
        output = [(folder / f"{rank}.err").read_text(errors="replace").strip() for rank in range(len(processes))]
        report = "\n".join(
            f"--- rank {rank}: {'still running' if code is None else f'exit status {code}'}\n{text[-6000:]}"
            for rank, (code, text) in enumerate(zip(status, output, strict=True))
        )
        why = "a rank failed" if any(status) else f"not done after {timeout_s:.0f} s"
        raise RanksFailed(f"{why}\n{report}")


def _run_one(folder: Path) -> None:
    from unisono.cluster.lifetime import die_with_parent

    die_with_parent()
    function_name, module_file, args = json.loads((folder / "call.json").read_text())
    spec = importlib.util.spec_from_file_location(Path(module_file).stem, module_file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # so that loader workers and dataclasses find it
    spec.loader.exec_module(module)
    result = getattr(module, function_name)(**args)
    staged = folder / f"{os.environ['RANK']}.tmp"
    staged.write_text(json.dumps(result))
    staged.replace(folder / f"{os.environ['RANK']}.json")


if __name__ == "__main__":
    _run_one(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a gloo thread that is still in C++ code would make Python abort on exit
