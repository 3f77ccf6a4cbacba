"""Starts a run on a Ray cluster, from the command line or from Python."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from unisono import tracebacks
from unisono.cluster.environment import detect
from unisono.config.resolve import Resolved
from unisono.engine.checks import check_settings, machines
from unisono.engine.recipe import Recipe
from unisono.engine.start.registry import importable_name
from unisono.engine.start.run import LaunchFailed, configured, with_absolute_paths
from unisono.errors import EXIT_DONE, EXIT_STOPPED, ConfigError, TrainingFailed, UserError
from unisono.observe.trackers.named import check_own
from unisono.ray.connection import connected
from unisono.settings import Settings
from unisono.typed_paths import all_typed, for_caller

_RAY_DECIDES = ("node_rank", "rdzv_endpoint")


def train(recipe: type[Recipe] | str, config: Any = None, *, address: str | None = None, **settings: Any) -> Any:
    """Trains a recipe on a Ray cluster and returns the same result as `unisono.train`.

    Call it in a driver of Ray, such as a script that `ray job submit` runs. `address` is HOST:PORT of the cluster; the
    default is the cluster that this program is connected to, the cluster of RAY_ADDRESS, or the cluster of this
    machine. `nnodes`, `nproc` and `gpus` set the number of machines and ranks; all other arguments are those of
    `unisono.train`. The recipe must be defined in a file that all nodes can import.
    """
    try:
        return start_on_ray(*configured(recipe, config, settings), address)
    except Exception as error:
        tracebacks.prune(error)
        raise


def without_machines(resolved: Resolved) -> Resolved:
    """Returns the settings to check before Ray chooses machines; rejects settings that the driver sets itself."""
    for name in _RAY_DECIDES:
        if resolved.explicit(name):
            raise ConfigError(f"{name}: the Ray driver sets this itself; remove it")
    machines(resolved.build(Settings).launch)  # rejects an invalid nnodes
    return resolved.with_values("default", nnodes=1)


def start_on_ray(recipe_class: type[Recipe], resolved: Resolved, address: str | None) -> Any:
    """Trains on the Ray cluster at `address`; returns the result of the run."""
    world = detect()
    if world.launcher != "plain":
        raise UserError(f"--on ray starts the ranks itself; run it without {world.launcher}")
    resolved = with_absolute_paths(resolved)
    fewest, most = machines(resolved.build(Settings).launch)
    check_settings(without_machines(resolved).build(Settings))
    check_own(resolved.values["track"])
    reference = importable_name(recipe_class)
    if reference is None:
        raise UserError(
            f"{recipe_class.__name__} is defined in {recipe_class.__module__}, which processes on other nodes cannot "
            "import; move it to a file of its own"
        )
    with connected(address):
        return _train(reference, resolved, fewest, most)


def _train(reference: str, resolved: Resolved, fewest: int, most: int) -> Any:
    import ray

    from unisono.cluster.launch.agent import print_line
    from unisono.cluster.rendezvous.authentication import SECRET
    from unisono.cluster.rendezvous.host import RendezvousHost
    from unisono.engine.length import Result
    from unisono.engine.run_folder.new_folder import lock_folder
    from unisono.observe.watch.notebook import shown_in_notebook
    from unisono.ray.driver import Driver
    from unisono.ray.placement import needs_of, placed

    needs = needs_of(resolved, fewest)
    if not resolved.explicit("join_timeout"):  # Ray may take longer than the default to find another node
        resolved = resolved.with_values("launcher", join_timeout=0)
    launch = resolved.build(Settings).launch
    with ExitStack() as cleanup:
        resolved, lock = lock_folder(resolved, reference.rpartition(":")[2])
        cleanup.callback(lock.release)
        cleanup.enter_context(shown_in_notebook(Path(resolved.values["output_dir"])))
        places = cleanup.enter_context(placed(needs, fewest, most, launch.join_timeout, print_line))
        secret = secrets.token_hex(32)  # without this secret, a machine cannot join the run
        host = RendezvousHost(
            0, fewest, most, launch.max_restarts, outside=True, secret=secret.encode(), print_line=print_line
        )
        cleanup.callback(host.shut_down)
        # A scheduler may hide the GPUs from the driver, so each machine detects its own GPUs.
        on_machine = resolved.with_values("flag", gpus="all") if needs.gpus else resolved
        if not needs.gpus and (launch.nproc is None or resolved.explicit("gpus")):
            on_machine = resolved.with_values("flag", gpus="0")
        on_machine = on_machine.with_values(
            "launcher", nnodes=f"{fewest}:{most}", rdzv_endpoint=f"{ray.util.get_node_ip_address()}:{host.port}"
        )

        def start(number: int) -> tuple[Mapping[str, Any], str, Mapping[str, str]]:
            settings = on_machine.with_values("launcher", node_rank=number).to_json()
            job = {"recipe": reference, "resolved": settings, "typed": dict(all_typed())}
            # Ray sets OMP_NUM_THREADS to the CPUs of the actor, which its ranks share.
            return job, os.getcwd(), {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), SECRET: secret}

        driver = Driver(places, needs, start, host, launch.max_restarts)
        code = driver.run()
        if code not in (EXIT_DONE, EXIT_STOPPED) or (code == EXIT_STOPPED and driver.result is None):
            raise LaunchFailed(code)
        if driver.result is None:
            raise TrainingFailed("no machine has reported a result")
        values = driver.result
        return Result(Path(for_caller(values["folder"])), values["status"], values["step"], values["last"])
