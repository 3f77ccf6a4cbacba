"""A small teacher for trying things out: made once by `unisono train wan-flow`, and kept.

It lies in $UNISONO_CACHE, or in the user's own cache folder, under a name that says how it was made. Who is killed
while making it goes on where it was.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unisono.cluster.lifetime import LAUNCHER_PID
from unisono.engine.recipe import Work
from unisono.errors import EXIT_STOPPED, TrainingFailed
from unisono.recipes.common.fingerprint import together
from unisono.recipes.wan.tiny.models import tiny_transformer_config
from unisono.recipes.wan_flow.settings import TINY

_FORMAT = 1
_LOOK_EVERY_S = 0.2
_OF_A_LAUNCHER = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC", "SLURM_", "PMI_", "PMIX_", "OMPI_"),
    *("MPI_", "ACCELERATE_", "UNISONO_"),
)
_PROGRAM = """
from unisono.cluster.lifetime import die_with_parent
die_with_parent()
from unisono.cli.main import program
program()
"""
_STEPS = "UNISONO_TINY_TEACHER_STEPS"  # fewer than it takes to learn anything: for tests


def folder_of(cache: Path | None = None) -> Path:
    """Where the small teacher is, or will be."""
    steps = os.environ.get(_STEPS, "")
    return (cache or cache_folder()) / "tiny_teacher" / together(_FORMAT, TINY, tiny_transformer_config(), steps)[:12]


def cache_folder() -> Path:
    """Where things are kept that are made once for all runs."""
    if told := os.environ.get("UNISONO_CACHE"):
        return Path(told).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "unisono"


def make(work: Work, cache: Path | None = None) -> None:
    """Trains the small teacher, if it is not there; comes back early when somebody asks to stop."""
    folder = folder_of(cache)
    pipeline, run = folder / "pipeline", folder / "run"
    with _alone(folder, work) as lock:
        if lock is None or (pipeline / "model_index.json").is_file():
            return
        work.message(
            f"making the tiny teacher: unisono train wan-flow --model_config tiny; a few minutes, once, in {folder}"
        )
        ranks = min(2, len(os.sched_getaffinity(0)))
        words = ["train", "wan-flow", "--model_config", "tiny", "--output_dir", str(run), "--nproc", str(ranks)]
        words += ["--gpus", "0", "--eval_every", "-1", "--preview_every", "-1"]
        if told := os.environ.get(_STEPS):
            words.append(f"--max_steps={told}")
        partial = folder / f"pipeline.{secrets.token_hex(4)}"
        if _unisono(folder, words, lock, work) and _unisono(folder, ["export", str(run), str(partial)], lock, work):
            partial.rename(pipeline)


def _unisono(folder: Path, words: list[str], lock: int, work: Work) -> bool:
    """Runs a command of unisono's; False when it was stopped, and goes on another time."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_LAUNCHER)}
    own[LAUNCHER_PID] = str(os.getpid())  # for `die_with_parent`, should this process be gone before it is asked
    command = [sys.executable, "-c", _PROGRAM, *words]
    with (folder / "log.txt").open("ab") as log:
        # The child ends with this process, and has the lock too: nobody else begins before it has really ended.
        child = subprocess.Popen(command, env=own, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[lock])
        while child.poll() is None:
            time.sleep(_LOOK_EVERY_S)
            if work.stopping:
                child.terminate()
                child.wait()
    if child.returncode and not work.stopping and child.returncode != EXIT_STOPPED:
        raise TrainingFailed(f"the tiny teacher could not be made; {folder / 'log.txt'} says why")
    return child.returncode == 0


@contextmanager
def _alone(folder: Path, work: Work) -> Iterator[int | None]:
    """Nobody else makes it meanwhile; None when somebody asked to stop before it was one's turn."""
    folder.mkdir(parents=True, exist_ok=True)
    told = False
    with (folder / "lock").open("a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not told:
                    told = True
                    work.message(f"waiting for another process that makes the tiny teacher in {folder}")
                if work.stopping:
                    yield None
                    return
                time.sleep(_LOOK_EVERY_S)
            else:
                yield lock.fileno()
                return
