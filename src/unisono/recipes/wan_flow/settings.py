"""Settings of the recipe `wan-flow`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from unisono.engine.recipe import Recipe
from unisono.recipes.wan.settings import TINY_DEFAULTS, Attention, GivenFramesName, Kind, SigmaSampling, TextDtype

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
"""Names of the same settings in other training scripts."""


@dataclass
class Config(Recipe.Config):
    """Flow matching on Wan"""

    model_path: str | None = None
    """Model to continue training: a diffusers folder, a hub id, a checkpoint folder in Wan's original format, or one .safetensors file (native and ComfyUI weight names too)."""
    model_config: str | None = None
    """Train from scratch instead: tiny or tiny-i2v (with their own VAE, text encoder and data), 1.3b, 14b, ti2v-5b, a14b, i2v-14b, flf2v-14b, i2v-a14b, or a JSON file with the arguments of WanTransformer3DModel."""
    parts_path: str | None = None
    """Model to take the VAE, text encoder and tokenizer from. Default: model_path."""
    expert: Literal["high", "low", "both"] = "both"
    """Which of the two transformers of Wan 2.2 A14B to train."""
    condition: GivenFramesName | None = None
    """Frames of each video that the model is given: first, first_last or none. Default: the usual ones of the model. Only models such as Wan 2.2 I2V-A14B (first, first_last) and TI2V-5B (none, first) offer a choice."""

    dataset_path: str = "./dataset"
    """Folder of images and videos, each with a caption in a text file of the same name, or all listed in metadata.csv, .json or .jsonl; or tar shards, such as clips-{000..009}.tar or s3://bucket/*.tar. `shapes` is the built-in dataset."""
    eval_dataset_path: str | None = None
    """Folder of samples to hold out for evaluation, laid out like dataset_path."""
    num_shapes: int = 2400
    """Number of training samples to draw with dataset_path shapes."""
    num_eval: int = 0
    """Number of samples of dataset_path, evenly spaced, to hold out for evaluation when eval_dataset_path is not given."""
    height: int = 0
    """Height of all samples in pixels. 0 (with width 0) keeps each sample's aspect ratio."""
    width: int = 0
    """Width of all samples in pixels. 0 (with height 0) keeps each sample's aspect ratio."""
    max_pixels: int = 480 * 832
    """Largest number of pixels of a frame when samples keep their aspect ratio; larger frames are scaled down."""
    num_frames: int = 81
    """Number of frames per video, of the form 4k + 1. A shorter video is trained on its longest window of that form."""
    fps: float = 16.0
    """Frames per second to resample videos to. 0 keeps each video's own frame rate."""
    window: Literal["head", "middle", "random"] = "head"
    """Position of the training window in a video that is longer than num_frames. random needs no_cache."""
    leave_out_bad: bool = False
    """Skip unusable files and list them, instead of stopping with an error."""
    latents: Literal["normalised", "raw"] = "normalised"
    """Kind of latents in the dataset's own name.latent.safetensors files: normalised (as the transformer takes them), or raw (as the VAE outputs them; they are normalised on loading)."""
    cache_dir: str | None = None
    """Folder for cached latents and text embeddings, which several runs may share. Default: inside the run folder."""
    no_cache: bool = False
    """Encode images, videos and captions in every step instead of caching them. The VAE and the text encoder then stay in memory."""
    text_dtype: TextDtype = "bfloat16"
    """Dtype of the text encoder, independent of mixed_precision; published pipelines use bfloat16. The tiny model always uses float32."""

    sigma_sampling: SigmaSampling = "logit_normal"
    """Distribution of the noise levels, before the shift."""
    logit_mean: float = 0.0
    """Mean of the logit, for sigma_sampling logit_normal. Larger values train more noise."""
    logit_std: float = 1.0
    """Standard deviation of the logit, for sigma_sampling logit_normal."""
    mode_scale: float = 1.29
    """Scale of the preference for medium noise levels, for sigma_sampling mode. 0 is uniform."""
    shift: float | Literal["auto"] = 3.0
    """Shift of the noise levels towards more noise, which larger samples need: 3 is usual at 480p, 5 at 720p and for TI2V-5B; auto follows each sample's size."""
    caption_dropout: float = 0.1
    """Probability of training a sample without its caption, which classifier-free guidance needs."""
    first_frame: float = 0.0
    """Probability that a video's first frame is given as a condition instead of being generated. TI2V-5B only."""
    masked_loss: bool = False
    """Weight the loss by the masks beside the samples (a.mask.png or a.mask.mp4): white counts, black does not."""
    unmasked_weight: float = 0.0
    """Loss weight of the black areas of a mask, from 0 to 1, with masked_loss."""

    adapter: Kind = "lora"
    """Kind of adapter that lora_rank trains: lora; dora (also trains the magnitude of each output, closer to full fine-tuning, slower); lokr (a Kronecker product, fewer weights)."""
    lokr_factor: int = -1
    """Size of the smaller factor of a lokr: larger factors train fewer weights, up to the square root of a layer's width. -1: the square root."""
    lora_rank: int = 0
    """Rank of the LoRA to train. 0 trains all weights."""
    lora_alpha: float | None = None
    """LoRA alpha; the output of the LoRA is scaled by lora_alpha / rank. Default: the rank."""
    lora_targets: str = ""
    """Comma-separated name endings of the layers that get a LoRA. Default: attention and feed-forward layers."""
    lora_path: str | None = None
    """LoRA file to continue training. The file determines rank and layers."""
    attention: Attention = "auto"
    """Attention kernel on a GPU; auto measures which one is fastest."""

    eval_levels: int = 8
    """Number of noise levels at which to evaluate held-out samples."""
    preview_prompts: str = ""
    """Captions to generate previews from, separated by |, or a text file with one caption per line. Default: some captions of the dataset."""
    num_previews: int = 4
    """Number of previews when preview_prompts is empty."""
    preview_steps: int = 30
    """Sampler steps of a preview."""
    guidance: float = 5.0
    """Classifier-free guidance scale of previews."""


TINY = {
    **TINY_DEFAULTS,
    "dataset_path": "shapes",
    "num_frames": 1,
    "max_steps": 600,
    "preview_steps": 25,
    "eval_every": 300,
    "preview_every": 300,
}
"""Defaults for the tiny model on a CPU."""

TINY_I2V = {**TINY, "num_frames": 5, "max_steps": 800, "num_previews": 12, "eval_every": 400, "preview_every": 400}
"""Defaults for the tiny image-to-video model on a CPU."""

LORA = {"learning_rate": 1e-4}
"""Defaults for a LoRA."""
