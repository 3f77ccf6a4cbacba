"""Everything a run can be told, on one page.

Each group is one concern and belongs to one room of the house; on the command line and in a config file all fields
are flat (`--batch_size 4`, `batch_size: 4`). The text under a field is its documentation: `unisono train --help`
prints it. A recipe adds its own fields beside these and may change these defaults (`Recipe.defaults`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class RunSettings:
    """The run"""

    output_dir: str | None = None
    """Folder of the run. Started again with the same folder, a run goes on where it stopped. Default: runs/<recipe>-<time>."""
    max_steps: int | None = None
    """Stop after this many optimizer steps."""
    num_epochs: int | None = None
    """Stop after the last sample of this many passes over the data (1 when max_steps is not given either)."""
    seed: int = 0
    """Names the run: initial weights, order of the samples and all noise follow from it."""
    resume: str = "auto"
    """auto: go on from the newest valid checkpoint of output_dir; never: refuse a folder with checkpoints; or a path to a checkpoint."""
    deterministic: bool = False
    """Bit-identical repetition: deterministic kernels and a fixed gradient bucket layout (slower)."""
    inject: str | None = None
    """Rehearse faults in the real processes: kind@rankR:stepS[:phase][:2.5s][:x3], e.g. kill@rank1:step7 (see docs/faults.md)."""
    disable_dropout: bool = False
    """Set every dropout probability of the model to 0 (verify does, because dropout is drawn per rank)."""


@dataclass(frozen=True)
class LaunchSettings:
    """Devices and launching"""

    gpus: str = "auto"
    """all; auto (every free GPU, by NVML); a count N (the N emptiest); or ids such as 0,2 (a single id: 3,). 0 trains on the CPU."""
    nproc: int | None = None
    """Start this many CPU ranks; together with gpus: this many ranks on those GPUs (sharing them if there are more ranks)."""
    backend: Literal["auto", "gloo"] = "auto"
    """How ranks talk to each other. auto: NCCL between GPUs, gloo elsewhere; gloo: also between GPUs (slower; where NCCL fails)."""
    min_memory_gb: float = 0.0
    """Take only GPUs with at least this much free memory."""
    nnodes: int | str = 1
    """Number of machines, when unisono launches on each of them itself; 1:4 trains with as many of 1 to 4 as are there."""
    node_rank: int | None = None
    """Number of this machine, 0 to the largest nnodes - 1; machine 0 is where the others meet."""
    rdzv_endpoint: str | None = None
    """host:port where the machines meet (port free on the first machine). Default on one machine: a free local port."""
    max_restarts: int = 3
    """How often the launcher restarts all ranks from the last checkpoint after one of them died."""
    hang_timeout: float = 600.0
    """Seconds without progress in a step or an evaluation batch after which the rank is named, with its stack, and all ranks are restarted. 0: never."""
    start_timeout: float = 1800.0
    """The same for starting: from finding each other to the end of the first step (which may compile)."""


@dataclass(frozen=True)
class ParallelSettings:
    """Strategy"""

    strategy: Literal["auto", "single", "dp", "ddp", "fsdp"] = "auto"
    """How the model is spread over the devices. auto: single on one device, ddp if everything fits on each, fsdp otherwise."""
    find_unused_parameters: bool = False
    """ddp: search for parameters that took no part in the loss (slower; needed when that differs from step to step)."""
    static_graph: bool = False
    """ddp: promise that the same parameters are used in the same order in every step."""
    gradient_as_bucket_view: bool = True
    """ddp: gradients live inside the communication buckets (saves one copy of the gradients)."""
    bucket_cap_mb: float = 25.0
    """ddp: size of a communication bucket."""
    broadcast_buffers: bool = True
    """ddp: copy buffers (batch norm statistics) from rank 0 before each forward pass."""
    sync_batch_norm: bool = False
    """Batch norm over the micro-batches of all ranks instead of each rank's own."""
    fsdp_cpu_offload: bool = False
    """fsdp: keep shards, gradients and optimizer state in host memory."""
    fsdp_reshard_after_forward: bool = True
    """fsdp: free gathered weights after the forward pass and gather them again for backward (less memory, more traffic)."""


@dataclass(frozen=True)
class BatchSettings:
    """Batch"""

    batch_size: int = 8
    """Samples per GPU and micro-batch. The effective batch is batch_size x GPUs x gradient_accumulation_steps."""
    global_batch_size: int | None = None
    """Samples per optimizer step over all GPUs; set directly, accumulation follows from it."""
    gradient_accumulation_steps: int | None = None
    """Micro-batches per optimizer step (1 unless global_batch_size asks for more)."""
    micro_batch: int | Literal["auto"] | None = None
    """Samples at once per GPU, at most (default: batch_size); never changes the result. auto: the most that fit, found before step 1."""
    guard_steps: int = 3
    """ddp: for this many steps per input shape, gradients wait until all ranks know that nobody ran out of memory. -1: always."""


