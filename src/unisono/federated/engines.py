"""The engines `local` and `simulation`: a federation in this process, or in Flower's simulation on Ray."""

from __future__ import annotations

import importlib.util
import logging
import os

from flwr.app import Context, RecordDict

from unisono.devices import num_cpu_cores
from unisono.errors import UserError
from unisono.federated.client_app import client_app
from unisono.federated.local_grid import LocalGrid
from unisono.federated.plan import ENVIRONMENT, FEDERATION, Federation
from unisono.federated.server_app import run_server, server_app


def run_local(federation: Federation) -> None:
    """Runs a federation in this process."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    options = federation.options
    os.environ[ENVIRONMENT] = str(federation.folder / FEDERATION)
    grid = LocalGrid(client_app(federation), options.clients, options.parallel)
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={})
    run_server(federation, grid, context)


def check_ray() -> None:
    """Raises UserError if Ray, which Flower's simulation needs, is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise UserError('engine simulation needs Ray; run: pip install "unisono[simulation]"')


def run_simulated(federation: Federation) -> None:
    """Runs a federation in Flower's simulation, whose clients are actors of a Ray cluster on this machine."""
    from flwr.simulation import run_simulation

    options = federation.options
    os.environ[ENVIRONMENT] = str(federation.folder / FEDERATION)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # keeps Ray from hiding GPUs from clients
    # Clients train inside Ray's workers, which have a lower CPU priority by default.
    os.environ.setdefault("RAY_worker_niceness", "0")
    cpus = max(1, num_cpu_cores())
    run_simulation(
        server_app=server_app(),
        client_app=client_app(federation),
        num_supernodes=options.clients,
        backend_config={
            # Ray assigns an actor a share of the cores; this does not limit the processes that the client starts.
            "client_resources": {"num_cpus": cpus / options.parallel},
            "init_args": {
                "num_cpus": cpus,
                "_node_ip_address": "127.0.0.1",
                "include_dashboard": False,
                "log_to_driver": False,
                "logging_level": logging.WARNING,
            },
        },
    )
