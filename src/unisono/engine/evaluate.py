"""Evaluates on all ranks. Each sample is evaluated once, and the metrics are exact.

Each rank evaluates a share of the data in batches of nearly equal size (or cost, if samples differ in shape), so that
no rank waits for another. Recipes return metrics that can be summed: sums with counts, or torchmetrics objects, which
merge their own state.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unisono.cluster.agree import Pending
from unisono.data.bits import Purpose, key_of
from unisono.data.loader import BadSample, Cursor, Loader, MicroBatch, positions_tensor, to_device
from unisono.data.noise import Noise
from unisono.data.order import Order
from unisono.data.resident import ResidentLoader, gathered, is_resident
from unisono.data.shapes import shapes_of
from unisono.engine.recipe import Recipe
from unisono.engine.step.out_of_memory import in_one_line, is_out_of_memory
from unisono.engine.step.precision import autocast
from unisono.engine.training_run import TrainingRun
from unisono.errors import RecipeError, TrainingFailed
from unisono.formatting import format_count

_MANY = 100
_GROUPED = 2**16  # group this many samples by shape at a time, because sorting millions is slow


class Evaluation:
    """Evaluates a recipe's model on its "eval" data."""

    def __init__(self, run: TrainingRun) -> None:
        recipe, strategy, settings = run.components.recipe, run.components.strategy, run.settings
        dataset = run.datasets.evaluation
        assert dataset is not None
        if recipe.coupled and type(recipe).evaluate is Recipe.evaluate:
            raise RecipeError(
                f"{type(recipe).__name__} has evaluation data, but its loss compares all samples, and each rank "
                'evaluates only some of them; define evaluate(), or return None from dataset("eval")'
            )
        self._recipe, self._strategy, self._settings = recipe, strategy, settings
        self._dataset = dataset.to(strategy.placement.device) if is_resident(dataset) else dataset
        self._rank, self._agreement, self._heartbeat = run.rank, run.rank.agreement, run.rank.heartbeat
        self._seed = key_of(Purpose.EVALUATION, settings.run.seed)
        self._batch = settings.eval.eval_batch_size or settings.batch.batch_size
        self.bad: list[BadSample] = []  # samples that any rank could not read
        for metric in _metrics_in(vars(recipe)):
            metric.to(strategy.placement.device)

    def run(self, step: int) -> dict[str, float | list[float]] | None:
        """Returns the metrics over the whole evaluation set, named eval/…; the same on every rank.

        Returns None if a stop request came before the evaluation was complete.
        """
        while True:
            sums: dict[str, Tensor] = {}  # name -> [sum, count] of this rank, or [sums, counts] of a curve
            metrics: dict[str, Any] = {}
            with self._strategy.evaluating(), closing(self._loader()) as loader:
                # A forward pass without backward leaves gathered weights behind, even if it failed.
                failure, stopped = self._over_data(loader, step, sums, metrics)
            self._strategy.weights_changed()
            if stopped or failure:  # also resets metrics that a failed batch has updated but not returned
                for metric in [*metrics.values(), *_metrics_in(vars(self._recipe))]:
                    metric.reset()
            if stopped:
                return None
            if not failure:
                values = self._over_ranks(sums) | self._computed(metrics)
                return {f"eval/{name}": value for name, value in values.items()}
            self._batch = -(-self._batch // 2)

    def _over_data(
        self, loader: Loader | ResidentLoader, step: int, sums: dict[str, Tensor], metrics: dict[str, Any]
    ) -> tuple[bool, bool]:
        """Evaluates this rank's share; returns whether any rank ran out of memory, and whether all must stop."""
        self._strategy.share_buffers()
        self._begin(step)
        failure: str | None = None
        bad: list[BadSample] = []
        exchange: Pending | None = None  # whether any rank has a stop request
        for micro in loader:
            if exchange is not None and exchange.read()["stop"]:  # begun one batch ago, so this does not wait
                return False, True
            exchange = self._agreement.start({"stop": self._rank.is_asked_to_stop})
            bad += micro.bad if self._strategy.placement.counts else ()
            if failure is None:
                failure = self._over_batch(micro, step, sums, metrics)
            else:
                self._heartbeat.at("evaluate", step)
        self._heartbeat.at("evaluate", step)  # tells hang detection that this rank has finished its data and waits
        if exchange is not None and exchange.read()["stop"]:
            return False, True
        agreed = self._agreement.start({"oom": failure is not None, "bad": len(bad)}).read()
        self.bad = [sample for part in self._agreement.all_gather(bad) for sample in part] if agreed["bad"] else []
        if len(self.bad) > self._settings.data.max_bad_samples:
            limit = self._settings.data.max_bad_samples
            raise TrainingFailed(
                f"evaluation: {format_count(len(self.bad), 'bad sample')}, max_bad_samples is {limit}: {self.bad[0]}; "
                "fix the data, or raise max_bad_samples to skip such samples"
            )
        return bool(agreed["oom"]), False

    def _over_batch(self, micro: MicroBatch, step: int, sums: dict[str, Tensor], metrics: dict[str, Any]) -> str | None:
        """Adds the metrics of one batch; returns the allocator's message if memory ran out."""
        device = self._strategy.placement.device
        floating = torch.float64 if self._settings.precision.dtype == "float64" else None
        try:
            self._heartbeat.at("evaluate", step)
            counts = not micro.is_dummy and self._strategy.placement.counts
            recipe = self._recipe if counts else _with_copied_metrics(self._recipe)
            data = to_device(gathered(micro.data), device, floating)
            positions = positions_tensor(micro.positions, device)
            returned = self._strategy.infer(partial(self._evaluate, recipe), data, positions)
            self._add(returned, sums, metrics, weight=1.0 if counts else 0.0)
            return None
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = in_one_line(error)
            error.__traceback__ = None  # its frames hold activations
        waits_for_others = self._strategy.sharded or self._strategy.placement.context > 1
        if waits_for_others or self._batch == 1:
            remedy = "use a smaller eval_batch_size" if self._batch > 1 else "even one sample does not fit"
            raise TrainingFailed(
                f"step {step}: out of memory in the evaluation, with batches of {self._batch}: {failure}; {remedy}; "
                "training can continue from the last checkpoint (--eval_every -1 disables evaluation)"
            )
        return failure

    def _begin(self, step: int) -> None:
        if type(self._recipe).before_evaluation is Recipe.before_evaluation:
            return
        self._heartbeat.at("evaluate", step)
        try:
            with autocast(self._strategy.placement.device, self._settings.precision):
                self._strategy.infer(self._recipe.before_evaluation)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise TrainingFailed(
                f"step {step}: out of memory before the evaluation: {in_one_line(error)}; training can continue from "
                "the last checkpoint (--eval_every -1 disables evaluation)"
            ) from None

    def _loader(self) -> Loader | ResidentLoader:
        size = len(self._dataset)  # type: ignore[arg-type]
        placement = self._strategy.placement
        order = Order(size, self._seed, shuffle=False)
        shapes = shapes_of(self._dataset, order)
        cursor = Cursor(
            start=0,
            end=size,
            global_batch=size if shapes is None else min(size, _GROUPED),
            micro_batch=self._batch,
            rank=placement.data_rank,
            world=placement.data_world,
            shapes=shapes,
        )
        if is_resident(self._dataset):
            return ResidentLoader(self._dataset, order, cursor, placement.device)
        pin = placement.device.type == "cuda"
        return Loader(self._dataset, self._recipe.collate, order, cursor, self._settings.data, pin)

    def _evaluate(self, recipe: Recipe, model: nn.Module, data: Any, positions: Tensor) -> Mapping[str, Any]:
        with autocast(self._strategy.placement.device, self._settings.precision):
            return recipe.evaluate(model, data, Noise(self._seed, positions))

    def _add(self, returned: Any, sums: dict[str, Tensor], metrics: dict[str, Any], weight: float) -> None:
        if not isinstance(returned, Mapping):
            raise RecipeError(
                f"evaluate() returned {type(returned).__name__}; return a mapping of name -> (sum, count)"
            )
        for name, value in returned.items():
            if _is_metric(value):
                if weight:  # with weight 0, the metrics are copies, which are discarded
                    metrics[name] = value
                continue
            if not isinstance(value, tuple) or len(value) != 2:
                raise RecipeError(f"evaluate(): {name} must be a (sum, count) pair or a torchmetrics object")
            device = self._strategy.placement.device
            total, count = (torch.as_tensor(part, device=device, dtype=torch.float64) for part in value)
            if total.numel() == 1 and count.dim() == 0:  # a number; the count of a curve has a dimension
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
        by_rank = self._agreement.all_gather(mine)  # gathered by name, because ranks may have different metrics
        names = sorted({name for sums_of_rank in by_rank for name in sums_of_rank})
        means: dict[str, float | list[float]] = {}
        for name in names:
            pairs = [torch.tensor(part[name], dtype=torch.float64) for part in by_rank if name in part]
            for pair in pairs:
                if pair.shape != pairs[0].shape:
                    raise RecipeError(_other_length(name, pairs[0].shape[1:], pair.shape[1:]))
            total, count = torch.stack(pairs).sum(0)
            means[name] = torch.where(count != 0, total / count, 0.0).tolist()
        return means

    def _computed(self, metrics: Mapping[str, Any]) -> dict[str, float | list[float]]:
        """Merges torchmetrics objects across ranks: their own synchronisation fails if a rank had no sample."""
        mine = {name: copy.deepcopy(metric).cpu() for name, metric in metrics.items() if metric.update_called}
        for metric in metrics.values():
            metric.reset()
        whole: dict[str, Any] = {}
        for part in self._agreement.all_gather(mine):
            for name, metric in part.items():
                metric.sync_on_compute = metric._to_sync = False  # compute() reads only _to_sync
                if name in whole:
                    whole[name].merge_state(metric)
                else:
                    whole[name] = metric
        values: dict[str, float | list[float]] = {}
        for name in sorted(whole):
            computed = whole[name].compute()
            several = computed if isinstance(computed, Mapping) else {name: computed}
            values |= {key: float(value) for key, value in several.items()}
        return values


def _other_length(name: str, *shapes: torch.Size) -> str:
    lengths = " and ".join(f"{shape[0]} points" if shape else "a number" for shape in shapes)
    return f"evaluate(): {name} was {lengths}; a curve must have the same length in every batch"


def _with_copied_metrics(recipe: Recipe) -> Recipe:
    """Returns a recipe with copies of the metrics, so that a batch with weight 0 leaves the originals unchanged."""
    copied = copy.copy(recipe)
    for name, value in vars(recipe).items():
        if next(_metrics_in(value), None) is not None:
            setattr(copied, name, copy.deepcopy(value))
    return copied


def _metrics_in(value: Any) -> Iterator[Any]:
    """Yields the torchmetrics objects in a recipe's attributes, and in lists and mappings too short to contain data."""
    if _is_metric(value):
        yield value
    elif isinstance(value, Mapping | nn.ModuleDict | list | tuple | nn.ModuleList) and len(value) <= _MANY:
        for inside in value.values() if isinstance(value, Mapping | nn.ModuleDict) else value:
            yield from _metrics_in(inside)


def _is_metric(value: Any) -> bool:
    return all(callable(getattr(value, method, None)) for method in ("update", "compute", "reset", "to"))
