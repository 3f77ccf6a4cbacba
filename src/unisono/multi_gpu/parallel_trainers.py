"""The two trainers of the public API: one uses a single process for all GPUs, the other one process per GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset

from unisono.multi_gpu.config import STRATEGIES, MultiGPUConfig
from unisono.multi_gpu.gpus import world_for
from unisono.multi_gpu.loaders import DataSource
from unisono.multi_gpu.own_model import UserParts
from unisono.multi_gpu.trainers import OwnTrainer


class DataParallelTrainer(OwnTrainer):
    """Trains from one process on all GPUs, on one GPU or on the CPU."""

    def __init__(
        self,
        model: nn.Module,
        config: MultiGPUConfig,
        train_loader: DataLoader[Any] | Dataset[Any],
        val_loader: DataLoader[Any] | Dataset[Any] | None = None,
        optimizer: Any = None,
        scheduler: Any = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        *,
        strategy: str = "dataparallel",
    ) -> None:
        """Uses the dataset, batch size, order, drop_last and collate_fn of the loaders.

        A loader's batch is split over all GPUs. Validation uses every sample once, even if its loader drops some.
        """
        train, val = DataSource.of(train_loader, "train_loader"), DataSource.of(val_loader, "val_loader")
        assert train.data is not None
        batch = {"batch_size": train.batch_size or config.batch_size}
        if train.batch_size is not None:  # nn.DataParallel splits the loader's batch
            batch["global_batch_size"] = train.batch_size * config.gradient_accumulation_steps
        parts = UserParts(
            model, train.data, val.data, loss_fn, optimizer, scheduler, collate_fn or train.collate or val.collate
        )
        if train.drop_last:
            parts.least_batch = config.global_batch_size or batch["batch_size"]
        settings: dict[str, Any] = {} if train.shuffle is None else {"shuffle": train.shuffle}
        if val.batch_size is not None:
            settings["eval_batch_size"] = val.batch_size
        super().__init__(parts, config, STRATEGIES[strategy], batch, **settings)


class DistributedDataParallelTrainer(OwnTrainer):
    """Trains with one process per GPU. Every process of the run must create this trainer and call the same methods."""

    def __init__(
        self,
        model: nn.Module,
        config: MultiGPUConfig,
        train_dataset: Dataset[Any],
        val_dataset: Dataset[Any] | None = None,
        batch_size: int | None = None,
        optimizer: Any = None,
        scheduler: Any = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        *,
        strategy: str = "distributed",
    ) -> None:
        """`batch_size` is per process and overrides the config's value."""
        train, val = DataSource.of(train_dataset, "train_dataset"), DataSource.of(val_dataset, "val_dataset")
        assert train.data is not None
        batch = {"batch_size": batch_size or train.batch_size or config.batch_size}
        parts = UserParts(
            model, train.data, val.data, loss_fn, optimizer, scheduler, collate_fn or train.collate or val.collate
        )
        if train.drop_last:
            world_size = config.world_size or world_for(config).size
            parts.least_batch = config.global_batch_size or batch["batch_size"] * world_size
        super().__init__(parts, config, STRATEGIES[strategy], batch)
