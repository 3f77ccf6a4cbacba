"""The recipe's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from unisono.engine.recipe import Recipe

ALIASES = {
    "checkpoint_dir": "output_dir",
    "gradient_checkpointing": "activation_checkpointing",
    "torch_compile": "compile",
    "lr": "learning_rate",
    "dataset_dir": "dataset_path",
    "max_train_steps": "max_steps",
    "pretrained_model_name_or_path": "model_path",
    "max_grad_norm": "grad_clip",
    "flow_shift": "shift",
    "discrete_flow_shift": "shift",
    "network_dim": "lora_rank",
    "network_alpha": "lora_alpha",
    "rank": "lora_rank",
    "ckpt_path": "model_path",
    "resume_from_checkpoint": "resume",
    "checkpointing_steps": "save_every",
    "validation_steps": "preview_every",
    "validation_prompts": "preview_prompts",
    "timestep_sampling": "sigma_sampling",
    "weighting_scheme": "sigma_sampling",
}
"""Names that people know from other scripts."""


@dataclass
class Config(Recipe.Config):
    """Flow matching on Wan"""

    model_path: str | None = None
    """The model to go on from: a diffusers folder, a hub id, a folder of the Wan repository, or one .safetensors file (native and ComfyUI names too)."""
    model_config: str | None = None
    """Train from nothing instead: tiny (with its own VAE, text encoder and data), 1.3b, 14b, ti2v-5b, a14b, or a JSON file with the settings of WanTransformer3DModel."""
    parts_path: str | None = None
    """The model whose VAE, text encoder and tokenizer are used. Default: those of model_path."""
    expert: Literal["high", "low", "both"] = "both"
    """Wan 2.2 A14B: which of its two transformers is trained."""

    dataset_path: str = "./dataset"
    """A folder of pictures and films with a text file each, or with metadata.csv, .json or .jsonl; `shapes` is the built-in set."""
    eval_dataset_path: str | None = None
    """The same, held out for evaluation."""
    num_shapes: int = 2400
    """shapes: so many of them are drawn to train on."""
    num_eval: int = 0
    """Hold out so many samples of dataset_path (evenly spaced) instead."""
    height: int = 0
    """Of all samples, in pixels; 0 (and width 0): each keeps its proportions."""
    width: int = 0
    """Of all samples, in pixels."""
    max_pixels: int = 480 * 832
    """Of a frame that keeps its proportions: larger ones are made smaller."""
    num_frames: int = 81
    """Of a film, 4k + 1. A shorter one is used with the longest window it has."""
    fps: float = 16.0
    """Frames per second that films are brought to; 0 leaves them."""
    window: Literal["head", "middle", "random"] = "head"
    """Where in a longer film its window begins; random needs no_cache."""
    leave_out_bad: bool = False
    """Leave out files that cannot be used, and say which, instead of stopping."""
    latents: Literal["normalised", "raw"] = "normalised"
    """What name.latent.safetensors beside the data hold: latents as the transformer takes them, or as the VAE gave them (raw), which are normalised here."""
    cache_dir: str | None = None
    """Where latents and embeddings are kept, for several runs. Default: in the run's folder."""
    no_cache: bool = False
    """Encode pictures, films and captions anew in every step; VAE and text encoder then stay in memory."""

    sigma_sampling: Literal["logit_normal", "uniform", "mode"] = "logit_normal"
    """How noise levels are drawn, before the shift."""
    logit_mean: float = 0.0
    """logit_normal: mean of the logit."""
    logit_std: float = 1.0
    """logit_normal: its standard deviation."""
    mode_scale: float = 1.29
    """mode: how much the middle is preferred."""
    shift: float | Literal["auto"] = 3.0
    """More noise for larger pictures: 3 is usual at 480p, 5 at 720p and for TI2V-5B; auto follows each sample's size."""
    caption_dropout: float = 0.1
    """How often a sample is learned without its caption, which guidance needs."""
    first_frame: float = 0.0
    """TI2V-5B only: how often a film's first frame is given, and only what follows is learned."""

    lora_rank: int = 0
    """Train a LoRA of this rank instead of all weights; 0: all weights."""
    lora_alpha: float | None = None
    """Its strength. Default: its rank."""
    lora_targets: str = ""
    """Ends of the names of layers that get one, separated by commas. Default: attention and feed-forward layers."""
    lora_path: str | None = None
    """A LoRA to go on from, with its own rank and layers."""
    attention: Literal["auto", "cudnn", "flash", "efficient", "math"] = "auto"
    """The kernel that computes attention on a GPU; auto measures which is fastest."""

    eval_levels: int = 8
    """Noise levels at which held-out samples are evaluated."""
    preview_prompts: str = ""
    """Captions to draw previews of, separated by |, or a text file with one in each line. Default: some of the data's."""
    num_previews: int = 4
    """Previews to draw, when no captions are given."""
    preview_steps: int = 30
    """Steps of the sampler."""
    guidance: float = 5.0
    """Guidance scale of previews."""


TINY = {
    "dataset_path": "shapes",
    "num_frames": 1,
    "mixed_precision": "no",
    "compile": False,
    "num_workers": 0,
    "batch_size": 32,
    "max_steps": 600,
    "learning_rate": 4e-3,
    "lr_schedule": "cosine",
    "warmup_steps": 50,
    "ema_decay": 0.99,
    "shift": 1.0,
    "guidance": 2.0,
    "preview_steps": 25,
    "num_previews": 24,
    "eval_every": 300,
    "preview_every": 300,
    "eval_batch_size": 96,
    "log_every": 50,
}
"""What suits the tiny model on a CPU."""

LORA = {"learning_rate": 1e-4}
"""What suits a LoRA."""
