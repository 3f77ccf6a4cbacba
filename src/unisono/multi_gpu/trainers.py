"""Trainers with the methods people know: train_epoch, validate, save_checkpoint, load_checkpoint.

They are a front door: what happens behind it is the engine's loop, with its exact batch, its order of samples, its
answer to a lack of memory and its checkpoints. Each method is called by every process of the run.
"""

from __future__ import annotations

import atexit
import functools
import math
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn
from torch.utils.data import default_collate

from unisono.checkpoint.load import load_whole
from unisono.config.config_class import check_whole
from unisono.engine.resume import named_checkpoint
from unisono.engine.run_folder.new_folder import default_folder
from unisono.engine.start.driven import DrivenRun, DrivenTrainer
from unisono.engine.start.rank_start import RankStart
from unisono.engine.start.run import configure, with_absolute_paths
from unisono.errors import EXIT_STOPPED, ConfigError, TrainingFailed
from unisono.multi_gpu.checkpoint_paths import check_place, check_there
from unisono.multi_gpu.config import STRATEGIES, MultiGPUConfig
from unisono.multi_gpu.gpus import cleanup_distributed_training, memory_of, take_devices, world_for
from unisono.multi_gpu.model_dtype import dtype_settings
from unisono.multi_gpu.own_model import Given, OwnModel
from unisono.typed_paths import for_caller, note_start_folder

T = TypeVar("T")
P = ParamSpec("P")

job_start: RankStart | None = None
"""How this process came to run, where launch_multi_gpu_training started it."""


class TrainingError(TrainingFailed, RuntimeError):
    """Training cannot go on; also a RuntimeError, which loops of one's own catch."""


def _one_call(method: Callable[Concatenate[OwnTrainer, P], T]) -> Callable[Concatenate[OwnTrainer, P], T]:
    """A method that a stop signal lets finish; the signal is acted on when it returns."""

    @functools.wraps(method)
    def wrapped(self: OwnTrainer, /, *arguments: P.args, **named: P.kwargs) -> T:
        self._in_call += 1
        try:
            result = method(self, *arguments, **named)
        finally:
            self._in_call -= 1
        if not self._in_call and self._run.stop_requested is not None and self.world_size == 1 and not self._closed:
            self._stop_here()
        return result

    return wrapped


class OptimizedDataParallel(nn.DataParallel[nn.Module]):
    """`nn.DataParallel` that tells how much memory each device uses; without GPUs, simply the model."""

    def get_device_memory_usage(self) -> dict[str, dict[str, int]]:
        """Bytes on each device: allocated, reserved, max_allocated, total."""
        devices = [torch.device("cuda", index) for index in self.device_ids] or [torch.device("cpu")]
        return memory_of(devices)


