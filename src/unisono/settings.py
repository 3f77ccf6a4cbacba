"""Every setting of a run, on one page.

Each group covers one concern and belongs to one package; on the command line and in a config file all fields are flat
(`--batch_size 4`, `batch_size: 4`). The text under a field is its documentation, which `unisono train --help` prints. A
recipe adds its own fields and may change these defaults (`Recipe.defaults`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

LARGEST_BATCH = 2**32
"""Samples of one optimizer step, on any data."""


@dataclass(frozen=True)
class RunSettings:
    """The run"""

    output_dir: str | None = None
    """Run folder. A run started again with the same folder continues where it stopped. Default: runs/<recipe>-<time>."""
    max_steps: int | None = None
    """Stop after this many optimizer steps."""
    num_epochs: int | None = None
    """Number of passes over the dataset (1 if max_steps is not given either)."""
    seed: int = 0
    """Random seed of the initial weights, the sample order and all noise."""
    resume: str = "auto"
    """auto: continue from the newest valid checkpoint in output_dir; never: refuse a folder that has checkpoints; or the path of a checkpoint."""
    deterministic: bool = False
    """Make runs repeatable bit by bit: deterministic kernels and a fixed gradient bucket layout (slower)."""
    inject: str | None = None
    """Inject faults into the real processes: kind@rankR:stepS[:phase][:2.5s][:x3], e.g. kill@rank1:step7 (see docs/faults.md)."""
    disable_dropout: bool = False
    """Set every dropout probability of the model to 0. verify does so, because dropout masks differ between ranks."""


@dataclass(frozen=True)
class LaunchSettings:
    """Devices and launching"""

    gpus: str = "auto"
    """GPUs to use: all; auto (every GPU that is free according to NVML); a count N (the N with most free memory); or ids such as 0,2 (a single id: 3,). 0 trains on the CPU."""
    nproc: int | None = None
    """Number of CPU ranks to start. Together with gpus: number of ranks on those GPUs (ranks share a GPU if there are more ranks than GPUs)."""
    max_ranks_per_core: int = 8
    """Largest number of ranks per CPU core that nproc may ask for. Raise it to start more; each rank needs some hundred MiB."""
    backend: Literal["auto", "gloo"] = "auto"
    """Communication backend. auto: NCCL between GPUs, gloo otherwise; gloo: also between GPUs (slower; use it where NCCL fails)."""
    min_memory_gb: float = 0.0
    """Use only GPUs with at least this much free memory, in GB."""
    nnodes: int | str = 1
    """Number of machines when you start unisono on each of them; 1:4 trains on as many of 1 to 4 as are available."""
    node_rank: int | None = None
    """Rank of this machine, from 0 to the largest nnodes - 1. Machine 0 hosts the rendezvous."""
    rdzv_endpoint: str | None = None
    """Rendezvous address host:port on machine 0. Default on one machine: a free local port."""
    max_restarts: int = 3
    """Number of times the launcher restarts all ranks from the last checkpoint after one of them died."""
    hang_timeout: float = 600.0
    """Seconds without progress in a step or an evaluation batch after which the launcher reports the hanging rank with its stack and restarts all ranks. 0: never."""
    start_timeout: float = 1800.0
    """The same limit for start-up: from the rendezvous to the end of the first step (which may compile)."""


@dataclass(frozen=True)
class ParallelSettings:
    """Strategy"""

    strategy: Literal["auto", "single", "dp", "ddp", "fsdp"] = "auto"
    """Parallel strategy. auto: single on one device, ddp if everything fits on each device, fsdp otherwise."""
    find_unused_parameters: bool = False
    """Allow parameters that take no part in the loss, which are refused otherwise. ddp searches for them in every step, which is slower."""
    static_graph: bool = False
    """ddp: assume that every step uses the same parameters in the same order."""
    gradient_as_bucket_view: bool = True
    """ddp: store gradients inside the communication buckets (saves one copy of the gradients)."""
    bucket_cap_mb: float = 25.0
    """ddp: size of a communication bucket in MB."""
    broadcast_buffers: bool = True
    """ddp: copy buffers (batch norm statistics) from rank 0 before each forward pass."""
    sync_batch_norm: bool = False
    """Compute batch norm statistics over the micro-batches of all ranks instead of each rank's own."""
    fsdp_cpu_offload: bool = False
    """fsdp: keep shards, gradients and optimizer state in host memory."""
    fsdp_reshard_after_forward: bool = True
    """fsdp: free gathered weights after the forward pass and gather them again for backward (less memory, more traffic)."""


@dataclass(frozen=True)
class BatchSettings:
    """Batch"""

    batch_size: int = 8
    """Samples per GPU and micro-batch. The effective batch is batch_size × GPUs × gradient_accumulation_steps."""
    global_batch_size: int | None = None
    """Samples per optimizer step over all GPUs. If set, gradient accumulation follows from it."""
    gradient_accumulation_steps: int | None = None
    """Micro-batches per optimizer step (default 1, or what global_batch_size requires)."""
    micro_batch: int | Literal["auto"] | None = None
    """Largest number of samples computed at once per GPU (default: batch_size). Does not change the result. auto: the largest number that fits, determined before step 1."""
    guard_steps: int = 3
    """ddp: number of steps per input shape in which gradients are reduced only after all ranks report that none ran out of memory. -1: all steps."""


