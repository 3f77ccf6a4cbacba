"""Scores of a whole video: each clip is encoded by itself, then windows of them are judged together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unisono.errors import UserError
from unisono.recipes.clips.data.datasets import windows_of
from unisono.recipes.clips.data.features import BUILTIN, FILES, model_of, read_blocks
from unisono.recipes.clips.data.statistics import STATS
from unisono.recipes.clips.video.clips import clips
from unisono.recipes.clips.video.damage import Damage
from unisono.recipes.common.bad_files import BadMedia

if TYPE_CHECKING:
    from unisono.recipes.clips.model import Scorer
    from unisono.recipes.clips.recipe import Clips

_AT_ONCE = 64  # clips that are encoded together
_SMALL = 3_000_000  # weights; the default model has a tenth of that


@dataclass(frozen=True)
class Scored:
    """What a model thinks of the clips of a video."""

    scores: NDArray[np.float64]
    """[T] from 0 to 1."""
    clip_seconds: float
    stats: NDArray[np.float16]
    """[T, len(names)] what can be said of each clip without a model."""
    names: Sequence[str]
    duration: float
    has_sound: bool
    damage: Damage | None = None
    """What of it could not be read."""


@torch.no_grad()
def score(
    recipe: Clips,
    model: Scorer,
    video: Path,
    device: torch.device | str,
    reached: Callable[[float], None] = lambda seconds: None,
) -> Scored:
    """The scores of a video of any length; memory grows by less than a kilobyte per clip.

    `reached` is called with the seconds of the video that are done.
    """
    settings = recipe.extraction_settings
    if settings.features == FILES:
        raise UserError(
            "this run was trained on features from files, and there are none of a new video; to cut videos, train with "
            "--features builtin, transformers:FOLDER or module:function"
        )
    model.eval()
    given = None if settings.features == BUILTIN else model_of(settings.features, str(device))
    size: tuple[int, int] | int = settings.feature_size if given else (settings.size, settings.size)
    encoder = _Encoder(model, device)
    stats: list[NDArray[np.float16]] = []
    try:
        reading = clips(video, settings.clip_seconds, settings.frames_per_clip, size, settings.sample_rate)
        with closing(reading):
            for block in read_blocks(reading, settings, given):
                stats.append(block["stats"])
                encoder.add(block)
                reached(reading.duration)
    except BadMedia as error:
        raise UserError(str(error)) from None
    with _enough_threads(model, device):
        judged = torch.sigmoid(over_time(model, encoder.all()[None], recipe.config.window))[0]
    return Scored(
        judged.double().cpu().numpy(),
        settings.clip_seconds,
        np.concatenate(stats),
        STATS,
        reading.duration,
        reading.has_sound,
        reading.damage,
    )


@contextmanager
def _enough_threads(model: Scorer, device: torch.device | str) -> Iterator[None]:
    """One thread for a small model on the CPU: where cores are shared, more threads mostly wait for each other."""
    before = torch.get_num_threads()
    small = sum(weight.numel() for weight in model.parameters()) < _SMALL
    if small and torch.device(device).type == "cpu" and before > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


class _Encoder:
    """Encodes the clips of a video many at a time: the last bits of a result depend on its company, so always these."""

    def __init__(self, model: Scorer, device: torch.device | str) -> None:
        self._model, self._device = model, device
        self._waiting: list[Mapping[str, NDArray[Any]]] = []
        self._encoded: list[Tensor] = []

    def add(self, block: Mapping[str, NDArray[Any]]) -> None:
        """Takes some clips; encodes those that wait when there are enough."""
        self._waiting.append({kind: np.array(block[kind]) for kind in self._model.encoders})
        if sum(len(next(iter(each.values()))) for each in self._waiting) >= _AT_ONCE:
            self._encode()

    def all(self) -> Tensor:
        """[clips, width] of the whole video."""
        if self._waiting:
            self._encode()
        return torch.cat(self._encoded)

    def _encode(self) -> None:
        inputs = {
            kind: torch.from_numpy(np.concatenate([each[kind] for each in self._waiting])).to(self._device)
            for kind in self._model.encoders
        }
        with _enough_threads(self._model, self._device):
            self._encoded.append(self._model.encode({kind: values[None] for kind, values in inputs.items()})[0])
        self._waiting.clear()


def logits_of(model: Scorer, inputs: Mapping[str, Tensor], window: int) -> Tensor:
    """[videos, clips] logits of whole videos."""
    length = next(iter(inputs.values())).shape[1]
    parts = [
        model.encode({kind: values[:, start : start + _AT_ONCE] for kind, values in inputs.items()})
        for start in range(0, length, _AT_ONCE)
    ]
    return over_time(model, torch.cat(parts, 1), window)


def over_time(model: Scorer, encoded: Tensor, window: int) -> Tensor:
    """[videos, clips] logits of [videos, clips, width].

    Where windows overlap, the one counts most in whose middle a clip is.
    """
    length = encoded.shape[1]
    total, weight = encoded.new_zeros(encoded.shape[:2]), encoded.new_zeros(length)
    for start, stop in windows_of(length, window):
        place = torch.arange(1, stop - start + 1, device=encoded.device, dtype=encoded.dtype)
        near = torch.minimum(place, place.flip(0))
        total[:, start:stop] += near * model.judge(encoded[:, start:stop])
        weight[start:stop] += near
    return total / weight
