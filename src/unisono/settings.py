"""Every setting of a run, on one page.

Each group covers one concern and belongs to one package; on the command line and in a config file all fields are flat
(`--batch_size 4`, `batch_size: 4`). The text under a field is its documentation, which `unisono train --help` prints. A
recipe adds its own fields and may change these defaults (`Recipe.defaults`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

LARGEST_BATCH = 2**32
"""Upper limit on the samples of one optimizer step."""


@dataclass(frozen=True)
class RunSettings:
    """The run"""

    output_dir: str | None = None
    """Run folder. If it already contains a run, training continues from that run's newest checkpoint. s3://BUCKET/FOLDER: works in a local cache folder, copies the run to this address (see mirror), and restores it from there on another machine. Default: runs/<recipe>-<time>."""
    max_steps: int | None = None
    """Number of optimizer steps after which the run ends, unless num_epochs ends it earlier."""
    num_epochs: int | None = None
    """Number of passes over the dataset after which the run ends. Default: 1, or no limit if max_steps is set."""
    seed: int = 0
    """Random seed of the initial weights, the sample order and all noise. It cannot change within a run."""
    resume: str = "auto"
    """Checkpoint to resume from. auto: the newest valid checkpoint in output_dir, if there is one; never: start a new run and refuse an output_dir that has checkpoints; or the path or s3:// address of a checkpoint or of another run's folder."""
    deterministic: bool = False
    """Use deterministic kernels and a fixed gradient bucket layout, so that a repeated or resumed run is bitwise identical (slower)."""
    inject: str | None = None
    """Inject faults to test recovery, as kind@rankR:stepS[:phase][:2.5s][:x3]; kill@rank1:step7 kills rank 1 in step 7 (see docs/faults.md)."""
    disable_dropout: bool = False
    """Set every dropout probability of the model to 0. Use it to compare runs on different numbers of ranks, because dropout masks differ between ranks. verify always sets it."""


@dataclass(frozen=True)
class LaunchSettings:
    """Devices and launching"""

    gpus: str = "auto"
    """GPUs to use. all: every visible GPU; auto: every GPU that is free according to NVML; a number N: the N GPUs with the most free memory; or GPU ids such as 0,2 (a single id needs a comma: 3,). 0 trains on the CPU."""
    nproc: int | None = None
    """Number of CPU ranks to start. If gpus is set as well: number of ranks on those GPUs (ranks share a GPU if there are more ranks than GPUs)."""
    max_ranks_per_core: int = 8
    """Upper limit for nproc, in ranks per CPU core. Raise it to start more ranks; each needs a few hundred MiB of memory."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Communication backend. auto: NCCL between GPUs, gloo between CPU ranks and between ranks that share a GPU; gloo: gloo everywhere (slower; use it if NCCL fails); nccl: NCCL even between ranks that share a GPU (very slow; for tests of NCCL on one GPU)."""
    min_memory_gb: float = 0.0
    """Minimum free memory, in GB, of every GPU that the run uses. auto, all and a count skip GPUs with less free memory; the id of such a GPU is an error."""
    nnodes: int | str = 1
    """Number of machines, for a run that you start on each of them yourself. 1:4 trains on as many of 1 to 4 machines as are available."""
    node_rank: int | None = None
    """Index of this machine, from 0 to nnodes - 1, if nnodes is more than 1. Machine 0 hosts the rendezvous."""
    rdzv_endpoint: str | None = None
    """Address host:port of the rendezvous on machine 0, if nnodes is more than 1. Default on one machine: a free local port."""
    join_timeout: float = 900.0
    """Seconds that a machine waits for the other machines if nnodes is more than 1, at startup and after losing its connection to them. 0: no limit."""
    max_restarts: int = 3
    """Maximum number of times that the launcher restarts all ranks from the last checkpoint after a rank dies. 0: the run ends when a rank dies."""
    hang_timeout: float = 600.0
    """Seconds that a step or an evaluation batch may take before the launcher reports the hanging rank with its stack and restarts all ranks. Raise it if single steps take longer. 0: no limit."""
    start_timeout: float = 1800.0
    """Seconds that a rank may take from the rendezvous to the end of its first step, which may include compilation, before the launcher treats it as hanging. 0: no limit."""