@dataclass(frozen=True)
class PrecisionSettings:
    """Precision and speed"""

    mixed_precision: Literal["no", "fp16", "bf16"] = "no"
    """Compute in 16 bit with 32-bit weights. fp16 uses loss scaling; bf16 needs none."""
    dtype: Literal["float32", "float64"] = "float32"
    """Data type of the weights. float64 is meant for verification."""
    tf32: bool = False
    """Allow TensorFloat-32 for 32-bit matrix products on the GPU."""
    compile: bool = False
    """Apply torch.compile to each repeated block of the model (to the whole model if it has none)."""
    cuda_graph: bool = False
    """Record a step as a CUDA graph and replay it. Helps small models that are limited by kernel launches. Supports single and ddp and inputs of one shape; Python code in loss() runs only once, during recording."""
    activation_checkpointing: bool = False
    """Recompute each repeated block in backward instead of storing its activations."""
    recompute_every: int = 1
    """With activation_checkpointing: recompute only every n-th block; the others store their activations."""


@dataclass(frozen=True)
class OptimSettings:
    """Optimizer and schedule"""

    optimizer: str = "adamw"
    """adamw, adam, sgd, or another class of torch.optim (not lbfgs, sparseadam). adamw8bit, adamw4bit: AdamW with a quarter or an eighth of its memory. adafactor: less memory still. muon: for the matrices of repeated blocks, with AdamW for all other weights. prodigy: finds its own learning rate. schedule_free_adamw: needs no schedule. All of them work on fsdp's shards. A recipe's optimizer() overrides it."""
    learning_rate: float = 1e-3
    """Peak learning rate. prodigy multiplies its own estimate by it; its default there is 1."""
    weight_decay: float = 0.01
    """Decoupled weight decay (adamw), L2 penalty (others)."""
    beta1: float = 0.9
    """First Adam coefficient; momentum of sgd and muon."""
    beta2: float = 0.999
    """Second Adam coefficient."""
    epsilon: float = 1e-8
    """Adam's epsilon."""
    grad_clip: float = 1.0
    """Clip the gradient of the whole model to this norm; 0 turns it off."""
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Learning-rate schedule after the warm-up, in optimizer steps. wsd: constant, then linear decay over the last part."""
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises from 0."""
    min_lr_ratio: float = 0.0
    """Final learning rate as a fraction of the peak (linear, cosine, wsd)."""
    wsd_decay_ratio: float = 0.1
    """Fraction of the run over which wsd decays."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiply the learning rate by effective batch / lr_scaling_batch, or by its square root."""
    lr_scaling_batch: int = 256
    """Effective batch for which learning_rate was chosen (used by lr_scaling)."""
    max_skipped_steps: int = 10
    """Stop after more than this many consecutive steps with a non-finite loss or gradient."""


def optimizer_presets(optimizer: str) -> dict[str, Any]:
    """Defaults that follow from the choice of an optimizer."""
    if optimizer.lower() == "prodigy":
        return {"learning_rate": 1.0}
    if optimizer.lower() == "schedule_free_adamw":  # it averages the weights itself and replaces a schedule
        return {"ema_decay": 0.0, "lr_schedule": "constant"}
    return {}


@dataclass(frozen=True)
class DataSettings:
    """Data"""

    num_workers: int = 2
    """Number of loader processes per rank. Does not change the result."""
    prefetch_factor: int = 2
    """Number of micro-batches that each loader process prepares in advance."""
    pin_memory: bool = True
    """Use page-locked host memory for faster copies to the GPU."""
    shuffle: bool = True
    """Shuffle the dataset with a new permutation in every epoch."""
    max_bad_samples: int = 0
    """Number of unreadable samples (after two attempts) to skip before the run ends with an error."""


@dataclass(frozen=True)
class EmaSettings:
    """Moving average of the weights"""

    ema_decay: float = 0.0
    """Decay of the exponential moving average of the weights, which evaluation, previews and export use. 0: off."""
    ema_warmup: bool = True
    """Use a smaller decay at the start, min(ema_decay, (1 + step) / (10 + step)), so that early weights are forgotten."""


@dataclass(frozen=True)
class EvalSettings:
    """Evaluation"""

    eval_every: int = 0
    """Number of steps between evaluations; the run also evaluates at its end. 0: only at the end; -1: never."""
    eval_first: bool = False
    """Evaluate once before the first step (step 0), so that the report can show what training changed."""
    eval_batch_size: int | None = None
    """Samples per GPU and evaluation batch (default: batch_size)."""
    best_metric: str | None = None
    """Evaluation metric by which to keep the best checkpoint, for instance eval/loss."""
    best_mode: Literal["min", "max"] = "min"
    """Whether a smaller or a larger best_metric is better."""
    preview_every: int = 0
    """Number of steps between previews; the run also draws one at its end. 0: only at the end; -1: never."""


@dataclass(frozen=True)
class SaveSettings:
    """Checkpoints"""

    save_every: int = 1000
    """Number of steps between checkpoints. A run also saves one at its end and when a signal stops it."""
    keep_last: int = 3
    """Number of newest checkpoints to keep, besides the best one. 0: keep all."""
    async_save: bool = True
    """Continue training while a checkpoint is being written."""


@dataclass(frozen=True)
class ObserveSettings:
    """Logging"""

    log_every: int = 10
    """Number of steps between lines in metrics.jsonl."""
    log_group_norms: bool = False
    """Also log the gradient norm of each parameter group of the optimizer, as grad_norm/NAME or grad_norm/NUMBER."""
    tensorboard: bool = True
    """Write TensorBoard files to tb/ in the run folder."""


@dataclass(frozen=True)
class Settings:
    """All settings of a run, by group."""

    run: RunSettings = field(default_factory=RunSettings)
    launch: LaunchSettings = field(default_factory=LaunchSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    precision: PrecisionSettings = field(default_factory=PrecisionSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    data: DataSettings = field(default_factory=DataSettings)
    ema: EmaSettings = field(default_factory=EmaSettings)
    eval: EvalSettings = field(default_factory=EvalSettings)
    save: SaveSettings = field(default_factory=SaveSettings)
    observe: ObserveSettings = field(default_factory=ObserveSettings)
