"""Settings of the recipe `wan-distill`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from unisono.engine.recipe import Recipe
from unisono.recipes.wan.settings import TINY_DEFAULTS, Attention, SigmaSampling, TextDtype

ALIASES = {
    "lr": "learning_rate",
    "num_steps": "max_steps",
    "gradient_checkpointing": "activation_checkpointing",
    "torch_compile": "compile",
    "max_grad_norm": "grad_clip",
    "guidance_scale": "guidance",
    "guidance_scale_2": "guidance_2",
    "flow_shift": "shift",
    "num_inference_steps": "teacher_steps",
}
"""Names of the same settings in other training scripts."""


@dataclass
class Config(Recipe.Config):
    """Distillation of a Wan model into a smaller one"""

    objective: Literal["regression", "dmd2"] = "regression"
    """What the student learns: regression reproduces the guided teacher's velocities, for a smaller model. dmd2 (distribution matching) trains the teacher's own size to sample in few_steps steps without guidance."""
    teacher_path: str | None = None
    """Teacher: a diffusers folder, a hub id, a checkpoint folder in Wan's original format, or one .safetensors file; `tiny` trains a small teacher first."""
    parts_path: str | None = None
    """Model to take the VAE, text encoder and tokenizer from. Default: the teacher."""
    student_config: str | None = None
    """JSON file with the student's size: hidden_size, depth, num_heads, …, or the arguments of WanTransformer3DModel. Default: half of the teacher's layers."""
    init: Literal["teacher", "fresh"] = "teacher"
    """The student's initial weights: a subset of the teacher's weights, or random weights (fresh)."""
    layers: str = "even"
    """Which of the teacher's layers the student starts with: even (evenly spaced), importance (the layers that change their input most, as measured), or comma-separated layer numbers such as 0,3,6,9."""

    data_path: str | None = None
    """Text file with one prompt per line; `shapes` are the built-in prompts of the tiny teacher."""
    num_eval: int | None = None
    """Number of prompts, evenly spaced, to hold out for evaluation. Default: one in twenty, at most 64."""
    eval_data_path: str | None = None
    """Text file of prompts to evaluate with, instead of holding out prompts of data_path."""
    height: int = 0
    """Height of generated samples in pixels. Default: image_size of student_config, or 512."""
    width: int = 0
    """Width of generated samples in pixels. Default: image_size of student_config, or 512."""
    num_frames: int = 1
    """Frames per sample: 1 generates images, more (of the form 4k + 1) videos."""
    text_dtype: TextDtype = "bfloat16"
    """Dtype of the text encoder, independent of mixed_precision. The tiny teacher always uses float32."""
    cache_dir: str | None = None
    """Folder for the teacher's roll-outs, which several runs may share. Default: inside the run folder."""

    rollouts: int = 4
    """Number of samples that the teacher generates per training prompt, each from different noise."""
    eval_rollouts: int = 1
    """Number of samples that the teacher generates per held-out prompt."""
    rollout_batch: int = 8
    """Batch size of the teacher's roll-outs, the same on any number of devices. Changing it changes the rounding of the samples."""
    teacher_sampler: Literal["unipc", "euler"] = "unipc"
    """Sampler of the teacher."""
    teacher_steps: int = 32
    """Sampler steps of the teacher."""
    guidance: float = 5.0
    """Guidance scale of the teacher (for A14B, of the high-noise expert). The student learns to reproduce the guided samples without guidance."""
    guidance_2: float | None = None
    """Guidance scale of the teacher's low-noise expert. Default: guidance."""
    negative_prompt: str = ""
    """Negative prompt: the teacher's guidance steers samples away from it."""
    pairs: int = 8
    """Number of noise levels per sample at which the teacher's velocity is stored. Has no effect with online."""
    shift: float = 3.0
    """Shift of the noise levels towards more noise, in sampling and in training: 3 is usual at 480p, 5 at 720p and for TI2V-5B, 12 for A14B."""
    sigma_sampling: SigmaSampling = "uniform"
    """Distribution of the noise levels, before the shift."""

    teacher_dtype: Literal["auto", "float32", "float16", "bfloat16", "float8"] = "auto"
    """Dtype of the teacher; auto is bfloat16 on a GPU. float8 stores the weights in 8 bits and computes in bfloat16. The setting base_precision is an alternative that also stores scales and supports 4 bits."""
    teacher_device_strategy: Literal["auto", "gpu", "cpu", "balanced", "gpu0"] = "auto"
    """Where to keep the teacher's weights: on each GPU (gpu, gpu0), in host memory and copied to the GPU block by block (cpu), or, with online, sharded over the GPUs (balanced). auto chooses gpu if they fit."""
    compile_teacher: bool = True
    """Compile the teacher with torch.compile; only on a GPU."""
    online: bool = False
    """Keep the teacher in memory and query it in every training step."""
    refresh_every: int = 0
    """Number of steps after which an online teacher generates new samples. 0: train on the same samples throughout."""

    velocity_weight: float = 1.0
    """Weight of the loss between the velocities of the student and the guided teacher."""
    flow_weight: float = 0.0
    """Weight of the flow-matching loss on the teacher's samples."""
    trajectory_weight: float = 0.0
    """Weight of the velocity loss at points along the teacher's trajectory."""
    trajectory_points: int = 4
    """Number of stored points per trajectory, for trajectory_weight."""
    few_step_weight: float = 0.0
    """Weight of the loss that predicts the end of the teacher's trajectory from a few of its points."""
    few_steps: int = 4
    """Number of the student's sampler steps, with objective dmd2 or few_step_weight. With few_step_weight, teacher_steps must be a multiple of few_steps."""
    feature_weight: float = 0.0
    """Weight of the loss between hidden states of matching layers; needs online and a student as wide as the teacher."""

    lora_rank: int = 64
    """Rank of the two LoRAs of objective dmd2, the student's and the score's. 0 trains all weights of both instead, which takes three times the teacher's memory and the optimizer state of two models."""
    lora_alpha: float | None = None
    """LoRA alpha; the output of a LoRA is scaled by lora_alpha / rank. Default: the rank."""
    lora_targets: str = ""
    """Comma-separated name endings of the layers that get a LoRA. Default: attention and feed-forward layers."""
    lora_path: str | None = None
    """LoRA file that is part of the teacher, with objective dmd2. Use it together with the student's LoRA afterwards."""
    score_steps: int = 5
    """Number of training steps of the score model per training step of the student, with objective dmd2. With more steps, the score follows the student's distribution more closely."""
    score_learning_rate: float | None = None
    """Learning rate of the score model, with objective dmd2. Default: learning_rate."""

    attention: Attention = "auto"
    """Attention kernel on a GPU; auto measures which one is fastest."""

    eval_levels: int = 8
    """Number of noise levels at which to evaluate held-out prompts."""
    sample_prompts: str = ""
    """Prompts to generate previews from, separated by |, or a text file with one caption per line. Default: held-out prompts, or the first ones."""
    num_previews: int = 4
    """Number of previews when sample_prompts is empty."""


