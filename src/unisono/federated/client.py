"""The program that runs one round of a client: `python -m unisono.federated.client ORDER.json`; see `client_app.py`."""

from __future__ import annotations

import os
import sys

from unisono.cluster.lifetime import die_with_parent
from unisono.errors import run_as_program

if __name__ == "__main__":
    die_with_parent()  # before torch is imported, which takes seconds

from pathlib import Path
from typing import Any

from unisono.cluster.environment import detect
from unisono.config.resolve import Resolved
from unisono.engine.recipe import Recipe
from unisono.engine.run_folder.new_folder import lock_folder
from unisono.engine.start.device_plan import DevicePlan, plan_devices
from unisono.engine.start.run import launch_job, with_absolute_paths
from unisono.federated.client_round import RoundOrder, job_of
from unisono.federated.plan import Federation
from unisono.plain_files import read_json


def main() -> int:
    """Runs the round on the client's devices, with one or several ranks."""
    order = read_json(Path(sys.argv[1]))
    federation = Federation.read(Path(order["federation"]))
    client, round_order = order["client"], RoundOrder(**order["order"])
    recipe_class, resolved = federation.settings_of(client)
    if round_order.task != "train":  # these tasks must leave no files in the client's run folder
        resolved = resolved.with_values("federate", tensorboard=False)
    resolved = with_absolute_paths(resolved)
    plan = plan_devices(resolved)
    resolved = plan.applied_to(resolved)
    share = federation.share_of(client, resolved, round_order.weights)
    if plan.ranks == 1:
        _run_here(recipe_class, resolved, plan, job_of(federation.recipe, share, round_order, resolved)["arguments"])
        return 0
    launch_job(
        lambda final: job_of(federation.recipe, share, round_order, final), resolved, plan, recipe_class.__qualname__
    )
    return 0


def _run_here(recipe_class: type[Recipe], resolved: Resolved, plan: DevicePlan, arguments: dict[str, Any]) -> None:
    """Runs the round in this process, which is the only rank."""
    from unisono.engine.start.rank_start import RankStart  # imports torch
    from unisono.federated.client_round import run_round

    os.environ.update(plan.environ)
    _, lock = lock_folder(resolved, recipe_class.__qualname__)
    try:
        run_round(arguments, RankStart(detect(), plan.requested_devices, None, plan.remarks, folder_is_locked=True))
    finally:
        lock.release()


if __name__ == "__main__":
    run_as_program(main)
