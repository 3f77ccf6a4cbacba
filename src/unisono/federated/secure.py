"""Secure aggregation by Flower's SecAgg+: the server learns only the sum of the clients' weights.

Flower supports SecAgg+ only for its older client interface, so this module wraps a client's round in a NumPyClient. All
clients have the same weight in the mean, because they do not send their sample counts.
"""

from __future__ import annotations

import math
from typing import Any

from flwr.app import Context
from flwr.client import Client, NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid

from unisono.errors import TrainingFailed
from unisono.federated.client_app import client_of, do_round, federation_of
from unisono.federated.plan import Federation
from unisono.federated.server_app import RoundLog, finish, save_model

_CLIPPING_RANGE = 8.0
"""Weights beyond this are clipped when SecAgg+ quantizes them to 22 bits."""


class _Client(NumPyClient):
    def __init__(self, federation: Federation, client: int) -> None:
        self._federation, self._client = federation, client

    def get_parameters(self, config: dict[str, Any]) -> list[Any]:
        arrays, _ = do_round(self._federation, self._client, "initial", None, 0)
        return [arrays[name] for name in sorted(arrays)]

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        names = str(config["names"]).split("\n")
        received = dict(zip(names, parameters, strict=True))
        arrays, reply = do_round(self._federation, self._client, "train", received, int(config["round"]))
        return [arrays[name] for name in names], 1, {"loss": reply["metrics"].get("loss", math.nan)}

    def evaluate(self, parameters: list[Any], config: dict[str, Any]) -> tuple[float, int, dict[str, Any]]:
        received = dict(zip(str(config["names"]).split("\n"), parameters, strict=True))
        _, reply = do_round(self._federation, self._client, "evaluate", received, 0)
        numbers = {name: value for name, value in reply["metrics"].items() if name.startswith("eval/")}
        return numbers.get("eval/loss", math.nan), reply["num_samples"], numbers


def secure_client_app(mods: list[Any]) -> ClientApp:
    """Builds the ClientApp of a federation with secure aggregation."""

    def client_fn(context: Context) -> Client:
        return _Client(federation_of(context), client_of(context)).to_client()

    return ClientApp(client_fn=client_fn, mods=[secaggplus_mod, *mods])


def run_secure_server(federation: Federation, grid: Grid, context: Context, log: RoundLog) -> None:
    """Runs all rounds with secure aggregation, and writes the global weights after each round."""
    options, folder = federation.options, federation.folder
    # The server computes the initial weights itself, from the recipe and the seed, as every client would.
    initial, _ = do_round(federation, 0, "initial", None, 0)
    names = sorted(initial)
    joined = "\n".join(names)

    def mean(results: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
        """Averages the clients' metrics."""
        total = sum(number for number, _ in results)
        keys = results[0][1] if results else {}
        return {key: sum(number * float(each[key]) for number, each in results) / total for key in keys}

    def after_round(number: int, arrays: list[Any], config: dict[str, Any]) -> None:
        save_model(folder, dict(zip(names, arrays, strict=True)), initial)

    class Strategy(FedAvg):
        def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
            losses = [float(each.metrics.get("loss", math.nan)) for _, each in results]
            dropped = ["a client did not reply"] * (options.clients - len(results))
            loss = sum(losses) / len(losses) if losses else math.nan
            log.line({"round": server_round, "clients": len(results), "dropped": dropped, "loss": loss})
            if not results:
                raise TrainingFailed(f"round {server_round}: no client replied")
            return super().aggregate_fit(server_round, results, failures)

        def configure_evaluate(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
            if server_round < options.rounds:
                return []
            return super().configure_evaluate(server_round, parameters, client_manager)

    strategy = Strategy(
        min_fit_clients=options.clients,
        min_evaluate_clients=options.clients,
        min_available_clients=options.clients,
        on_fit_config_fn=lambda round_: {"round": round_, "names": joined},
        on_evaluate_config_fn=lambda round_: {"names": joined},
        fit_metrics_aggregation_fn=mean,
        evaluate_metrics_aggregation_fn=mean,
        evaluate_fn=after_round,
        initial_parameters=ndarrays_to_parameters([initial[name] for name in names]),
    )
    legacy = LegacyContext(context, config=ServerConfig(num_rounds=options.rounds), strategy=strategy)
    workflow = SecAggPlusWorkflow(
        num_shares=options.clients,
        reconstruction_threshold=max(2, math.ceil(2 * options.clients / 3)),
        max_weight=1.0,
        clipping_range=_CLIPPING_RANGE,
        timeout=options.round_timeout,
    )
    DefaultWorkflow(fit_workflow=workflow)(grid, legacy)
    if log.num_rounds < options.rounds:  # Flower only logs a failed round, and keeps the weights of the previous one
        raise TrainingFailed(f"too few clients replied in {options.rounds - log.num_rounds} rounds to unmask their sum")
    evaluated = legacy.history.metrics_distributed
    finish(folder, {name: values[-1][1] for name, values in evaluated.items() if values})