TINY = {
    **TINY_DEFAULTS,
    "data_path": "shapes",
    "height": 32,
    "width": 32,
    "rollouts": 16,
    "eval_rollouts": 18,
    "rollout_batch": 96,
    "teacher_sampler": "euler",
    "teacher_steps": 24,
    "pairs": 8,
    "max_steps": 1200,
    "eval_every": 600,
    "preview_every": 600,
}
"""Defaults for the tiny teacher on a CPU."""

DMD2 = {"learning_rate": 2e-5, "beta1": 0.0, "warmup_steps": 20, "ema_decay": 0.99}
"""Defaults of the objective dmd2 with LoRAs. Momentum is off, because the score changes between student steps."""

DMD2_WHOLE = {**DMD2, "learning_rate": 2e-6}
"""Defaults of the objective dmd2 for all weights."""

TINY_DMD2 = {
    **{"learning_rate": 1e-3, "score_learning_rate": 2e-3, "lora_rank": 16, "max_steps": 360, "ema_decay": 0.95},
    **{"eval_every": 360, "preview_every": 360, "eval_rollouts": 6, "warmup_steps": 0, "beta1": 0.0},
}
"""Defaults of the objective dmd2 for the tiny teacher."""

TINY_STUDENT = {"num_attention_heads": 2, "attention_head_dim": 24, "ffn_dim": 192, "num_layers": 3}
"""The student of the tiny teacher: half the width, 21 % of the weights."""

HOW_TO_DRAW = "how_to_draw.json"
"""File in an exported student's folder: the arguments to call its pipeline with."""
