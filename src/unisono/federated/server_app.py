"""Flower's ServerApp: asks a client for the initial weights, runs the rounds, and writes the global weights."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    FedProx,
    Strategy,
)
from safetensors.numpy import save_file

from unisono.atomic_files import atomic_file, write_atomically
from unisono.errors import TrainingFailed
from unisono.federated.client_app import federation_of
from unisono.federated.plan import Federation, FederationOptions

MODEL, ROUNDS, RESULT = "model.safetensors", "rounds.jsonl", "result.json"
_POLL_S = 0.2


class _Averaging:
    """Extends Flower's strategies for both algorithms: logs rounds, and evaluates only after the last round."""

    log: RoundLog

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
        return super().configure_train(server_round, arrays, config, grid)  # type: ignore[misc]

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        replies = list(replies)
        arrays, metrics = super().aggregate_train(server_round, replies)  # type: ignore[misc]
        self.log.round(server_round, replies, metrics)
        if arrays is None:
            raise TrainingFailed(f"round {server_round}: no client replied")
        return arrays, metrics

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
        if server_round < self.log.rounds:
            return []
        return super().configure_evaluate(server_round, arrays, config, grid)  # type: ignore[misc]


class _FedAvg(_Averaging, FedAvg):
    pass


class _FedProx(_Averaging, FedProx):
    pass


class RoundLog:
    """Writes a line of rounds.jsonl for each round."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self.rounds = rounds
        self.num_rounds = 0
        """Number of finished rounds."""
        self._file = folder / ROUNDS

    def round(self, number: int, replies: list[Message], metrics: MetricRecord | None) -> None:
        """Writes the line of a round."""
        failed = [str(message.error.reason).strip().splitlines()[-1] for message in replies if message.has_error()]
        numbers = {name: value for name, value in (metrics or {}).items() if name != "num-examples"}
        self.line({"round": number, "clients": len(replies) - len(failed), "dropped": failed, **numbers})

    def line(self, record: dict[str, Any]) -> None:
        """Appends the line of a finished round."""
        self.num_rounds += 1
        with open(self._file, "a") as file:
            file.write(json.dumps(record, default=str) + "\n")


def strategy_of(options: FederationOptions, log: RoundLog) -> Strategy:
    """Returns Flower's strategy for the options; wraps it if differential privacy involves the server."""
    least: dict[str, Any] = {
        "min_train_nodes": options.min_clients,
        "min_evaluate_nodes": options.min_clients,
        "min_available_nodes": options.min_clients,
    }
    averaging: _FedAvg | _FedProx
    averaging = (
        _FedProx(**least, proximal_mu=options.proximal_mu) if options.algorithm == "fedprox" else _FedAvg(**least)
    )
    averaging.log = log
    wrappers = {
        "server": DifferentialPrivacyServerSideFixedClipping,
        "client": DifferentialPrivacyClientSideFixedClipping,
    }
    if options.privacy not in wrappers:
        return averaging
    return wrappers[options.privacy](averaging, options.noise_multiplier, options.clipping_norm, options.clients)


def initial_arrays(grid: Grid, timeout: float) -> ArrayRecord:
    """Gets the initial weights from any client: all clients compute the same weights from the recipe and the seed."""
    content = RecordDict({"config": ConfigRecord({"server-round": 0})})
    node = min(grid.get_node_ids())
    message = Message(content, dst_node_id=node, message_type="query.initial")
    [reply] = list(grid.send_and_receive([message], timeout=timeout))
    if reply.has_error():
        raise TrainingFailed(str(reply.error.reason).strip().splitlines()[-1])
    return reply.content.array_records["arrays"]


def wait_for_clients(grid: Grid, number: int, timeout: float) -> None:
    """Waits until `number` clients are connected."""
    deadline = time.monotonic() + timeout
    while (connected := len(list(grid.get_node_ids()))) < number:
        if time.monotonic() > deadline:
            raise TrainingFailed(f"{connected} of {number} clients have connected within {timeout:.0f} s")
        time.sleep(_POLL_S)


def save_model(folder: Path, arrays: Mapping[str, Any], like: Mapping[str, Any]) -> None:
    """Writes the global weights in the dtypes of the initial weights, because averaging turns integers into floats."""
    typed = {name: np.ascontiguousarray(array, dtype=like[name].dtype) for name, array in arrays.items()}
    with atomic_file(folder / MODEL) as temporary:
        save_file(typed, temporary)


def run_server(federation: Federation, grid: Grid, context: Context) -> None:
    """Runs all rounds, and writes the global weights after each round."""
    options, folder = federation.options, federation.folder
    log = RoundLog(folder, options.rounds)
    wait_for_clients(grid, options.clients, options.round_timeout)
    if options.secure_aggregation:
        from unisono.federated.secure import run_secure_server

        run_secure_server(federation, grid, context, log)
        return
    initial = initial_arrays(grid, options.round_timeout)
    like = {name: array.numpy() for name, array in initial.items()}

    def after_round(number: int, arrays: ArrayRecord) -> None:
        save_model(folder, {name: array.numpy() for name, array in arrays.items()}, like)

    result = strategy_of(options, log).start(
        grid=grid,
        initial_arrays=initial,
        num_rounds=options.rounds,
        timeout=options.round_timeout,
        evaluate_fn=after_round,
    )
    evaluated = dict(result.evaluate_metrics_clientapp.get(options.rounds) or {})
    finish(folder, {name: value for name, value in evaluated.items() if name.startswith("eval/")})


def finish(folder: Path, metrics: dict[str, Any]) -> None:
    """Writes the result of the federation; must be called after all other files are written."""
    write_atomically(folder / RESULT, json.dumps({"metrics": metrics}) + "\n")


def server_app() -> ServerApp:
    """Returns the ServerApp, which reads its federation when it runs and writes an error to its folder."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        federation = federation_of(context)
        try:
            run_server(federation, grid, context)
        except Exception as error:
            write_atomically(federation.folder / RESULT, json.dumps({"error": f"{error}"}) + "\n")
            raise

    return app
