"""The tiny teacher, for trying out the recipe; `unisono train wan-flow` trains it once.

Its folder is in $UNISONO_CACHE or in the user's cache folder; the folder's name is a hash of the training settings. If
that training is killed, the next run continues it from its checkpoint.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unisono.cluster.lifetime import LAUNCHER_PID
from unisono.engine.recipe import Work
from unisono.errors import EXIT_STOPPED, TrainingFailed
from unisono.observe.folder import METRICS
from unisono.recipes.common.fingerprint import combined
from unisono.recipes.wan.tiny.models import tiny_transformer_config
from unisono.recipes.wan_flow.settings import TINY

_FORMAT = 1
_POLL_EVERY_S = 0.5
_LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC", "SLURM_", "PMI_", "PMIX_", "OMPI_"),
    *("MPI_", "ACCELERATE_", "UNISONO_"),
)
_PROGRAM = """
from unisono.cluster.lifetime import die_with_parent
die_with_parent()
from unisono.cli.main import program
program()
"""
_STEPS_VARIABLE = "UNISONO_TINY_TEACHER_STEPS"  # tests set it to shorten the training, although nothing is learned then


def folder_of(cache: Path | None = None) -> Path:
    """Returns the tiny teacher's folder."""
    steps = os.environ.get(_STEPS_VARIABLE, "")
    return (cache or cache_folder()) / "tiny_teacher" / combined(_FORMAT, TINY, tiny_transformer_config(), steps)[:12]


def cache_folder() -> Path:
    """Returns the folder for files that all runs share."""
    if folder := os.environ.get("UNISONO_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "unisono"


def make(work: Work, cache: Path | None = None) -> None:
    """Trains the tiny teacher if it does not exist; returns early if the run is asked to stop."""
    folder = folder_of(cache)
    pipeline, run = folder / "pipeline", folder / "run"
    if (pipeline / "model_index.json").is_file():
        return
    work.message(
        f"training the tiny teacher (unisono train wan-flow --model_config tiny) in {folder}: this happens once and "
        "takes a few minutes"
    )
    steps = int(os.environ.get(_STEPS_VARIABLE) or str(TINY["max_steps"]))
    with work.progress("training the tiny teacher", steps, "steps") as advance:

        def show_progress() -> None:
            advance.to(_newest_step(run))

        with _locked(folder, work, show_progress) as lock:
            if lock is None or (pipeline / "model_index.json").is_file():
                return
            ranks = min(2, len(os.sched_getaffinity(0)))
            train = ["train", "wan-flow", "--model_config", "tiny", "--output_dir", str(run), "--nproc", str(ranks)]
            train += ["--gpus", "0", "--eval_every", "-1", "--preview_every", "-1", "--log_every", "5"]
            train.append(f"--max_steps={steps}")
            partial = folder / f"pipeline.{secrets.token_hex(4)}"
            commands = (train, ["export", str(run), str(partial)])
            if all(_run_unisono(folder, arguments, lock, work, show_progress) for arguments in commands):
                partial.rename(pipeline)


def _newest_step(run: Path) -> int:
    """Returns the newest step in a run's metrics.jsonl; 0 if there is none yet."""
    try:
        lines = (run / METRICS).read_bytes().splitlines()[-3:-1]  # the last line may be incomplete
        return max((int(json.loads(line)["step"]) for line in lines), default=0)
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _run_unisono(folder: Path, arguments: list[str], lock: int, work: Work, show_progress: Callable[[], None]) -> bool:
    """Runs a unisono command and shows its progress; returns False if it was stopped and must be continued later."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER_VARIABLES)}
    # Read by `die_with_parent`, in case this process dies before the child calls it.
    environment[LAUNCHER_PID] = str(os.getpid())
    command = [sys.executable, "-c", _PROGRAM, *arguments]
    with (folder / "log.txt").open("ab") as log:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        # The child is killed when this process dies. It inherits the lock, so no other process trains before it ends.
        child = subprocess.Popen(command, env=environment, pass_fds=[lock], **streams)
        while child.poll() is None:
            time.sleep(_POLL_EVERY_S)
            show_progress()
            if work.stopping:
                child.terminate()
                child.wait()
    if child.returncode and not work.stopping and child.returncode != EXIT_STOPPED:
        raise TrainingFailed(f"training the tiny teacher failed; see {folder / 'log.txt'}")
    return child.returncode == 0


@contextmanager
def _locked(folder: Path, work: Work, show_progress: Callable[[], None]) -> Iterator[int | None]:
    """Holds the lock on the folder; yields None if the run is asked to stop while waiting for the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    is_waiting = False
    with (folder / "lock").open("a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not is_waiting:
                    is_waiting = True
                    work.message(f"waiting for another process that trains the tiny teacher in {folder}")
                if work.stopping:
                    yield None
                    return
                show_progress()
                time.sleep(_POLL_EVERY_S)
            else:
                yield lock.fileno()
                return
