"""The recipe's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from unisono.engine.recipe import Recipe

ALIASES = {"lr": "learning_rate", "labels": "data_path", "batch": "batch_size", "epochs": "num_epochs"}
"""Names that people know from other scripts."""


@dataclass
class Config(Recipe.Config):
    """Which moments of a video are worth cutting out"""

    data_path: str | None = None
    """A folder of videos with labels.csv (video,start,end,score), or a file of labels: .csv, .jsonl (QVHighlights), .h5 (Mr. HiSum); `mirror` is the built-in set."""
    media_path: str | None = None
    """The folder of the videos, or of their features. Default: where the labels are."""
    eval_data_path: str | None = None
    """Other labels to evaluate with."""
    num_eval: int | None = None
    """Hold out so many videos of data_path (evenly spaced) instead. Default: one of five."""
    highest_score: float = 1.0
    """The best score in labels.csv; they become 0 to 1."""
    feature_seconds: float | None = None
    """Seconds of each row of a feature file. Default: clip_seconds."""
    leave_out_bad: bool = False
    """Leave out files that cannot be used, and say which, instead of stopping."""
    num_videos: int = 120
    """mirror: so many are made to learn from, and a quarter of that to evaluate with."""
    cache_dir: str | None = None
    """Where what is computed of the videos is kept, for several runs. Default: in the run's folder."""
    extract_workers: int = 1
    """Videos that each process decodes at once."""

    clip_seconds: float = 2.0
    """The length of a clip, which gets one score."""
    frames_per_clip: int = 8
    """Frames that are looked at in each clip."""
    frame_size: int = 32
    """Their height and width in pixels."""
    features: str = "builtin"
    """What is computed of each clip: builtin (small frames, sound and statistics, for an encoder that is trained), files (.npy, .npz, .h5 beside the labels), transformers:FOLDER (a vision model), or module:function."""
    use: str = ""
    """Which of it is given to the model, separated by commas: frames, mel, stats, features. Default: all there is but stats."""

    width: int = 96
    """Of the model."""
    layers: int = 2
    """Of the transformer over time."""
    heads: int = 4
    """Of its attention."""
    dropout: float = 0.0
    """In the transformer."""
    window: int = 64
    """Clips that are seen together; a longer video is scored in windows that overlap by half."""
    score_loss: Literal["bce", "mse"] = "bce"
    """How the error of a score is measured."""
    ranking_weight: float = 1.0
    """Of the loss that puts better clips before worse ones."""
    positive_from: float = 0.5
    """The score from which a clip counts as a highlight, in mAP and HIT@1."""
    shuffle_labels: bool = False
    """A control: labels of the training videos are dealt out at random, so that there is nothing to learn."""


MIRROR = {
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
"""What suits the built-in set on a CPU."""