@dataclass(frozen=True)
class ParallelSettings:
    """Strategy"""

    strategy: Literal["auto", "single", "dp", "ddp", "fsdp", "hsdp"] = "auto"
    """Parallel strategy. auto: single on one device, ddp if everything fits on each device, fsdp otherwise. hsdp: fsdp within each machine (see shard_size)."""
    find_unused_parameters: bool = False
    """Allow trainable parameters that the loss does not use. By default, they are an error. ddp then searches for unused parameters in every step, which is slower."""
    static_graph: bool = False
    """ddp: assume that every step uses the same parameters in the same order, which lets ddp optimize communication. It disables guarded steps (see guard_steps)."""
    gradient_as_bucket_view: bool = True
    """ddp: store gradients inside the communication buckets (saves one copy of the gradients)."""
    bucket_cap_mb: float = 25.0
    """ddp: size of a communication bucket in MB. With smaller buckets, communication overlaps with backward earlier; larger buckets need fewer messages."""
    broadcast_buffers: bool = True
    """ddp: broadcast buffers (batch norm statistics) from rank 0 before each step."""
    sync_batch_norm: bool = False
    """Compute batch norm statistics over the micro-batches of all ranks instead of each rank's own. Needs GPUs."""
    shard_size: int | Literal["auto", "node", "all"] = "auto"
    """fsdp: number of consecutive ranks over which one copy of the weights is sharded; each further group of this size holds another copy (HSDP). A smaller number needs more memory per rank and less communication between machines. node: the ranks of one machine; all: a single copy over all ranks; auto: node if there are several machines and one machine has room for a copy, otherwise all."""
    fsdp_cpu_offload: bool = False
    """fsdp: keep shards, gradients and optimizer state in host memory, for a model that does not fit on the GPUs (slower)."""
    context_parallel: int = 1
    """Number of consecutive ranks that process one sample together, each with a part of its tokens, for samples whose activations do not fit on one GPU. It must divide the number of ranks. Such a group counts as one GPU in the effective batch. The recipe must support it (wan-flow and wan-distill do)."""
    blocks_on_host: int | Literal["auto"] = 0
    """Number of repeated blocks that are stored in host memory and copied to the GPU just before they are needed (single and ddp; see docs/small_cards.md): the frozen weights of a LoRA run, or weights, gradients and optimizer state of a full fine-tune. Two of these blocks are on the GPU at any time, so only values above 2 save memory. It does not change the result. auto: as few blocks as possible."""
    fsdp_reshard_after_forward: bool = True
    """fsdp: free a block's gathered weights after its forward pass and gather them again for backward (less memory, more traffic). Weights outside of blocks stay gathered until backward in any case."""
    fsdp_sync: Literal["every", "last"] = "every"
    """fsdp: when ranks sum gradients. every: after each micro-batch, so that each rank stores only its shards; last: once per step, which needs less communication and the memory of one whole gradient per rank."""


@dataclass(frozen=True)
class BatchSettings:
    """Batch"""

    batch_size: int = 8
    """Number of samples per micro-batch on each GPU. The effective batch is batch_size × GPUs × gradient_accumulation_steps; GPUs that process a sample together (context_parallel) count as one."""
    global_batch_size: int | None = None
    """Samples per optimizer step across all GPUs. Set it to make a run independent of the number of GPUs: gradient accumulation follows from it."""
    gradient_accumulation_steps: int | None = None
    """Micro-batches per GPU and optimizer step (default: 1, or what global_batch_size requires)."""
    micro_batch: int | Literal["auto"] | None = None
    """Maximum number of samples that a GPU processes at once (default: batch_size). Lower it to save memory; it does not change the result. auto: the largest number that fits, found by trial before step 1."""
    guard_steps: int = 3
    """ddp: number of guarded steps per input shape. In a guarded step, ranks reduce gradients only after all of them have finished backward. That is slower, but the step can be repeated if a rank runs out of memory. -1: guard all steps; 0: none."""


