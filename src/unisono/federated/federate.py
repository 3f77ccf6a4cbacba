"""Starts a federation and waits for its result."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.engine.checks import check_not_in_storage
from unisono.engine.run_folder.new_folder import default_folder
from unisono.engine.start.registry import load_recipe
from unisono.engine.start.settings_source import SettingsSource
from unisono.errors import TrainingFailed, UserError
from unisono.federated.plan import Federation, FederationOptions
from unisono.formatting import format_count, format_number
from unisono.observe.folder import check_writable
from unisono.observe.json_lines import JsonLines
from unisono.observe.lock import FolderLock
from unisono.typed_paths import absolute

_POLL_S = 0.5


@dataclass(frozen=True)
class FederationResult:
    """The result of a federation."""

    folder: Path
    model: Path
    """Path of a safetensors file with the global weights."""
    rounds: list[dict[str, Any]]
    """One record per round: number of clients that replied, clients that dropped out, and mean loss."""
    metrics: dict[str, float]
    """Metrics of the global weights on the data of all clients."""


def check_flower() -> None:
    """Raises UserError if Flower is not installed."""
    try:
        os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
        import flwr.serverapp  # noqa: F401
    except ImportError:
        raise UserError('federate needs Flower; run: pip install "unisono[federated]"') from None


def run_federation(
    recipe: str, options: FederationOptions, source: SettingsSource, say: Callable[[str], None]
) -> FederationResult:
    """Runs all rounds of a federation, and prints each round when it has finished."""
    check_flower()
    recipe_class = load_recipe(recipe)
    options.check()
    planned = Federation(Path(), recipe, source, options)
    planned.check()
    resolved = source.resolve(recipe_class, {})
    check_not_in_storage(resolved, "federate")
    named = resolved.values["output_dir"]
    folder = Path(absolute(named or default_folder(f"federate-{recipe_class.__qualname__}")))
    check_writable(folder)
    engine = _engine(options)
    federation = Federation(folder, recipe, source, options)
    lock = FolderLock(folder)
    lock.take()
    try:
        federation.write()
        with _Printed(folder, options.rounds, say):
            engine(federation)
    finally:
        lock.release()
    return read_result(folder)


def read_result(folder: Path) -> FederationResult:
    """Reads the result from the folder of a federation; raises TrainingFailed if the federation failed."""
    try:
        result = json.loads((folder / "result.json").read_text())
    except FileNotFoundError:
        raise TrainingFailed(f"the federation has not finished; see {folder}") from None
    if "error" in result:
        raise TrainingFailed(f"the federation failed: {result['error']}")
    rounds = list(JsonLines(folder / "rounds.jsonl"))
    return FederationResult(folder, folder / "model.safetensors", rounds, result["metrics"])


def _engine(options: FederationOptions) -> Callable[[Federation], None]:
    if options.engine == "simulation":
        from unisono.federated.engines import check_ray, run_simulated

        check_ray()
        return run_simulated
    if options.engine == "processes":
        from unisono.federated.processes import check_ports, run_processes

        check_ports(options.port, options.clients)
        return run_processes
    from unisono.federated.engines import run_local

    return run_local


class _Printed:
    """Prints a line for each round while the engine runs."""

    def __init__(self, folder: Path, rounds: int, say: Callable[[str], None]) -> None:
        self._folder, self._rounds, self._say = folder, rounds, say
        self._printed, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self._print()

    def _follow(self) -> None:
        while not self._ended.wait(_POLL_S):
            self._print()

    def _print(self) -> None:
        records = list(JsonLines(self._folder / "rounds.jsonl"))
        for record in records[self._printed :]:
            loss = record.get("loss")
            text = f"round {record['round']}/{self._rounds}: {format_count(record['clients'], 'client')}"
            text += "" if loss is None else f", mean loss {format_number(float(loss))}"
            for reason in record["dropped"]:
                text += f"; dropped: {reason}"
            self._say(text)
        self._printed = len(records)
