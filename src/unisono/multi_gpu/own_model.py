"""A recipe that consists of the user's own model, datasets, loss function, optimizer and scheduler."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Dataset

from unisono.data.noise import Noise
from unisono.engine.recipe import Loss, Recipe
from unisono.engine.step.make_optimizer import from_settings, named_optimizer, not_for_muon
from unisono.engine.step.optimizer_step import StepReport
from unisono.errors import ConfigError, RecipeError
from unisono.multi_gpu.loss import LossFunction, broadcast_weights, check_loss, loss_of
from unisono.optim.base import ShardAwareOptimizer
from unisono.optim.named import OPTIMIZERS
from unisono.parallel.blocks.repeated import repeated_blocks
from unisono.settings import Settings


@dataclass
class UserParts:
    """The objects that the user passes to a trainer."""

    model: nn.Module
    train: Dataset[Any]
    val: Dataset[Any] | None = None
    loss_fn: LossFunction | None = None
    optimizer: Any = None  # an optimizer, a class, a name, or a function of the parameters that returns one
    scheduler: Any = None  # a scheduler, or a function of the optimizer that returns one
    collate: Callable[[list[Any]], Any] | None = None
    schedule_every_step: bool = False
    num_ranks: int = 1
    least_batch: int = 0  # an epoch drops its last batch if that has fewer samples (a loader's drop_last)
    parameter_names: dict[int, str] = field(default_factory=dict)  # names by id() of the original parameters

    def __post_init__(self) -> None:
        while isinstance(self.model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            self.model = self.model.module
        if not isinstance(self.model, nn.Module):
            raise RecipeError(f"model: expected a torch.nn.Module, got {type(self.model).__name__}")
        check_loss(self.loss_fn)
        for name, data in (("train", self.train), ("validation", self.val)):
            if data is not None and not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
                raise RecipeError(
                    f"the {name} dataset ({type(data).__name__}) cannot be indexed; pass a dataset with __len__ and "
                    "__getitem__ (a run could not resume in the middle of an IterableDataset)"
                )
        self.parameter_names = {id(parameter): name for name, parameter in self.model.named_parameters()}

    @property
    def named_optimizer(self) -> str | None:
        """The optimizer's name if the user chose one of `unisono.optim` by name; otherwise None."""
        is_named = isinstance(self.optimizer, str) and self.optimizer.lower() in OPTIMIZERS
        return self.optimizer.lower() if is_named else None

    def samples_per_epoch(self) -> int | None:
        """Returns the number of samples that an epoch reads; None for all samples."""
        if not self.least_batch:
            return None
        num = len(self.train)  # type: ignore[arg-type]
        if 0 < num < self.least_batch:
            raise ConfigError(
                f"drop_last=True drops all samples, because the dataset has only {num} samples and the batch size is "
                f"{self.least_batch}; use a smaller batch size, or drop_last=False"
            )
        return num // self.least_batch * self.least_batch or None


@dataclass
class EpochLog:
    """The results of the epochs so far; stored in checkpoints."""

    epochs: list[dict[str, Any]] = field(default_factory=list)  # the result of each epoch
    total: float = 0.0  # sum of the losses of the current epoch
    count: float = 0.0
    steps_scheduled: int = 0
    saved_epoch: int = -1  # epoch number that the caller passed to save_checkpoint last
    saved_at: int = -1  # number of samples consumed when that checkpoint was saved

    def add(self, report: StepReport) -> None:
        """Adds a step of the current epoch."""
        if not report.skipped and math.isfinite(report.loss):
            self.total, self.count = self.total + report.loss * report.count, self.count + report.count

    def end_epoch(self, number: int) -> dict[str, float]:
        """Ends the current epoch and returns its result."""
        loss = self.total / self.count if self.count else math.nan
        self.total = self.count = 0.0
        self.epochs.append({"epoch": number, "train_loss": loss})
        return {"train_loss": loss}

    def save(self, number: int, samples: int) -> None:
        """Records that the caller saves a checkpoint for epoch `number`, after `samples` samples."""
        self.saved_epoch, self.saved_at = number, samples

    def last_epoch(self, samples: int) -> int:
        """Returns the last epoch (in the caller's numbering) in a checkpoint after `samples` samples; -1 if none."""
        if samples == self.saved_at or not self.epochs:
            return self.saved_epoch
        return int(self.epochs[-1]["epoch"])