@dataclass(frozen=True)
class MemorySettings:
    """GPU memory"""

    fit: Literal["no", "auto", "exact"] = "no"
    """Change settings until the run is predicted to fit into GPU memory, at the lowest cost in speed (see docs/small_cards.md). Settings that you pass stay as they are. auto may store frozen weights in 8 or 4 bits and use an 8-bit optimizer, which changes the result; exact never does. no: change nothing."""
    gpu_memory_gb: float | None = None
    """Use at most this much memory of each GPU, in GiB, as if the GPU had no more. With fit and --print_config: memory of the GPU for which to choose settings; this works without a GPU."""


@dataclass(frozen=True)
class PrecisionSettings:
    """Precision and speed"""

    mixed_precision: Literal["no", "fp16", "bf16", "fp8"] = "no"
    """Compute in 16-bit precision with 32-bit weights, which is faster and needs less memory. bf16 needs Ampere or newer GPUs; fp16 uses loss scaling. fp8 is bf16 with quantize fp8: faster for wide layers on Ada, Hopper and newer GPUs, with --compile."""
    quantize: Literal["no", "fp8", "int8"] = "no"
    """Round the operands of the matrix products of trained linear layers in repeated blocks to fp8 or int8; weights stay 32-bit parameters. Covers the forward pass and the gradients of inputs; see quantize_weight_gradient and docs/quantized_training.md."""
    quantize_weight_gradient: bool = False
    """With quantize or mixed_precision fp8: also round the operands of the weights' gradients. This is faster, but the result then depends on the size of the micro-batches, and therefore on the number of ranks."""
    quantize_min_size: int = 512
    """With quantize, sparsity or mixed_precision fp8: leave linear layers with fewer inputs or outputs than this in 16-bit precision, because quantising their operands takes longer than it saves."""
    dtype: Literal["float32", "float64"] = "float32"
    """Data type of weights, gradients and optimizer state. float64 is meant for verification."""
    base_precision: Literal["auto", "bf16", "fp8", "int8", "nf4"] = "auto"
    """Storage format of the frozen linear layers in repeated blocks: the base of a LoRA, a teacher. fp8 and int8 take 1 byte per weight, nf4 about half a byte; trained weights keep their type. auto: the type of the computation. It cannot change within a run."""
    sparsity: Literal["no", "2:4"] = "no"
    """2:4 sets two of every four consecutive weights of each output in the linear layers of repeated blocks to zero: in each step, the two with the smallest magnitude. Changes the model; see docs/quantized_training.md for what it gains and costs. It cannot change within a run."""
    tf32: bool = False
    """Allow TensorFloat-32 for 32-bit matrix products and convolutions on the GPU, which is faster and less precise."""
    compile: bool = False
    """Apply torch.compile to each repeated block of the model (to the whole model if it has none). The first steps take longer."""
    cuda_graph: bool = False
    """Record a step as a CUDA graph and replay it, which speeds up small models that are limited by kernel launches. It requires strategy single or ddp, and inputs of one shape. Python code in loss() runs only once, during recording."""
    activation_checkpointing: bool | Literal["selective"] = False
    """Recompute each repeated block in backward instead of storing its activations. This saves memory and takes about a third more computation. selective: also store the results of attention and of every second matrix product, which are expensive to recompute."""
    activation_memory_gb: float | None = None
    """Memory per GPU, in GiB, for the activations that all repeated blocks together store for backward. A trial before step 1 measures the blocks, and each block then recomputes as little as this allows: nothing, what is cheap, or everything. Use it instead of activation_checkpointing."""
    recompute_every: int = 1
    """With activation_checkpointing: recompute only every n-th block. The others store their activations, which is faster and needs more memory."""

    @property
    def product_format(self) -> Literal["fp8", "int8"] | None:
        """The format to which operands of matrix products are rounded; None if they are not."""
        if self.mixed_precision == "fp8":
            return "fp8"
        return None if self.quantize == "no" else self.quantize


