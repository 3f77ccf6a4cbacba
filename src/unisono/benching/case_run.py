"""Runs one case, in a process that starts its ranks and with a temporary run folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.benching.cases import Case
from unisono.benching.process import JOB, RESULT
from unisono.cluster.lifetime import die_with_parent
from unisono.errors import EXIT_STOPPED, EXIT_USER_ERROR, TrainingFailed, UserError
from unisono.typed_paths import as_typed


class CaseRun:
    """The process of one case."""

    def __init__(
        self,
        recipe: str,
        case: Case,
        options: Mapping[str, Any],
        folder: Path,
        log: Path,
        environ: Mapping[str, str],
    ) -> None:
        """Starts the process; `folder` is a temporary folder for the run, and `log` the file for the ranks' output."""
        self._case, self._folder, self._log = case, folder, log
        resolved = case.resolved.with_values("bench", output_dir=str(folder / "run"))
        job = {"recipe": recipe, "ranks": case.ranks, "resolved": resolved.to_json(), "options": dict(options)}
        (folder / JOB).write_text(json.dumps(job))
        parent = os.getpid()

        def end_with_parent() -> None:
            die_with_parent()
            if os.getppid() != parent:
                os._exit(128 + signal.SIGKILL)

        # -P: files in the current folder cannot shadow modules. A new session: Ctrl-C reaches only the parent.
        with open(log, "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "unisono.benching.process", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **environ},
                start_new_session=True,
                preexec_fn=end_with_parent,  # the parent has no threads, so this is safe
            )

    def stop(self) -> None:
        """Asks the ranks to stop."""
        self._process.terminate()

    def result(self) -> dict[str, Any] | None:
        """Waits for the ranks and returns what they measured; None if they were asked to stop."""
        code = self._process.wait()
        if code == EXIT_STOPPED:
            return None
        if code:
            kind = UserError if code == EXIT_USER_ERROR else TrainingFailed
            number = self._case.ranks
            raise kind(f"{number} rank{'s' * (number > 1)}: {self._last_words()}; see {as_typed(self._log)}")
        return json.loads(Path(self._folder, RESULT).read_text())  # type: ignore[no-any-return]

    def close(self) -> None:
        """Kills the ranks if they are still running."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1].removeprefix("unisono: ") if lines else "it printed nothing"
