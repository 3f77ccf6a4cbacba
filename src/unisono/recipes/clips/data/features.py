"""What is computed of each clip: statistics and a picture of its sound (`statistics`), and what a model sees in it.

A model's features come from a vision model of transformers on this disk, or from a function of the user's.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unisono.engine.start.registry import load_object
from unisono.errors import ConfigError
from unisono.recipes.clips.data.statistics import log_mel, spectra, stats
from unisono.recipes.common.fingerprint import of_folders, together

if TYPE_CHECKING:
    from unisono.recipes.clips.video.clips import Reading

BUILTIN, FILES, TRANSFORMERS = "builtin", "files", "transformers:"


@dataclass(frozen=True)
class ExtractSettings:
    """What decides the content of what is extracted, besides the files."""

    clip_seconds: float = 2.0
    frames_per_clip: int = 8
    size: int = 32
    """Height and width of the frames that are kept."""
    sample_rate: int = 16_000
    mel_steps: int = 20
    mel_bands: int = 32
    features: str = BUILTIN
    """builtin (frames, mel, stats), files (features), transformers:FOLDER or module:function (features, mel, stats)."""
    feature_size: int = 224
    """The shorter side of the frames that a model is given."""


Features = Callable[[NDArray[np.uint8], NDArray[np.float32], int], Any]
"""What a user's function is: (frames uint8 [clips, F, height, width, 3], sound float32 [clips, samples], sample_rate)
-> numbers [clips, D], an array or a tensor. Frames are upright RGB; sound is one channel, zeros where there is none. It
is given up to `BLOCK` clips of one video at a time, in order."""

BLOCK = 16
"""Clips that a model sees at once: always the same ones, because the last bits of a result depend on its company."""


def model_of(kind: str, device: str = "cpu") -> Features | None:
    """What computes the features that `kind` names; None for those that need no model."""
    if kind in (BUILTIN, FILES):
        return None
    if kind.startswith(TRANSFORMERS):
        return _VisionModel(Path(kind.removeprefix(TRANSFORMERS)), device)
    return _users_function(kind)[0]


def fingerprint(kind: str) -> str:
    """A name for what `kind` computes: another one when the model's or the function's file changes."""
    if kind in (BUILTIN, FILES):
        return kind
    if kind.startswith(TRANSFORMERS):
        return of_folders([_model_folder(Path(kind.removeprefix(TRANSFORMERS)))], "transformers")
    function, file = _users_function(kind)
    content = hashlib.sha256(file.read_bytes()).hexdigest() if file else ""
    return together(kind.rpartition(":")[2], getattr(function, "__module__", ""), content)


def checked(kind: str, features: Features, frames: NDArray[np.uint8], sound: NDArray[np.float32], rate: int) -> Any:
    """float16 [clips, D] what a model says of some clips; ConfigError where that is not what it should be."""
    try:
        told = features(frames, sound, rate)
        numbers = np.asarray(told.detach().float().cpu() if isinstance(told, Tensor) else told, dtype=np.float32)
    except ConfigError:
        raise
    except Exception as error:  # of a user's function: anything
        what = " ".join(str(error).split())[:200]
        raise ConfigError(f"features {kind} failed on {len(frames)} clips ({type(error).__name__}: {what})") from error
    if numbers.ndim != 2 or len(numbers) != len(frames) or not numbers.shape[1]:
        raise ConfigError(
            f"features {kind} gave numbers of shape {numbers.shape} for {len(frames)} clips; expected (clips, D)"
        )
    if not np.isfinite(numbers).all() or np.abs(numbers).max() > 65_000:
        raise ConfigError(f"features {kind} gave numbers that are not finite, or too large for 16 bit")
    return numbers.astype(np.float16)


class _VisionModel:
    """A vision model of transformers in a folder: its picture of each frame, averaged over the frames of a clip."""

    def __init__(self, folder: Path, device: str) -> None:
        from transformers import AutoImageProcessor, AutoModel

        self._folder, self._device = _model_folder(folder), device
        local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        try:
            self._processor = AutoImageProcessor.from_pretrained(folder, **local)  # type: ignore[no-untyped-call]
            # Never a pickle: .bin files can run any program.
            self._model = AutoModel.from_pretrained(folder, use_safetensors=True, dtype=torch.float32, **local)
        except (OSError, ValueError, ImportError, KeyError) as error:
            told = " ".join(str(error).split())[:200]
            raise ConfigError(f"{folder} cannot be loaded as a vision model of transformers ({told})") from None
        self._model.eval().requires_grad_(False).to(device)

    @torch.no_grad()
    def __call__(self, frames: NDArray[np.uint8], sound: NDArray[np.float32], sample_rate: int) -> Tensor:
        clips, per_clip = frames.shape[:2]
        pictures = list(frames.reshape(-1, *frames.shape[2:]))
        inputs = self._processor(images=pictures, return_tensors="pt", input_data_format="channels_last")
        pixels = inputs["pixel_values"].to(self._device, torch.float32)
        model = self._model
        seen = model.get_image_features(pixel_values=pixels) if hasattr(model, "get_image_features") else None
        seen = model(pixel_values=pixels) if seen is None else seen
        if not isinstance(seen, Tensor):
            pooled = getattr(seen, "pooler_output", None)
            seen = seen.last_hidden_state if pooled is None else pooled
        if seen.shape[0] != len(pictures):
            raise ConfigError(f"{self._folder}: this model does not look at single pictures; use one that does")
        if seen.dim() == 4:  # [pictures, channels, height, width], of a convolutional network
            seen = seen.flatten(2).mean(2)
        elif seen.dim() == 3:  # [pictures, patches, width]
            seen = seen.mean(1)
        return seen.view(clips, per_clip, -1).mean(1).cpu()


def _model_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json; expected the folder of a vision model of transformers")
    return folder


def _users_function(words: str) -> tuple[Features, Path | None]:
    """The function that `package.module:function` or `file.py:function` names, and the file it stands in."""
    place, _, name = words.rpartition(":")
    if not place or not name.isidentifier():
        raise ConfigError(
            f"features {words!r}: expected {BUILTIN}, {FILES}, {TRANSFORMERS}FOLDER, or a function of yours as "
            "module:function or file.py:function"
        )
    function = load_object(words)
    if not callable(function):
        raise ConfigError(f"features {words}: {name!r} is not a function")
    file = getattr(sys.modules.get(getattr(function, "__module__", None) or ""), "__file__", None)
    return function, Path(file) if file else None


def read_blocks(
    reading: Reading, settings: ExtractSettings, model: Features | None
) -> Generator[dict[str, NDArray[Any]]]:
    """The arrays of a video, up to BLOCK clips at a time."""
    rate, some = settings.sample_rate, []
    while True:
        clip = next(reading, None)
        if clip is not None:
            some.append(clip)
        if some and (clip is None or len(some) == BLOCK):
            frames, sound = np.stack([each[0] for each in some]), np.stack([each[1] for each in some])
            powers = [spectra(each, rate) for each in sound]
            yield {
                **(
                    {"frames": frames}
                    if model is None
                    else {"features": checked(settings.features, model, frames, sound, rate)}
                ),
                "mel": np.stack([log_mel(each, rate, settings.mel_steps, settings.mel_bands) for each in powers]),
                "stats": np.stack([stats(*each, power, rate) for each, power in zip(some, powers, strict=True)]),
            }
            some = []
        if clip is None:
            return