class OwnModel(Recipe):
    """Trains the user's model; each trainer creates a subclass with its own `parts`."""

    built_by_rank_zero = False  # every rank has its own model before the run begins, and model() broadcasts its weights
    whole_epochs = True  # a global batch must end with its epoch, because the user's loop starts the next one
    parts: ClassVar[UserParts | None] = None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.log = EpochLog()
        self._settings = Settings()
        self._optimizer: Optimizer | None = None
        self._scheduler: Any = None

    @property
    def _parts(self) -> UserParts:
        if self.parts is None:
            raise RecipeError(
                "the model of this run was defined in a script, and the run folder does not contain that script; load "
                "the weights in the script with unisono.multi_gpu.load_weights"
            )
        return self.parts

    def check_settings(self, settings: Settings) -> None:
        """Stores the settings, which `optimizer` uses later."""
        self._settings = settings

    def model(self) -> nn.Module:
        parts = self._parts
        if parts.num_ranks > 1:
            broadcast_weights(parts.model)
        return parts.model

    def dataset(self, split: str) -> Dataset[Any] | None:
        return self._parts.train if split == "train" else self._parts.val

    def collate(self, items: list[Any]) -> Any:
        collate = self._parts.collate or super().collate
        return collate(items)

    def loss(self, model: nn.Module, batch: Any, noise: Noise) -> Loss:
        return loss_of(model, batch, self._parts.loss_fn)

    # --- optimizer and scheduler

    def optimizer(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        user_optimizer, named = self._parts.optimizer, list(parameters)
        settings = self._settings.optim
        if user_optimizer is None or self._parts.named_optimizer is not None:
            others = not_for_muon(self._parts.model, repeated_blocks(self._parts.model))
            self._optimizer = from_settings(named, settings, shards=self.shards, not_for_muon=others)
        elif isinstance(user_optimizer, str):
            options = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
            self._optimizer = named_optimizer(user_optimizer)(named, **options)  # type: ignore[arg-type]
        elif isinstance(user_optimizer, Optimizer):
            self._optimizer = self._with_current_weights(user_optimizer, dict(named))
        elif isinstance(user_optimizer, type) and issubclass(user_optimizer, Optimizer):
            options = {"lr": settings.learning_rate, **self._shards_for(user_optimizer)}
            self._optimizer = user_optimizer(named, **options)  # type: ignore[arg-type]
        elif callable(user_optimizer):
            self._optimizer = user_optimizer([parameter for _, parameter in named])
        else:
            raise ConfigError(f"optimizer: expected a torch.optim.Optimizer, got {type(user_optimizer).__name__}")
        self._make_scheduler()
        return self._optimizer  # the engine checks the result of a user's function

    def _with_current_weights(self, optimizer: Optimizer, weights: Mapping[str, nn.Parameter]) -> Optimizer:
        """Returns the user's optimizer, or a new one with the same options if sharding has replaced the weights."""
        groups: list[dict[str, Any]] = []
        for group in optimizer.param_groups:
            names = [self._parts.parameter_names.get(id(parameter)) for parameter in group["params"]]
            if None in names:
                raise ConfigError("optimizer has weights of another model; create it from model.parameters()")
            groups.append({**group, "params": [weights[name] for name in names if name and name in weights]})
            groups[-1].pop("param_names", None)
        is_unchanged = all(
            before is now
            for group, new in zip(optimizer.param_groups, groups, strict=True)
            for before, now in zip(group["params"], new["params"], strict=False)
        )
        if is_unchanged:
            return optimizer
        if optimizer.state:
            raise ConfigError(
                "optimizer has already made steps; with strategy sharded, pass a new one or use load_checkpoint"
            )
        return type(optimizer)(groups, **optimizer.defaults, **self._shards_for(type(optimizer)))

    def _shards_for(self, kind: type[Optimizer]) -> dict[str, Any]:
        return {"shards": self.shards} if issubclass(kind, ShardAwareOptimizer) else {}

    def _make_scheduler(self) -> None:
        user_scheduler = self._parts.scheduler
        _check_scheduler(user_scheduler, self._parts.optimizer)
        if user_scheduler is None or hasattr(user_scheduler, "step"):
            self._scheduler = user_scheduler
            for scheduler in _nested_schedulers(user_scheduler):
                scheduler.optimizer = self._optimizer
        elif callable(user_scheduler):
            self._scheduler = user_scheduler(self._optimizer)
        else:
            kind = type(user_scheduler).__name__
            raise ConfigError(f"scheduler: expected a scheduler of torch.optim.lr_scheduler, got {kind}")

    def learning_rate(self, step: int) -> list[float]:
        """Returns the learning rate of each parameter group, as set by the user's scheduler or code."""
        assert self._optimizer is not None
        if self._parts.schedule_every_step and self._scheduler is not None:
            while self.log.steps_scheduled < step:
                self.log.steps_scheduled += 1
                self._step_scheduler()
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def end_epoch(self, loss: float, *, validated: bool) -> None:
        """Steps a scheduler that counts epochs. ReduceLROnPlateau gets the validation loss if there is one."""
        if self._scheduler is None or self._parts.schedule_every_step:
            return
        watches_loss = isinstance(self._scheduler, ReduceLROnPlateau)
        if watches_loss and validated == (self._parts.val is not None):
            self._step_scheduler(loss)
        elif not watches_loss and not validated:
            self._step_scheduler()

    def _step_scheduler(self, *arguments: float) -> None:
        with warnings.catch_warnings():
            # Torch warns if the scheduler was created with a different optimizer.
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step|.*overridden after learning rate")
            self._scheduler.step(*arguments)

    # --- state in checkpoints

    def remember(self) -> dict[str, Any]:
        rates = [] if self._optimizer is None else [float(group["lr"]) for group in self._optimizer.param_groups]
        schedules = [_plain(scheduler.state_dict()) for scheduler in _nested_schedulers(self._scheduler)]
        return {**vars(self.log), "rates": rates, "schedules": schedules}

    def recall(self, remembered: Any) -> None:
        stored = remembered if isinstance(remembered, dict) else {}
        log = EpochLog()
        for name, default in vars(log).items():
            value = stored.get(name, default)
            if type(value) is type(default) or (isinstance(default, float) and isinstance(value, int)):
                setattr(log, name, value)
        log.epochs = [row for row in log.epochs if isinstance(row, dict) and isinstance(row.get("epoch"), int)]
        self.log = log
        rates, groups = stored.get("rates"), [] if self._optimizer is None else self._optimizer.param_groups
        if isinstance(rates, list) and len(rates) == len(groups):
            for group, rate in zip(groups, rates, strict=True):
                if isinstance(rate, int | float) and math.isfinite(rate):
                    group["lr"] = torch.full_like(group["lr"], rate) if torch.is_tensor(group["lr"]) else float(rate)
        schedules = stored.get("schedules")
        states = schedules if isinstance(schedules, list) else []
        for scheduler, state in zip(_nested_schedulers(self._scheduler), states, strict=False):
            _restore(scheduler, state)


def _check_scheduler(scheduler: Any, optimizer: Any) -> None:
    """Raises ConfigError for a scheduler that would have no effect."""
    if isinstance(scheduler, Optimizer):
        raise ConfigError(f"scheduler: {type(scheduler).__name__} is an optimizer; pass it as optimizer=")
    if isinstance(scheduler, type):
        name = scheduler.__name__
        raise ConfigError(
            f"scheduler is the class {name}; pass an instance for your optimizer, or a function that creates one: "
            f"lambda optimizer: {name}(optimizer, …)"
        )
    scheduled = getattr(scheduler, "optimizer", None)
    if isinstance(scheduled, Optimizer) and scheduled is not optimizer:
        raise ConfigError("scheduler changes the learning rate of another optimizer; pass that optimizer as optimizer=")


def _nested_schedulers(scheduler: Any) -> list[Any]:
    """Returns a scheduler and the schedulers inside it (SequentialLR and ChainedScheduler contain others)."""
    if scheduler is None:
        return []
    inner = getattr(scheduler, "_schedulers", ())
    return [scheduler, *(nested for each in inner for nested in _nested_schedulers(each))]


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of a scheduler's state that JSON can store. The script defines functions and tables again."""
    return {name: value for name, value in state.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))


def _restore(scheduler: Any, state: Any) -> None:
    """Restores a scheduler's attributes. Ignores values of the wrong type, which a damaged file may contain."""
    if not isinstance(state, dict):
        return
    # LambdaLR's state contains None in place of functions, so the attribute itself is checked too.
    current = {
        name: value for name, value in _plain(scheduler.state_dict()).items() if _is_plain(getattr(scheduler, name, 0))
    }
    for name, value in state.items():
        if name in current and _is_plain(value) and (current[name] is None or isinstance(value, type(current[name]))):
            setattr(scheduler, name, value)
