"""Evaluation over all ranks: every sample once, metrics exact.

Each rank takes a contiguous share of the data in batches of nearly equal size, so that no rank waits for another.
What a recipe returns adds up: sums with counts, or torchmetrics objects, which know how to add up themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from unisono.cluster.agree import Agreement
from unisono.data.bits import Purpose, key_of
from unisono.data.loader import Cursor, Loader, place
from unisono.data.noise import Noise
from unisono.data.order import Order
from unisono.engine.precision import autocast
from unisono.engine.recipe import Recipe
from unisono.errors import RecipeError
from unisono.parallel.strategy import Strategy
from unisono.settings import Settings


class Evaluation:
    """Evaluates a recipe's model on its "eval" data."""

    def __init__(
        self, recipe: Recipe, strategy: Strategy, dataset: Dataset[Any], settings: Settings, agreement: Agreement
    ) -> None:
        self._recipe, self._strategy, self._dataset, self._settings = recipe, strategy, dataset, settings
        self._agreement = agreement
        self._seed = key_of(Purpose.EVALUATION, settings.run.seed)
        for value in vars(recipe).values():
            if _is_metric(value):
                value.to(strategy.place.device)

    def run(self) -> dict[str, float]:
        """The metrics over the whole evaluation set, named eval/…; the same on every rank."""
        sums: dict[str, Tensor] = {}  # name -> [sum, count] of this rank
        metrics: dict[str, Any] = {}
        self._strategy.share_buffers()
        with self._strategy.evaluating(), closing(self._loader()) as loader:
            for micro in loader:
                device = self._strategy.place.device
                positions = torch.arange(micro.chunk.positions.start, micro.chunk.positions.stop, device=device)
                floating = torch.float64 if self._settings.precision.dtype == "float64" else None
                found = self._strategy.infer(self._evaluate, place(micro.data, device, floating), positions)
                self._add(found, sums, metrics, weight=0.0 if micro.chunk.stand_in else 1.0)
        self._strategy.weights_changed()  # a forward pass without backward leaves gathered weights behind
        found_all = self._over_ranks(sums) | self._computed(metrics)
        return {f"eval/{name}": value for name, value in found_all.items()}

    def _loader(self) -> Loader:
        size = len(self._dataset)  # type: ignore[arg-type]
        place_ = self._strategy.place
        batch = self._settings.eval.eval_batch_size or self._settings.batch.batch_size
        cursor = Cursor(start=0, end=size, global_batch=size, micro_batch=batch, rank=place_.rank, world=place_.world)
        order = Order(size, self._seed, shuffle=False)
        pin = place_.device.type == "cuda"
        return Loader(self._dataset, self._recipe.collate, order, cursor, self._settings.data, pin)

    def _evaluate(self, model: nn.Module, data: Any, positions: Tensor) -> Mapping[str, Any]:
        with autocast(self._strategy.place.device, self._settings.precision):
            return self._recipe.evaluate(model, data, Noise(self._seed, positions))

    def _add(self, found: Any, sums: dict[str, Tensor], metrics: dict[str, Any], weight: float) -> None:
        if not isinstance(found, Mapping):
            raise RecipeError(f"evaluate() returned {type(found).__name__}; return a mapping of name -> (sum, count)")
        for name, value in found.items():
            if _is_metric(value):
                metrics[name] = value
                if weight == 0:  # a rank that stands in has no sample of its own: nothing else is in there
                    value.reset()
                continue
            if not isinstance(value, tuple) or len(value) != 2:
                raise RecipeError(f"evaluate(): {name} must be a (sum, count) pair or a torchmetrics object")
            device = self._strategy.place.device
            pair = torch.stack(
                [torch.as_tensor(part, device=device, dtype=torch.float64).reshape(()) for part in value]
            )
            sums[name] = sums.get(name, torch.zeros_like(pair)) + pair * weight

    def _over_ranks(self, sums: dict[str, Tensor]) -> dict[str, float]:
        mine = {name: pair.tolist() for name, pair in sums.items()}
        parts = self._agreement.agree_all(mine)  # by name: a rank may have met metrics that others have not
        names = sorted({name for part in parts for name in part})
        pairs = {
            name: [sum(column) for column in zip(*(p[name] for p in parts if name in p), strict=True)] for name in names
        }
        return {name: total / count if count else 0.0 for name, (total, count) in pairs.items()}

    def _computed(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """torchmetrics objects, added up here: their own synchronisation fails where a rank had no sample."""
        mine = {name: copy.deepcopy(metric).cpu() for name, metric in metrics.items() if metric.update_called}
        for metric in metrics.values():
            metric.reset()
        whole: dict[str, Any] = {}
        for part in self._agreement.agree_all(mine):
            for name, metric in part.items():
                metric.sync_on_compute = False
                if name in whole:
                    whole[name].merge_state(metric)
                else:
                    whole[name] = metric
        return {name: float(whole[name].compute()) for name in sorted(whole)}


def _is_metric(value: Any) -> bool:
    return all(callable(getattr(value, method, None)) for method in ("update", "compute", "reset", "to"))
