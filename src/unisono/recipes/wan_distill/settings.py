"""The recipe's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from unisono.engine.recipe import Recipe

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
"""Names that people know from other scripts."""


@dataclass
class Config(Recipe.Config):
    """Distillation of a Wan model into a smaller one"""

    teacher_path: str | None = None
    """The model to imitate: a diffusers folder, a hub id, a folder of the Wan repository, or one .safetensors file; `tiny` makes a small one first."""
    parts_path: str | None = None
    """The model whose VAE, text encoder and tokenizer are used. Default: the teacher's."""
    student_config: str | None = None
    """A JSON file that says how large the student is: hidden_size, depth, num_heads, …, or the settings of WanTransformer3DModel. Default: half of the teacher's layers."""
    init: Literal["teacher", "fresh"] = "teacher"
    """How the student begins: with a part of the teacher's weights, or from nothing."""
    layers: str = "even"
    """Which of the teacher's layers the student gets: even (evenly spaced), importance (those that change most, measured), or their numbers, as in 0,3,6,9."""

    data_path: str | None = None
    """A text file with one prompt in each line; `shapes` are the built-in prompts of the tiny teacher."""
    num_eval: int | None = None
    """Hold out so many prompts (evenly spaced). Default: one of twenty, at most 64."""
    eval_data_path: str | None = None
    """A text file of prompts to evaluate with, instead."""
    height: int = 0
    """Of what is drawn, in pixels. Default: image_size of the student's configuration, or 512."""
    width: int = 0
    """Of what is drawn, in pixels."""
    num_frames: int = 1
    """1: pictures. More, 4k + 1: films."""
    cache_dir: str | None = None
    """Where what the teacher draws is kept, for several runs. Default: in the run's folder."""

    rollouts: int = 4
    """What the teacher draws for each prompt to learn from, each from another noise."""
    eval_rollouts: int = 1
    """What it draws for each held-out prompt."""
    rollout_batch: int = 8
    """Samples that the teacher draws at once; part of the result's last bits, so the same on any number of devices."""
    teacher_sampler: Literal["unipc", "euler"] = "unipc"
    """How the teacher draws."""
    teacher_steps: int = 32
    """Steps of its sampler."""
    guidance: float = 5.0
    """Its guidance scale, which the student learns to do without; of A14B's high-noise expert, where there are two."""
    guidance_2: float | None = None
    """Of its low-noise expert. Default: as guidance."""
    negative_prompt: str = ""
    """What guidance leads away from."""
    pairs: int = 8
    """Noise levels at which the teacher is asked about each sample it has drawn, when its answers are kept."""
    shift: float = 3.0
    """Of the noise levels, in drawing and in learning: 3 is usual at 480p, 5 at 720p and for TI2V-5B, 12 for A14B."""
    sigma_sampling: Literal["uniform", "logit_normal", "mode"] = "uniform"
    """How noise levels are spread, before the shift."""

    teacher_dtype: Literal["auto", "float32", "float16", "bfloat16", "float8"] = "auto"
    """What the teacher computes in; auto: bfloat16 on a GPU. float8 keeps its weights in 8 bit and computes in bfloat16."""
    teacher_device_strategy: Literal["auto", "gpu", "cpu", "balanced", "gpu0"] = "auto"
    """Where the teacher's weights are: on each GPU (gpu, gpu0), in the computer's memory and brought block by block (cpu), or, with online, a part on each GPU (balanced). auto takes gpu if it fits."""
    compile_teacher: bool = True
    """Compile the teacher, on a GPU."""
    online: bool = False
    """Keep the teacher while the student learns, and ask it anew at every step."""
    refresh_every: int = 0
    """online: steps after which the teacher draws new samples; 0: never."""

    velocity_weight: float = 1.0
    """Of the loss that compares the student's velocity with the guided teacher's."""
    flow_weight: float = 0.0
    """Of flow matching on the teacher's samples."""
    trajectory_weight: float = 0.0
    """Of the same comparison at points of the teacher's own path."""
    trajectory_points: int = 4
    """Points of each path that are kept for it."""
    few_step_weight: float = 0.0
    """Of the loss that leads from few points of the path straight to its end."""
    few_steps: int = 4
    """The number of these points, and of the steps that the student then draws in; teacher_steps is a multiple of it."""
    feature_weight: float = 0.0
    """Of the loss that compares what kept layers give; needs online and a student as wide as the teacher."""
    attention: Literal["auto", "cudnn", "flash", "efficient", "math"] = "auto"
    """The kernel that computes attention on a GPU; auto measures which is fastest."""

    eval_levels: int = 8
    """Noise levels at which held-out prompts are evaluated."""
    sample_prompts: str = ""
    """Prompts to draw previews of, separated by |, or a text file with one in each line. Default: held-out ones, or the first ones."""
    num_previews: int = 4
    """Previews to draw, when no prompts are given."""


TINY = {
    "data_path": "shapes",
    "height": 32,
    "width": 32,
    "rollouts": 16,
    "eval_rollouts": 18,
    "rollout_batch": 96,
    "teacher_sampler": "euler",
    "teacher_steps": 24,
    "guidance": 2.0,
    "shift": 1.0,
    "pairs": 8,
    "mixed_precision": "no",
    "compile": False,
    "num_workers": 0,
    "batch_size": 32,
    "max_steps": 1200,
    "learning_rate": 4e-3,
    "lr_schedule": "cosine",
    "warmup_steps": 50,
    "ema_decay": 0.99,
    "num_previews": 24,
    "eval_every": 600,
    "preview_every": 600,
    "eval_batch_size": 96,
    "log_every": 50,
}
"""What suits the tiny teacher on a CPU."""

TINY_STUDENT = {"num_attention_heads": 2, "attention_head_dim": 24, "ffn_dim": 192, "num_layers": 3}
"""The student of the tiny teacher: half its width, 0.21 of its weights."""

HOW_TO_DRAW = "how_to_draw.json"
"""In a student's folder: what to call its pipeline with."""
