"""A trained run as a scorer of videos, with what its scores mean: its training data and its calibration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from unisono.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from unisono.recipes.clips.calibration import Calibration
    from unisono.recipes.clips.video.damage import Damage
    from unisono.recipes.clips.video.footage import Footage


Reached = Callable[[float], None]
"""A scorer calls it with the number of seconds of the video that it has processed so far."""


class Scored(Protocol):
    """The result of a scorer: the score of each clip, and what the scorer learned about the video while reading it."""

    @property
    def scores(self) -> NDArray[np.floating[Any]]: ...
    @property
    def clip_seconds(self) -> float: ...
    @property
    def duration(self) -> float: ...
    @property
    def has_sound(self) -> bool: ...
    @property
    def damage(self) -> Damage | None: ...


@dataclass(frozen=True)
class Judge:
    """A scorer of videos, with the facts that clips.json and the page report about it."""

    score: Callable[[Path, Reached], Scored]
    name: str = ""
    trained_on: str = ""
    """The run's data_path, for the mirror set with its number of videos."""
    calibration: Calibration | None = None
    mirror_size: int | None = None
    """Height and width of the training videos of a run that was trained on the mirror set; None for other runs."""

    def about(self, footage: Footage) -> str:
        """Returns a warning when the run was not trained on videos of this kind; otherwise an empty string."""
        if self.mirror_size is None or footage.width == footage.height == self.mirror_size:
            return ""
        return (
            "the run was trained on the built-in mirror set, drawings of moving dots, so its scores mean nothing "
            "for other videos; train on labelled videos of this kind (--data_path)"
        )


def trained_judge(run: Path, *, step: str | None, weights: str, recipe_from: str | None, device: torch.device) -> Judge:
    """Loads a run of the recipe `clips` as a scorer."""
    from unisono.engine.export import load_trained
    from unisono.recipes.clips.calibration import calibration_of
    from unisono.recipes.clips.model import Scorer
    from unisono.recipes.clips.recipe import Clips
    from unisono.recipes.clips.scoring import score
    from unisono.recipes.clips.settings import MIRROR

    recipe, model, which = load_trained(run, step=step, weights=weights, words=recipe_from)
    if not isinstance(recipe, Clips) or not isinstance(model, Scorer):
        raise ConfigError(f"{run} is a run of {type(recipe).__name__}, which cannot score videos; pass a run of clips")
    model = model.to(device)
    config = recipe.config
    is_mirror = config.data_path == MIRROR
    return Judge(
        lambda video, reached: score(recipe, model, video, device, reached),
        f"{run}, {which}",
        f"the built-in mirror set ({config.num_videos} videos)" if is_mirror else str(config.data_path),
        calibration_of(run, int(step) if step and step.isdecimal() else None),
        config.frame_size if is_mirror else None,
    )
