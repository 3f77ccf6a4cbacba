"""Compares the training speed on all devices and on one device, and finds the largest batch that fits."""

from __future__ import annotations

import copy
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from io import StringIO
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from unisono.devices import visible_gpus
from unisono.errors import ConfigError
from unisono.multi_gpu.config import MultiGPUConfig
from unisono.multi_gpu.gpus import get_gpu_info
from unisono.multi_gpu.loss import loss_of
from unisono.multi_gpu.manager import MultiGPUTrainingManager
from unisono.planning.host import free_host_memory

_LARGEST = 4096
_PART_OF_HOST = 0.5  # fraction of the host's free memory to use; the rest is left to other programs
_BESIDE_SAVED = 2.0  # memory for tensors saved for backward, their gradients and workspace, per byte of saved tensors
_STATE_PER_WEIGHT = 4  # number of tensors of a weight's size: the weight, its gradient, and Adam's two moments


class _Repeated(Dataset[Any]):
    """Repeats a dataset until it has `size` samples."""

    def __init__(self, data: Any, size: int) -> None:
        self._data, self._size = data, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        return self._data[index % len(self._data)]


def benchmark_multi_gpu_performance(
    model: nn.Module,
    dataset: Dataset[Any],
    config: MultiGPUConfig | None = None,
    *,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    steps: int = 20,
    warmup_steps: int = 5,
) -> dict[str, Any]:
    """Trains a copy of the model on all devices and another on one device; returns time, throughput and memory.

    Under torchrun every process must call it, and all processes get the same result. It leaves no files and does not
    change the model.
    """
    config = config or MultiGPUConfig()
    result = _from_main(_measure(model, dataset, config, loss_fn, steps, warmup_steps))
    one: dict[str, Any] | None = None
    if result["num_devices"] > 1:
        with _without_launcher() as is_main:
            if is_main:  # the other ranks wait in _from_main
                single = replace(config, strategy="single", num_gpus=min(1, get_gpu_info()["count"]), gpu_ids=None)
                single = replace(single, world_size=None, rank=None)
                one = _measure(model, dataset, single, loss_fn, steps, warmup_steps, alone=True)
        one = _from_main(one)
    one = one or dict(result)
    num_devices = result["num_devices"]
    speedup = result["samples_per_second"] / one["samples_per_second"]
    requested = config.world_size or (len(config.gpu_ids) if config.gpu_ids else config.num_gpus) or num_devices
    result["devices_asked_for"] = requested
    if requested > num_devices and _is_main():
        name = "world_size" if config.world_size else "gpu_ids" if config.gpu_ids else "num_gpus"
        measured = "one device was" if num_devices == 1 else f"{num_devices} devices were"
        print(
            f"unisono: {name} is {requested}, but {measured} measured, because this script is one process; start it "
            f"with torchrun --nproc_per_node={requested} to measure {requested} devices",
            file=sys.stderr,
        )
    return {**result, "single_device": one, "speedup": speedup, "efficiency": speedup / num_devices}


def _measure(
    model: nn.Module,
    dataset: Any,
    config: MultiGPUConfig,
    loss_fn: Any,
    steps: int,
    warmup_steps: int,
    *,
    alone: bool = False,
) -> dict[str, Any]:
    model = copy.deepcopy(model)
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder, redirect_stderr(StringIO()):
        quiet = {**config.settings, "tensorboard": False, "log_every": 2**30, "save_every": 0, "keep_last": 0}
        shared = folder if alone else _from_main(folder)
        run = replace(config, output_dir=shared, persistent_workers=True, settings=quiet)
        trainer = MultiGPUTrainingManager(run).create_trainer(model, _Repeated(dataset, 2**40), loss_fn=loss_fn)
        batch = trainer.get_performance_stats()["global_batch_size"]
        trainer.run_steps(warmup_steps)
        started = time.perf_counter()
        trainer.run_steps(steps)
        seconds = time.perf_counter() - started
        stats = trainer.get_performance_stats()
        trainer.close()
    samples = steps * batch
    loads = {gpu.index: gpu.utilization for gpu in visible_gpus()}
    return {
        "training_time": seconds,
        "samples": samples,
        "samples_per_second": samples / seconds,
        "strategy": stats["strategy"],
        "num_devices": stats["num_devices"],
        "global_batch_size": batch,
        "gpu_utilization": {"gpu_info": get_gpu_info(), "percent": loads, "memory_usage": stats["memory"]},
        "memory": stats["memory"],
    }


