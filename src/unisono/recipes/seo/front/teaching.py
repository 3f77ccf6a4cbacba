"""The engine's training: epochs, early stopping, folds, checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unisono.errors import ConfigError
from unisono.multi_gpu.trainers import OwnTrainer
from unisono.recipes.seo.front.config import SEOConfig
from unisono.recipes.seo.front.data import texts_and_labels
from unisono.recipes.seo.front.device_info import Placed
from unisono.recipes.seo.front.devices import precision
from unisono.recipes.seo.front.learner import TRAINING
from unisono.recipes.seo.front.loaders import Loaders
from unisono.recipes.seo.front.metrics import of_classes, of_numbers
from unisono.recipes.seo.front.stopping import EarlyStopping
from unisono.recipes.seo.front.training import Material, gathered, make_trainer, share

BEST = "best_model"
"""The name of the checkpoint of the best epoch."""


class Teaching(Placed):
    """An engine that learns from labels."""

    def __init__(self, config: SEOConfig | None = None, noted: str | None = None) -> None:
        self._given: tuple[Material, Material | None] | None = None
        self._from: Path | None = None  # a checkpoint that the next trainer goes on from
        self._epochs = 0  # the number of the next one
        super().__init__(config, noted)

    def _need_trainer(self, train: Any, val: Any, epochs: int) -> OwnTrainer:
        """The trainer of these texts; other texts than before go on with the weights as they are, in a new run."""
        given = Material.of(train, "train_loader"), None if val is None else Material.of(val, "val_loader")
        if self._trainer is not None and self._given is not None:
            if given[0] == self._given[0] and given[1] in (None, self._given[1]):
                return self._trainer
            if self.config.output_dir is not None:
                raise ConfigError(
                    f"train_loader or val_loader has other texts than the run in {self.config.output_dir} began with; "
                    "make another engine, with another output_dir"
                )
        if self._cleaned and self._devices.world.size > 1:
            raise ConfigError("cleanup_multi_gpu() has left the other processes; make another engine to train")
        self.config.check()
        self._close()
        self._given, self._epochs = given, 0
        self._trainer = trainer = make_trainer(
            self._learner, self._devices, *given, epochs=epochs, output_dir=self._run_folder()
        )
        self._learner.learned_epochs += len(trainer.history)  # of an earlier start of this run
        if self._from is not None:
            self._epochs, self._from = trainer.load_checkpoint(self._from / TRAINING) + 1, None
        return trainer

    def _run_folder(self) -> str | None:
        own = self.config.output_dir
        return None if own is None else str(Path(own).absolute())  # the script may go elsewhere while it is written to

    def train_epoch(self, train_loader: Any, val_loader: Any = None, epoch: int | None = None) -> dict[str, Any]:
        """Trains on every text once, and validates; what it brought, the same in every process."""
        return self._train_epoch(train_loader, val_loader, self.config.num_epochs, epoch)

    def _train_epoch(self, train: Any, val: Any, epochs: int, number: int | None = None) -> dict[str, Any]:
        trainer = self._need_trainer(train, val, epochs)
        number = self._epochs if number is None else number
        done = len(trainer.history)
        with torch.autograd.set_detect_anomaly(self.config.enable_autograd_anomaly):
            found: dict[str, Any] = {"epoch": number, **trainer.train_epoch(number)}
        self._learner.learned_epochs += len(trainer.history) - done
        self._epochs = number + 1
        if val is not None:
            found |= trainer.validate(number)
        return {**found, "learning_rate": trainer.get_performance_stats()["learning_rate"]}

    def train_with_early_stopping(
        self, train_loader: Any, val_loader: Any = None, max_epochs: int | None = None
    ) -> dict[str, Any]:
        """Trains until nothing improves, keeps the best epoch as `best_model`, and ends with its weights.

        With save_checkpoints=False nothing is kept, and the weights are those of the last epoch.
        """
        config = self.config
        epochs = config.num_epochs if max_epochs is None else max_epochs
        if not isinstance(epochs, int) or epochs < 1:
            raise ConfigError(f"max_epochs: expected a whole number of at least 1, got {epochs!r}")
        monitor = config.early_stopping_monitor
        if monitor != "train_loss" and val_loader is None:
            raise ConfigError(f"early_stopping_monitor {monitor} needs a val_loader; give one, or watch train_loss")
        stopping = EarlyStopping(
            config.early_stopping_patience, config.early_stopping_min_delta, monitor, config.early_stopping_mode
        )
        done = len(self._need_trainer(train_loader, val_loader, epochs).history)
        first, history, best = self._epochs, [], None
        for epoch in range(first, first + epochs):
            history.append(self._train_epoch(train_loader, val_loader, epochs, epoch))
            stop = stopping(history[-1][monitor])
            if stopping.improved and config.save_checkpoints:
                # Of a run that goes on, the weights of epochs before its last one are gone; their checkpoint is not.
                passed = epoch - first < done - 1
                best = self._place(BEST) if passed else self.save_checkpoint(BEST)
            if stop:
                break
        found = history[max(0, stopping.best_epoch)]
        if best is not None and best.is_dir() and found is not history[-1]:
            self.load_checkpoint(best)
        return {
            "epochs_completed": len(history),
            "best_epoch": found["epoch"],
            "best_val_loss": found.get("val_loss"),
            f"best_{monitor}": found[monitor],
            "early_stopping_triggered": stopping.early_stop and len(history) < epochs,
            "history": history,
            "checkpoint": None if best is None else str(best),
            "folder": None if self._trainer is None else str(self._trainer.folder),
        }

    def _over_folds(self, folds: Sequence[Loaders], max_epochs: int | None) -> dict[str, Any]:
        """Trains and evaluates a model of its own for each fold."""
        rows: list[dict[str, Any]] = []
        for number, (train, val) in enumerate(folds, 1):
            config, name = self.config, f"fold_{number}"
            own = None if config.output_dir is None else str(Path(config.output_dir) / name)
            told = replace(config, output_dir=own, checkpoint_dir=str(Path(config.checkpoint_dir) / name))
            fold = Teaching(told, noted=self._devices.note)
            found = fold.train_with_early_stopping(train, val, max_epochs)
            kept = {key: found[key] for key in ("epochs_completed", "best_epoch", "best_val_loss", "checkpoint")}
            rows.append({"fold": number, **kept, **fold.evaluate_model(val)})
            fold._close()
        numbers = [key for key, value in rows[0].items() if isinstance(value, float)]
        columns = {key: np.array([row[key] for row in rows if row[key] is not None]) for key in numbers}
        return {
            "folds": rows,
            "mean": {key: float(values.mean()) for key, values in columns.items()},
            "std": {key: float(values.std()) for key, values in columns.items()},
        }

    def evaluate_model(self, loader: Any) -> dict[str, Any]:
        """How right the model is about these texts, beside what always saying the same gets; shared over processes."""
        learner = self._learner
        texts, labels = texts_and_labels(loader, "loader")
        if learner.labels is None or learner.model is None:
            raise ConfigError("there is no model to evaluate yet; train it, or load_checkpoint")
        if not texts or labels is None:
            raise ConfigError("loader has no labelled texts; there is nothing to compare with")
        truth = learner.labels.encode(labels)
        some = learner.predict(share(texts, self._devices), precision(self.config, self._devices))
        logits = np.array(gathered(list(some), len(texts), self._devices))
        if learner.labels.regression:
            scale, mean = learner.labels.scale, learner.labels.mean
            return of_numbers([float(each) * scale + mean for each in truth], (logits[:, 0] * scale + mean).tolist())
        loss = torch.nn.functional.cross_entropy(torch.tensor(logits), torch.tensor(truth))
        return {"loss": float(loss), **of_classes(truth, logits.argmax(1).tolist())}

    # --- checkpoints

    def _place(self, path: str | Path) -> Path:
        return Path(path) if Path(path).is_absolute() else Path(self.config.checkpoint_dir) / path

    def save_checkpoint(self, path: str | Path = "checkpoint") -> Path:
        """Saves everything into a folder (in checkpoint_dir), also when it ends in .pt: nothing in it is pickled."""
        if self._trainer is None:
            raise ConfigError("there is nothing to save yet; train first")
        folder = self._place(path)
        self._learner.check_place(folder)
        self._trainer.save_checkpoint(self._epochs - 1, folder / TRAINING)
        if self._trainer.is_main:
            self._learner.write_about(folder)
        self.synchronize_gpus()
        return folder

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Takes up a checkpoint, of any number of GPUs: for analysing, and to train on from there."""
        folder = Path(path) if Path(path).exists() else self._place(path)
        if self._trainer is None:
            self._learner.read(folder)
            self._model.to(self.device)
            self._from = folder
        else:
            self._learner.read_about(folder)
            self._epochs = self._trainer.load_checkpoint(folder / TRAINING) + 1
        return {"path": str(folder), "epochs": self._learner.learned_epochs}

    def get_training_status(self) -> dict[str, Any]:
        """What was trained so far."""
        learner, trainer = self._learner, self._trainer
        labels = learner.labels
        return {
            **({} if trainer is None else trainer.get_performance_stats()),
            "trained": learner.learned_epochs > 0,
            "epochs": learner.learned_epochs,
            "labels": None if labels is None else list(labels.classes) or "numbers",
            "history": [] if trainer is None else trainer.history,
            "folder": None if trainer is None else str(trainer.folder),
        }
