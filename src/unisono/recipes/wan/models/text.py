"""Encodes captions into the text embeddings that a Wan transformer attends to.

The text encoder (UMT5) returns one row per token. Only the caption's rows are stored. They are padded with zeros to the
transformer's text length (512 for the published models) when the transformer needs them. There is no attention mask, so
the transformer attends to the zeros too. The result is bitwise equal to that of `diffusers.WanPipeline.encode_prompt`,
so training and inference use the same embeddings.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.errors import ConfigError
from unisono.recipes.common.fingerprint import combined, of_module, of_tokenizer
from unisono.recipes.wan.models.parts import count_in, load_part, loading


def clean(caption: str) -> str:
    """Prepares a caption for the encoder: repairs mojibake, decodes HTML entities, collapses whitespace."""
    try:
        import ftfy
    except ImportError:
        # Without ftfy, diffusers silently skips this step and computes other embeddings.
        raise ConfigError("cleaning captions needs ftfy, which is not installed; run: pip install ftfy") from None
    # Unescapes twice, as diffusers does, because text from the web is often escaped twice.
    repaired = html.unescape(html.unescape(ftfy.fix_text(caption)))
    return re.sub(r"\s+", " ", repaired.strip()).strip()


class TextEncoder:
    """A tokenizer and a UMT5 encoder."""

    def __init__(self, tokenizer: Any, model: Any) -> None:  # a fast tokenizer and a UMT5EncoderModel
        clean("")  # raises early if ftfy is missing
        if len(tokenizer) > model.config.vocab_size:
            raise ConfigError(
                f"the tokenizer has {len(tokenizer):,} tokens and the text encoder {model.config.vocab_size:,}; use "
                "the model's own tokenizer"
            )
        self.tokenizer, self.model = tokenizer, model.eval().requires_grad_(False)

    @classmethod
    def load(cls, tokenizer: Path, text_encoder: Path, dtype: torch.dtype) -> TextEncoder:
        """Loads the tokenizer and the text encoder from these folders, on the CPU."""
        from transformers import AutoTokenizer, UMT5EncoderModel

        with loading(tokenizer):
            loaded = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
        return cls(loaded, load_part(UMT5EncoderModel, text_encoder, dtype=dtype))

    def to(self, device: str | torch.device) -> TextEncoder:
        """Moves the encoder to a device; returns itself."""
        self.model.to(device)
        return self

    @property
    def width(self) -> int:
        """Width of an embedding."""
        return int(self.model.config.d_model)

    def fingerprint(self) -> str:
        """Hashes the tokenizer and the text encoder's weights."""
        return combined(of_tokenizer(self.tokenizer), of_module(self.model))

    @torch.no_grad()
    def encode(self, captions: Sequence[str], max_length: int) -> list[Tensor]:
        """Encodes each caption as an embedding [n, width]: one row per token, at most `max_length`."""
        return [self._encode(clean(caption), max_length) for caption in captions]

    def _encode(self, text: str, max_length: int) -> Tensor:
        # Encodes captions one by one and padded to the full length, because both affect rounding: an embedding must not
        # depend on the other captions, and must equal the pipeline's embedding.
        tokens = self.tokenizer(
            [text],
            padding="max_length",
            max_length=max_length,
            truncation=True,
            add_special_tokens=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        device, length = self.model.device, int(tokens.attention_mask.sum())
        with torch.autocast(device.type, enabled=False):  # the run may use 16-bit autocast
            rows = self.model(tokens.input_ids.to(device), tokens.attention_mask.to(device)).last_hidden_state[0]
        unpadded: Tensor = rows[:length].clone()  # a view would keep the padding in memory
        return unpadded


def pad(rows: Tensor, length: int) -> Tensor:
    """Pads an embedding with zeros to [length, width]."""
    if len(rows) > length:
        raise ValueError(f"{len(rows)} rows do not fit into a text length of {length}")
    padded = rows.new_zeros(length, rows.shape[1])
    padded[: len(rows)] = rows
    return padded


def check_width(text_config: Mapping[str, Any], transformer_config: Mapping[str, Any]) -> None:
    """Raises ConfigError if the transformer does not accept the text encoder's embeddings."""
    outputs, inputs = count_in(text_config, "d_model", "text encoder"), int(transformer_config.get("text_dim") or 4096)
    if outputs != inputs:
        raise ConfigError(
            f"the text encoder's embeddings have width {outputs} (d_model), but the transformer takes {inputs} "
            "(text_dim); use the model's own text encoder"
        )
