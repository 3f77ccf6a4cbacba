"""The program that `Machine` starts on its node: unisono's launcher, for a job that it reads from stdin as JSON.

The job has the keys `recipe` (a reference), `resolved` (the settings of the run on this machine), `typed` (paths as the
user typed them) and `result_to` (the file descriptor of a pipe for the result).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from unisono.cluster.lifetime import die_with_parent, end_process
from unisono.cluster.signals import stop_before_start
from unisono.typed_paths import adopt_typed, as_typed, note_start_folder

if __name__ == "__main__":
    # Do this before importing torch, which takes seconds: meanwhile, the actor could die or a signal could arrive.
    die_with_parent()
    stop_before_start()
    note_start_folder()

from unisono.config.resolve import Resolved
from unisono.engine.start.device_plan import plan_devices
from unisono.engine.start.registry import load_recipe
from unisono.engine.start.run import launch_recipe
from unisono.errors import EXIT_DONE, EXIT_STOPPED, UnisonoError, UserError
from unisono.observe.lock import LOCK
from unisono.settings import Settings


def main() -> int:
    """Launches the ranks of this machine, writes the result, and returns the exit code."""
    job = json.load(sys.stdin)
    try:
        return _launch(job)
    except UnisonoError as error:
        if not error.already_printed:
            print(as_typed(f"unisono: {error}"), file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _launch(job: dict[str, Any]) -> int:
    adopt_typed(job["typed"])
    recipe_class = load_recipe(job["recipe"])
    resolved = Resolved.from_json((Settings, recipe_class.Config), job["resolved"])
    output = Path(resolved.values["output_dir"])
    if not (output / LOCK).exists():  # the driver has locked the folder
        raise UserError(
            f"output_dir {output} is a different folder on the node {os.uname().nodename} than on the node of the "
            "driver; choose a folder on a file system that all nodes share"
        )
    plan = plan_devices(resolved)
    result = launch_recipe(job["recipe"], plan.applied_to(resolved), plan, has_driver=True)
    values = {"folder": str(output), "status": result.status, "step": result.step, "last": result.last}
    with os.fdopen(job["result_to"], "w") as pipe:
        json.dump(values, pipe)
    return EXIT_STOPPED if result.status == "stopped" else EXIT_DONE


if __name__ == "__main__":
    end_process(main())