@dataclass(frozen=True)
class PrecisionSettings:
    """Precision and speed"""

    mixed_precision: Literal["no", "fp16", "bf16"] = "no"
    """Compute in 16 bit with 32 bit weights. fp16 scales the loss; bf16 needs no scaling."""
    dtype: Literal["float32", "float64"] = "float32"
    """Type of the weights. float64 is for proofs."""
    tf32: bool = False
    """Let 32-bit matrix products use TensorFloat-32 on the GPU."""
    compile: bool = False
    """torch.compile each repeated block of the model (the whole model if it has none)."""
    cuda_graph: bool = False
    """Record a step as a CUDA graph and replay it: for small models, whose time goes into launching kernels. single and ddp; inputs of one shape; what a loss() does in Python is done once, when it is recorded."""
    activation_checkpointing: bool = False
    """Recompute each repeated block in backward instead of storing its activations."""
    recompute_every: int = 1
    """activation_checkpointing: recompute every n-th block only; the others keep their activations."""


@dataclass(frozen=True)
class OptimSettings:
    """Optimizer and schedule"""

    optimizer: str = "adamw"
    """adamw, adam, sgd, or the name of another class in torch.optim. A recipe's optimizer() wins over it."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
    weight_decay: float = 0.01
    """Decoupled weight decay (adamw), L2 penalty (others)."""
    beta1: float = 0.9
    """First Adam coefficient; momentum of sgd."""
    beta2: float = 0.999
    """Second Adam coefficient."""
    epsilon: float = 1e-8
    """Adam's epsilon."""
    grad_clip: float = 1.0
    """Clip the gradient of the whole model to this norm; 0 turns it off."""
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape after the warm-up, counted in optimizer steps. wsd: constant, then linear decay over the last part."""
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises from 0."""
    min_lr_ratio: float = 0.0
    """Learning rate at the end, as a part of the peak (linear, cosine, wsd)."""
    wsd_decay_ratio: float = 0.1
    """Part of the run over which wsd decays."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiply the learning rate by effective batch / lr_scaling_batch, or by its square root."""
    lr_scaling_batch: int = 256
    """The effective batch for which learning_rate was chosen (used by lr_scaling)."""
    max_skipped_steps: int = 10
    """Stop when more steps in a row than this had a non-finite loss or gradient."""


@dataclass(frozen=True)
class DataSettings:
    """Data"""

    num_workers: int = 2
    """Loader processes per rank. Any number gives the same run."""
    prefetch_factor: int = 2
    """Micro-batches each worker prepares in advance."""
    pin_memory: bool = True
    """Page-locked host memory for faster copies to the GPU."""
    shuffle: bool = True
    """A new permutation of the data set in every epoch; otherwise the data set's own order."""
    max_bad_samples: int = 0
    """Samples that cannot be read (tried twice) are left out and counted; more than this many end the run."""


@dataclass(frozen=True)
class EmaSettings:
    """Moving average of the weights"""

    ema_decay: float = 0.0
    """Decay of the exponential moving average used for evaluation, previews and export; 0 turns it off."""
    ema_warmup: bool = True
    """Start with a smaller decay, min(ema_decay, (1 + step) / (10 + step)), so that early weights are forgotten."""


@dataclass(frozen=True)
class EvalSettings:
    """Evaluation"""

    eval_every: int = 0
    """Evaluate every so many steps, and at the end. 0: only at the end; -1: never."""
    eval_batch_size: int | None = None
    """Samples per GPU in evaluation (default: batch_size)."""
    best_metric: str | None = None
    """Keep the checkpoint with the best value of this evaluation metric, for instance eval/loss."""
    best_mode: Literal["min", "max"] = "min"
    """Whether a smaller or a larger best_metric is better."""
    preview_every: int = 0
    """Let the recipe draw a preview every so many steps, and at the end. 0: only at the end; -1: never."""


@dataclass(frozen=True)
class SaveSettings:
    """Checkpoints"""

    save_every: int = 1000
    """Save a checkpoint every so many steps; one is always saved at the end and when stopped by a signal."""
    keep_last: int = 3
    """Keep this many of the newest checkpoints (the best one is kept too); 0 keeps all."""
    async_save: bool = True
    """Train on while a checkpoint is being written."""


@dataclass(frozen=True)
class ObserveSettings:
    """Seeing"""

    log_every: int = 10
    """Write a line to metrics.jsonl every so many steps."""
    tensorboard: bool = True
    """Write TensorBoard files to the run's folder tb/."""


@dataclass(frozen=True)
class Settings:
    """All settings of a run, by room."""

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
