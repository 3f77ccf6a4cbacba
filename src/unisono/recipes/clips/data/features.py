"""Computes the features of each clip: frames, log-mel spectrogram and statistics, or a feature model's output.

A feature model is a vision model for transformers in a local folder, or a function that the user wrote.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unisono.errors import ConfigError
from unisono.recipes.clips.data.statistics import log_mel, spectra, stats
from unisono.recipes.common.fingerprint import combined, of_folders
from unisono.references import load_object

if TYPE_CHECKING:
    from unisono.recipes.clips.video.clips import Reading

BUILTIN, FILES, TRANSFORMERS = "builtin", "files", "transformers:"


@dataclass(frozen=True)
class ExtractSettings:
    """The settings that determine the extracted features."""

    clip_seconds: float = 2.0
    frames_per_clip: int = 8
    size: int = 32
    """Height and width of the stored frames."""
    sample_rate: int = 16_000
    mel_steps: int = 20
    mel_bands: int = 32
    features: str = BUILTIN
    """builtin (frames, mel, stats), files (features), transformers:FOLDER or module:function (features, mel, stats)."""
    feature_size: int = 224
    """Length in pixels of the shorter side of the frames that a feature model gets."""

    @property
    def decoded_size(self) -> tuple[int, int] | int:
        """The size of decoded frames: height and width or, for a feature model, the length of the shorter side."""
        return (self.size, self.size) if self.features in (BUILTIN, FILES) else self.feature_size


FeatureModel = Callable[[NDArray[np.uint8], NDArray[np.float32], int], Any]
"""(frames uint8 [clips, F, height, width, 3], sound float32 [clips, samples], sample_rate) -> features [clips, D], an
array or a tensor. Frames are upright RGB; sound has one channel and is zero where the video has none. A call gets up to
`BLOCK` consecutive clips of one video."""

BLOCK = 16
"""Number of clips per call of a feature model. Fixed, because the last bits of a result depend on the batch size."""


def model_of(kind: str, device: str = "cpu") -> FeatureModel | None:
    """Returns the model that computes features of this kind; None for kinds that need no model."""
    if kind in (BUILTIN, FILES):
        return None
    if kind.startswith(TRANSFORMERS):
        return _VisionModel(Path(kind.removeprefix(TRANSFORMERS)), device)
    return _user_function(kind)[0]


def fingerprint(kind: str) -> str:
    """Hashes the model's files, or the file with the user's function, that compute features of this kind."""
    if kind in (BUILTIN, FILES):
        return kind
    if kind.startswith(TRANSFORMERS):
        return of_folders([_model_folder(Path(kind.removeprefix(TRANSFORMERS)))], "transformers")
    function, file = _user_function(kind)
    content = hashlib.sha256(file.read_bytes()).hexdigest() if file else ""
    return combined(kind.rpartition(":")[2], getattr(function, "__module__", ""), content)


def _compute(
    kind: str, model: FeatureModel, frames: NDArray[np.uint8], sound: NDArray[np.float32], rate: int
) -> NDArray[np.float16]:
    """Computes the features [clips, D] of some clips; raises ConfigError if the result has the wrong type or shape."""
    try:
        output = model(frames, sound, rate)
        features = np.asarray(output.detach().float().cpu() if isinstance(output, Tensor) else output, dtype=np.float32)
    except ConfigError:
        raise
    except Exception as error:  # a user's function may raise anything
        message = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"features {kind} failed on {len(frames)} clips ({type(error).__name__}: {message})"
        ) from error
    if features.ndim != 2 or len(features) != len(frames) or not features.shape[1]:
        raise ConfigError(
            f"features {kind} returned an array of shape {features.shape} for {len(frames)} clips; expected (clips, D)"
        )
    if not np.isfinite(features).all() or np.abs(features).max() > 65_000:
        raise ConfigError(f"features {kind} returned numbers that are not finite or too large for float16")
    return features.astype(np.float16)


class _VisionModel:
    """A vision model for transformers in a folder; a clip's features are the mean over its frames."""

    def __init__(self, folder: Path, device: str) -> None:
        from transformers import AutoImageProcessor, AutoModel

        self._folder, self._device = _model_folder(folder), device
        local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        try:
            self._processor = AutoImageProcessor.from_pretrained(folder, **local)  # type: ignore[no-untyped-call]
            # Never loads .bin files, because unpickling them can execute arbitrary code.
            self._model = AutoModel.from_pretrained(folder, use_safetensors=True, dtype=torch.float32, **local)
        except (OSError, ValueError, ImportError, KeyError) as error:
            message = " ".join(str(error).split())[:200]
            raise ConfigError(f"{folder} cannot be loaded as a vision model of transformers ({message})") from None
        self._model.eval().requires_grad_(False).to(device)

    @torch.no_grad()
    def __call__(self, frames: NDArray[np.uint8], sound: NDArray[np.float32], sample_rate: int) -> Tensor:
        clips, per_clip = frames.shape[:2]
        images = list(frames.reshape(-1, *frames.shape[2:]))
        inputs = self._processor(images=images, return_tensors="pt", input_data_format="channels_last")
        pixels = inputs["pixel_values"].to(self._device, torch.float32)
        features = getattr(self._model, "get_image_features", self._model)(pixel_values=pixels)
        if not isinstance(features, Tensor):
            pooled = getattr(features, "pooler_output", None)
            features = features.last_hidden_state if pooled is None else pooled
        if features.shape[0] != len(images):
            raise ConfigError(f"{self._folder}: this model does not accept single images; use a model that does")
        if features.dim() == 4:  # [images, channels, height, width], of a convolutional network
            features = features.flatten(2).mean(2)
        elif features.dim() == 3:  # [images, patches, width]
            features = features.mean(1)
        per_frame: Tensor = features.view(clips, per_clip, -1)
        return per_frame.mean(1).cpu()


def _model_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json; expected the folder of a vision model of transformers")
    return folder


def _user_function(kind: str) -> tuple[FeatureModel, Path | None]:
    """Imports the function `package.module:function` or `file.py:function`; also returns the file that defines it."""
    module, _, name = kind.rpartition(":")
    if not module or not name.isidentifier():
        raise ConfigError(
            f"features {kind!r}: expected {BUILTIN}, {FILES}, {TRANSFORMERS}FOLDER, or your own function as "
            "module:function or file.py:function"
        )
    function = load_object(kind)
    if not callable(function):
        raise ConfigError(f"features {kind}: {name!r} is not a function")
    file = getattr(sys.modules.get(getattr(function, "__module__", None) or ""), "__file__", None)
    return function, Path(file) if file else None


def read_blocks(
    reading: Reading, settings: ExtractSettings, model: FeatureModel | None
) -> Generator[dict[str, NDArray[Any]]]:
    """Yields the features of a video, up to BLOCK clips at a time."""
    rate = settings.sample_rate
    while clips := list(islice(reading, BLOCK)):
        frames, sound = np.stack([clip[0] for clip in clips]), np.stack([clip[1] for clip in clips])
        powers = [spectra(samples, rate) for samples in sound]
        mel = np.stack([log_mel(power, rate, settings.mel_steps, settings.mel_bands) for power in powers])
        yield {
            **({"features": _compute(settings.features, model, frames, sound, rate)} if model else {"frames": frames}),
            # Missing sound is 0, to distinguish it from recorded silence, which is -1.
            "mel": mel if reading.facts.has_sound else np.zeros_like(mel),
            "stats": np.stack([stats(*clip, power, rate) for clip, power in zip(clips, powers, strict=True)]),
        }