def _is_main() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


@contextmanager
def _without_launcher() -> Iterator[bool]:
    """Hides the launcher's environment variables, so that rank 0 can train alone; yields whether this is rank 0."""
    hidden = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE", "UNISONO_JOB") if name in os.environ}
    try:
        yield _is_main()
    finally:
        os.environ.update(hidden)


def _from_main(value: Any) -> Any:
    """Broadcasts a value from rank 0 to all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def get_optimal_batch_size(
    model: nn.Module,
    num_gpus: int | None = None,
    memory_per_sample: float | None = None,
    *,
    dataset: Dataset[Any] | None = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    config: MultiGPUConfig | None = None,
    max_batch_size: int = _LARGEST,
) -> int:
    """Returns the largest `batch_size` that fits on each device.

    With a `dataset`, it tries batch sizes on a GPU; on the CPU, it measures how much memory a forward pass saves per
    sample. Without a dataset, it computes the size from `memory_per_sample`, in GB (default 0.1).
    """
    if max_batch_size < 1:
        raise ConfigError(f"max_batch_size: expected at least 1, got {max_batch_size}")
    gpus = [] if num_gpus == 0 else visible_gpus()
    if dataset is not None and len(dataset) == 0:  # type: ignore[arg-type]
        raise ConfigError("dataset is empty; pass one with at least one sample")
    if dataset is not None and gpus:
        return _by_trying(model, dataset, loss_fn, config or MultiGPUConfig(), max_batch_size)
    if dataset is not None:
        per_sample = _saved_per_sample(model, dataset, loss_fn) * _BESIDE_SAVED
    else:
        per_sample = (0.1 if memory_per_sample is None else memory_per_sample) * 1e9
        if per_sample <= 0:
            raise ConfigError(f"memory_per_sample: expected a number of GB above 0, got {memory_per_sample}")
    state = sum(weight.numel() * weight.element_size() for weight in model.parameters()) * _STATE_PER_WEIGHT
    free = min(gpu.free_bytes for gpu in gpus[:num_gpus]) if gpus else free_host_memory()
    room = free * _PART_OF_HOST * (1.6 if gpus else 1.0) - state
    return max(1, min(max_batch_size, int(room / per_sample)))


def _by_trying(model: nn.Module, dataset: Any, loss_fn: Any, config: MultiGPUConfig, largest: int) -> int:
    """Finds the batch size by trying sizes with the weights and the optimizer state in memory."""
    home = next(model.parameters()).device
    with tempfile.TemporaryDirectory(prefix="unisono-size-") as folder, redirect_stderr(StringIO()):
        settings = {**config.settings, "micro_batch": "auto", "tensorboard": False}
        run = replace(
            config, strategy="single", num_gpus=1, gpu_ids=None, num_workers=0, output_dir=folder, settings=settings
        )
        run = replace(run, batch_size=largest, global_batch_size=None, gradient_accumulation_steps=1)
        trainer = MultiGPUTrainingManager(run).create_trainer(model, _Repeated(dataset, 2**40), loss_fn=loss_fn)
        size = trainer.most_at_once()
        trainer.close()
        del trainer
    model.to(home)
    gc.collect()
    torch.cuda.empty_cache()
    return size


def _saved_per_sample(model: nn.Module, dataset: Any, loss_fn: Any) -> float:
    """Measures the bytes that autograd saves for backward per sample: two samples minus one sample."""
    was_training = model.training
    model.train()
    first = min(2, len(dataset))
    saved = [_saved_bytes(model, default_collate([dataset[i % first] for i in range(num)]), loss_fn) for num in (1, 2)]
    model.train(was_training)
    return max(float(saved[1] - saved[0]), 1.0)


def _saved_bytes(model: nn.Module, batch: Any, loss_fn: Any) -> int:
    weights = {weight.untyped_storage().data_ptr() for weight in [*model.parameters(), *model.buffers()]}
    sizes: dict[int, int] = {}

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    buffers = [buffer.clone() for buffer in model.buffers()]
    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        loss = loss_of(model, batch, loss_fn)
        torch.autograd.grad(loss.total, [w for w in model.parameters() if w.requires_grad], allow_unused=True)
    with torch.no_grad():  # undoes the update of batch-norm statistics
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
    return sum(sizes.values())
