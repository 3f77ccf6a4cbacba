"""Runs one round of a client on each of its ranks: loads the global weights, trains, and writes the new weights.

The client's run resumes from its own checkpoint, exactly as under `unisono train`; only its weights are replaced. The
process saves a checkpoint after the round and exits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from unisono.atomic_files import atomic_file, write_atomically
from unisono.config.resolve import Resolved
from unisono.engine.length import Result
from unisono.engine.start.rank_start import RankStart
from unisono.engine.start.registry import load_recipe
from unisono.engine.start.session import run_session
from unisono.engine.trainer import Trainer
from unisono.engine.training_run import TrainingRun
from unisono.errors import TrainingFailed
from unisono.federated.client_recipe import ClientShare, client_recipe
from unisono.settings import Settings


@dataclass(frozen=True)
class RoundOrder:
    """The task of a client in a round."""

    task: Literal["initial", "train", "evaluate"]
    """initial: only write the initial weights; train: train a round; evaluate: only evaluate the global weights."""
    steps: int
    weights: str | None
    """Path of a safetensors file with the global weights."""
    reply: str
    """Folder for the client's weights and metrics."""


class RoundTrainer(Trainer):
    """Trains one round of a client's run."""

    def __init__(self, run: TrainingRun, open_folder: Callable[[], None], order: RoundOrder) -> None:
        super().__init__(run, open_folder)
        self._order_of_round = order
        self._end = self.state.step + order.steps

    def train(self) -> Result:
        """Runs the task of the round, and writes the reply."""
        order, metrics = self._order_of_round, dict[str, Any]()
        if order.weights is not None:
            load_weights(self.components.strategy, load_file(order.weights))
        result = Result(self._folder.path, "done", self.state.step, metrics)
        if order.task == "evaluate":
            with self._finishing_saves():
                metrics |= self._evaluate() or {} if self._evaluation is not None else {}
            self._recorder.close()
        elif order.task == "train":
            result = super().train()
            if self.state.step < self._end and self.state.samples < self.length.samples:
                raise TrainingFailed(f"a signal stopped the client at step {self.state.step} of the round")
            metrics |= result.last
            result = Result(result.folder, "round", result.step, result.last)
        weights = whole_weights(self.components.strategy)  # collective: every rank must call it
        if self._main:
            self._write(order, weights, metrics)
        return result

    def _write(self, order: RoundOrder, weights: Mapping[str, Tensor], metrics: Mapping[str, Any]) -> None:
        folder = Path(order.reply)
        if order.task != "evaluate":
            with atomic_file(folder / "weights.safetensors") as temporary:
                save_file(dict(weights), temporary)
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float | str)}
        evaluated = 0 if self._run.datasets.evaluation is None else len(self._run.datasets.evaluation)  # type: ignore[arg-type]
        reply = {
            "step": self.state.step,
            "num_samples": evaluated if order.task == "evaluate" else self._run.datasets.num_samples,
            "metrics": numbers,
        }
        write_atomically(folder / "reply.json", json.dumps(reply))

    def _step_once(self) -> Mapping[str, float]:
        requests = super()._step_once()
        return {**requests, "stop": 1.0} if self.state.step >= self._end else requests

    def _stopping(self) -> bool:
        if self.state.step < self._end:
            return super()._stopping()
        self._settle()
        return True


def run_round(arguments: dict[str, Any], start: RankStart) -> dict[str, Any]:
    """Runs the round on one rank of a client; `unisono.engine.start.rank` calls it."""
    share, order = ClientShare(**arguments["share"]), RoundOrder(**arguments["order"])
    recipe_class = client_recipe(load_recipe(arguments["recipe"]), share)
    resolved = Resolved.from_json((Settings, recipe_class.Config), arguments["resolved"])
    result = run_session(recipe_class, resolved, start, lambda run, opened: RoundTrainer(run, opened, order))
    return {"step": result.step}


def job_of(recipe: str, share: ClientShare, order: RoundOrder, resolved: Resolved) -> dict[str, Any]:
    """Describes a client's round for `launch_job`."""
    arguments = {"recipe": recipe, "share": asdict(share), "order": asdict(order), "resolved": resolved.to_json()}
    return {"call": f"{__name__}:{run_round.__name__}", "arguments": arguments}


def whole_weights(strategy: Any) -> dict[str, Tensor]:
    """Gathers weights and persistent buffers from all ranks into host memory; every rank must call it."""
    whole = {}
    for name, tensor in strategy.tensors().items():
        value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        whole[name] = value.detach().to("cpu", copy=True).contiguous()
    return whole


def load_weights(strategy: Any, weights: Mapping[str, Tensor]) -> None:
    """Replaces weights and persistent buffers with `weights`, by name; every rank must call it."""
    own = strategy.tensors()
    missing = sorted(own.keys() ^ weights.keys())
    if missing:
        raise TrainingFailed(f"the global weights do not fit the client's model: {missing[0]} is in only one of them")
    with torch.no_grad():
        for name, tensor in own.items():
            value = weights[name]
            if value.shape != tensor.shape:
                shapes = f"{list(value.shape)} and {list(tensor.shape)}"
                raise TrainingFailed(f"the global weight {name} does not fit the client's model: shapes {shapes}")
            if isinstance(tensor, DTensor):
                on_mesh = value.to(tensor.device, tensor.dtype)
                tensor.copy_(distribute_tensor(on_mesh, tensor.device_mesh, tensor.placements))
            else:
                tensor.copy_(value)
    strategy.weights_changed()