@dataclass(frozen=True)
class OptimSettings:
    """Optimizer and schedule"""

    optimizer: str = "adamw"
    """Optimizer: adamw, adam, sgd, or the name of another torch.optim class (except lbfgs and sparseadam). The optimizer state of adamw8bit and adamw4bit takes a quarter and an eighth of the memory of adamw's state; adafactor's state takes almost none. muon trains the matrices of repeated blocks, adamw all other weights. prodigy estimates its own learning rate. schedule_free_adamw needs no schedule. A recipe's optimizer() takes precedence."""
    learning_rate: float = 1e-3
    """Peak learning rate, after the warm-up and before the decay. With prodigy: factor applied to the learning rate that prodigy estimates (default: 1)."""
    weight_decay: float = 0.01
    """Weight decay: decoupled for adamw, an L2 penalty for other optimizers."""
    beta1: float = 0.9
    """Decay of Adam's first moment; momentum of sgd and muon."""
    beta2: float = 0.999
    """Decay of Adam's second moment."""
    epsilon: float = 1e-8
    """Term that Adam adds to the denominator for numerical stability."""
    grad_clip: float = 1.0
    """Maximum norm of the gradient of the whole model. A larger gradient is scaled down to this norm. 0: no clipping."""
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Learning-rate schedule after the warm-up. linear and cosine decay to the end of the run; wsd is constant and decays linearly at the end (wsd_decay_ratio)."""
    warmup_steps: int = 0
    """Number of optimizer steps over which the learning rate rises linearly to its peak."""
    min_lr_ratio: float = 0.0
    """Final learning rate as a fraction of the peak (linear, cosine, wsd)."""
    wsd_decay_ratio: float = 0.1
    """Fraction of the run, at its end, over which the schedule wsd decays the learning rate."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Scale the learning rate with the effective batch: linear multiplies it by the ratio effective batch / lr_scaling_batch, sqrt by the square root of this ratio."""
    lr_scaling_batch: int = 256
    """Effective batch, in samples, at which lr_scaling leaves learning_rate unchanged."""
    max_skipped_steps: int = 10
    """Number of consecutive steps with a non-finite loss or gradient that are skipped before the run ends with an error."""


def optimizer_presets(optimizer: str) -> dict[str, Any]:
    """Returns the defaults of other settings that depend on the chosen optimizer."""
    if optimizer.lower() == "prodigy":
        return {"learning_rate": 1.0}
    if optimizer.lower() == "schedule_free_adamw":  # this optimizer averages the weights and needs no schedule
        return {"ema_decay": 0.0, "lr_schedule": "constant"}
    return {}


@dataclass(frozen=True)
class DataSettings:
    """Data"""

    num_workers: int = 2
    """Number of loader processes per rank; it does not change the result. 0: read samples in the training process."""
    prefetch_factor: int = 2
    """Number of micro-batches that each loader process prefetches. Raise it if reading times vary; each prefetched micro-batch takes memory."""
    pin_memory: bool = True
    """Load batches into page-locked host memory, from which copies to the GPU are faster."""
    shuffle: bool = True
    """Read the dataset in a new random order in every epoch. Otherwise every epoch reads it in index order."""
    shuffle_window: int = 0
    """Shuffle within windows of this many samples, each of which touches only a few of the dataset's blocks (the shards of a tar dataset, see docs/data.md). The order of the blocks changes in every epoch. Use it if samples are stored in large or remote files; a window takes no memory, so choose one that spans several blocks. It cannot change within a run. 0: shuffle the whole dataset."""
    max_bad_samples: int = 0
    """Number of unreadable samples that a run skips before it ends with an error. A sample counts as unreadable if reading it fails twice."""


@dataclass(frozen=True)
class EmaSettings:
    """Moving average of the weights"""

    ema_decay: float = 0.0
    """Decay of the exponential moving average of the weights, for instance 0.999. Evaluation, previews and export use the average. 0: no average."""
    ema_warmup: bool = True
    """Use a smaller decay at the start of the run, min(ema_decay, (1 + step) / (10 + step)), so that the average forgets early weights."""


