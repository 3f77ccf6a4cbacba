"""AdvancedLLMSEOEngine: trains a model on your labels to score texts, and analyses texts with it.

Under torchrun every process creates the engine and calls the same methods. Only `analyze_seo_score` and
`optimize_content` may be called by a single process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from unisono.config.values import shown
from unisono.errors import ConfigError
from unisono.multi_gpu.gpus import cleanup_distributed_training
from unisono.multi_gpu.trainers import OptimizedDataParallel
from unisono.observe.status_line import print_line
from unisono.recipes.seo.front.config import SEOConfig
from unisono.recipes.seo.front.devices import effective_batch, find_devices, precision
from unisono.recipes.seo.front.rewriting import improve
from unisono.recipes.seo.front.texts import (
    LabelledTexts,
    Loader,
    RankSampler,
    Split,
    check_texts,
    fold_texts,
    split_texts,
)
from unisono.recipes.seo.front.training import Training
from unisono.recipes.seo.site.text_rules import check_text


class AdvancedLLMSEOEngine:
    """Trains and evaluates a classifier of texts, and analyses texts with it, as configured by an SEOConfig."""

    def __init__(self, config: SEOConfig | None = None) -> None:
        if not isinstance(config, SEOConfig | None):
            raise ConfigError(f"config: expected an SEOConfig, got {type(config).__name__}")
        self.config = config or SEOConfig()
        self._note: str | None = None
        self._left_group = False
        self._ranker: Any = None
        self._setup_multi_gpu_training()

    # Devices ---------------------------------------------------------------------------------------------------------

    def _setup_multi_gpu_training(self) -> None:
        """Selects the devices, joins the other processes, and prints a note if fewer GPUs exist than requested."""
        self._devices = find_devices(self.config)
        self._training = Training(self.config, self._devices)
        if self._devices.note and self._devices.note != self._note and self._devices.world.is_main:
            print_line(f"note: {self._devices.note}")
        self._note = self._devices.note

    def _setup_dataparallel_training(self, num_gpus: int) -> None:
        """Switches to this many GPUs from one process, before training."""
        self._change_strategy("dataparallel", num_gpus)

    def _setup_distributed_training(self, num_gpus: int) -> None:
        """Switches to one process per GPU, before training."""
        self._change_strategy("distributed", num_gpus)

    def _change_strategy(self, strategy: str, num_gpus: int) -> None:
        if self._training.trainer is not None:
            raise ConfigError("the devices cannot change after training has begun; create a new engine")
        self.config.use_multi_gpu, self.config.multi_gpu_strategy, self.config.num_gpus = True, strategy, num_gpus
        self._setup_multi_gpu_training()

    def _wrap_model_for_multi_gpu(self) -> nn.Module:
        """Returns the model wrapped for several devices, for your own loop; the engine's training does not use it."""
        if self.is_dataparallel:
            return self._wrap_model_dataparallel()
        return self._wrap_model_distributed() if self.is_distributed else self._model

    def _wrap_model_dataparallel(self) -> nn.Module:
        """Returns the model in nn.DataParallel, for your own loop."""
        return OptimizedDataParallel(self._model)

    def _wrap_model_distributed(self) -> nn.Module:
        """Returns the model in DistributedDataParallel, for your own loop."""
        if not self.is_distributed:
            raise ConfigError("there are no other processes; start the script with torchrun")
        config = self.config
        return nn.parallel.DistributedDataParallel(
            self._model,
            find_unused_parameters=config.find_unused_parameters,
            gradient_as_bucket_view=config.gradient_as_bucket_view,
            broadcast_buffers=config.broadcast_buffers,
            bucket_cap_mb=config.bucket_cap_mb,
            static_graph=config.static_graph,
        )

    @property
    def _model(self) -> nn.Module:
        if self.seo_model is None:
            raise ConfigError("there is no model yet: its number of classes depends on the labels; train first")
        return self.seo_model

    @property
    def seo_model(self) -> nn.Module | None:
        """The model without a wrapper; None before training."""
        return self._training.classifier.model

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._devices.device

    @property
    def is_dataparallel(self) -> bool:
        """Whether several GPUs train from one process."""
        return self._devices.strategy == "dataparallel" and not self._left_group

    @property
    def is_distributed(self) -> bool:
        """Whether several processes train."""
        return self._devices.world.size > 1 and not self._left_group

    def get_multi_gpu_status(self) -> dict[str, Any]:
        """Returns the strategy, devices, processes, precision, effective batch and memory use."""
        config, devices, trainer = self.config, self._devices, self._training.trainer
        batch = effective_batch(config, devices.num_requested)
        return {
            "use_multi_gpu": config.use_multi_gpu,
            "strategy": devices.strategy if trainer is None else trainer.strategy,
            "requested_strategy": config.multi_gpu_strategy if config.use_multi_gpu else "single",
            "num_gpus": devices.num_gpus,
            "requested_gpus": devices.num_requested,
            "num_devices": devices.num_devices,
            "device": str(devices.device),
            "world_size": devices.world.size,
            "rank": devices.world.rank,
            "local_rank": devices.world.local_rank,
            "is_dataparallel": self.is_dataparallel,
            "is_distributed": self.is_distributed,
            "backend": config.distributed_backend if devices.num_gpus else "gloo",
            "precision": {"no": "float32", "fp16": "float16", "bf16": "bfloat16"}[precision(config, devices)],
            "batch_size": config.batch_size,
            "gradient_accumulation_steps": -(-batch // (config.batch_size * devices.num_devices)),
            "effective_batch_size": batch,
            "num_workers": config.dataloader_num_workers,
            "memory": devices.memory() if trainer is None else trainer.get_memory_stats(),
        }

    def synchronize_gpus(self) -> None:
        """Waits until all processes have called this and all GPUs have finished their work."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            for index in range(self._devices.num_gpus) if self.is_dataparallel else [None]:
                torch.cuda.synchronize(index)
        if self.is_distributed:
            torch.distributed.all_reduce(torch.zeros(1))

    def cleanup_multi_gpu(self) -> None:
        """Ends the run and leaves the process group. The model remains available for analysis."""
        self._training.close()
        cleanup_distributed_training()
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()
        self._left_group = True

    # Training --------------------------------------------------------------------------------------------------------

    def create_distributed_dataloaders(
        self, texts: Sequence[str], labels: Sequence[Any], name: str = "training", val_split: float = 0.2
    ) -> tuple[Loader, Loader]:
        """Returns training and validation loaders. If you iterate over them yourself, each process reads its own texts.

        Both splits have the same fraction of each class, and equal texts are in the same split. `name` has no effect.
        """
        check_texts(texts, labels)
        return self._loaders(texts, labels, split_texts(texts, labels, val_split, self.config.seed))

    create_training_dataloaders = create_distributed_dataloaders

    def _loaders(self, texts: Sequence[str], labels: Sequence[Any], split: Split) -> tuple[Loader, Loader]:
        config, world = self.config, self._devices.world
        data = LabelledTexts(texts, labels, self._training.classifier.load_tokenizer(texts), config.max_length)

        def loader(indices: list[int], shuffle: bool) -> Loader:
            return DataLoader(
                Subset(data, indices),
                config.batch_size,
                sampler=RankSampler(len(indices), world.rank, world.size, shuffle=shuffle, seed=config.seed),
                collate_fn=data.collate,
                num_workers=config.dataloader_num_workers,
                pin_memory=self._devices.num_gpus > 0,
            )

        return loader(split[0], True), loader(split[1], False)

    def train_epoch(self, train_loader: Loader, val_loader: Loader | None = None) -> dict[str, Any]:
        """Trains on every text once and validates; returns the losses, the same on every process."""
        self._check_group()
        return self._training.train_epoch(train_loader, val_loader, self.config.num_epochs)

    def train_with_early_stopping(
        self, train_loader: Loader, val_loader: Loader, max_epochs: int | None = None
    ) -> dict[str, Any]:
        """Trains until the validation loss stops improving, saves the best epoch as `best_model`, and loads it.

        With save_checkpoints=False nothing is saved, and the model keeps the weights of the last epoch.
        """
        self._check_group()
        return self._training.train_with_early_stopping(train_loader, val_loader, self._num_epochs(max_epochs))

    def train_cross_validation(
        self, texts: Sequence[str], labels: Sequence[Any], num_folds: int = 5, max_epochs: int | None = None
    ) -> dict[str, Any]:
        """Trains a new model on each fold; returns the metrics of each, their mean and standard deviation.

        The engine's own model does not change.
        """
        self._check_group()
        check_texts(texts, labels)
        num_epochs, rows = self._num_epochs(max_epochs), list[dict[str, Any]]()
        for number, split in enumerate(fold_texts(texts, labels, num_folds, self.config.seed), 1):
            rows.append(self._training.train_fold(number, *self._loaders(texts, labels, split), num_epochs))
        names = [name for name in rows[0] if all(isinstance(row.get(name), float) for row in rows)]
        columns = {name: np.array([row[name] for row in rows]) for name in names}
        return {
            "folds": rows,
            "mean": {name: float(values.mean()) for name, values in columns.items()},
            "std": {name: float(values.std()) for name, values in columns.items()},
        }

    def _num_epochs(self, max_epochs: int | None) -> int:
        num_epochs = self.config.num_epochs if max_epochs is None else max_epochs
        if not isinstance(num_epochs, int) or num_epochs < 1:
            raise ConfigError(f"max_epochs: expected a whole number of at least 1, got {num_epochs!r}")
        return num_epochs

    def _check_group(self) -> None:
        if self._left_group and self._devices.world.size > 1:
            raise ConfigError("cleanup_multi_gpu() has left the process group; create a new engine to train")

    def evaluate_model(self, loader: Loader) -> dict[str, Any]:
        """Evaluates the model on these texts, with a constant prediction as the baseline."""
        return self._training.evaluate(loader)

    def save_checkpoint(self, path: str | Path = "checkpoint") -> Path:
        """Saves a checkpoint as a folder in checkpoint_dir, even if the name ends in .pt; it contains no pickle."""
        return self._training.save_checkpoint(path)

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Loads a checkpoint that was saved with any number of GPUs, for analysis and to continue training."""
        return {"path": str(self._training.load_checkpoint(path)), "epochs": self._training.classifier.num_epochs}

    # Analysis --------------------------------------------------------------------------------------------------------

    def analyze_seo_score(self, text: str, keywords: Sequence[str] | str = ()) -> dict[str, Any]:
        """Returns the learned score of a text and, separately under `checks`, the results of rule-based checks.

        `seo_score` is a number, the probability of the second of two classes, or the mean of several numeric classes.
        It is None before training, and `reason` says why.
        """
        _check_text(text, "text")
        checks = [asdict(check) for check in check_text(text, _keywords(keywords))]
        return {**self._training.classifier.score(text), "checks": checks}

    def optimize_content(self, content: str, target_keywords: Sequence[str] | str) -> dict[str, Any]:
        """Reorders, drops and splits sentences of the text where that does not lower its score.

        No words are added. `changes` lists every change that was tried, with the score before and after it.
        """
        keywords = _keywords(target_keywords)
        if not keywords:
            raise ConfigError("target_keywords is empty; pass the search terms that the text should rank for")
        _check_text(content, "content")
        score_of, scored_by = self._judge(keywords)
        original_score = score_of(content.strip()) if score_of else None
        text, score, changes = improve(content.strip(), keywords, score_of)
        return {
            "original_content": content,
            "optimized_content": text if text != content.strip() else content,
            "original_score": original_score,
            "optimized_score": score,
            "improvement": None if original_score is None or score is None else score - original_score,
            "scored_by": scored_by,
            "changes": changes,
            "checks_before": [asdict(check) for check in check_text(content, keywords)],
            "checks_after": [asdict(check) for check in check_text(text, keywords)],
        }

    def _judge(self, keywords: Sequence[str]) -> tuple[Callable[[str], float] | None, str]:
        """Returns a function that scores a text for these keywords, and its description."""
        if self.config.rank_model is None:
            score = self._training.classifier.score
            if (reason := score("any text")["reason"]) is not None:
                return None, f"{reason}; or set rank_model"
            return lambda text: float(score(text)["seo_score"]), "the classifier trained by this engine"
        if self._ranker is None:
            from unisono.recipes.seo.trained import open_ranker

            self._ranker = open_ranker(self.config.rank_model)
        ranker = self._ranker
        description = f"rank_model {self.config.rank_model}: how well the text answers {', '.join(keywords)}"
        return lambda text: float(ranker.scores(list(keywords), [text]).mean()), description


def _keywords(keywords: Sequence[str] | str) -> list[str]:
    values = [keywords] if isinstance(keywords, str) else list(keywords)
    if not all(isinstance(value, str) and value.strip() for value in values):
        raise ConfigError(f"keywords: expected words, got {values!r}")
    return values


def _check_text(text: Any, name: str) -> None:
    if not isinstance(text, str):
        raise ConfigError(f"{name}: expected a string, got {shown(text)} of type {type(text).__name__}")
    if not text.strip():
        raise ConfigError(f"{name} is empty")
