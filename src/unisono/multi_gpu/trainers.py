"""The methods that both trainers share: train_epoch, validate, train, save_checkpoint, load_checkpoint.

Each method runs the engine's loop, which provides batches, order, recovery and checkpoints. Every process must call it.
"""

from __future__ import annotations

import atexit
import functools
import math
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
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
from unisono.multi_gpu.checkpoint_paths import check_source, check_target
from unisono.multi_gpu.config import STRATEGIES, MultiGPUConfig
from unisono.multi_gpu.gpus import cleanup_distributed_training, memory_of, take_devices, world_for
from unisono.multi_gpu.model_dtype import dtype_settings
from unisono.multi_gpu.own_model import OwnModel, UserParts
from unisono.observe.watch.notebook import in_notebook
from unisono.typed_paths import for_caller, note_start_folder

T = TypeVar("T")
P = ParamSpec("P")

job_start: RankStart | None = None
"""How this rank starts, if launch_multi_gpu_training started this process; None otherwise."""


class TrainingError(TrainingFailed, RuntimeError):
    """Training cannot continue. It is also a RuntimeError, because many training loops catch that."""


def _defer_stop(method: Callable[Concatenate[OwnTrainer, P], T]) -> Callable[Concatenate[OwnTrainer, P], T]:
    """Decorates a method so that a stop signal takes effect only when the method returns."""

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
    """`nn.DataParallel` that also reports the memory use of each device. Without GPUs, it just calls the model."""

    def get_device_memory_usage(self) -> dict[str, dict[str, int]]:
        """Returns this process's memory on each device, in bytes: allocated, reserved, max_allocated, total."""
        devices = [torch.device("cuda", index) for index in self.device_ids] or [torch.device("cpu")]
        return memory_of(devices)


