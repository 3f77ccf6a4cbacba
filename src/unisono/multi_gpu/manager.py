"""Chooses the trainer that fits the config and the hardware."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from unisono.errors import ConfigError
from unisono.multi_gpu.config import MultiGPUConfig
from unisono.multi_gpu.gpus import get_gpu_info, world_for
from unisono.multi_gpu.parallel_trainers import DataParallelTrainer, DistributedDataParallelTrainer
from unisono.multi_gpu.trainers import OwnTrainer


class MultiGPUTrainingManager:
    """Creates a trainer from a config. Works in a script, under torchrun and in a notebook, with any number of GPUs."""

    def __init__(self, config: MultiGPUConfig | None = None) -> None:
        self.config = config or MultiGPUConfig()
        self.trainer: OwnTrainer | None = None

    def create_trainer(
        self,
        model: nn.Module,
        train_dataset: Dataset[Any],
        val_dataset: Dataset[Any] | None = None,
        *,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        optimizer: Any = None,
        scheduler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        batch_size: int | None = None,
        **fields: Any,
    ) -> OwnTrainer:
        """Creates a trainer and closes the previous one. `fields` override fields of the config for this trainer."""
        config = self.config
        if fields or batch_size is not None:
            own = {} if batch_size is None else {"batch_size": batch_size}
            config = MultiGPUConfig.from_dict({**config.to_dict(), **own, **fields})
        config.check()
        if self.trainer is not None:
            self.trainer.close()
        strategy = config.strategy
        one_process = strategy in ("single", "dataparallel") or (strategy == "auto" and world_for(config).size == 1)
        trainer = DataParallelTrainer if one_process else DistributedDataParallelTrainer
        parts = {"loss_fn": loss_fn, "optimizer": optimizer, "scheduler": scheduler, "collate_fn": collate_fn}
        self.trainer = trainer(model, config, train_dataset, val_dataset, **parts, strategy=strategy)
        if config is not self.config:
            self.trainer.watch(self.config)
        return self.trainer

    def train(self, epochs: int, save_path: str | Path | None = "checkpoints") -> dict[str, Any]:
        """Trains `epochs` epochs with the trainer that was created last; see OwnTrainer.train."""
        return self._trainer.train(epochs, save_path)

    def get_performance_stats(self) -> dict[str, Any]:
        """Returns the statistics of the trainer that was created last, and the GPUs of this machine."""
        return {**self._trainer.get_performance_stats(), "gpu_info": get_gpu_info()}

    @property
    def _trainer(self) -> OwnTrainer:
        if self.trainer is None:
            raise ConfigError("there is no trainer yet; call create_trainer(model, train_dataset) first")
        return self.trainer
