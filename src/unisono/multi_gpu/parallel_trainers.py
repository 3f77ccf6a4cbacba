"""The two trainers that people know by name: one process for all GPUs, or one process per GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset

from unisono.multi_gpu.config import STRATEGIES, MultiGPUConfig
from unisono.multi_gpu.gpus import world_for
from unisono.multi_gpu.loaders import Loaded
from unisono.multi_gpu.own_model import Given
from unisono.multi_gpu.trainers import OwnTrainer


class DataParallelTrainer(OwnTrainer):
    """Trains with all GPUs from one process; with one device, or none, likewise."""

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
        """Of the loaders, data, batch size, order, drop_last and collate_fn are taken.

        A loader's batch is cut over all GPUs. Validation reads every sample once, also where its loader drops some.
        """
        train, val = Loaded.of(train_loader, "train_loader"), Loaded.of(val_loader, "val_loader")
        assert train.data is not None
        collate = collate_fn or train.collate or val.collate
        given = Given(model, train.data, val.data, loss_fn, optimizer, scheduler, collate)
        settings: dict[str, Any] = {} if train.shuffle is None else {"shuffle": train.shuffle}
        batch = {"batch_size": config.batch_size, "gradient_accumulation_steps": config.gradient_accumulation_steps}
        if train.batch_size is not None:  # as nn.DataParallel cuts it
            whole = train.batch_size * config.gradient_accumulation_steps
            batch = {"batch_size": train.batch_size, "global_batch_size": whole}
        if config.global_batch_size is not None:
            batch = {"batch_size": batch["batch_size"], "global_batch_size": config.global_batch_size}
        if val.batch_size is not None:
            settings["eval_batch_size"] = val.batch_size
        given.drops = (config.global_batch_size or batch["batch_size"]) if train.drop_last else 0
        super().__init__(given, config, STRATEGIES[strategy], batch, **settings)


class DistributedDataParallelTrainer(OwnTrainer):
    """Trains with a process per GPU: each process of the run makes this trainer and calls its methods."""

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
        """`batch_size` is per process, as the config's, which it replaces."""
        train, val = Loaded.of(train_dataset, "train_dataset"), Loaded.of(val_dataset, "val_dataset")
        assert train.data is not None
        given = Given(
            model, train.data, val.data, loss_fn, optimizer, scheduler, collate_fn or train.collate or val.collate
        )
        batch = {
            "batch_size": batch_size or train.batch_size or config.batch_size,
            "gradient_accumulation_steps": config.gradient_accumulation_steps,
        }
        if config.global_batch_size is not None:
            batch = {"batch_size": batch["batch_size"], "global_batch_size": config.global_batch_size}
        if train.drop_last:
            given.drops = config.global_batch_size or batch["batch_size"] * (
                config.world_size or world_for(config).size
            )
        super().__init__(given, config, STRATEGIES[strategy], batch)