class OwnTrainer:
    """Base class of the trainers: trains the user's own model epoch by epoch."""

    def __init__(
        self, parts: UserParts, config: MultiGPUConfig, strategy: str, batch: dict[str, int], **settings: Any
    ) -> None:
        """`strategy`, `batch` and `settings` use the engine's names. `settings` override the config's settings."""
        self.config, self.model = config, parts.model
        if config.global_batch_size is not None:
            batch["global_batch_size"] = config.global_batch_size
        elif "global_batch_size" not in batch:
            batch["gradient_accumulation_steps"] = config.gradient_accumulation_steps
        world = job_start.world if job_start is not None else world_for(config)
        self._devices = take_devices(config, strategy, world, global_batch=batch.get("global_batch_size"))
        parts.num_ranks, parts.schedule_every_step = world.size, config.scheduler_interval == "step"
        attributes = {
            "parts": parts,
            # A custom collate function usually pads, so batches have different lengths.
            "many_shapes": parts.collate not in (None, default_collate),
            "title": config.title or type(parts.model).__name__,
            "samples_per_epoch": parts.samples_per_epoch(),
            "__module__": OwnModel.__module__,
        }
        kind = type("OwnModel", (OwnModel,), attributes)
        dtype, remarks = dtype_settings(parts.model, config)
        overrides = {
            **config.engine_settings(parts.named_optimizer),
            **{"strategy": self._devices.strategy, "gpus": self._devices.gpus, **batch, **dtype},
            **({"output_dir": _new_folder()} if config.output_dir is None else {}),
            **settings,
        }
        if job_start is None:
            note_start_folder()
        resolved = with_absolute_paths(configure(kind, overrides=overrides))
        remarks += self._devices.remarks
        start = RankStart(world, self._devices.requested, remarks=remarks)
        if job_start is not None:
            start = replace(job_start, remarks=[*remarks, *job_start.remarks], folder_is_locked=True)
        with self._devices.visible():
            self._run = DrivenRun(kind, resolved, start)
        self._engine = self._run.trainer
        self._recipe: OwnModel = self._engine.components.recipe  # type: ignore[assignment]
        recipe = self._recipe
        self._engine.on_report = lambda report: recipe.log.add(report)
        self._resumed = len(recipe.log.epochs)  # number of epochs that this run had trained before it was resumed
        self._resumable = config.output_dir is not None or job_start is not None
        self._seconds, self._samples, self._closed, self._warned_of_repetition = 0.0, 0, False, False
        self._watched, self._in_call = [(config, config.batch_size)], 0
        this = weakref.ref(self)
        self._run.on_signal_between = lambda: _stop_between_calls(this)
        atexit.register(_close, this)  # because scripts rarely close a trainer

    @property
    def strategy(self) -> str:
        """The strategy in use: single, dataparallel, distributed or sharded."""
        name = self._engine.components.strategy.name
        return next(public for public, engines in STRATEGIES.items() if engines == name)

    @property
    def world_size(self) -> int:
        """The number of training processes."""
        return self._engine.components.strategy.placement.world

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which should print messages."""
        return self._engine.components.strategy.placement.rank == 0

    @property
    def folder(self) -> Path:
        """The run folder, with metrics.jsonl, events.jsonl, and checkpoints if output_dir is set."""
        return Path(for_caller(self._run.folder))

    @property
    def history(self) -> list[dict[str, Any]]:
        """The result of each epoch as a dict with epoch, train_loss, and val_loss if the epoch was validated."""
        return [dict(row) for row in self._recipe.log.epochs]

    @_defer_stop
    def train_epoch(self, epoch: int) -> dict[str, float]:
        """Trains on every sample once; returns {"train_loss": mean over the epoch}, the same in every process.

        In a resumed run (same output_dir), an epoch that is already trained is not trained again, and the method
        returns its earlier result.
        """
        log = self._recipe.log
        if row := self._earlier_result(epoch):
            return {"train_loss": float(row["train_loss"])}
        if log.epochs and epoch <= log.epochs[-1]["epoch"] and not self._warned_of_repetition:
            self._warned_of_repetition = True
            self._say(
                f"train_epoch({epoch}): epoch {log.epochs[-1]['epoch']} is already trained, so this call trains a "
                "further epoch; after load_checkpoint, continue with the epoch that it returns plus 1"
            )
        self._follow_batch_size()
        started, before = time.perf_counter(), self._engine.state.samples
        stopped = self._do(lambda engine: engine.train_epoch(keep_reading=self.config.persistent_workers))
        self._seconds += time.perf_counter() - started
        self._samples += self._engine.state.samples - before
        if stopped:
            self._stop_here()
        result = log.end_epoch(epoch)
        self._recipe.end_epoch(result["train_loss"], validated=False)
        if self._resumable:
            self._do(lambda engine: engine.keep())
        return result

    @_defer_stop
    def validate(self, epoch: int) -> dict[str, float]:
        """Returns {"val_loss": mean over all samples of the validation dataset}; {} without validation data."""
        earlier = self._earlier_result(epoch)
        if "val_loss" in earlier:
            return {name: value for name, value in earlier.items() if name.startswith("val_")}
        metrics = self._do(lambda engine: engine.evaluate())
        if metrics is None:
            if self._run.stop_requested is not None:
                self._stop_here()
            return {}
        result = {name.replace("eval/", "val_"): value for name, value in metrics.items() if isinstance(value, float)}
        for row in self._recipe.log.epochs[::-1]:
            if row["epoch"] == epoch:
                row.update(result)
                break
        self._recipe.end_epoch(result["val_loss"], validated=True)
        return result

    def _earlier_result(self, epoch: int) -> dict[str, Any]:
        """Returns the result of an epoch that was trained before the run was resumed; {} for other epochs."""
        return next((row for row in self._recipe.log.epochs[: self._resumed] if row["epoch"] == epoch), {})

    @_defer_stop
    def train(self, epochs: int, save_path: str | Path | None = "checkpoints") -> dict[str, Any]:
        """Trains and validates `epochs` epochs, and saves the best model to `save_path`/best_model.pth.

        The best epoch is the one with the lowest val_loss or, without validation data, train_loss. Returns a dict with
        the history, the best epoch, its loss and the path of its checkpoint, which is on disk by then.
        """
        if not isinstance(epochs, int) or epochs < 1:
            raise ConfigError(f"epochs: expected a whole number of at least 1, got {epochs!r}")
        best_loss, best_epoch, checkpoint = math.inf, None, None
        for epoch in range(epochs):
            self._engine.last_epoch = epochs
            result = {**self.train_epoch(epoch), **self.validate(epoch)}
            loss = result.get("val_loss", result["train_loss"])
            if loss < best_loss:
                best_loss, best_epoch = loss, epoch
                if save_path is not None:
                    path = self.save_checkpoint(epoch, Path(save_path, "best_model.pth"))
                    checkpoint = path if path.is_dir() else None  # an earlier checkpoint may be deleted
        # Wait for the saves, because the caller may move or delete the folder afterwards.
        self._do(lambda engine: engine.finish_saves())
        return {
            "history": self.history,
            "best_epoch": best_epoch,
            "best_loss": best_loss,
            "checkpoint": None if checkpoint is None else str(checkpoint),
            "folder": str(self.folder),
        }

    @_defer_stop
    def save_checkpoint(self, epoch: int, path: str | Path) -> Path:
        """Saves weights, optimizer, scheduler and data position; returns the path when they are on disk.

        `path` becomes a folder of safetensors and JSON files, even if it ends in .pth. A later save to the same path
        replaces the checkpoint; a checkpoint of another run is renamed first. Epochs that were trained before the run
        was resumed are not saved again.
        """
        folder = Path(path)
        if self._is_past(epoch):
            if not self._run.decide(folder.exists):
                self._say(
                    f"{folder} is not saved, because an earlier start trained epoch {epoch} and its weights are no "
                    "longer in memory"
                )
            return folder
        self._run.decide(lambda: check_target(folder))
        self._recipe.log.save(epoch, self._engine.state.samples)
        self._do(lambda engine: engine.save_to(folder))
        return folder

    def _is_past(self, epoch: int) -> bool:
        """Returns whether this epoch and at least one more were trained before the run was resumed."""
        done = [row["epoch"] for row in self._recipe.log.epochs[: self._resumed]]
        return epoch in done and self._engine.state.samples > (done.index(epoch) + 1) * self._engine.epoch_samples

    @_defer_stop
    def load_checkpoint(self, path: str | Path) -> int:
        """Continues from a checkpoint of any strategy and number of GPUs; returns the last epoch that it contains."""
        self._run.decide(lambda: check_source(Path(path)))
        checkpoint = self._run.checkpoint_at(str(path))
        self._do(lambda engine: engine.continue_from(checkpoint))
        self._resumed = 0
        return self._recipe.log.last_epoch(self._engine.state.samples)

    def run_steps(self, steps: int) -> None:
        """Trains for `steps` optimizer steps and waits for the devices to finish; used by benchmarks."""
        self._do(lambda engine: engine.train_steps(steps))

    def most_at_once(self) -> int:
        """Finds the largest micro-batch that fits on every device by trying. Needs settings={"micro_batch": "auto"}."""
        return self._do(lambda engine: engine.find_micro_batch())

    def get_memory_stats(self) -> dict[str, dict[str, int]]:
        """Returns this process's memory on each of its devices, in bytes: allocated, reserved, max_allocated, total."""
        return memory_of(list(self._engine.components.strategy.placement.devices))

    def get_performance_stats(self) -> dict[str, Any]:
        """Returns the speed, devices, batch size and losses of the training so far."""
        placement, epochs = self._engine.components.strategy.placement, self._recipe.log.epochs
        last = epochs[-1] if epochs else {}
        losses = [row["val_loss"] for row in epochs if "val_loss" in row]
        return {
            "strategy": self.strategy,
            "world_size": self.world_size,
            "num_devices": self.world_size * len(placement.devices),
            "global_batch_size": self._engine.state.global_batch,
            "epochs": len(epochs),
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
        """Waits for unfinished saves and stops the loader workers. Called automatically when the script ends."""
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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()

    def watch(self, config: MultiGPUConfig) -> None:
        """Makes changes of batch_size in the caller's `config` take effect; the trainer uses a modified copy of it."""
        self._watched.append((config, config.batch_size))

    def _follow_batch_size(self) -> None:
        """Applies a change of `config.batch_size`, which users' loops make after running out of memory."""
        sizes = self._run.decide(lambda: [config.batch_size for config, _ in self._watched])
        changed = [(old, new) for (_, old), new in zip(self._watched, sizes, strict=True) if old != new]
        if not changed:
            return
        before, size = changed[0]
        check_whole("batch_size", size, at_least=1)
        self._watched = [(config, new) for (config, _), new in zip(self._watched, sizes, strict=True)]
        plan = self._do(lambda engine: engine.use_micro_batch(size))
        self._say(
            f"batch_size changed from {before} to {size}: from now on a micro-batch has at most {plan.micro_batch} "
            f"samples; the effective batch stays {plan.global_batch}, in {plan.accumulation} micro-batches"
        )

    def _do(self, work: Callable[[DrivenTrainer], T]) -> T:
        if self._closed:
            raise ConfigError("this trainer is closed; create a new one")
        try:
            return self._run.do(work)
        except TrainingFailed as error:
            if isinstance(error, TrainingError):
                raise
            raise TrainingError(str(error)) from None

    def _stop_here(self) -> None:
        """Saves a checkpoint and ends the user's loop after a stop signal."""
        self._do(lambda engine: engine.keep())
        self._close("stopped")
        if hasattr(sys, "ps1") or in_notebook():
            raise KeyboardInterrupt
        self._say(f"checkpoint saved in {self.folder}; run again with output_dir={str(self.folder)!r} to continue")
        raise SystemExit(EXIT_STOPPED)


_folders: set[str] = set()  # run folders that this process has chosen; some may not be on disk yet


def _new_folder() -> str:
    """Returns runs/ownmodel-<time>, with a number if several trainers are created within a second."""
    name = base = default_folder(OwnModel.__name__)
    number = 1
    while name in _folders or Path(name).exists():
        number += 1
        name = f"{base}-{number}"
    _folders.add(name)
    return name


def _stop_between_calls(reference: weakref.ref[OwnTrainer]) -> bool:
    """Handles a stop signal while the user's own code runs. A single process saves a checkpoint and ends the script."""
    trainer = reference()
    if trainer is None or trainer._closed:
        return False
    if trainer.world_size == 1 and not trainer._in_call:
        trainer._stop_here()
    return True


def _close(reference: weakref.ref[OwnTrainer]) -> None:
    """Closes a trainer at the end of the script, except on a failed rank, which would wait for the other ranks."""
    trainer = reference()
    if trainer is None:
        return
    failed = getattr(sys, "last_value", None) is not None
    if not failed or trainer.world_size == 1:
        trainer._close("failed" if failed else "done")
        cleanup_distributed_training()


def load_weights(path: str | Path) -> dict[str, torch.Tensor]:
    """Loads the weights of a checkpoint, or of a run's newest checkpoint, for `model.load_state_dict`."""
    return load_whole(named_checkpoint(Path(path), {"recipe": OwnModel.__name__}), "model.")
