"""The program that starts the ranks of one measured run: `python -m unisono.benching.process FOLDER`.

It reads `job.json` in the folder and writes `result.json`. Everything that the ranks print goes to the program's
output, which the benchmark redirects to a log file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from unisono.cluster.signals import stop_before_start
from unisono.config.resolve import Resolved
from unisono.engine.start.device_plan import plan_devices
from unisono.engine.start.registry import load_recipe
from unisono.engine.start.run import LaunchFailed, launch_job
from unisono.errors import EXIT_DONE, EXIT_STOPPED, ConfigError, run_as_program
from unisono.settings import Settings
from unisono.typed_paths import note_start_folder

JOB, RESULT = "job.json", "result.json"


def main() -> int:
    """Measures one case; returns 75 if a signal stopped it."""
    stop_before_start()
    note_start_folder()
    folder = Path(sys.argv[1])
    job: dict[str, Any] = json.loads((folder / JOB).read_text())
    recipe_class = load_recipe(job["recipe"])
    resolved = Resolved.from_json((Settings, recipe_class.Config), job["resolved"])
    plan = plan_devices(resolved)
    if plan.ranks != job["ranks"]:
        raise ConfigError(
            f"gpus {job['ranks']}: only {plan.ranks} GPUs are free; wait for the others, or measure fewer"
        )

    def call(final: Resolved) -> dict[str, Any]:
        arguments = {"recipe": job["recipe"], "resolved": final.to_json(), "options": job["options"]}
        return {"call": "unisono.benching.rank:measure", "arguments": arguments}

    try:
        result = launch_job(call, plan.applied_to(resolved), plan, recipe_class.__qualname__)
    except LaunchFailed as failed:  # print nothing more: the ranks have printed the reason as the last line
        return failed.exit_code
    if result is None:
        return EXIT_STOPPED
    (folder / RESULT).write_text(json.dumps(result))
    return EXIT_DONE


if __name__ == "__main__":
    run_as_program(main)
