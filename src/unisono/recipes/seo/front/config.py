"""SEOConfig: the settings of AdvancedLLMSEOEngine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from unisono.config.config_class import ConfigClass, check_one_of, check_whole
from unisono.errors import ConfigError

STRATEGIES = ("dataparallel", "distributed", "auto")
PRECISIONS = {"float16": "fp16", "bfloat16": "bf16", "float32": "no"}


@dataclass
class SEOConfig(ConfigClass):
    """Settings for training a classifier of texts."""

    model_name: str = "minilm"
    """A transformers model: a folder, a hub id, `minilm` (part of unisono[seo]) or `tiny` (built from the texts)."""
    max_length: int = 512
    """Maximum number of tokens per text. Longer texts are truncated."""
    label: str = "auto"
    """Type of the labels: class, number, or auto (classes if they are words or a few distinct integers)."""
    batch_size: int = 16
    """Texts per GPU and micro-batch. The effective batch is this × GPUs × gradient_accumulation_steps."""
    gradient_accumulation_steps: int = 1
    """Micro-batches per optimizer step."""
    effective_batch_size: int | None = None
    """Texts per optimizer step over all GPUs. The number of accumulation steps follows from it."""
    learning_rate: float = 2e-5
    """Peak learning rate of AdamW."""
    lr_scheduler: str = "cosine"
    """Learning rate after warm-up: cosine, linear or constant."""
    warmup_steps: int = 100
    """Number of optimizer steps over which the learning rate rises from 0 to its peak."""
    num_epochs: int = 3
    """Maximum number of epochs. The learning rate schedule ends with the last one."""
    early_stopping_patience: int = 5
    """Stop after this many epochs without a lower validation loss."""
    early_stopping_min_delta: float = 0.001
    """Smallest decrease in validation loss that counts as an improvement."""
    use_lora: bool = True
    """Train a LoRA and the new head instead of all weights."""
    lora_r: int = 16
    """Rank of the LoRA."""
    lora_alpha: float = 32
    """Scale of the LoRA."""
    use_mixed_precision: bool = True
    """Compute in 16 bit on a GPU, with 32-bit weights. The CPU uses 32 bit unless mixed_precision_dtype is set."""
    mixed_precision_dtype: str = "auto"
    """Dtype to compute in: auto (bfloat16 if the GPU supports it, else float16), float16, bfloat16 or float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them: less memory, more time, the same result."""
    dataloader_num_workers: int = 4
    """Loader processes per training process. Any number gives the same run."""
    seed: int = 0
    """Random seed of the new weights, of the order of the texts and of dropout."""
    output_dir: str | None = None
    """Run folder. Training with the folder of an earlier run resumes it. Default: a new folder in runs/."""
    checkpoint_dir: str = "checkpoints"
    """Folder of the checkpoints."""
    save_checkpoints: bool = True
    """Whether train_with_early_stopping saves the best epoch and loads its weights at the end."""
    rank_model: str | None = "minilm"
    """Model that optimize_content scores texts with: a run of `unisono train seo`, a folder, a hub id or `minilm`.
    None: the classifier that this engine trained."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Further settings by the names that `unisono train --help` lists, such as {"weight_decay": 0.1}."""

    use_multi_gpu: bool = False
    """Train on several GPUs. False: train on one device and ignore the fields below."""
    multi_gpu_strategy: str = "dataparallel"
    """Strategy: dataparallel (all GPUs from one process), distributed (one process per GPU, by torchrun), or auto."""
    num_gpus: int = 1
    """Number of GPUs per machine. If fewer are available, gradient accumulation keeps the effective batch."""
    distributed_backend: str = "nccl"
    """Communication backend: nccl between GPUs (ranks on the CPU use gloo), or gloo everywhere."""
    distributed_init_method: str = "env://"
    """Rendezvous: env://, or tcp://host:port instead of distributed_master_addr and distributed_master_port."""
    distributed_world_size: int = 1
    """Number of processes if you start the processes by hand. A launcher sets this number itself."""
    distributed_rank: int = 0
    """Rank of this process if you start the processes by hand."""
    distributed_master_addr: str = "localhost"
    """Address of rank 0 if you start the processes by hand."""
    distributed_master_port: str = "12355"
    """Port of rank 0 if you start the processes by hand."""
    sync_batch_norm: bool = False
    """Compute batch norm statistics over the micro-batches of all processes."""
    find_unused_parameters: bool = False
    """distributed: detect weights that did not contribute to the loss (slower)."""
    gradient_as_bucket_view: bool = False
    """distributed: gradients are views of the communication buckets (saves one copy of them)."""
    broadcast_buffers: bool = True
    """distributed: copy buffers from rank 0 in every step."""
    bucket_cap_mb: float = 25
    """distributed: size of a communication bucket in MiB."""
    static_graph: bool = False
    """distributed: assume that every step uses the same weights in the same order."""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Rejects invalid values. Also called when a run begins, because fields can be set after construction."""
        for each in fields(self):
            _check_type(each.name, str(each.type), getattr(self, each.name))
        check_one_of("multi_gpu_strategy", self.multi_gpu_strategy, STRATEGIES)
        check_one_of("lr_scheduler", self.lr_scheduler, ("cosine", "linear", "constant"))
        check_one_of("mixed_precision_dtype", self.mixed_precision_dtype, ("auto", *PRECISIONS))
        check_one_of("label", self.label, ("auto", "class", "number"))
        for name in ("max_length", "batch_size", "num_epochs", "lora_r", "gradient_accumulation_steps", "num_gpus"):
            check_whole(name, getattr(self, name), at_least=1)
        for name in ("warmup_steps", "dataloader_num_workers", "distributed_rank", "seed", "early_stopping_patience"):
            check_whole(name, getattr(self, name), at_least=0)
        for name in ("learning_rate", "lora_alpha", "bucket_cap_mb"):
            _check_number(name, getattr(self, name), above=0)
        _check_number("early_stopping_min_delta", self.early_stopping_min_delta)
        self._check_processes()
        self._check_batch()
        if not isinstance(self.settings, Mapping):
            raise ConfigError(f"settings: expected a dict of settings by name, got {type(self.settings).__name__}")
        for name in self.settings:
            if name in _FIELD_OF:
                raise ConfigError(f"settings: {name} has its own field here, {_FIELD_OF[name]}; set that")

    def _check_processes(self) -> None:
        check_one_of("distributed_backend", self.distributed_backend, ("nccl", "gloo"))
        check_whole("distributed_world_size", self.distributed_world_size, at_least=1)
        if self.distributed_rank >= self.distributed_world_size:
            raise ConfigError(
                f"distributed_rank {self.distributed_rank} must be below distributed_world_size "
                f"{self.distributed_world_size}"
            )
        self.master_address()

    def master_address(self) -> tuple[str, str]:
        """Returns the address and port of rank 0 for processes that were started by hand."""
        method, port = self.distributed_init_method, str(self.distributed_master_port)
        address = self.distributed_master_addr
        if method.startswith("tcp://"):
            address, _, port = method.removeprefix("tcp://").rpartition(":")
        elif method != "env://":
            raise ConfigError(f"distributed_init_method: expected env:// or tcp://host:port, got {method!r}")
        if not address or not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
            name = "distributed_init_method" if method != "env://" else "distributed_master_addr and _port"
            raise ConfigError(f"{name}: expected an address and a port from 1 to 65535, got {address!r} and {port!r}")
        return address, port

    def _check_batch(self) -> None:
        steps, effective = self.gradient_accumulation_steps, self.effective_batch_size
        check_whole("effective_batch_size", effective, at_least=1)
        devices = self.num_gpus if self.use_multi_gpu else 1
        if steps > 1 and effective is not None and self.batch_size * devices * steps != effective:
            raise ConfigError(
                f"batch_size {self.batch_size} x {devices} GPUs x gradient_accumulation_steps {steps} = "
                f"{self.batch_size * devices * steps} is not effective_batch_size {effective}; set only one of them"
            )


_FIELD_OF = {
    "activation_checkpointing": "gradient_checkpointing",
    "mixed_precision": "mixed_precision_dtype",
    "global_batch_size": "effective_batch_size",
    "num_workers": "dataloader_num_workers",
    "strategy": "multi_gpu_strategy",
    "backend": "distributed_backend",
    "gpus": "num_gpus",
    "nproc": "distributed_world_size",
    "lr_schedule": "lr_scheduler",
    **{name: name for name in ("gradient_checkpointing", "batch_size", "learning_rate", "num_epochs", "seed")},
    **{name: name for name in ("gradient_accumulation_steps", "warmup_steps", "output_dir", "num_gpus")},
    **{name: name for name in ("sync_batch_norm", "bucket_cap_mb", "find_unused_parameters", "static_graph")},
    **{name: name for name in ("broadcast_buffers", "gradient_as_bucket_view")},
}
"""Maps engine settings to the SEOConfig fields that set them."""


def _check_type(name: str, annotation: str, value: Any) -> None:
    if annotation == "bool" and value not in (True, False):
        raise ConfigError(f"{name}: expected True or False, got {value!r}")
    if value is None and "None" not in annotation:
        raise ConfigError(f"{name}: expected a value, got None")
    if annotation == "str" and not isinstance(value, str | os.PathLike) and name != "distributed_master_port":
        raise ConfigError(f"{name}: expected text, got {value!r}")


def _check_number(name: str, value: Any, *, above: float | None = None) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 <= value <= sys.float_info.max) or (above is not None and value <= above):
        raise ConfigError(f"{name}: expected a number {'of at least 0' if above is None else 'above 0'}, got {value!r}")
