"""Flower's ClientApp: passes the server's weights to the client's run, and sends the client's weights back.

Training runs in a separate process, `unisono.federated.client`, so this process never imports torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.clientapp.typing import Mod
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from unisono.errors import TrainingFailed
from unisono.federated.plan import ENVIRONMENT, Federation

Arrays = dict[str, NDArray[Any]]


def federation_of(context: Context) -> Federation:
    """Returns the federation that this process belongs to."""
    path = context.run_config.get("federation") or os.environ[ENVIRONMENT]
    return Federation.read(Path(str(path)))


def client_of(context: Context) -> int:
    """Returns the number of this client."""
    return int(context.node_config["partition-id"])


def do_round(
    federation: Federation, client: int, task: str, arrays: Mapping[str, NDArray[Any]] | None, round_: int
) -> tuple[Arrays, dict[str, Any]]:
    """Runs a task of a round in a separate process; returns the client's weights and its metrics."""
    if task == "train" and federation.options.drops(client, round_):
        raise TrainingFailed(f"client {client} drops out of round {round_} (--drop)")
    with tempfile.TemporaryDirectory(prefix="unisono-round-") as place:
        folder = Path(place)
        weights = None
        if arrays is not None:
            weights = str(folder / "global.safetensors")
            save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, weights)
        order = {"task": task, "steps": federation.options.local_steps, "weights": weights, "reply": place}
        file = folder / "order.json"
        path = str(federation.folder / "federation.json")
        file.write_text(json.dumps({"federation": path, "client": client, "order": order}))
        log = federation.folder / "clients" / f"{client}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as output:
            command = [sys.executable, "-P", "-m", "unisono.federated.client", str(file)]
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False)
        if done.returncode or not (folder / "reply.json").exists():
            lines = log.read_text(errors="replace").strip().splitlines()
            raise TrainingFailed(
                f"client {client}, round {round_}: {lines[-1] if lines else done.returncode} (see {log})"
            )
        reply = json.loads((folder / "reply.json").read_text())
        own = load_file(folder / "weights.safetensors") if task != "evaluate" else {}
    return own, reply


def _arrays(record: Any) -> Arrays:
    return {name: array.numpy() for name, array in record.items()}


def _record(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def client_app(federation: Federation) -> ClientApp:
    """Builds the ClientApp of a federation, with Flower's mods for differential privacy."""
    options = federation.options
    mods: list[Mod] = []
    if options.privacy == "client":
        mods.append(fixedclipping_mod)
    elif options.privacy == "local":
        mods.append(LocalDpMod(options.clipping_norm, options.clipping_norm, options.epsilon, options.delta))
    if options.secure_aggregation:
        from unisono.federated.secure import secure_client_app

        return secure_client_app(mods)
    app = ClientApp(mods=[])

    @app.query("initial")
    def initial(message: Message, context: Context) -> Message:
        arrays, _ = do_round(federation_of(context), client_of(context), "initial", None, 0)
        return Message(RecordDict({"arrays": _record(arrays)}), reply_to=message)

    @app.train(mods=mods)
    def train(message: Message, context: Context) -> Message:
        round_ = int(str(message.content["config"]["server-round"]))
        received = _arrays(message.content["arrays"])
        arrays, reply = do_round(federation_of(context), client_of(context), "train", received, round_)
        numbers = {"num-examples": reply["num_samples"], "loss": reply["metrics"].get("loss", float("nan"))}
        return Message(RecordDict({"arrays": _record(arrays), "metrics": MetricRecord(numbers)}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        received = _arrays(message.content["arrays"])
        _, reply = do_round(federation_of(context), client_of(context), "evaluate", received, 0)
        numbers = {name: value for name, value in reply["metrics"].items() if name.startswith("eval/")}
        record = MetricRecord({"num-examples": reply["num_samples"], **numbers})
        return Message(RecordDict({"metrics": record}), reply_to=message)

    return app
