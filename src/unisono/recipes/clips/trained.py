"""Loads a trained run as a video scorer, with information about its training data and its calibration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from unisono.recipes.clips.calibration import Calibration
    from unisono.recipes.clips.scoring import Scored
    from unisono.recipes.clips.video.footage import Footage


@dataclass(frozen=True)
class VideoScorer:
    """A function that scores videos, with the information about its run that clips.json and the page show."""

    score: Callable[[Path, Callable[[float], None]], Scored]
    """Scores a video; calls the callback with the seconds of the video that have been processed so far."""
    name: str = ""
    trained_on: str = ""
    """The run's data_path; for the mirror set, its name and number of videos."""
    calibration: Calibration | None = None
    mirror_size: int | None = None
    """Height and width of the training videos if the run was trained on the mirror set; otherwise None."""

    def warning_for(self, footage: Footage) -> str:
        """Returns a warning if the run was not trained on videos of this kind; otherwise an empty string."""
        if self.mirror_size is None or footage.width == footage.height == self.mirror_size:
            return ""
        return (
            "the run was trained on the built-in mirror set, drawings of moving dots, so its scores mean nothing "
            "for other videos; train on labelled videos of this kind (--data_path)"
        )


def load_scorer(
    run: Path, *, step: str | None, weights: str, recipe_from: str | None, device: torch.device
) -> VideoScorer:
    """Loads a run of the recipe `clips` as a video scorer."""
    from unisono.engine.export import load_trained
    from unisono.recipes.clips.calibration import calibration_of
    from unisono.recipes.clips.model import Scorer
    from unisono.recipes.clips.recipe import Clips
    from unisono.recipes.clips.scoring import score
    from unisono.recipes.clips.settings import MIRROR

    recipe, model, which = load_trained(run, step=step, weights=weights, reference=recipe_from)
    if not isinstance(recipe, Clips) or not isinstance(model, Scorer):
        raise ConfigError(f"{run} is a run of {type(recipe).__name__}, which cannot score videos; pass a run of clips")
    model = model.to(device)
    config = recipe.config
    is_mirror = config.data_path == MIRROR
    return VideoScorer(
        lambda video, progress: score(recipe, model, video, device, progress),
        f"{run}, {which}",
        f"the built-in mirror set ({config.num_videos} videos)" if is_mirror else str(config.data_path),
        calibration_of(run, int(which.rpartition("step_")[2])),  # resolves the steps "newest" and "best" too
        config.frame_size if is_mirror else None,
    )
