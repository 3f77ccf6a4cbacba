"""A process that has imported everything that training needs, and forks a rank for each request: see `warm_ranks.py`.

It never loads a recipe, starts no thread and does not touch the GPUs, so a fork behaves like a new process.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path

from unisono.cluster.hangs.stacks import write_stacks_on_signal
from unisono.cluster.lifetime import die_with_parent, end_process
from unisono.cluster.signals import note_signals_early

COMMAND = (sys.executable, "-P", "-m", "unisono.engine.start.warm_rank")
"""Starts this program; -P: files in the current folder cannot shadow modules."""

# torch imports its compiler when it creates an optimizer, even if nothing is compiled.
_NEEDED = (
    "unisono.engine.start.rank",
    "unisono.engine.start.session",
    "torch._inductor",
    "numpy.random",
    "numpy.ctypeslib",
)


def main() -> None:
    """Serves requests until standard input ends."""
    requests, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 0)
    os.dup2(devnull, 1)  # a library that prints on import must not corrupt the protocol
    _import_all()
    while line := requests.readline():
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            requests.close()
            answers.close()
            _become_rank(request["environ"])
        _answer(answers, {"pid": pid})
        _, status = os.waitpid(pid, 0)
        _answer(answers, {"status": os.waitstatus_to_exitcode(status)})


def _import_all() -> None:
    """Imports the modules that every run needs."""
    for module in _NEEDED:
        import_module(module)


def _answer(answers: object, value: dict[str, int]) -> None:
    print(json.dumps(value), file=answers, flush=True)  # type: ignore[call-overload]


def _become_rank(environ: dict[str, str]) -> None:
    """Does the same as a new process of `unisono.engine.start.rank`, including the start-up of Python and torch."""
    os.setsid()
    os.environ.update(environ)
    folder = Path(os.environ["UNISONO_JOB"])
    log = os.open(folder / f"log_rank{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    die_with_parent()
    note_signals_early()
    write_stacks_on_signal(folder, int(os.environ["RANK"]))
    import numpy as np
    import torch

    from unisono.engine.start.rank import main as train

    np.random.seed()  # after a fork, Python reseeds only its own generator
    if "OMP_NUM_THREADS" in environ:  # OpenMP has read the variable already, when it was loaded
        torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))
    end_process(train())


if __name__ == "__main__":
    die_with_parent()
    main()
