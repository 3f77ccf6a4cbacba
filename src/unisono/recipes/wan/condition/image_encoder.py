"""The CLIP image encoder of Wan 2.1's image-to-video models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.errors import ConfigError
from unisono.recipes.common.fingerprint import of_folders
from unisono.recipes.wan.models.parts import count_in, load_part, loading

FOLDERS = ("image_encoder", "image_processor")
"""The pipeline parts that compute image embeddings."""

IMAGE_TOKENS = 257
"""Number of tokens per given frame; all published models use the same image encoder."""

_TEXT_LENGTH = 512  # diffusers' attention takes the last 512 tokens as text and all others as image


class ImageEncoder:
    """An image processor together with a CLIP vision model."""

    def __init__(self, processor: Any, model: Any) -> None:
        self.processor, self.model = processor, model.eval().requires_grad_(False)

    @classmethod
    def load(cls, encoder: Path, processor: Path) -> ImageEncoder:
        """Loads the image encoder and the image processor from these folders, in float32 on the CPU."""
        from transformers import CLIPVisionModel

        with loading(processor):
            loaded = _processor_class().from_pretrained(processor)
        return cls(loaded, load_part(CLIPVisionModel, encoder, dtype=torch.float32))

    def to(self, device: str | torch.device) -> ImageEncoder:
        """Moves the encoder to a device; returns itself."""
        self.model.to(device)
        return self

    @torch.no_grad()
    def encode(self, pictures: Tensor) -> Tensor:
        """Embeds the given frames of one sample, uint8 [n, H, W, 3], as float32 [n, tokens, width].

        Uses the second-to-last layer, as in diffusers' pipeline, which encodes all given frames of a sample together.
        """
        from PIL import Image

        images = [Image.fromarray(picture.numpy()) for picture in pictures.cpu()]
        device = self.model.device
        pixels = self.processor(images=images, return_tensors="pt").pixel_values.to(device)
        with torch.autocast(device.type, enabled=False):  # the run may use 16-bit autocast
            states = self.model(pixel_values=pixels, output_hidden_states=True).hidden_states
        return states[-2].float()  # type: ignore[no-any-return]


def fingerprint(encoder: Path, processor: Path) -> str:
    """Hashes the files in both folders and the processor's class, which depends on whether torchvision is installed."""
    return of_folders([encoder, processor], _processor_class().__name__)


def num_tokens(config: Mapping[str, Any]) -> int:
    """Returns the number of tokens per image, from the image encoder's config."""
    side = count_in(config, "image_size", "image encoder") // count_in(config, "patch_size", "image encoder")
    return side**2 + 1  # + 1: the class token


def check_image_encoder(config: Mapping[str, Any], transformer: Mapping[str, Any], text_length: int) -> None:
    """Raises ConfigError if the transformer does not accept the image encoder's embeddings."""
    width, expected = count_in(config, "hidden_size", "image encoder"), int(transformer["image_dim"])
    if width != expected:
        raise ConfigError(
            f"the image encoder's embeddings have width {width} (hidden_size), but the transformer takes {expected} "
            "(image_dim); use the model's own image encoder"
        )
    positions, tokens = transformer.get("pos_embed_seq_len"), num_tokens(config)
    if positions and int(positions) != 2 * tokens:
        raise ConfigError(
            f"the image encoder gives {tokens} tokens per frame, but the transformer has positions for {positions} "
            "tokens of two frames (pos_embed_seq_len); use the model's own image encoder"
        )
    if text_length != _TEXT_LENGTH:
        raise ConfigError(
            f"the tokenizer pads to {text_length} tokens; diffusers' models with image embeddings need {_TEXT_LENGTH}: "
            "set model_max_length in tokenizer/tokenizer_config.json"
        )


def _processor_class() -> Any:
    # Returns the class that diffusers' pipeline would load, which depends on whether torchvision is installed.
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # it warns when torchvision is missing
    try:
        from transformers import CLIPImageProcessor
    finally:
        logging.set_verbosity(verbosity)
    return CLIPImageProcessor
