"""The tiny teacher for trying things out: `unisono train wan-flow` trains it once.

Its folder is in $UNISONO_CACHE, or in the user's cache folder, under a hash of how it is trained. A process that is
killed while training it continues from its checkpoint the next time.
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

from unisono.cluster.lifetime import LAUNCHER_PID
from unisono.engine.recipe import Work
from unisono.errors import EXIT_STOPPED, TrainingFailed
from unisono.observe.folder import METRICS
from unisono.recipes.common.fingerprint import together
from unisono.recipes.wan.tiny.models import tiny_transformer_config
from unisono.recipes.wan_flow.settings import TINY

_FORMAT = 1
_LOOK_EVERY_S = 0.5
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
_STEPS = "UNISONO_TINY_TEACHER_STEPS"  # for tests: a run too short to learn anything


def folder_of(cache: Path | None = None) -> Path:
    """The folder of the tiny teacher."""
    steps = os.environ.get(_STEPS, "")
    return (cache or cache_folder()) / "tiny_teacher" / together(_FORMAT, TINY, tiny_transformer_config(), steps)[:12]


def cache_folder() -> Path:
    """The folder for files that all runs share."""
    if folder := os.environ.get("UNISONO_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "unisono"


def make(work: Work, cache: Path | None = None) -> None:
    """Trains the tiny teacher if it does not exist; returns early when the run is asked to stop."""
    folder = folder_of(cache)
    pipeline, run = folder / "pipeline", folder / "run"
    if (pipeline / "model_index.json").is_file():
        return
    work.message(
        f"training the tiny teacher (unisono train wan-flow --model_config tiny), once, a few minutes, in {folder}"
    )
    steps = int(os.environ.get(_STEPS) or str(TINY["max_steps"]))
    with work.progress("training the tiny teacher", steps, "steps") as advance:

        def look() -> None:
            advance.to(_step_of(run))

        with _alone(folder, work, look) as lock:
            if lock is None or (pipeline / "model_index.json").is_file():
                return
            ranks = min(2, len(os.sched_getaffinity(0)))
            train = ["train", "wan-flow", "--model_config", "tiny", "--output_dir", str(run), "--nproc", str(ranks)]
            train += ["--gpus", "0", "--eval_every", "-1", "--preview_every", "-1", "--log_every", "5"]
            train.append(f"--max_steps={steps}")
            partial = folder / f"pipeline.{secrets.token_hex(4)}"
            export = ["export", str(run), str(partial)]
            if _unisono(folder, train, lock, work, look) and _unisono(folder, export, lock, work, look):
                partial.rename(pipeline)


def _step_of(run: Path) -> int:
    """The newest step in a run's metrics.jsonl; 0 before there is one."""
    try:
        lines = (run / METRICS).read_bytes().splitlines()
        return max(
            (int(json.loads(line)["step"]) for line in lines[-3:-1]), default=0
        )  # the last line may be incomplete
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _unisono(folder: Path, arguments: list[str], lock: int, work: Work, look: Callable[[], None]) -> bool:
    """Runs a unisono command and reports progress meanwhile; False when it was stopped and will continue later."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_LAUNCHER)}
    own[LAUNCHER_PID] = str(os.getpid())  # for `die_with_parent`, in case this process dies before the child calls it
    command = [sys.executable, "-c", _PROGRAM, *arguments]
    with (folder / "log.txt").open("ab") as log:
        # The child dies with this process and holds the lock too: no one else starts before it has really ended.
        child = subprocess.Popen(command, env=own, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[lock])
        while child.poll() is None:
            time.sleep(_LOOK_EVERY_S)
            look()
            if work.stopping:
                child.terminate()
                child.wait()
    if child.returncode and not work.stopping and child.returncode != EXIT_STOPPED:
        raise TrainingFailed(f"training the tiny teacher failed; see {folder / 'log.txt'}")
    return child.returncode == 0


@contextmanager
def _alone(folder: Path, work: Work, look: Callable[[], None]) -> Iterator[int | None]:
    """Holds the lock on the folder; yields None when the run is asked to stop while waiting for it."""
    folder.mkdir(parents=True, exist_ok=True)
    has_reported = False
    with (folder / "lock").open("a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not has_reported:
                    has_reported = True
                    work.message(f"waiting for another process that trains the tiny teacher in {folder}")
                if work.stopping:
                    yield None
                    return
                look()
                time.sleep(_LOOK_EVERY_S)
            else:
                yield lock.fileno()
                return
