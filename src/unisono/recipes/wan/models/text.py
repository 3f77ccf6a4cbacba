"""From captions to the rows of numbers that a Wan transformer attends to.

The text encoder (UMT5) gives one row per token. Only the rows of the caption are kept; the transformer gets them with
zeros up to its text length (512 for the real models) and, without a mask, attends to the zeros too. All of it as
`diffusers.WanPipeline.encode_prompt` does it, to the bit, so that a model is trained on what it is used with.
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
from unisono.recipes.common.fingerprint import of_module, of_tokenizer, together
from unisono.recipes.wan.models.parts import count_in, load_part, loading, part_of


def clean(caption: str) -> str:
    """The caption as the encoder gets it: broken characters mended, HTML's signs read, one space between words."""
    try:
        import ftfy
    except ImportError:
        # diffusers leaves this step out without a word when ftfy is missing, and other rows come out.
        raise ConfigError("captions are cleaned with ftfy, which is not installed; run: pip install ftfy") from None
    # Twice, because text from the web is often escaped twice.
    mended = html.unescape(html.unescape(ftfy.fix_text(caption)))
    return re.sub(r"\s+", " ", mended.strip()).strip()


class TextEncoder:
    """A tokenizer and a UMT5 encoder: captions in, rows out."""

    def __init__(self, tokenizer: Any, model: Any) -> None:  # a fast tokenizer and a UMT5EncoderModel
        clean("")  # says at once if it cannot
        if len(tokenizer) > model.config.vocab_size:
            raise ConfigError(
                f"the tokenizer knows {len(tokenizer):,} tokens and the text encoder {model.config.vocab_size:,}; use "
                "the tokenizer that belongs to the model"
            )
        self.tokenizer, self.model = tokenizer, model.eval().requires_grad_(False)

    @classmethod
    def load(
        cls, model_path: str | Path, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu"
    ) -> TextEncoder:
        """The tokenizer and the text encoder of a Wan model in diffusers' layout."""
        from transformers import AutoTokenizer, UMT5EncoderModel

        folder = part_of(model_path, "tokenizer")
        with loading(folder):
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        return cls(tokenizer, load_part(UMT5EncoderModel, model_path, "text_encoder", dtype=dtype)).to(device)

    def to(self, device: str | torch.device) -> TextEncoder:
        """Itself, on a device."""
        self.model.to(device)
        return self

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return int(self.model.config.d_model)

    def fingerprint(self) -> str:
        """A name for what it computes: another tokenizer or other weights have another one."""
        return together(of_tokenizer(self.tokenizer), of_module(self.model))

    @torch.no_grad()
    def encode(self, captions: Sequence[str], max_length: int) -> list[Tensor]:
        """The rows of each caption, [n, width]: those of its tokens, of which it has at most `max_length`."""
        return [self._encode(clean(caption), max_length) for caption in captions]

    def _encode(self, text: str, max_length: int) -> Tensor:
        # One by one and padded to the full length: both change the rounding, and the rows of a caption must not depend
        # on who else is encoded, nor differ from what the pipeline computes.
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
        with torch.autocast(device.type, enabled=False):  # a run may compute in 16 bit around us
            rows = self.model(tokens.input_ids.to(device), tokens.attention_mask.to(device)).last_hidden_state[0]
        own: Tensor = rows[:length].clone()  # not a view, which would keep the padding in memory
        return own


def pad(rows: Tensor, length: int) -> Tensor:
    """[length, width] the rows of a caption with zeros below."""
    if len(rows) > length:
        raise ValueError(f"{len(rows)} rows do not fit into a text length of {length}")
    padded = rows.new_zeros(length, rows.shape[1])
    padded[: len(rows)] = rows
    return padded


def check_width(text_config: Mapping[str, Any], transformer_config: Mapping[str, Any]) -> None:
    """Says (ConfigError) if a transformer is not made for the rows of a text encoder."""
    given, taken = count_in(text_config, "d_model", "text encoder"), int(transformer_config.get("text_dim") or 4096)
    if given != taken:
        raise ConfigError(
            f"the text encoder gives rows of {given} numbers (d_model) and the transformer takes {taken} (text_dim); "
            "use the text encoder that belongs to the model"
        )
