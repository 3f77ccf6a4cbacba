"""Trains, evaluates and saves the engine's classifier with unisono.multi_gpu."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from unisono.engine.step.learning_rate import learning_rate_factor
from unisono.errors import ConfigError
from unisono.multi_gpu.manager import MultiGPUTrainingManager
from unisono.multi_gpu.trainers import OwnTrainer
from unisono.observe.status_line import print_line
from unisono.recipes.seo.front.classifier import (
    TRAINING,
    Classifier,
    Collate,
    Tokens,
    classification_loss,
    encode,
    labels_of,
    regression_loss,
)
from unisono.recipes.seo.front.config import SEOConfig
from unisono.recipes.seo.front.devices import Devices, effective_batch, trainer_config
from unisono.recipes.seo.front.texts import Loader, texts_and_labels
from unisono.recipes.seo.metrics.scores import class_metrics, number_metrics
from unisono.settings import OptimSettings

BEST = "best_model"
"""Name of the checkpoint of the best epoch."""
Texts = tuple[list[str], list[Any]]
"""A list of texts and a list of their labels."""


class Schedule:
    """The learning rate of a step as a fraction of its peak.

    This is a class because LambdaLR does not save plain functions in a checkpoint.
    """

    def __init__(self, config: SEOConfig, num_steps: int) -> None:
        self.num_steps = num_steps
        schedule: Any = config.lr_scheduler
        self.settings = OptimSettings(lr_schedule=schedule, warmup_steps=config.warmup_steps)

    def __call__(self, step: int) -> float:
        return learning_rate_factor(step, self.num_steps, self.settings)


class Training:
    """Trains a classifier on the devices of an engine."""

    def __init__(self, config: SEOConfig, devices: Devices) -> None:
        self.config, self.devices = config, devices
        self.classifier = Classifier(config)
        self.trainer: OwnTrainer | None = None
        self._data: tuple[Texts, Texts | None] | None = None
        self._checkpoint: Path | None = None  # checkpoint that the next trainer starts from
        self._epoch = 0  # number of the next epoch

    def start(self, train: Loader, val: Loader | None, num_epochs: int) -> OwnTrainer:
        """Returns the trainer for these texts. Other texts start a new run with the current weights."""
        data = texts_and_labels(train, "train_loader"), None if val is None else texts_and_labels(val, "val_loader")
        if self.trainer is not None and self._data is not None:
            if data[0] == self._data[0] and data[1] in (None, self._data[1]):
                return self.trainer
            if self.config.output_dir is not None:
                raise ConfigError(
                    f"the texts of the loaders differ from those of the run in {self.config.output_dir}; create a new "
                    "engine with another output_dir"
                )
        self.config.check()
        self.close()
        self.trainer = self._make_trainer(*data, num_epochs)
        self._data, self._epoch = data, 0
        self.classifier.num_epochs += len(self.trainer.history)  # epochs that this run trained before it was resumed
        if self._checkpoint is not None:
            self._epoch, self._checkpoint = self.trainer.load_checkpoint(self._checkpoint / TRAINING) + 1, None
        return self.trainer

    def _make_trainer(self, train: Texts, val: Texts | None, num_epochs: int) -> OwnTrainer:
        config, classifier, devices = self.config, self.classifier, self.devices
        labels = classifier.labels or labels_of([*train[1], *(val[1] if val else ())], config.label)
        datasets = [None if data is None else self._tokens(data, encode(data[1], labels)) for data in (train, val)]
        model = classifier.build(labels, train[0])
        num_steps = num_epochs * -(-len(train[0]) // effective_batch(config, devices.num_requested))
        if devices.world.is_main and config.warmup_steps > num_steps:
            print_line(
                f"note: warmup_steps {config.warmup_steps} exceeds the {num_steps} steps of this run, so the learning "
                f"rate never reaches {config.learning_rate:g}; use {max(1, num_steps // 10)}"
            )
        schedule = Schedule(config, num_steps)

        def make_scheduler(optimizer: Optimizer) -> LambdaLR:
            return LambdaLR(optimizer, schedule)

        # The path is absolute, because the script may change its working directory during the run.
        output_dir = None if config.output_dir is None else str(Path(config.output_dir).absolute())
        manager = MultiGPUTrainingManager(trainer_config(config, devices, output_dir=output_dir))
        assert datasets[0] is not None
        return manager.create_trainer(
            model,
            datasets[0],
            datasets[1],
            loss_fn=classification_loss if labels.names else regression_loss,
            scheduler=make_scheduler,
            collate_fn=Collate(classifier.tokenizer.pad_token_id, torch.int64 if labels.names else torch.float32),
        )

    def _tokens(self, data: Texts, labels: list[Any]) -> Tokens:
        rows, num_cut = self.classifier.tokenize(data[0])
        if num_cut and self.devices.world.is_main:
            limit = self.config.max_length
            print_line(f"note: {num_cut} of {len(rows)} texts are longer than max_length {limit} and were truncated")
        return Tokens(rows, labels)

    def train_epoch(self, train: Loader, val: Loader | None, num_epochs: int) -> dict[str, Any]:
        """Trains on every text once and validates."""
        trainer, epoch = self.start(train, val, num_epochs), self._epoch
        num_done = len(trainer.history)
        metrics: dict[str, Any] = {"epoch": epoch, **trainer.train_epoch(epoch)}
        self.classifier.num_epochs += len(trainer.history) - num_done
        self._epoch = epoch + 1
        if val is not None:
            metrics |= trainer.validate(epoch)
        return {**metrics, "learning_rate": trainer.get_performance_stats()["learning_rate"]}

    def train_with_early_stopping(self, train: Loader, val: Loader, num_epochs: int) -> dict[str, Any]:
        """Trains until the validation loss stops improving, and ends with the weights of the best epoch."""
        config = self.config
        num_done = len(self.start(train, val, num_epochs).history)  # epochs that this run trained before it was resumed
        history: list[dict[str, Any]] = []
        best, best_loss, num_without = 0, math.inf, 0
        checkpoint: Path | None = None
        for number in range(num_epochs):
            history.append(self.train_epoch(train, val, num_epochs))
            loss = history[-1]["val_loss"]
            num_without += 1
            if best_loss - loss > config.early_stopping_min_delta:
                best, best_loss, num_without = number, loss, 0
                if config.save_checkpoints:
                    # Except for the last one, the weights of epochs before the resume are only in the checkpoint.
                    checkpoint = self._path(BEST) if number < num_done - 1 else self.save_checkpoint(BEST)
            if num_without >= max(1, config.early_stopping_patience):
                break
        if checkpoint is not None and checkpoint.is_dir() and best < len(history) - 1:
            self.load_checkpoint(checkpoint)
        assert self.trainer is not None
        return {
            "epochs_completed": len(history),
            "best_epoch": history[best]["epoch"],
            "best_val_loss": history[best]["val_loss"],
            "early_stopping_triggered": len(history) < num_epochs,
            "history": history,
            "checkpoint": None if checkpoint is None else str(checkpoint),
            "folder": str(self.trainer.folder),
        }

    def train_fold(self, number: int, train: Loader, val: Loader, num_epochs: int) -> dict[str, Any]:
        """Trains a new model on a fold of a cross-validation, and evaluates it."""
        config, name = self.config, f"fold_{number}"
        output_dir = None if config.output_dir is None else str(Path(config.output_dir) / name)
        fold_config = replace(config, output_dir=output_dir, checkpoint_dir=str(Path(config.checkpoint_dir) / name))
        fold = Training(fold_config, self.devices)
        result = fold.train_with_early_stopping(train, val, num_epochs)
        summary = {key: result[key] for key in ("epochs_completed", "best_epoch", "best_val_loss", "checkpoint")}
        metrics = {"fold": number, **summary, **fold.evaluate(val)}
        fold.close()
        return metrics

    def evaluate(self, loader: Loader) -> dict[str, Any]:
        """Evaluates the model on these texts, with a constant prediction as the baseline. Ranks share the work."""
        classifier, world = self.classifier, self.devices.world
        texts, values = texts_and_labels(loader, "loader")
        if classifier.model is None or classifier.labels is None:
            raise ConfigError("there is no model to evaluate yet; train it, or call load_checkpoint")
        labels, names = classifier.labels, classifier.labels.names
        targets = np.array(encode(values, labels))
        predicted = torch.zeros(len(texts), *([len(names)] if names else []), dtype=torch.float64)
        predicted[world.rank :: world.size] = classifier.predict(texts[world.rank :: world.size])
        if world.size > 1:
            torch.distributed.all_reduce(predicted)
        if names:
            metrics = class_metrics(predicted.numpy(), targets)
            renamed = {name.lower(): value for name, value in metrics.items()}
            baseline = {"baseline_accuracy": float(np.bincount(targets).max() / len(targets))}
            return {"loss": renamed.pop("log_loss"), **renamed, **baseline, "num": len(texts)}
        targets = targets * labels.std + labels.mean
        metrics = number_metrics(predicted.numpy(), targets)
        renamed = {name.lower(): value for name, value in metrics.items()}
        return {**renamed, "baseline_rmse": float(targets.std()), "num": len(texts)}

    def _path(self, path: str | Path) -> Path:
        return Path(path) if Path(path).is_absolute() else Path(self.config.checkpoint_dir) / path

    def save_checkpoint(self, path: str | Path) -> Path:
        """Saves a checkpoint to a folder in checkpoint_dir: safetensors and JSON, no pickle."""
        if self.trainer is None:
            raise ConfigError("there is nothing to save yet; train first")
        folder = self._path(path)
        self.classifier.check_folder(folder)
        self.trainer.save_checkpoint(self._epoch - 1, folder / TRAINING)
        if self.trainer.is_main:
            self.classifier.write(folder)
        if self.devices.world.size > 1:
            torch.distributed.barrier()
        return folder

    def load_checkpoint(self, path: str | Path) -> Path:
        """Loads a checkpoint that was saved with any number of GPUs; training continues from it."""
        folder = Path(path) if Path(path).exists() else self._path(path)
        if self.trainer is None:
            self.classifier.read(folder)
            assert self.classifier.model is not None
            self.classifier.model.to(self.devices.device)
            self._checkpoint = folder
        else:
            self.classifier.read_description(folder)
            self._epoch = self.trainer.load_checkpoint(folder / TRAINING) + 1
        return folder

    def close(self) -> None:
        """Ends the current run."""
        if self.trainer is not None:
            self.trainer.close()
        self.trainer = None
