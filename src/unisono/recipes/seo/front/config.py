"""SEOConfig: everything the engine can be told, in the words people use for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unisono.config.plain import Plain, check_one_of, check_whole
from unisono.errors import ConfigError
from unisono.recipes.seo.front.meaningless import Meaningless, refuse_meaningless

STRATEGIES = ("dataparallel", "distributed", "auto")
SCHEDULES = ("cosine", "linear", "constant", "exponential", "step", "plateau")
MONITORS = ("val_loss", "val_accuracy", "train_loss")
PRECISIONS = {"float16": "fp16", "bfloat16": "bf16", "float32": "no"}


@dataclass
class SEOConfig(Plain, Meaningless):  # type: ignore[misc]
    """How to train a model of texts. Every field acts, or is refused with the reason."""

    model_name: str = "minilm"
    """A transformers model: a folder, a hub id, `minilm` (comes with unisono[seo]), or `tiny` (made from the data)."""
    max_length: int = 512
    """Tokens of a text; what is longer is cut."""
    batch_size: int = 16
    """Texts per GPU and micro-batch; the effective batch is this × GPUs × gradient_accumulation_steps."""
    learning_rate: float = 2e-5
    """Peak learning rate (AdamW)."""
    num_epochs: int = 3
    """How long to train, at most; the schedule of the learning rate ends with it."""
    device: str = "auto"
    """auto: a GPU if there is one; cpu; cuda; or one GPU by its number, such as cuda:1."""
    output_dir: str | None = None
    """Folder of the run: started again with the same one, it goes on where it stopped. Default: runs/..."""
    label: str = "auto"
    """What labels are: class, number, or auto (classes if they are words or few whole numbers)."""
    seed: int = 0
    """Of the new weights, of the order of texts, and of dropout."""

    use_lora: bool = True
    """Train a LoRA and the new head instead of all weights."""
    lora_r: int = 16
    """Its rank."""
    lora_alpha: float = 32
    """Its scale."""
    lora_dropout: float = 0.1
    """In it."""

    weight_decay: float = 0.01
    """Decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Clip the gradient of the whole batch to this norm; 0: not at all."""
    lr_scheduler: str = "cosine"
    """cosine, linear, constant, exponential, step or plateau."""
    lr_scheduler_params: dict[str, Any] = field(default_factory=dict)
    """cosine: eta_min, T_max (steps); linear: eta_min; exponential: gamma of each epoch; step: step_size (epochs),
    gamma; plateau: factor, patience (epochs), min_lr. Also {"cosine": {...}, "step": {...}}: those of lr_scheduler."""
    warmup_steps: int = 100
    """Optimizer steps over which the learning rate rises from 0; plateau has none."""
    early_stopping_patience: int = 5
    """Stop after so many epochs without improvement."""
    early_stopping_min_delta: float = 0.001
    """What counts as one."""
    early_stopping_monitor: str = "val_loss"
    """val_loss, val_accuracy or train_loss."""
    early_stopping_mode: str = "min"
    """min: smaller is better; max: larger."""
    gradient_accumulation_steps: int = 1
    """Micro-batches per optimizer step."""
    use_gradient_accumulation: bool = False
    """Insist on it: True without a number of steps or an effective batch is refused."""
    effective_batch_size: int | None = None
    """Texts per optimizer step over all GPUs, given directly; accumulation follows from it."""

    use_mixed_precision: bool = True
    """Compute in 16 bit on a GPU, with 32 bit weights; on the CPU everything is 32 bit unless a type is named."""
    mixed_precision_dtype: str = "auto"
    """auto (bfloat16 where the GPU has it, else float16), float16, bfloat16 or float32."""
    mixed_precision_enabled: bool = True
    """False: as use_mixed_precision=False."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them: less memory, more time, the same result."""

    dataloader_num_workers: int = 4
    """Loader processes for each training process. Any number gives the same run."""
    dataloader_pin_memory: bool = True
    """Page-locked host memory for faster copies to the GPU."""
    dataloader_persistent_workers: bool = True
    """Keep the loader processes between epochs."""

    save_checkpoints: bool = True
    """train_with_early_stopping keeps the best epoch, and ends with it."""
    checkpoint_dir: str = "checkpoints"
    """Where checkpoints are kept."""
    tensorboard_logging: bool = True
    """Write TensorBoard files to the run's folder."""
    enable_autograd_anomaly: bool = False
    """Let PyTorch look for the operation that made a NaN (slow)."""

    use_multi_gpu: bool = False
    """Train on several GPUs; False: on one device, whatever the fields below say."""
    multi_gpu_strategy: str = "dataparallel"
    """dataparallel (all GPUs from one process), distributed (a process per GPU, by torchrun), or auto."""
    num_gpus: int = 1
    """How many GPUs (of each machine). With fewer there, accumulation keeps the effective batch."""
    distributed_backend: str = "nccl"
    """nccl between GPUs (ranks on the CPU take gloo by themselves), or gloo everywhere."""
    distributed_init_method: str = "env://"
    """env://, or tcp://host:port for distributed_master_addr and _port in one."""
    distributed_world_size: int = 1
    """How many processes there are, where they are started by hand; a launcher says it itself."""
    distributed_rank: int = 0
    """Which of them this is."""
    distributed_master_addr: str = "localhost"
    """Where processes that are started by hand meet."""
    distributed_master_port: str = "12355"
    """The port there."""
    sync_batch_norm: bool = False
    """Batch norm over the micro-batches of all processes."""
    find_unused_parameters: bool = False
    """distributed: look for weights that took no part in the loss (slower)."""
    gradient_as_bucket_view: bool = False
    """distributed: gradients live inside the communication buckets (saves one copy of them)."""
    broadcast_buffers: bool = True
    """distributed: copy buffers from the first process in every step."""
    bucket_cap_mb: float = 25
    """distributed: size of a communication bucket."""
    static_graph: bool = False
    """distributed: promise that all steps use the same weights in the same order."""

    seo_keywords: list[str] = field(default_factory=list)
    """Keywords that analyze_seo_score and optimize_content look for where none are given."""
    rank_model: str | None = "minilm"
    """Tells optimize_content how well a text answers a keyword: a run of `unisono train seo`, a folder, a hub id,
    `minilm`; None: the trained score does."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Further settings by the names that `unisono train --help` lists, such as {"ema_decay": 0.999}."""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Refuses what no run can be made of; also called when a run begins, because fields may be set later."""
        refuse_meaningless(self)
        check_one_of("multi_gpu_strategy", self.multi_gpu_strategy, STRATEGIES)
        check_one_of("lr_scheduler", self.lr_scheduler, SCHEDULES)
        check_one_of("early_stopping_monitor", self.early_stopping_monitor, MONITORS)
        check_one_of("early_stopping_mode", self.early_stopping_mode, ("min", "max"))
        check_one_of("mixed_precision_dtype", self.mixed_precision_dtype, ("auto", *PRECISIONS))
        check_one_of("label", self.label, ("auto", "class", "number"))
        for name in ("max_length", "batch_size", "num_epochs", "lora_r", "gradient_accumulation_steps", "num_gpus"):
            check_whole(name, getattr(self, name), at_least=1)
        for name in ("warmup_steps", "dataloader_num_workers", "distributed_rank", "seed", "early_stopping_patience"):
            check_whole(name, getattr(self, name), at_least=0)
        for name in ("learning_rate", "lora_alpha", "bucket_cap_mb"):
            _number(name, getattr(self, name), above=0)
        for name in ("weight_decay", "max_grad_norm", "early_stopping_min_delta", "lora_dropout"):
            _number(name, getattr(self, name))
        if self.early_stopping_mode == "max" and self.early_stopping_monitor != "val_accuracy":
            raise ConfigError(f"early_stopping_mode max: a larger {self.early_stopping_monitor} is not better; use min")
        if self.early_stopping_mode == "min" and self.early_stopping_monitor == "val_accuracy":
            raise ConfigError("early_stopping_mode min: a smaller val_accuracy is not better; use max")
        self._check_device()
        self._check_processes()
        self._check_batch()
        if not isinstance(self.settings, Mapping):
            raise ConfigError(f"settings: expected a dict of settings by name, got {type(self.settings).__name__}")
        if twice := [name for name in self.settings if name in _FIELD_OF]:
            raise ConfigError(f"settings: {twice[0]} has a field of its own here ({_FIELD_OF[twice[0]]}); set that")

    def _check_device(self) -> None:
        number = self.device.removeprefix("cuda:")
        if self.device not in ("auto", "cpu", "cuda") and not (self.device.startswith("cuda:") and number.isdecimal()):
            why = "; training on mps is not built in" if self.device == "mps" else ""
            raise ConfigError(f"device: expected auto, cpu, cuda or cuda:0, got {self.device!r}{why}")
        if self.use_multi_gpu and self.device.startswith("cuda:") and self.num_gpus > 1:
            raise ConfigError(f"device {self.device} is one GPU, and num_gpus is {self.num_gpus}; use cuda or auto")

    def _check_processes(self) -> None:
        if self.distributed_backend not in ("nccl", "gloo"):
            raise ConfigError(
                f"distributed_backend: expected nccl or gloo, got {self.distributed_backend!r}; PyTorch as it is "
                "installed by pip has no other"
            )
        check_whole("distributed_world_size", self.distributed_world_size, at_least=1)
        if self.distributed_rank >= self.distributed_world_size:
            raise ConfigError(
                f"distributed_rank {self.distributed_rank} needs a distributed_world_size above it, not "
                f"{self.distributed_world_size}"
            )
        self.meeting_point()

    def meeting_point(self) -> tuple[str, str]:
        """Where processes that are started by hand meet: address and port."""
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
        steps, wanted = self.gradient_accumulation_steps, self.effective_batch_size
        check_whole("effective_batch_size", wanted, at_least=1)
        if self.use_gradient_accumulation and steps == 1 and wanted is None:
            raise ConfigError(
                "use_gradient_accumulation=True does not say over how many batches; give "
                "gradient_accumulation_steps or effective_batch_size"
            )
        devices = self.num_gpus if self.use_multi_gpu else 1
        if steps > 1 and wanted is not None and self.batch_size * devices * steps != wanted:
            raise ConfigError(
                f"batch_size {self.batch_size} x {devices} GPUs x gradient_accumulation_steps {steps} = "
                f"{self.batch_size * devices * steps} is not effective_batch_size {wanted}; leave one of them out"
            )


_FIELD_OF = {
    "activation_checkpointing": "gradient_checkpointing",
    "grad_clip": "max_grad_norm",
    "mixed_precision": "mixed_precision_dtype",
    "global_batch_size": "effective_batch_size",
    "num_workers": "dataloader_num_workers",
    "pin_memory": "dataloader_pin_memory",
    "strategy": "multi_gpu_strategy",
    "backend": "distributed_backend",
    "gpus": "num_gpus",
    "nproc": "distributed_world_size",
    "lr_schedule": "lr_scheduler",
    **{name: name for name in ("gradient_checkpointing", "batch_size", "learning_rate", "weight_decay", "num_epochs")},
    **{name: name for name in ("gradient_accumulation_steps", "warmup_steps", "seed", "output_dir", "num_gpus")},
}
"""Settings of the engine that SEOConfig has a field for -> that field."""


def _number(name: str, value: Any, *, above: float | None = None) -> None:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    if not fits or (above is not None and value <= above):
        raise ConfigError(f"{name}: expected a number {'of at least 0' if above is None else 'above 0'}, got {value!r}")
