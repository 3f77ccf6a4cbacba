"""The settings of the recipe `clips`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from unisono.engine.recipe import Recipe

ALIASES = {"lr": "learning_rate", "labels": "data_path", "batch": "batch_size", "epochs": "num_epochs"}
"""Alternative names of settings, known from other scripts."""

MIRROR = "mirror"
"""The `data_path` that selects the built-in mirror set."""

INPUT_KINDS = ("frames", "mel", "stats", "features")
"""The inputs that `use` can select."""


@dataclass
class Config(Recipe.Config):
    """Highlight detection: which moments of a video are worth cutting out"""

    data_path: str | None = None
    """Labelled videos: a folder with videos and labels.csv (video,start,end,score), or a label file (.csv, .jsonl of QVHighlights, .h5 of Mr. HiSum). `mirror` generates the built-in dataset."""
    media_path: str | None = None
    """Folder that contains the videos or their feature files. Default: the folder of the labels."""
    eval_data_path: str | None = None
    """Labels of the held-out videos, in the same formats as data_path. Replaces num_eval."""
    num_eval: int | None = None
    """Number of videos of data_path to hold out for evaluation, evenly spaced. Default: one in five."""
    highest_score: float = 1.0
    """Highest possible score in labels.csv. All scores are divided by it, so that they lie between 0 and 1."""
    feature_seconds: float | None = None
    """Seconds of video that each row of a feature file covers. Default: clip_seconds."""
    leave_out_bad: bool = False
    """Skip unreadable files and labels without a video, and report them, instead of stopping with an error."""
    follow_links: bool = False
    """Also read videos and feature files through symbolic links that point outside their folder."""
    num_videos: int = 120
    """Number of training videos to generate with `--data_path mirror`; a quarter as many are generated for evaluation."""
    cache_dir: str | None = None
    """Folder for the extracted features, which several runs can share. Default: a folder inside the run folder."""
    extract_workers: int = 1
    """Number of videos that each process decodes in parallel during feature extraction."""

    clip_seconds: float = 2.0
    """Length of a clip in seconds. The model gives each clip one score."""
    frames_per_clip: int = 8
    """Number of frames to sample from each clip."""
    frame_size: int = 32
    """Height and width in pixels to which `--features builtin` resizes the frames."""
    features: str = "builtin"
    """Features of each clip: builtin (small frames, mel spectrogram and statistics, for an encoder that is trained), files (.npy, .npz or .h5 next to the labels), transformers:FOLDER (a pretrained vision model), or module:function (your own)."""
    use: str = ""
    """Comma-separated inputs of the model: frames, mel, stats, features. Default: all that are available, except stats."""

    width: int = 96
    """Hidden size of the model."""
    layers: int = 2
    """Number of transformer layers over time."""
    heads: int = 4
    """Number of attention heads; must divide width."""
    dropout: float = 0.0
    """Dropout probability in the transformer."""
    window: int = 64
    """Number of consecutive clips that the model sees at once. Longer videos are scored in windows that overlap by half."""
    score_loss: Literal["bce", "mse"] = "bce"
    """Loss between predicted and labelled scores: binary cross-entropy or mean squared error."""
    ranking_weight: float = 1.0
    """Weight of the pairwise ranking loss, which orders the clips of a window; 0 disables it."""
    positive_from: float = 0.5
    """Lowest labelled score (0 to 1) at which a clip counts as a highlight in mAP and HIT@1."""
    shuffle_labels: bool = False
    """Shuffle the labels within each training video, as a control experiment: the model must then score like chance."""


MIRROR_PRESETS = {
    "batch_size": 4,
    "num_epochs": 8,
    "learning_rate": 2e-3,
    "warmup_steps": 20,
    "lr_schedule": "cosine",
    "mixed_precision": "no",
    "num_workers": 0,
    "eval_every": 100,
    "preview_every": -1,
    "log_every": 20,
}
"""Defaults for training on the mirror set on a CPU."""
