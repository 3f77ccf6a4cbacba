"""The engine's devices: where it trains, and what can be asked about that."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from unisono.errors import ConfigError
from unisono.multi_gpu.gpus import cleanup_distributed_training
from unisono.multi_gpu.trainers import OptimizedDataParallel, OwnTrainer
from unisono.observe.status_line import print_line
from unisono.recipes.seo.front.config import SEOConfig
from unisono.recipes.seo.front.devices import Devices, effective_batch, find_devices, join_others, memory, precision
from unisono.recipes.seo.front.learner import Learner


class Placed:
    """An engine that knows its devices, and has not learned anything yet."""

    def __init__(self, config: SEOConfig | None = None, noted: str | None = None) -> None:
        """`noted`: what was said about the devices already."""
        self.config = config or SEOConfig()
        self._learner = Learner(self.config)
        self._trainer: OwnTrainer | None = None
        self._cleaned = False
        self._noted = noted
        self._setup_multi_gpu_training()

    def _setup_multi_gpu_training(self) -> Devices:
        """Finds the devices, and meets the other processes; says once where there are fewer than asked for."""
        self._devices = found = find_devices(self.config)
        join_others(self.config, found)
        if found.note and found.note != self._noted and found.world.is_main:
            self._noted = found.note
            print_line(f"note: {found.note}")
        return found

    def _setup_dataparallel_training(self, num_gpus: int) -> Devices:
        """The same for so many GPUs from one process."""
        return self._change(use_multi_gpu=True, multi_gpu_strategy="dataparallel", num_gpus=num_gpus)

    def _setup_distributed_training(self, num_gpus: int) -> Devices:
        """The same for a process per GPU."""
        return self._change(use_multi_gpu=True, multi_gpu_strategy="distributed", num_gpus=num_gpus)

    def _change(self, **fields: Any) -> Devices:
        if self._trainer is not None:
            raise ConfigError("the run has begun on its devices; make another engine")
        for name, value in fields.items():
            setattr(self.config, name, value)
        return self._setup_multi_gpu_training()

    def _wrap_model_for_multi_gpu(self) -> nn.Module:
        """The model as it computes on several devices. Training needs no such call: the engine does it by itself."""
        if self.is_dataparallel:
            return self._wrap_model_dataparallel()
        return self._wrap_model_distributed() if self.is_distributed else self._model

    def _wrap_model_dataparallel(self) -> nn.Module:
        """The model in nn.DataParallel, for a loop of one's own; without GPUs that is the model."""
        return OptimizedDataParallel(self._model)

    def _wrap_model_distributed(self) -> nn.Module:
        """The model in DistributedDataParallel, for a loop of one's own."""
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
        if self._learner.model is None:
            raise ConfigError("there is no model yet: how many classes it has is known from the labels; train it first")
        return self._learner.model

    @property
    def is_dataparallel(self) -> bool:
        """Whether several GPUs train from one process."""
        return self._devices.strategy == "dataparallel" and not self._cleaned

    @property
    def is_distributed(self) -> bool:
        """Whether several processes train."""
        return self._devices.world.size > 1 and not self._cleaned

    @property
    def num_gpus(self) -> int:
        """GPUs that take part; 0: the CPU."""
        return self._devices.num_gpus

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return self._devices.device

    @property
    def seo_model(self) -> nn.Module | None:
        """The model, without any wrapper; None before labels were seen."""
        return self._learner.model

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer; None before texts were seen."""
        return self._learner.tokenizer

    def get_multi_gpu_status(self) -> dict[str, Any]:
        """On what it trains: strategy, GPUs, device, processes, precision, effective batch, memory."""
        config, found = self.config, self._devices
        batch = effective_batch(config, found.asked)
        stats = {} if self._trainer is None else self._trainer.get_performance_stats()
        return {
            "use_multi_gpu": config.use_multi_gpu,
            "strategy": stats.get("strategy", found.strategy),
            "requested_strategy": config.multi_gpu_strategy if config.use_multi_gpu else "single",
            "num_gpus": found.num_gpus,
            "requested_gpus": found.asked,
            "num_devices": found.num_devices,
            "device": str(found.device),
            "world_size": found.world.size,
            "rank": found.world.rank,
            "local_rank": found.world.local_rank,
            "is_dataparallel": self.is_dataparallel,
            "is_distributed": self.is_distributed,
            "backend": config.distributed_backend if found.num_gpus else "gloo",
            "precision": {"no": "float32", "fp16": "float16", "bf16": "bfloat16"}[precision(config, found)],
            "batch_size": config.batch_size,
            "gradient_accumulation_steps": -(-batch // (config.batch_size * found.num_devices)),
            "effective_batch_size": stats.get("global_batch_size", batch),
            "num_workers": config.dataloader_num_workers,
            "memory": memory(found) if self._trainer is None else self._trainer.get_memory_stats(),
        }

    def synchronize_gpus(self) -> None:
        """Waits until every process has come here, and its GPUs have computed what they were given."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            for number in range(torch.cuda.device_count() if self.is_dataparallel else 1):
                torch.cuda.synchronize(number if self.is_dataparallel else None)
        if self.is_distributed:
            torch.distributed.all_reduce(torch.zeros(1))

    def cleanup_multi_gpu(self) -> None:
        """Ends the run and leaves the other processes; the model stays, for analysing."""
        self._close()
        cleanup_distributed_training()
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()
        self._cleaned = True

    def _close(self) -> None:
        if self._trainer is not None:
            self._trainer.close()
        self._trainer = None
