"""Evaluation over all ranks: every sample once, metrics exact.

Each rank takes a share of the data in batches of nearly equal size (or cost, where samples differ in shape), so that
no rank waits for another. What a recipe returns adds up: sums with counts, or torchmetrics objects, which know how to
add up themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from unisono.cluster.agree import Agreement, Pending
from unisono.cluster.pulse import Pulse
from unisono.cluster.signals import StopRequest
from unisono.data.bits import Purpose, key_of
from unisono.data.loader import BadSample, Cursor, Loader, on_device, place
from unisono.data.noise import Noise
from unisono.data.order import Order
from unisono.data.resident import ResidentLoader, gathered, is_resident
from unisono.data.shapes import shapes_of
from unisono.engine.memory import in_one_line, is_out_of_memory
from unisono.engine.precision import autocast
from unisono.engine.recipe import Recipe
from unisono.errors import RecipeError, TrainingFailed
from unisono.parallel.strategy import Strategy
from unisono.settings import Settings

_MANY = 100
_GROUPED = 2**16  # samples among which those of one shape find each other: a list of millions would be long


class Evaluation:
    """Evaluates a recipe's model on its "eval" data."""

    def __init__(
        self,
        recipe: Recipe,
        strategy: Strategy,
        dataset: Dataset[Any],
        settings: Settings,
        agreement: Agreement,
        pulse: Pulse,
        stop: StopRequest,
    ) -> None:
        if recipe.coupled and type(recipe).evaluate is Recipe.evaluate:
            raise RecipeError(
                f"{type(recipe).__name__} has data to evaluate on and a loss that compares samples, which no share of "
                "that data can give; write evaluate(), or return None for that data"
            )
        self._recipe, self._strategy, self._settings = recipe, strategy, settings
        self._dataset = dataset.to(strategy.place.device) if is_resident(dataset) else dataset
        self._agreement, self._pulse, self._stop = agreement, pulse, stop
        self._seed = key_of(Purpose.EVALUATION, settings.run.seed)
        self._batch = settings.eval.eval_batch_size or settings.batch.batch_size
        self.bad: list[BadSample] = []  # samples that could not be read, on all ranks
        for metric in _metrics_in(vars(recipe)):
            metric.to(strategy.place.device)

    def run(self, step: int) -> dict[str, float | list[float]] | None:
        """The metrics over the whole evaluation set, named eval/…; the same on every rank.

        None when somebody asked the run to stop before it was over.
        """
        while True:
            sums: dict[str, Tensor] = {}  # name -> [sum, count] of this rank, or [sums, counts] of a curve
            metrics: dict[str, Any] = {}
            with self._strategy.evaluating(), closing(self._loader()) as loader:
                # A forward pass without backward leaves gathered weights behind, also one that failed.
                failure, stopped = self._over_data(loader, step, sums, metrics)
            self._strategy.weights_changed()
            if stopped or failure:  # also those that a batch has updated and, failing, not returned
                for metric in [*metrics.values(), *_metrics_in(vars(self._recipe))]:
                    metric.reset()
            if stopped:
                return None
            if not failure:
                found_all = self._over_ranks(sums) | self._computed(metrics)
                return {f"eval/{name}": value for name, value in found_all.items()}
            self._batch = -(-self._batch // 2)

    def _over_data(
        self, loader: Loader | ResidentLoader, step: int, sums: dict[str, Tensor], metrics: dict[str, Any]
    ) -> tuple[bool, bool]:
        """One pass over this rank's share; whether any rank ran out of memory, and whether all shall stop."""
        self._strategy.share_buffers()
        self._begin(step)
        failure: str | None = None
        bad: list[BadSample] = []
        asked: Pending | None = None
        device = self._strategy.place.device
        floating = torch.float64 if self._settings.precision.dtype == "float64" else None
        for micro in loader:
            if asked is not None and asked.read()["stop"]:  # asked a batch ago: the answer is there
                return False, True
            asked = self._agreement.start({"stop": self._stop.requested is not None})
            bad += micro.bad
            try:
                self._pulse.at("evaluate", step)
                if failure is not None:
                    continue
                recipe = _twin(self._recipe) if micro.stand_in else self._recipe
                positions = on_device(micro.positions, device)
                call = partial(self._evaluate, recipe)
                found = self._strategy.infer(call, place(gathered(micro.data), device, floating), positions)
                self._add(found, sums, metrics, weight=0.0 if micro.stand_in else 1.0)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failure, found = in_one_line(error), None
                error.__traceback__ = None
                if self._strategy.sharded or self._batch == 1:
                    less = "use a smaller eval_batch_size" if self._batch > 1 else "even one sample does not fit"
                    raise TrainingFailed(
                        f"step {step}: out of memory in the evaluation, with {self._batch} at once: {failure}; "
                        f"{less}; training can go on from the last checkpoint (eval_every -1: without evaluation)"
                    ) from None
        self._pulse.at("evaluate", step)  # done with its data: one that still computes is less far
        if asked is not None and asked.read()["stop"]:
            return False, True
        agreed = self._agreement.start({"oom": failure is not None, "bad": len(bad)}).read()
        self.bad = [sample for part in self._agreement.agree_all(bad) for sample in part] if agreed["bad"] else []
        if len(self.bad) > self._settings.data.max_bad_samples:
            limit = self._settings.data.max_bad_samples
            raise TrainingFailed(
                f"evaluation: {len(self.bad)} bad samples, max_bad_samples is {limit}: {self.bad[0]}; "
                "mend the data, or raise max_bad_samples to leave them out"
            )
        return bool(agreed["oom"]), False

    def _begin(self, step: int) -> None:
        if type(self._recipe).before_evaluation is Recipe.before_evaluation:
            return
        self._pulse.at("evaluate", step)
        try:
            with autocast(self._strategy.place.device, self._settings.precision):
                self._strategy.infer(self._recipe.before_evaluation)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise TrainingFailed(
                f"step {step}: out of memory before the evaluation: {in_one_line(error)}; training can go on from the "
                "last checkpoint (eval_every -1: without evaluation)"
            ) from None

    def _loader(self) -> Loader | ResidentLoader:
        size = len(self._dataset)  # type: ignore[arg-type]
        place_ = self._strategy.place
        order = Order(size, self._seed, shuffle=False)
        shapes = shapes_of(self._dataset, order)
        cursor = Cursor(
            start=0,
            end=size,
            global_batch=size if shapes is None else min(size, _GROUPED),
            micro_batch=self._batch,
            rank=place_.rank,
            world=place_.world,
            shapes=shapes,
        )
        if is_resident(self._dataset):
            return ResidentLoader(self._dataset, order, cursor, place_.device)
        pin = place_.device.type == "cuda"
        return Loader(self._dataset, self._recipe.collate, order, cursor, self._settings.data, pin)

    def _evaluate(self, recipe: Recipe, model: nn.Module, data: Any, positions: Tensor) -> Mapping[str, Any]:
        with autocast(self._strategy.place.device, self._settings.precision):
            return recipe.evaluate(model, data, Noise(self._seed, positions))

    def _add(self, found: Any, sums: dict[str, Tensor], metrics: dict[str, Any], weight: float) -> None:
        if not isinstance(found, Mapping):
            raise RecipeError(f"evaluate() returned {type(found).__name__}; return a mapping of name -> (sum, count)")
        for name, value in found.items():
            if _is_metric(value):
                if weight:  # of a stand-in it is the twin's
                    metrics[name] = value
                continue
            if not isinstance(value, tuple) or len(value) != 2:
                raise RecipeError(f"evaluate(): {name} must be a (sum, count) pair or a torchmetrics object")
            device = self._strategy.place.device
            total, count = (torch.as_tensor(part, device=device, dtype=torch.float64) for part in value)
            if total.numel() == 1 and count.dim() == 0:  # a number in brackets; a curve of one point has counts
                total = total.reshape(())
            if total.dim() > 1 or (count.numel() != 1 and count.shape != total.shape):
                raise RecipeError(f"evaluate(): {name} must be a number or a curve (one dimension), as (sum, count)")
            pair = torch.stack([total, count.reshape(()).expand_as(total) if count.numel() == 1 else count])
            before = sums.setdefault(name, torch.zeros_like(pair))
            if before.shape != pair.shape:
                raise RecipeError(_other_length(name, before.shape[1:], pair.shape[1:]))
            sums[name] = before + pair * weight

    def _over_ranks(self, sums: dict[str, Tensor]) -> dict[str, float | list[float]]:
        mine = {name: pair.tolist() for name, pair in sums.items()}
        parts = self._agreement.agree_all(mine)  # by name: a rank may have met metrics that others have not
        names = sorted({name for part in parts for name in part})
        found: dict[str, float | list[float]] = {}
        for name in names:
            pairs = [torch.tensor(part[name], dtype=torch.float64) for part in parts if name in part]
            for pair in pairs:
                if pair.shape != pairs[0].shape:
                    raise RecipeError(_other_length(name, pairs[0].shape[1:], pair.shape[1:]))
            total, count = torch.stack(pairs).sum(0)
            found[name] = torch.where(count != 0, total / count, 0.0).tolist()
        return found

    def _computed(self, metrics: Mapping[str, Any]) -> dict[str, float | list[float]]:
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
        found: dict[str, float | list[float]] = {}
        for name in sorted(whole):
            computed = whole[name].compute()
            several = computed if isinstance(computed, Mapping) else {name: computed}
            found |= {key: float(value) for key, value in several.items()}
        return found


def _other_length(name: str, *shapes: torch.Size) -> str:
    found = " and ".join(f"{shape[0]} points" if shape else "a number" for shape in shapes)
    return f"evaluate(): {name} was {found}; a curve must be as long in every batch"


def _twin(recipe: Recipe) -> Recipe:
    """The recipe with copies of its metrics: what a stand-in adds to them is forgotten, whatever they held before."""
    twin = copy.copy(recipe)
    for name, value in vars(recipe).items():
        if next(_metrics_in(value), None) is not None:
            setattr(twin, name, copy.deepcopy(value))
    return twin


def _metrics_in(value: Any) -> Iterator[Any]:
    """torchmetrics objects in what a recipe holds, also in lists and mappings (of data, when they are long)."""
    if _is_metric(value):
        yield value
    elif isinstance(value, Mapping | nn.ModuleDict | list | tuple | nn.ModuleList) and len(value) <= _MANY:
        for inside in value.values() if isinstance(value, Mapping | nn.ModuleDict) else value:
            yield from _metrics_in(inside)


def _is_metric(value: Any) -> bool:
    return all(callable(getattr(value, method, None)) for method in ("update", "compute", "reset", "to"))
