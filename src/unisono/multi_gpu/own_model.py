"""A recipe made of what the user has: a model, data sets, a loss function, an optimizer, a scheduler."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
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
from unisono.multi_gpu.loss import LossFunction, check_loss, loss_of, same_weights_everywhere
from unisono.optim.named import OPTIMIZERS
from unisono.parallel.blocks import repeated_blocks
from unisono.settings import Settings


@dataclass
class Given:
    """What the user brings."""

    model: nn.Module
    train: Dataset[Any]
    val: Dataset[Any] | None = None
    loss_fn: LossFunction | None = None
    optimizer: Any = None  # an optimizer, its class, its name, or a function of the parameters
    scheduler: Any = None  # a scheduler, or a function of the optimizer
    collate: Callable[[list[Any]], Any] | None = None
    every_step: bool = False  # the scheduler is stepped after every step
    ranks: int = 1
    drops: int = 0  # a last batch of an epoch with fewer samples than this is left out, as drop_last of a loader does
    names: dict[int, str] = field(default_factory=dict)  # of the weights, by id: sharding replaces them

    def __post_init__(self) -> None:
        while isinstance(self.model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            self.model = self.model.module
        if not isinstance(self.model, nn.Module):
            raise RecipeError(f"model: expected a torch.nn.Module, got {type(self.model).__name__}")
        check_loss(self.loss_fn)
        for name, data in (("train", self.train), ("validation", self.val)):
            if data is not None and not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
                raise RecipeError(
                    f"the {name} data ({type(data).__name__}) cannot be read by number; give a data set with __len__ "
                    "and __getitem__ (an IterableDataset has no order that resume could go on with)"
                )
        self.names = {id(parameter): name for name, parameter in self.model.named_parameters()}

    def samples_per_epoch(self) -> int | None:
        """How many samples an epoch reads, where that is not all of them."""
        if not self.drops:
            return None
        num = len(self.train)  # type: ignore[arg-type]
        if 0 < num < self.drops:
            raise ConfigError(
                f"drop_last=True leaves nothing to train on: the data have {num} samples, a batch {self.drops}; "
                "use a smaller batch, or drop_last=False"
            )
        return num // self.drops * self.drops or None


@dataclass
class Story:
    """What a run of epochs remembers of itself."""

    epochs: list[dict[str, Any]] = field(default_factory=list)  # what each has brought
    total: float = 0.0  # of the epoch under way
    count: float = 0.0
    steps_scheduled: int = 0
    saved_epoch: int = -1  # the number that the caller gave to the last checkpoint of his own
    saved_at: int = -1  # samples consumed by then

    def add(self, report: StepReport) -> None:
        """Notes a step of the epoch under way."""
        if not report.skipped and math.isfinite(report.loss):
            self.total, self.count = self.total + report.loss * report.count, self.count + report.count

    def end_epoch(self, number: int) -> dict[str, float]:
        """What the epoch has brought."""
        loss = self.total / self.count if self.count else math.nan
        self.total = self.count = 0.0
        self.epochs.append({"epoch": number, "train_loss": loss})
        return {"train_loss": loss}

    def save(self, number: int, samples: int) -> None:
        """The caller saves a checkpoint with this number, after so many samples."""
        self.saved_epoch, self.saved_at = number, samples

    def number(self, samples: int) -> int:
        """Of the epoch that a checkpoint after so many samples has behind it, as the caller counts; or -1."""
        if samples == self.saved_at or not self.epochs:
            return self.saved_epoch
        return int(self.epochs[-1]["epoch"])


class OwnModel(Recipe):
    """Trains what the user brings; made anew for each trainer, with `given` filled in."""

    whole_epochs = True  # an epoch is a loop of the user's: it must end where it ends
    given: ClassVar[Given | None] = None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.story = Story()
        self._settings = Settings()
        self._optimizer: Optimizer | None = None
        self._scheduler: Any = None

    @property
    def _given(self) -> Given:
        if self.given is None:
            raise RecipeError(
                "the model of this run came from a script, which is not stored; there, unisono.multi_gpu.load_weights "
                "gives its weights"
            )
        return self.given

    def check_settings(self, settings: Settings) -> None:
        """Keeps them, for the optimizer."""
        self._settings = settings

    def model(self) -> nn.Module:
        given = self._given
        if given.ranks > 1:
            same_weights_everywhere(given.model)
        return given.model

    def dataset(self, split: str) -> Dataset[Any] | None:
        return self._given.train if split == "train" else self._given.val

    def collate(self, items: list[Any]) -> Any:
        own = self._given.collate
        return super().collate(items) if own is None else own(items)

    def loss(self, model: nn.Module, batch: Any, noise: Noise) -> Loss:
        return loss_of(model, batch, self._given.loss_fn)

    # --- optimizer and scheduler

    def optimizer(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        own, named = self._given.optimizer, list(parameters)
        if own is None or isinstance(own, str):
            settings = self._settings.optim
            if own is None or own.lower() in OPTIMIZERS:
                settings = settings if own is None else replace(settings, optimizer=own)
                others = not_for_muon(self._given.model, repeated_blocks(self._given.model))
                self._optimizer = from_settings(named, settings, shards=self.shards, not_for_muon=others)
            else:
                kind, rate = named_optimizer(own), settings.learning_rate
                self._optimizer = kind(named, lr=rate, weight_decay=settings.weight_decay)  # type: ignore[call-arg]
        elif isinstance(own, Optimizer):
            self._optimizer = self._over(own, dict(named))
        elif isinstance(own, type) and issubclass(own, Optimizer):
            self._optimizer = own(named, lr=self._settings.optim.learning_rate)  # type: ignore[call-arg]
        elif callable(own):
            self._optimizer = own([parameter for _, parameter in named])
        else:
            raise ConfigError(f"optimizer: expected a torch.optim.Optimizer, got {type(own).__name__}")
        self._take_scheduler()
        return self._optimizer  # the engine checks what a function has returned

    def _over(self, own: Optimizer, here: Mapping[str, nn.Parameter]) -> Optimizer:
        """The user's optimizer; where weights are shards by now, one like it over these."""
        groups: list[dict[str, Any]] = []
        for group in own.param_groups:
            names = [self._given.names.get(id(parameter)) for parameter in group["params"]]
            if None in names:
                raise ConfigError("optimizer holds weights that are not the model's; make it of model.parameters()")
            groups.append({**group, "params": [here[name] for name in names if name is not None and name in here]})
            groups[-1].pop("param_names", None)
        same = all(
            mine is theirs
            for group, new in zip(own.param_groups, groups, strict=True)
            for mine, theirs in zip(group["params"], new["params"], strict=False)
        )
        if same:
            return own
        if own.state:
            raise ConfigError(
                "optimizer has already stepped; under strategy sharded give a new one, or load_checkpoint"
            )
        return type(own)(groups, **own.defaults)

    def _take_scheduler(self) -> None:
        own = self._given.scheduler
        _check_scheduler(own, self._given.optimizer)
        if own is None or hasattr(own, "step"):
            self._scheduler = own
            for scheduler in _all_in(own):
                scheduler.optimizer = self._optimizer
        elif callable(own):
            self._scheduler = own(self._optimizer)
        else:
            raise ConfigError(f"scheduler: expected one of torch.optim.lr_scheduler, got {type(own).__name__}")

    def learning_rate(self, step: int) -> list[float]:
        """As the optimizer has it: its rates are the user's, who may also set them by hand."""
        assert self._optimizer is not None
        if self._given.every_step and self._scheduler is not None:
            while self.story.steps_scheduled < step:
                self.story.steps_scheduled += 1
                self._step_scheduler()
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def epoch_over(self, loss: float, *, validated: bool) -> None:
        """Steps a scheduler that goes by epochs; one that looks at a loss, when there is the one to look at."""
        if self._scheduler is None or self._given.every_step:
            return
        plateau = isinstance(self._scheduler, ReduceLROnPlateau)
        if plateau and validated == (self._given.val is not None):
            self._step_scheduler(loss)
        elif not plateau and not validated:
            self._step_scheduler()

    def _step_scheduler(self, *arguments: float) -> None:
        with warnings.catch_warnings():
            # A rebuilt optimizer is not the one that the scheduler was made with.
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step|.*overridden after learning rate")
            self._scheduler.step(*arguments)

    # --- what a checkpoint keeps of it

    def remember(self) -> dict[str, Any]:
        rates = [] if self._optimizer is None else [float(group["lr"]) for group in self._optimizer.param_groups]
        schedules = [_plain(scheduler.state_dict()) for scheduler in _all_in(self._scheduler)]
        return {**vars(self.story), "rates": rates, "schedules": schedules}

    def recall(self, remembered: Any) -> None:
        known = remembered if isinstance(remembered, dict) else {}
        story = Story()
        for name, before in vars(story).items():
            value = known.get(name, before)
            if type(value) is type(before) or (isinstance(before, float) and isinstance(value, int)):
                setattr(story, name, value)
        story.epochs = [row for row in story.epochs if isinstance(row, dict) and isinstance(row.get("epoch"), int)]
        self.story = story
        rates, groups = known.get("rates"), [] if self._optimizer is None else self._optimizer.param_groups
        if isinstance(rates, list) and len(rates) == len(groups):
            for group, rate in zip(groups, rates, strict=True):
                if isinstance(rate, int | float) and math.isfinite(rate):
                    group["lr"] = torch.full_like(group["lr"], rate) if torch.is_tensor(group["lr"]) else float(rate)
        schedules = known.get("schedules")
        for scheduler, state in zip(
            _all_in(self._scheduler), schedules if isinstance(schedules, list) else [], strict=False
        ):
            _fill(scheduler, state)


