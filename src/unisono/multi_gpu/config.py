"""The configuration of training with your own model, and its translation to engine settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from unisono.config.config_class import ConfigClass, check_one_of, check_whole
from unisono.config.fields import fields_by_name
from unisono.errors import ConfigError
from unisono.settings import Settings, optimizer_presets

STRATEGIES = {
    "auto": "auto",
    "single": "single",
    "dataparallel": "dp",
    "distributed": "ddp",
    "sharded": "fsdp",
}
"""Maps a strategy's name in the public API to the engine's name."""
_ALIASES = {"dp": "dataparallel", "ddp": "distributed", "distributeddataparallel": "distributed", "fsdp": "sharded"}


@dataclass
class MultiGPUConfig(ConfigClass):
    """Configures the training of your own model. A field that would have no effect is an error."""

    num_gpus: int | None = None
    """Number of GPUs. None: all free GPUs; 0: the CPU. If there are fewer, accumulation keeps the effective batch."""
    gpu_ids: list[int] | None = None
    """Ids of the GPUs to use, as in nvidia-smi and get_gpu_info()."""
    min_memory_gb: float = 4.0
    """Minimum free memory, in GB, that a GPU must have to be used."""
    strategy: str = "auto"
    """auto, single, dataparallel (one process), distributed (one process per GPU) or sharded (FSDP)."""
    backend: str = "nccl"
    """Communication backend. nccl: NCCL between GPUs (CPU ranks use gloo in any case); gloo: gloo for all ranks."""
    world_size: int | None = None
    """Number of training processes. If `rank` is set, you start them; otherwise launch_multi_gpu_training does."""
    rank: int | None = None
    """Rank of this process, if you start the processes yourself. They connect to master_addr."""
    local_rank: int | None = None
    """Rank of this process on its machine. Default: rank."""
    master_addr: str = "localhost"
    """Rendezvous address of processes that you start yourself, which is the host of rank 0."""
    master_port: str = "12355"
    """Rendezvous port. launch_multi_gpu_training chooses a free port unless you change this default."""
    pin_memory: bool = True
    """Load batches into page-locked host memory, from which copies to the GPU are faster."""
    num_workers: int = 4
    """Number of loader workers per training process. It does not affect the result."""
    persistent_workers: bool = True
    """Keep the loader workers alive between epochs, so that they prefetch the next epoch."""
    find_unused_parameters: bool = False
    """distributed: allow weights that the loss does not depend on, and detect them in every step (slower)."""
    broadcast_buffers: bool = True
    """distributed: broadcast buffers (such as batch-norm statistics) from rank 0 in every step."""
    bucket_cap_mb: float = 25
    """distributed: size of a gradient bucket, in MB."""
    gradient_as_bucket_view: bool = False
    """distributed: make gradients views of the buckets, which saves one copy of them."""
    static_graph: bool = False
    """distributed: assume that every step uses the same weights in the same order."""
    memory_efficient_find_unused_parameters: bool = False
    """Not supported, because PyTorch has no such option; True is an error."""

    batch_size: int = 32
    """Samples per GPU and micro-batch. The effective batch is batch_size × GPUs × gradient_accumulation_steps."""
    global_batch_size: int | None = None
    """Samples per optimizer step over all GPUs. If it is set, it determines the effective batch."""
    gradient_accumulation_steps: int = 1
    """Micro-batches per optimizer step."""
    learning_rate: float = 1e-3
    """Learning rate of the default optimizer (AdamW), or of an optimizer that you pass by name or class."""
    weight_decay: float = 0.01
    """Weight decay of the default optimizer."""
    grad_clip: float = 0.0
    """Maximum norm of the model's gradient. A larger gradient is scaled down to this norm. 0: no clipping."""
    mixed_precision: str = "no"
    """Precision of the computation: no (float32), fp16, bf16 or fp8."""
    activation_checkpointing: bool | Literal["selective"] = False
    """Recompute activations in the backward pass instead of storing them, which saves memory and takes more time.
    "selective": store the results that are expensive to recompute."""
    scheduler_interval: str = "epoch"
    """When to step the scheduler: after every epoch or after every step."""
    shuffle: bool = True
    """Read the samples in a new random order in every epoch."""
    seed: int = 0
    """Random seed of the sample order, of dropout, and of the weights that model_fn initialises."""
    title: str | None = None
    """Title of the run in the start-up banner. Default: the name of the model's class."""
    output_dir: str | None = None
    """Run folder. If it already contains this run, training continues from its last checkpoint. Default: runs/…"""
    max_restarts: int = 3
    """Maximum number of times that launch_multi_gpu_training restarts all processes after one of them died."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Further settings of `unisono train --help`, by name, such as {"ema_decay": 0.999}."""

    def __post_init__(self) -> None:
        self.check()

    @classmethod
    def _check_names(cls, names: Iterable[object]) -> None:
        """Raises ConfigError for an unknown name; the message translates names of other libraries."""
        names, own_names = list(names), {field.name for field in fields(cls)}
        for name in names:
            if name in _FOREIGN:
                raise ConfigError(f"unknown field {name} of {cls.__name__}; it is {_FOREIGN[str(name)]} here")
            if name not in own_names and name in fields_by_name([Settings]) and name not in _OWN:
                raise ConfigError(f'{name} is an engine setting; pass it as settings={{"{name}": …}}')
        super()._check_names(names)

    def check(self) -> None:
        """Raises ConfigError for invalid values. Creating a trainer checks again, because fields can change."""
        self.strategy = _ALIASES.get(str(self.strategy).lower(), self.strategy)
        check_one_of("strategy", self.strategy, STRATEGIES)
        check_one_of("backend", self.backend, ("nccl", "gloo"))
        check_one_of("scheduler_interval", self.scheduler_interval, ("epoch", "step"))
        for name in ("num_gpus", "rank", "local_rank", "num_workers", "max_restarts"):
            check_whole(name, getattr(self, name), at_least=0)
        for name in ("world_size", "batch_size", "global_batch_size", "gradient_accumulation_steps"):
            check_whole(name, getattr(self, name), at_least=1)
        if self.memory_efficient_find_unused_parameters:
            raise ConfigError(
                "memory_efficient_find_unused_parameters: PyTorch has no such option; use find_unused_parameters=True"
            )
        if self.gpu_ids is not None:
            self._check_ids(self.gpu_ids)
        if self.rank is not None and (self.world_size is None or self.rank >= self.world_size):
            raise ConfigError(f"rank {self.rank} needs a larger world_size than {self.world_size}; set both")
        port = str(self.master_port)
        if not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
            raise ConfigError(f"master_port: expected a port from 1 to 65535, got {self.master_port!r}")
        if not isinstance(self.settings, Mapping):
            raise ConfigError(f"settings: expected a dict of settings by name, got {type(self.settings).__name__}")
        if twice := [name for name in self.settings if name in _OWN]:
            raise ConfigError(f"settings: {twice[0]} is set by {_OWN[twice[0]]}; use that instead")

    def _check_ids(self, ids: list[int]) -> None:
        if not ids or len(set(ids)) < len(ids) or not all(isinstance(each, int) and each >= 0 for each in ids):
            raise ConfigError(
                f"gpu_ids: expected distinct GPU indices such as [0, 2], got {ids}; to train on the CPU, set num_gpus=0"
            )
        if self.num_gpus not in (None, len(ids)):
            raise ConfigError(f"num_gpus {self.num_gpus} contradicts the {len(ids)} gpu_ids {ids}; remove one of them")

    def engine_settings(self, optimizer: str | None = None) -> dict[str, Any]:
        """Translates the config to engine settings, except devices and batch size, which depend on the machine.

        `optimizer` is the name of an optimizer of `unisono.optim`, if the user chose one.
        """
        self.check()
        settings = {
            "backend": "gloo" if self.backend == "gloo" else "auto",
            "min_memory_gb": self.min_memory_gb,
            "pin_memory": self.pin_memory,
            "num_workers": self.num_workers,
            "find_unused_parameters": self.find_unused_parameters,
            "broadcast_buffers": self.broadcast_buffers,
            "bucket_cap_mb": self.bucket_cap_mb,
            "gradient_as_bucket_view": self.gradient_as_bucket_view,
            "static_graph": self.static_graph,
            "learning_rate": self.learning_rate,
            "weight_decay": self.weight_decay,
            "grad_clip": self.grad_clip,
            "mixed_precision": self.mixed_precision,
            "activation_checkpointing": self.activation_checkpointing,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "max_restarts": self.max_restarts,
            "eval_every": -1,  # the caller's own loop evaluates
            "preview_every": -1,
            **({} if self.output_dir is None else {"output_dir": str(self.output_dir)}),
            **self.settings,
        }
        if optimizer is not None:
            settings["optimizer"] = optimizer
        presets = optimizer_presets(str(settings.get("optimizer", "")))
        if "learning_rate" in presets and settings["learning_rate"] == MultiGPUConfig.learning_rate:
            del settings["learning_rate"]  # the user did not change the default
        return settings


_FOREIGN = {
    "lr": "learning_rate",
    "amp": "mixed_precision",
    "use_amp": "mixed_precision",
    "fp16": 'mixed_precision="fp16"',
    "bf16": 'mixed_precision="bf16"',
    "epochs": "train(epochs)",
    "num_epochs": "train(epochs)",
    "max_grad_norm": "grad_clip",
    "accumulation_steps": "gradient_accumulation_steps",
    "gradient_checkpointing": "activation_checkpointing",
    "sampler": "determined by shuffle and seed, so that the sample order is the same on any number of GPUs,",
}
"""Maps option names of other libraries to the names that unisono uses."""

_OWN = {
    **{f.name: f.name for f in fields(MultiGPUConfig)},
    "strategy": "strategy",
    "gpus": "num_gpus or gpu_ids",
    "nproc": "world_size",
    "num_epochs": "the number of epochs that you train",
    "max_steps": "the number of epochs that you train",
    "eval_every": "your calls of validate()",
}