class OwnTrainer:
    """What both trainers are: a model of the user's, trained epoch by epoch."""

    def __init__(
        self, given: Given, config: MultiGPUConfig, strategy: str, batch: dict[str, int], **settings: Any
    ) -> None:
        """`strategy` and `batch` are the engine's words; so are `settings`, which win over the config's."""
        self.config, self.model = config, given.model
        world = job_start.world if job_start is not None else world_for(config)
        self._devices = taken = take_devices(config, strategy, world, whole_batch=batch.get("global_batch_size"))
        given.ranks, given.every_step = world.size, config.scheduler_interval == "step"
        # Who puts samples together in a way of his own pads them, each batch to another length.
        pads = given.collate not in (None, default_collate)
        own = {"given": given, "many_shapes": pads, "title": config.title or type(given.model).__name__}
        own["samples_per_epoch"] = given.samples_per_epoch()
        kind = type("OwnModel", (OwnModel,), {**own, "__module__": OwnModel.__module__})
        own_dtype, remarks = dtype_settings(given.model, config)
        chosen = {"strategy": taken.strategy, "gpus": taken.gpus, **batch, **own_dtype}
        if config.output_dir is None:
            chosen["output_dir"] = _new_folder()
        if job_start is None:
            note_start_folder()
        resolved = with_absolute_paths(configure(kind, overrides={**config.engine_settings(), **chosen, **settings}))
        remarks += list(taken.remarks) + (job_start.remarks if job_start is not None else [])
        start = RankStart(world, taken.asked, remarks=remarks)
        if job_start is not None:
            start = RankStart(
                world,
                job_start.requested_devices,
                job_start.job_folder,
                remarks,
                job_start.trained,
                folder_is_locked=True,
            )
        with taken.visible():
            self._run = DrivenRun(kind, resolved, start)
        self._engine = self._run.trainer
        self._recipe: OwnModel = self._engine.components.recipe  # type: ignore[assignment]
        self._engine.on_report = self._note
        self._resumed = len(self._recipe.story.epochs)  # epochs that an earlier start of this run has done
        self._resumable = config.output_dir is not None or job_start is not None
        self._seconds, self._samples, self._closed, self._told_number = 0.0, 0, False, False
        self._watched, self._in_call = [(config, config.batch_size)], 0
        me = weakref.ref(self)
        self._run.on_signal_between = lambda: _stopped_between(me)
        # A script ends when its loop does: nobody closes a trainer.
        self._at_exit = weakref.ref(self)
        atexit.register(_close, self._at_exit)

    def _note(self, report: Any) -> None:
        self._recipe.story.add(report)

    @property
    def strategy(self) -> str:
        """single, dataparallel, distributed or sharded: what auto has become, too."""
        name = self._engine.components.strategy.name
        return next(known for known, ours in STRATEGIES.items() if ours == name)

    @property
    def world_size(self) -> int:
        """How many processes train."""
        return self._engine.components.strategy.placement.world

    @property
    def is_main(self) -> bool:
        """Whether this is the process that should talk to the user."""
        return self._engine.components.strategy.placement.rank == 0

    @property
    def folder(self) -> Path:
        """The run's folder: metrics.jsonl, events.jsonl, and checkpoints where output_dir was given."""
        return Path(for_caller(self._run.folder))

    @property
    def history(self) -> list[dict[str, Any]]:
        """What each epoch has brought: epoch, train_loss, and val_loss where it was validated."""
        return [dict(row) for row in self._recipe.story.epochs]

    @_one_call
    def train_epoch(self, epoch: int) -> dict[str, float]:
        """Trains on every sample once; {"train_loss": the mean over the epoch}, the same on every process.

        In a run that goes on (same output_dir), an epoch that is done already returns at once with what it brought.
        """
        story = self._recipe.story
        for row in story.epochs[: self._resumed]:
            if row["epoch"] == epoch:
                return {"train_loss": float(row["train_loss"])}
        if story.epochs and epoch <= story.epochs[-1]["epoch"] and not self._told_number:
            self._told_number = True
            self._say(
                f"train_epoch({epoch}): epoch {story.epochs[-1]['epoch']} is done already, and this trains one more; "
                "after load_checkpoint, begin with the epoch it returns + 1"
            )
        self._follow_batch_size()
        began, before = time.perf_counter(), self._engine.state.samples
        stopped = self._do(lambda engine: engine.train_epoch(keep_reading=self.config.persistent_workers))
        self._seconds += time.perf_counter() - began
        self._samples += self._engine.state.samples - before
        if stopped:
            self._stop_here()
        found = story.end_epoch(epoch)
        self._recipe.epoch_over(found["train_loss"], validated=False)
        if self._resumable:
            self._do(lambda engine: engine.keep())
        return found

    @_one_call
    def validate(self, epoch: int) -> dict[str, float]:
        """The mean loss over the validation data, each sample once: {"val_loss": …}; {} without such data."""
        story = self._recipe.story
        known = next((row for row in story.epochs[: self._resumed] if row["epoch"] == epoch), {})
        if "val_loss" in known:
            return {name: value for name, value in known.items() if name.startswith("val_")}
        metrics = self._do(lambda engine: engine.evaluate())
        if metrics is None:
            if self._run.stop_requested is not None:
                self._stop_here()
            return {}
        found = {name.replace("eval/", "val_"): value for name, value in metrics.items() if isinstance(value, float)}
        for row in story.epochs[::-1]:
            if row["epoch"] == epoch:
                row.update(found)
                break
        self._recipe.epoch_over(found["val_loss"], validated=True)
        return found

    @_one_call
    def train(self, epochs: int, save_path: str | Path | None = "checkpoints") -> dict[str, Any]:
        """Trains so many epochs, validates each, and keeps the best as `save_path`/best_model.pth.

        Returns when the last checkpoint is on disk: the history, the best epoch and loss, and where its checkpoint is.
        The best is the one with the lowest val_loss, or train_loss without validation data.
        """
        if not isinstance(epochs, int) or epochs < 1:
            raise ConfigError(f"epochs: expected a whole number of at least 1, got {epochs!r}")
        best, best_epoch, kept = math.inf, None, None
        for epoch in range(epochs):
            self._engine.last_epoch = epochs
            found = {**self.train_epoch(epoch), **self.validate(epoch)}
            loss = found.get("val_loss", found["train_loss"])
            if loss < best:
                best, best_epoch = loss, epoch
                if save_path is not None:
                    path = self.save_checkpoint(epoch, Path(save_path, "best_model.pth"))
                    kept = path if path.is_dir() else None  # of an epoch that was passed, and somebody took it away
        # Whoever gets the result may take the folder away, which a save under way still writes to.
        self._do(lambda engine: engine.finish_saves())
        return {
            "history": self.history,
            "best_epoch": best_epoch,
            "best_loss": best,
            "checkpoint": None if kept is None else str(kept),
            "folder": str(self.folder),
        }

    @_one_call
    def save_checkpoint(self, epoch: int, path: str | Path) -> Path:
        """Saves weights, optimizer, scheduler and place in the data; returns when it is on disk.

        `path` becomes a folder, also when it ends in .pth: safetensors and JSON, nothing pickled. Saved again, it holds
        the new one, and the old one is deleted after that; a checkpoint of another run is set aside. In a run that
        goes on, an epoch that was passed by an earlier start saves nothing: what was saved then stays.
        """
        folder = Path(path)
        if self._is_passed(epoch):
            if not self._run.decide(folder.exists):
                self._say(f"epoch {epoch} was passed by an earlier start; its weights are gone, {folder} is not saved")
            return folder
        self._run.decide(lambda: check_place(folder))
        self._recipe.story.save(epoch, self._engine.state.samples)
        self._do(lambda engine: engine.save_to(folder))
        return folder

    def _is_passed(self, epoch: int) -> bool:
        """Whether an earlier start of this run has done an epoch, and the weights are those of a later moment."""
        done = [row["epoch"] for row in self._recipe.story.epochs[: self._resumed]]
        return epoch in done and self._engine.state.samples > (done.index(epoch) + 1) * self._engine.epoch_samples

    @_one_call
    def load_checkpoint(self, path: str | Path) -> int:
        """Goes on from a checkpoint, of any strategy and number of GPUs; the last epoch that was done by then."""
        self._run.decide(lambda: check_there(Path(path)))
        found = self._run.checkpoint_at(str(path))
        self._do(lambda engine: engine.continue_from(found))
        self._resumed = 0
        return self._recipe.story.number(self._engine.state.samples)

    def run_steps(self, steps: int) -> None:
        """Trains so many optimizer steps, and waits for the devices: for measurements."""
        self._do(lambda engine: engine.train_steps(steps))

    def most_at_once(self) -> int:
        """The most samples at once that fit on every device, found by trying (settings={"micro_batch": "auto"})."""
        return self._do(lambda engine: engine.find_micro_batch())

    def get_memory_stats(self) -> dict[str, dict[str, int]]:
        """Bytes of this process on each of its devices: allocated, reserved, max_allocated, total."""
        return memory_of(list(self._engine.components.strategy.placement.devices))

    def get_performance_stats(self) -> dict[str, Any]:
        """How fast the training was so far, on what, and what it has reached."""
        placement, story = self._engine.components.strategy.placement, self._recipe.story
        last = story.epochs[-1] if story.epochs else {}
        losses = [row["val_loss"] for row in story.epochs if "val_loss" in row]
        return {
            "strategy": self.strategy,
            "world_size": self.world_size,
            "num_devices": self.world_size * len(placement.devices),
            "global_batch_size": self._engine.state.global_batch,
            "epochs": len(story.epochs),
            "steps": self._engine.state.step,
            "samples": self._samples,
            "training_time": self._seconds,
            "samples_per_second": self._samples / self._seconds if self._seconds else 0.0,
            "train_loss": last.get("train_loss"),
            "val_loss": last.get("val_loss"),
            "best_val_loss": min(losses, default=None),
            "learning_rate": self._recipe.learning_rate(self._engine.state.step)[0],
            "memory": self.get_memory_stats(),
        }

    def close(self) -> None:
        """Waits for checkpoints under way and ends the loader's processes; done by itself when the script ends."""
        self._close("done")

    def _close(self, status: str) -> None:
        if not self._closed:
            self._closed = True
            self._run.close(status)

    def _say(self, text: str) -> None:
        if self.is_main:
            print(f"unisono: {text}", file=sys.stderr)

    def __enter__(self) -> OwnTrainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    def watch(self, config: MultiGPUConfig) -> None:
        """Also follows the batch_size of this config, of which the trainer's own is a copy with other fields."""
        self._watched.append((config, config.batch_size))

    def _follow_batch_size(self) -> None:
        """Takes up a `config.batch_size` that the caller changed, as loops do that ran out of memory."""
        sizes = self._run.decide(lambda: [config.batch_size for config, _ in self._watched])
        changed = [(old, new) for (_, old), new in zip(self._watched, sizes, strict=True) if old != new]
        if not changed:
            return
        before, size = changed[0]
        check_whole("batch_size", size, at_least=1)
        self._watched = [(config, new) for (config, _), new in zip(self._watched, sizes, strict=True)]
        plan = self._do(lambda engine: engine.use_micro_batch(size))
        self._say(
            f"batch_size {before} -> {size}: at most {plan.micro_batch} samples at once per device from now on; the "
            f"effective batch stays {plan.global_batch} (gradients of {plan.accumulation} micro-batches add up)"
        )

    def _do(self, work: Callable[[DrivenTrainer], T]) -> T:
        if self._closed:
            raise ConfigError("this trainer is closed; make a new one")
        try:
            return self._run.do(work)
        except TrainingFailed as error:
            if isinstance(error, TrainingError):
                raise
            raise TrainingError(str(error)) from None

    def _stop_here(self) -> None:
        """A signal asked to stop: what is there is saved, and the loop of the user's ends."""
        self._do(lambda engine: engine.keep())
        self._close("stopped")
        if hasattr(sys, "ps1") or "ipykernel" in sys.modules:
            raise KeyboardInterrupt
        self._say(f"saved in {self.folder}; with output_dir={str(self.folder)!r} it goes on")
        raise SystemExit(EXIT_STOPPED)


