"""Runs, imports and checks the scripts of the examples."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from command_line import Ended, end, start


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Inside the `with` block, the scripts of `folder` can be imported by name; they are unloaded at the end.

    Two folders of examples have scripts of the same name, and a module stays imported for all tests of a process.
    """
    before, writes = set(sys.modules), sys.dont_write_bytecode
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = writes
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", None)).startswith(f"{folder}/"):
                del sys.modules[name]


def begun(*words: object, cwd: Path, first: str = "", **more: str) -> subprocess.Popen[str]:
    """Starts a program as a shell in this virtual environment would; `first` is a folder to search before PATH."""
    path = os.pathsep.join([first, str(Path(sys.executable).parent), os.environ["PATH"]]).lstrip(":")
    program, *rest = map(str, words)
    return start(rest, cwd=cwd, program=[program], **{"PATH": path, "OMP_NUM_THREADS": "1", **more})


def command(*words: object, cwd: Path, seconds: float = 240, first: str = "", **more: str) -> Ended:
    """Starts a program as `begun` does, and waits for its end."""
    return end(begun(*words, cwd=cwd, first=first, **more), seconds)


def check_shell_script(script: Path) -> None:
    """Checks that bash can parse the script and that it is executable."""
    subprocess.run(["bash", "-n", script], check=True)
    assert script.suffix == ".slurm" or os.access(script, os.X_OK)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", script], check=True)


def check_batch_script(script: Path, program: str, last: str, tools: Path) -> None:
    """Checks that a batch script starts one task per GPU, signals them before the time limit, and requeues itself.

    `last` is the expected end of a task's arguments; `tools` is a folder for programs that replace SLURM's.
    """
    text = script.read_text()
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, flags=re.MULTILINE))
    assert len(options) == text.count("#SBATCH") and options["ntasks-per-node"] == options["gpus-per-node"]
    assert options["signal"] == "USR1@120", "to the tasks, which save and stop"
    for name, body in {"srun": 'echo "$@"; exit 75', "scontrol": 'echo "$@"'}.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    words = ["bash", script.name, "--batch_size", 2]
    ended = command(*words, cwd=script.parent, first=str(tools), SLURM_JOB_ID="7", SLURM_CPUS_PER_TASK="8")
    task, queue = ended.out.splitlines()
    assert task.startswith(f"--kill-on-bad-exit=1 --cpus-per-task=8 python {program} ")
    assert task.endswith(f"{last} --batch_size 2")
    assert (queue, ended.code) == ("requeue 7", 75)
