"""Kinds of Wan models that cannot be trained, recognised by their weights, classes and channels.

All of them have inputs besides text: an image, a control video, a voice, a pose. Training on text and videos alone
would make them forget how to use these inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from unisono.errors import ConfigError

_BY_WEIGHT = {
    "a VACE model": ("vace_blocks.", "vace_patch_embedding."),
    "a control model": ("control_adapter.", "ref_conv.", "controlnet", "control_blocks.", "control_patch_embedding."),
    "a speech-to-video (S2V) model": (
        "casual_audio_encoder.",
        "audio_injector.",
        "trainable_cond_mask.",
        "audio_proj.",
    ),
    "an Animate model": ("pose_patch_embedding.", "face_adapter.", "face_encoder.", "motion_encoder."),
}
_BY_CLASS = {
    "a VACE model": ("vace",),
    "a control model": ("control",),
    "a speech-to-video (S2V) model": ("s2v", "speech"),
    "an Animate model": ("animate",),
    "an image-to-video model": ("imagetovideo",),
}
TRAINABLE = "text-to-video models (Wan 2.1 T2V, Wan 2.2 T2V-A14B and TI2V-5B) can be trained here"


def refuse_weights(names: Iterable[str], where: str) -> None:
    """Raises ConfigError for weights of an unsupported kind of model; `where` is their file."""
    for name in names:
        for kind, beginnings in _BY_WEIGHT.items():
            if name.startswith(beginnings):
                raise ConfigError(f"{where} is {kind} ({name}) and cannot be trained; only {TRAINABLE}")


def refuse_class(name: str, where: str) -> None:
    """Raises ConfigError for an unsupported class of transformer or pipeline; `where` is its folder."""
    for kind, words in _BY_CLASS.items():
        if any(word in name.lower() for word in words):
            raise ConfigError(f"{where} is {kind} ({name}) and cannot be trained; only {TRAINABLE}")


def refuse_channels(transformer: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError for a transformer with more input than output channels: the rest is an image or a video."""
    inputs = int(transformer.get("in_channels") or 16)
    outputs = int(transformer.get("out_channels") or inputs)
    if inputs > outputs:
        raise ConfigError(
            f"{where} takes {inputs} channels, {inputs - outputs} of them for an image or a control video "
            f"(image-to-video, Fun, control), and cannot be trained; only {TRAINABLE}"
        )