@dataclass(frozen=True)
class EvalSettings:
    """Evaluation"""

    eval_every: int = 0
    """Number of steps between evaluations; the run also evaluates at its end. 0: only at the end; -1: never."""
    eval_first: bool = False
    """Evaluate once before the first step (step 0), so that the report can show what training changed."""
    eval_batch_size: int | None = None
    """Number of samples per evaluation batch on each GPU (default: batch_size)."""
    best_metric: str | None = None
    """Evaluation metric that selects the best checkpoint, for instance eval/loss. The best checkpoint is never deleted."""
    best_mode: Literal["min", "max"] = "min"
    """Whether a smaller or a larger best_metric is better."""
    preview_every: int = 0
    """Number of steps between previews; the run also draws one at its end. 0: only at the end; -1: never."""


@dataclass(frozen=True)
class SaveSettings:
    """Checkpoints"""

    save_every: int = 1000
    """Number of steps between checkpoints. A run also saves one at its end and when a signal stops it. 0: only in those two cases."""
    keep_last: int = 3
    """Number of newest checkpoints to keep, besides the best one. 0: keep all."""
    async_save: bool = True
    """Write checkpoints in the background while training continues; takes host memory for a copy of the state."""
    mirror: str | None = None
    """Address in object storage, such as s3://BUCKET/FOLDER, to which a process in the background copies each checkpoint, with metrics, events and previews. If output_dir holds no run yet but the address does, the run is restored from there. Needs unisono[storage] (see docs/storage.md)."""
    mirror_timeout: float = 300.0
    """Seconds that a run waits at its end until its last checkpoint has been copied to mirror. Copies never delay a step."""


@dataclass(frozen=True)
class ObserveSettings:
    """Logging"""

    log_every: int = 10
    """Number of steps between lines in metrics.jsonl, and so between points in the trackers."""
    log_group_norms: bool = False
    """Also log the gradient norm of each parameter group of the optimizer, as grad_norm/NAME or grad_norm/NUMBER."""
    peak_tflops: float | None = None
    """Peak rate of one device in TFLOP/s, from which unisono computes the model FLOPs utilization (`mfu`). Default: the data sheet's rate of dense matrix products in the precision of the run. `mfu` is not logged on GPUs whose rate is unknown."""
    profile: str | None = None
    """Profile some steps on every rank. The value has the form steps=5[,memory][,start=N]: steps is the number of steps to profile, memory also records memory use over time, and start is the first profiled step (default: a few steps after the run starts or resumes). Writes traces, tables of operators and waits, and pictures to profile/ in the run folder (see docs/profile.md). It does not change the result."""
    tensorboard: bool = True
    """Write TensorBoard files to tb/ in the run folder."""
    track: str | None = None
    """Comma-separated list of trackers that receive metrics, previews, settings and events: wandb, mlflow, tensorboard, or your own tracker as my_file.py:MyTracker (see docs/tracking.md). Each runs in its own process and cannot slow down training. none: no tracker."""
    track_project: str | None = None
    """Project in W&B and experiment in MLflow. Default: WANDB_PROJECT and MLFLOW_EXPERIMENT_NAME if they are set, otherwise the name of the recipe."""
    track_offline: bool = False
    """Write the data of trackers to the run folder and use no network. `wandb sync` uploads W&B's files later."""
    track_timeout: float = 60.0
    """Seconds that a run waits at its end for its trackers. They never delay a step."""


@dataclass(frozen=True)
class Settings:
    """All settings of a run, by group."""

    run: RunSettings = field(default_factory=RunSettings)
    launch: LaunchSettings = field(default_factory=LaunchSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    precision: PrecisionSettings = field(default_factory=PrecisionSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    data: DataSettings = field(default_factory=DataSettings)
    ema: EmaSettings = field(default_factory=EmaSettings)
    eval: EvalSettings = field(default_factory=EvalSettings)
    save: SaveSettings = field(default_factory=SaveSettings)
    observe: ObserveSettings = field(default_factory=ObserveSettings)
