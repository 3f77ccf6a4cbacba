"""Everything that bring-your-own-model training can be told, in the words people use for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from unisono.config.config_class import ConfigClass, check_one_of, check_whole
from unisono.config.fields import fields_by_name
from unisono.errors import ConfigError
from unisono.settings import Settings

STRATEGIES = {
    "auto": "auto",
    "single": "single",
    "dataparallel": "dp",
    "distributed": "ddp",
    "sharded": "fsdp",
}
"""Strategies as people call them -> as the engine does."""
_SAME = {"dp": "dataparallel", "ddp": "distributed", "distributeddataparallel": "distributed", "fsdp": "sharded"}


@dataclass
class MultiGPUConfig(ConfigClass):
    """How to train a model of your own. Every field acts, or is refused with the reason."""

    num_gpus: int | None = None
    """How many GPUs; None: all that are free, 0: the CPU. With fewer than asked for, accumulation keeps the batch."""
    gpu_ids: list[int] | None = None
    """Which GPUs, by the numbers that nvidia-smi and get_gpu_info() give."""
    min_memory_gb: float = 4.0
    """Take only GPUs with at least this much free memory."""
    strategy: str = "auto"
    """auto, single, dataparallel (one process), distributed (a process per GPU), sharded (the model in parts, too)."""
    backend: str = "nccl"
    """nccl between GPUs (ranks on the CPU take gloo by themselves), or gloo everywhere."""
    world_size: int | None = None
    """How many processes launch_multi_gpu_training starts; with `rank`: how many there are."""
    rank: int | None = None
    """Which of them this is, where no launcher says so: the process joins the others at master_addr."""
    local_rank: int | None = None
    """Which one of its machine it is (default: rank)."""
    master_addr: str = "localhost"
    """Where processes that were started by hand meet."""
    master_port: str = "12355"
    """The port there. The launchers find a free one themselves, unless another than this default is given."""
    pin_memory: bool = True
    """Page-locked host memory for faster copies to the GPU."""
    num_workers: int = 4
    """Loader processes for each training process. Any number gives the same run."""
    persistent_workers: bool = True
    """Keep the loader processes between epochs; they read the next one ahead."""
    find_unused_parameters: bool = False
    """distributed: look for weights that took no part in the loss (slower)."""
    broadcast_buffers: bool = True
    """distributed: copy buffers (batch norm's statistics) from the first process in every step."""
    bucket_cap_mb: float = 25
    """distributed: size of a communication bucket."""
    gradient_as_bucket_view: bool = False
    """distributed: gradients live inside the buckets (saves one copy of them)."""
    static_graph: bool = False
    """distributed: promise that all steps use the same weights in the same order."""
    memory_efficient_find_unused_parameters: bool = False
    """PyTorch has no such option: True is refused."""

    batch_size: int = 32
    """Samples per GPU and micro-batch; the effective batch is this × GPUs × gradient_accumulation_steps."""
    global_batch_size: int | None = None
    """Samples per optimizer step over all GPUs, given directly."""
    gradient_accumulation_steps: int = 1
    """Micro-batches per optimizer step."""
    learning_rate: float = 1e-3
    """For the optimizer that is made where none is given (AdamW)."""
    weight_decay: float = 0.01
    """Likewise."""
    grad_clip: float = 0.0
    """Clip the gradient of the whole model to this norm; 0: not at all."""
    mixed_precision: str = "no"
    """no, fp16 or bf16."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them: less memory, more time."""
    scheduler_interval: str = "epoch"
    """When a scheduler is stepped: after every epoch, or every step."""
    shuffle: bool = True
    """A new order of the samples in every epoch."""
    seed: int = 0
    """Of the order, of dropout, and of models that model_fn makes."""
    title: str | None = None
    """What the start-up banner calls the run. Default: the name of the model's class."""
    output_dir: str | None = None
    """Folder of the run: a run that is started again with the same one goes on where it stopped. Default: runs/…"""
    max_restarts: int = 3
    """How often launch_multi_gpu_training starts all processes again after one has died."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Further settings by the names that `unisono train --help` lists, such as {"ema_decay": 0.999}."""

    def __post_init__(self) -> None:
        self.check()

    @classmethod
    def _check_names(cls, names: Iterable[object]) -> None:
        """As everywhere; and names that people try, and settings that are the engine's."""
        names, known = list(names), {field.name for field in fields(cls)}
        for name in names:
            if name in _TRIED:
                raise ConfigError(f"unknown field {name} of {cls.__name__}; it is {_TRIED[str(name)]} here")
            if name not in known and name in fields_by_name([Settings]) and name not in _OWN:
                raise ConfigError(f'{name} is one of the further settings: settings={{"{name}": …}}')
        super()._check_names(names)

    def check(self) -> None:
        """Refuses what no run can be made of; also called when a trainer is made, because fields may be set later."""
        self.strategy = _SAME.get(str(self.strategy).lower(), self.strategy)
        check_one_of("strategy", self.strategy, STRATEGIES)
        check_one_of("backend", self.backend, ("nccl", "gloo"))
        check_one_of("scheduler_interval", self.scheduler_interval, ("epoch", "step"))
        for name in ("num_gpus", "rank", "local_rank", "num_workers", "max_restarts"):
            check_whole(name, getattr(self, name), at_least=0)
        for name in ("world_size", "batch_size", "global_batch_size", "gradient_accumulation_steps"):
            check_whole(name, getattr(self, name), at_least=1)
        if self.memory_efficient_find_unused_parameters:
            raise ConfigError(
                "memory_efficient_find_unused_parameters: PyTorch has no such option; find_unused_parameters=True is "
                "the one there is"
            )
        if self.gpu_ids is not None:
            self._check_ids(self.gpu_ids)
        if self.rank is not None and (self.world_size is None or self.rank >= self.world_size):
            raise ConfigError(f"rank {self.rank} needs a world_size above it, not {self.world_size}; give both")
        port = str(self.master_port)
        if not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
            raise ConfigError(f"master_port: expected a port from 1 to 65535, got {self.master_port!r}")
        if not isinstance(self.settings, Mapping):
            raise ConfigError(f"settings: expected a dict of settings by name, got {type(self.settings).__name__}")
        if twice := [name for name in self.settings if name in _OWN]:
            raise ConfigError(f"settings: {twice[0]} has a field of its own here ({_OWN[twice[0]]}); set that")

    def _check_ids(self, ids: list[int]) -> None:
        if not ids or len(set(ids)) < len(ids) or not all(isinstance(each, int) and each >= 0 for each in ids):
            raise ConfigError(f"gpu_ids: expected different numbers such as [0, 2], got {ids}; num_gpus=0 is the CPU")
        if self.num_gpus not in (None, len(ids)):
            raise ConfigError(
                f"num_gpus {self.num_gpus} contradicts the {len(ids)} gpu_ids {ids}; leave one of them out"
            )

    def engine_settings(self) -> dict[str, Any]:
        """The engine's settings, less those about devices and the batch, which depend on where the run takes place."""
        self.check()
        return {
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
            "eval_every": -1,  # when to evaluate is for the caller's loop to say
            "preview_every": -1,
            **({} if self.output_dir is None else {"output_dir": str(self.output_dir)}),
            **self.settings,
        }


_TRIED = {
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
    "sampler": "nothing: the order of samples is what makes runs the same (shuffle and seed are there)",
}
"""Names of other libraries -> what is meant here."""

_OWN = {
    **{f.name: f.name for f in fields(MultiGPUConfig)},
    "strategy": "strategy",
    "gpus": "num_gpus or gpu_ids",
    "nproc": "world_size",
    "num_epochs": "the epochs that are trained",
    "max_steps": "the epochs that are trained",
    "eval_every": "validate() in the loop",
}