_folders: set[str] = set()  # of this process's runs, which need not be there yet


def _new_folder() -> str:
    """runs/ownmodel-<time>, with a number where several trainers are made in one second."""
    name = wanted = default_folder(OwnModel.__name__)
    number = 1
    while name in _folders or Path(name).exists():
        number += 1
        name = f"{wanted}-{number}"
    _folders.add(name)
    return name


def _stopped_between(trainer: weakref.ref[OwnTrainer]) -> bool:
    """On a signal while the user's own code runs: saves and ends the script, where it trains alone."""
    found = trainer()
    if found is None or found._closed:
        return False
    if found.world_size == 1 and not found._in_call:
        found._stop_here()
    return True


def _close(trainer: weakref.ref[OwnTrainer]) -> None:
    """When the script ends; not when it failed on one of several ranks, which would wait here for the others."""
    found = trainer()
    if found is None:
        return
    failed = getattr(sys, "last_value", None) is not None
    if not failed or found.world_size == 1:
        found._close("failed" if failed else "done")
        cleanup_distributed_training()


def load_weights(path: str | Path) -> dict[str, torch.Tensor]:
    """The model's weights in a checkpoint, or in the newest one of a run, for `model.load_state_dict`; needs no GPU."""
    return load_whole(named_checkpoint(Path(path), {"recipe": OwnModel.__name__}), "model.")
