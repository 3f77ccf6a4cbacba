"""Recognises Wan models that cannot be trained, by their weights, classes and channels.

All of them have inputs besides text and given frames: a control video, a voice, a pose. Training without these inputs
would make the models forget how to use them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from unisono.errors import ConfigError
from unisono.recipes.wan.condition.kind import channels_of, has_condition_channels

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
}
TRAINABLE = (
    "text-to-video and image-to-video models (Wan 2.1 T2V, I2V and FLF2V, Wan 2.2 T2V-A14B, I2V-A14B and TI2V-5B) can "
    "be trained here"
)


def refuse_weights(names: Iterable[str], where: str) -> None:
    """Raises ConfigError for weights of an unsupported kind of model; `where` names their file."""
    for name in names:
        for kind, beginnings in _BY_WEIGHT.items():
            if name.startswith(beginnings):
                raise ConfigError(f"{where} is {kind} ({name}) and cannot be trained; only {TRAINABLE}")


def refuse_class(name: str, where: str) -> None:
    """Raises ConfigError for an unsupported class of transformer or pipeline; `where` names its folder."""
    for kind, words in _BY_CLASS.items():
        if any(word in name.lower() for word in words):
            raise ConfigError(f"{where} is {kind} ({name}) and cannot be trained; only {TRAINABLE}")


def refuse_channels(transformer: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError if the input channels are neither a latent's nor an image-to-video model's."""
    inputs, outputs = channels_of(transformer)
    if inputs > outputs and not has_condition_channels(transformer):
        raise ConfigError(
            f"{where} takes {inputs} channels, {inputs - outputs} of them for a control video (Fun, control), and "
            f"cannot be trained; only {TRAINABLE}"
        )
    if transformer.get("image_dim") and inputs == outputs:
        raise ConfigError(
            f"{where} attends to an image, but takes only the {inputs} channels of a latent, and cannot be trained; "
            f"only {TRAINABLE}"
        )


def refuse_given_frames(transformer: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError for an image-to-video model, because prompts alone contain no frames to give it."""
    inputs, outputs = channels_of(transformer)
    if inputs > outputs:
        raise ConfigError(
            f"{where} takes {inputs} channels, {inputs - outputs} of them for given frames or a control video, and "
            "prompts alone do not provide them; use a text-to-video model"
        )
