"""Scores whole videos: encodes each clip separately, then scores overlapping windows of encoded clips."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unisono.errors import UserError
from unisono.recipes.clips.data.datasets import windows_of
from unisono.recipes.clips.data.features import FILES, model_of, read_blocks
from unisono.recipes.clips.video.clips import clips
from unisono.recipes.clips.video.damage import Damage
from unisono.recipes.common.bad_files import BadMedia

if TYPE_CHECKING:
    from unisono.recipes.clips.model import Scorer
    from unisono.recipes.clips.recipe import Clips

_CLIPS_AT_ONCE = 64  # batch size of the encoder; fixed, because the last bits of a result depend on it
_SMALL_MODEL = 3_000_000  # maximum number of weights of a small model; the default model has a tenth of this


@dataclass(frozen=True)
class Scored:
    """The scores of a video, and its properties that are known only after the whole file has been read."""

    scores: NDArray[np.float64]
    """One score per clip [T], from 0 to 1."""
    clip_seconds: float
    duration: float
    has_sound: bool
    damage: Damage | None = None
    parts: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """For the built-in scorer: the contribution of each part to each score; the contributions add up to the score."""


@torch.no_grad()
def score(
    recipe: Clips,
    model: Scorer,
    video: Path,
    device: torch.device | str,
    progress: Callable[[float], None] = lambda seconds: None,
) -> Scored:
    """Scores a video of any length; memory grows by less than a kilobyte per clip.

    Calls `progress` with the seconds of the video that have been processed so far.
    """
    settings = recipe.extraction_settings
    if settings.features == FILES:
        raise UserError(
            "this run was trained on feature files, which do not exist for a new video; to cut videos, train with "
            "--features builtin, transformers:FOLDER or module:function"
        )
    model.eval()
    encoder = _Encoder(model, device)
    feature_model = model_of(settings.features, str(device))
    try:
        reading = clips(
            video, settings.clip_seconds, settings.frames_per_clip, settings.decoded_size, settings.sample_rate
        )
        with closing(reading):
            for block in read_blocks(reading, settings, feature_model):
                encoder.add(block)
                progress(reading.duration)
    except BadMedia as error:
        raise UserError(str(error)) from None
    with _suitable_threads(model, device):
        scores = torch.sigmoid(window_logits(model, encoder.result()[None], recipe.config.window))[0]
    return Scored(
        scores.double().cpu().numpy(), settings.clip_seconds, reading.duration, reading.has_sound, reading.damage
    )


@contextmanager
def _suitable_threads(model: Scorer, device: torch.device | str) -> Iterator[None]:
    """Uses one thread for a small model on the CPU: if cores are shared, more threads mostly wait for each other."""
    threads = torch.get_num_threads()
    is_small = sum(weight.numel() for weight in model.parameters()) < _SMALL_MODEL
    if not is_small or torch.device(device).type != "cpu" or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Encoder:
    """Encodes the clips of one video, _CLIPS_AT_ONCE at a time."""

    def __init__(self, model: Scorer, device: torch.device | str) -> None:
        self._model, self._device = model, device
        self._pending: list[Mapping[str, NDArray[Any]]] = []
        self._encoded: list[Tensor] = []

    def add(self, block: Mapping[str, NDArray[Any]]) -> None:
        """Adds the next clips of the video."""
        self._pending.append({kind: np.array(block[kind]) for kind in self._model.encoders})
        if sum(len(next(iter(arrays.values()))) for arrays in self._pending) >= _CLIPS_AT_ONCE:
            self._encode()

    def result(self) -> Tensor:
        """Returns the encoded clips [clips, width] of the whole video."""
        if self._pending:
            self._encode()
        return torch.cat(self._encoded)

    def _encode(self) -> None:
        inputs = {
            kind: torch.from_numpy(np.concatenate([arrays[kind] for arrays in self._pending])).to(self._device)[None]
            for kind in self._model.encoders
        }
        with _suitable_threads(self._model, self._device):
            self._encoded.append(self._model.encode(inputs)[0])
        self._pending.clear()


def logits_of(model: Scorer, inputs: Mapping[str, Tensor], window: int) -> Tensor:
    """Computes the logits [videos, clips] of whole videos."""
    length = next(iter(inputs.values())).shape[1]
    parts = [
        model.encode({kind: values[:, start : start + _CLIPS_AT_ONCE] for kind, values in inputs.items()})
        for start in range(0, length, _CLIPS_AT_ONCE)
    ]
    return window_logits(model, torch.cat(parts, 1), window)


def window_logits(model: Scorer, encoded: Tensor, window: int) -> Tensor:
    """Computes the logits [videos, clips] of encoded clips [videos, clips, width].

    Where windows overlap, averages their logits, weighted by the clip's distance from the end of each window.
    """
    length = encoded.shape[1]
    total, weight = encoded.new_zeros(encoded.shape[:2]), encoded.new_zeros(length)
    for start, stop in windows_of(length, window):
        position = torch.arange(1, stop - start + 1, device=encoded.device, dtype=encoded.dtype)
        from_end = torch.minimum(position, position.flip(0))
        total[:, start:stop] += from_end * model.score_encoded(encoded[:, start:stop])
        weight[start:stop] += from_end
    return total / weight