def _check_scheduler(own: Any, optimizer: Any) -> None:
    """Refuses one that would do nothing, or something else."""
    if isinstance(own, Optimizer):
        raise ConfigError(f"scheduler: {type(own).__name__} is an optimizer; give it as optimizer=")
    if isinstance(own, type):
        raise ConfigError(
            f"scheduler is the class {own.__name__}; give one of your optimizer, or a function that makes it: "
            f"lambda optimizer: {own.__name__}(optimizer, …)"
        )
    theirs = getattr(own, "optimizer", None)
    if isinstance(theirs, Optimizer) and theirs is not optimizer:
        raise ConfigError(
            "scheduler changes the rate of another optimizer; give the one it was made with as optimizer="
        )


def _all_in(scheduler: Any) -> list[Any]:
    """A scheduler and those inside it (SequentialLR, ChainedScheduler)."""
    if scheduler is None:
        return []
    return [scheduler, *(each for inner in getattr(scheduler, "_schedulers", ()) for each in _all_in(inner))]


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON can hold of a scheduler's state; its functions and tables are the script's own."""
    return {name: value for name, value in state.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))


def _fill(scheduler: Any, state: Any) -> None:
    """Takes up numbers that the scheduler has itself, in the types it has them in: the file may say anything."""
    if not isinstance(state, dict):
        return
    # LambdaLR tells None for each function of the script's.
    own = {
        name: value for name, value in _plain(scheduler.state_dict()).items() if _is_plain(getattr(scheduler, name, 0))
    }
    for name, value in state.items():
        if name in own and _is_plain(value) and (own[name] is None or isinstance(value, type(own[name]))):
            setattr(scheduler, name, value)
