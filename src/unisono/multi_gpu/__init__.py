"""Trains your own model, with your datasets and loss function, on any number of GPUs.

    from unisono.multi_gpu import MultiGPUConfig, MultiGPUTrainingManager

    manager = MultiGPUTrainingManager(MultiGPUConfig(batch_size=32))
    trainer = manager.create_trainer(model, train_dataset, val_dataset, loss_fn=loss_fn, optimizer=optimizer)
    for epoch in range(10):
        print(trainer.train_epoch(epoch), trainer.validate(epoch))

The same script runs on the CPU, on one GPU, on several (`torchrun --nproc_per_node=4 script.py`), and in a notebook.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.multi_gpu.benchmark import benchmark_multi_gpu_performance, get_optimal_batch_size
    from unisono.multi_gpu.config import MultiGPUConfig
    from unisono.multi_gpu.gpus import (
        cleanup_distributed_training,
        clear_memory_cache,
        get_gpu_info,
        select_optimal_gpus,
        setup_cuda_environment,
        setup_distributed_training,
    )
    from unisono.multi_gpu.launch import launch_distributed_training, launch_multi_gpu_training
    from unisono.multi_gpu.manager import MultiGPUTrainingManager
    from unisono.multi_gpu.parallel_trainers import DataParallelTrainer, DistributedDataParallelTrainer
    from unisono.multi_gpu.trainers import OptimizedDataParallel, TrainingError, load_weights

_MODULES = {
    "benchmark": ("benchmark_multi_gpu_performance", "get_optimal_batch_size"),
    "config": ("MultiGPUConfig",),
    "gpus": (
        *("cleanup_distributed_training", "clear_memory_cache", "get_gpu_info", "select_optimal_gpus"),
        *("setup_cuda_environment", "setup_distributed_training"),
    ),
    "launch": ("launch_distributed_training", "launch_multi_gpu_training"),
    "manager": ("MultiGPUTrainingManager",),
    "parallel_trainers": ("DataParallelTrainer", "DistributedDataParallelTrainer"),
    "trainers": ("OptimizedDataParallel", "TrainingError", "load_weights"),
}

__all__ = [
    "DataParallelTrainer",
    "DistributedDataParallelTrainer",
    "MultiGPUConfig",
    "MultiGPUTrainingManager",
    "OptimizedDataParallel",
    "TrainingError",
    "benchmark_multi_gpu_performance",
    "cleanup_distributed_training",
    "clear_memory_cache",
    "get_gpu_info",
    "get_optimal_batch_size",
    "launch_distributed_training",
    "launch_multi_gpu_training",
    "load_weights",
    "select_optimal_gpus",
    "setup_cuda_environment",
    "setup_distributed_training",
]


def __getattr__(name: str) -> Any:
    # Import a module on first use, so that get_gpu_info() does not wait for the import of torch.
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"unisono.multi_gpu.{module}"), name)
    raise AttributeError(f"module 'unisono.multi_gpu' has no attribute {name!r}")
