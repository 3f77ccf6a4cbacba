"""Greedy text generation, and the logits of target tokens, for encoder-decoders and decoders."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unisono.recipes.seo.models.encoder import Row, pad
from unisono.recipes.seo.models.folders import quietly
from unisono.recipes.seo.models.lora import is_lora

UNSEEN = -100
"""Label of tokens that do not count in the loss."""
_AT_ONCE = 16


def cue_for(kind: str) -> str:
    """Returns the text between the page and the output in a decoder's prompt."""
    return f"\n\n{kind.capitalize()}:"


def first_token(model: Any, tokenizer: Any) -> int:
    """Returns the token with which the decoder of an encoder-decoder starts."""
    places = _plain(model).config, _plain(model).generation_config  # models define the start token in different places
    candidates = [getattr(place, name, None) for name in ("decoder_start_token_id", "bos_token_id") for place in places]
    return int(next(token for token in (*candidates, tokenizer.pad_token_id) if token is not None))


def logits_of(model: Any, batch: Any, start: int | None) -> Tensor:
    """Returns the logits of the targets, [texts, labels, vocabulary]; `start` is an encoder-decoder's first token."""
    inputs = {"input_ids": batch["ids"], "attention_mask": batch["mask"], "use_cache": False}
    if start is not None:
        before = batch["labels"].roll(1, dims=1)
        before[:, 0] = start
        before = before.masked_fill(before == UNSEEN, start)  # positions after the end token do not affect the loss
        logits: Tensor = model(**inputs, decoder_input_ids=before).logits
        return logits
    keep = batch["keep"]
    if "logits_to_keep" in inspect.signature(_plain(model).forward).parameters:
        last_logits: Tensor = model(**inputs, logits_to_keep=keep).logits
        return last_logits
    every: Tensor = model(**inputs).logits
    return every[:, keep]


def write(model: nn.Module, tokenizer: Any, prompts: Sequence[Row], num_tokens: int) -> list[str]:
    """Generates one line of text per prompt; a decoder's prompts include the cue."""
    plain = _plain(model)
    two = bool(plain.config.is_encoder_decoder)
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    written = [""] * len(prompts)
    for start in range(0, len(order), _AT_ONCE):
        numbers = order[start : start + _AT_ONCE]
        rows = [prompts[number] for number in numbers]
        ids, mask = pad(rows, tokenizer.pad_token_id, multiple=1)
        if not two:  # a decoder continues after the last column, so pad on the left
            ids, mask = (_to_the_right(table, rows) for table in (ids, mask))
        device = next(plain.parameters()).device
        with quietly(), torch.no_grad(), _all_tokens(plain, tokenizer, num_tokens):
            generated = plain.generate(input_ids=ids.to(device), attention_mask=mask.to(device))
        for number, row in zip(numbers, generated[:, 1 if two else ids.shape[1] :].tolist(), strict=True):
            written[number] = _text(row, tokenizer)
    return written


@contextmanager
def _all_tokens(model: Any, tokenizer: Any, num_tokens: int) -> Iterator[None]:
    """Configures greedy generation of a fixed number of tokens; tokens after the end token are dropped later.

    A sharded model gathers its weights on all ranks for each token, so no rank may finish early. The options are set on
    the model, because generate() reads all other options from there.
    """
    from transformers import GenerationConfig

    config_class: Any = GenerationConfig  # untyped
    before = model.generation_config
    model.generation_config = config_class(
        max_new_tokens=num_tokens,
        do_sample=False,
        num_beams=1,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=before.bos_token_id,
        decoder_start_token_id=first_token(model, tokenizer) if model.config.is_encoder_decoder else None,
        forced_bos_token_id=before.forced_bos_token_id,
    )
    try:
        yield
    finally:
        model.generation_config = before


def _text(row: Sequence[int], tokenizer: Any) -> str:
    ends = {tokenizer.eos_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id} - {None}
    stop = next((place for place, token in enumerate(row) if token in ends), len(row))
    return " ".join(tokenizer.decode(row[:stop], skip_special_tokens=True).split())


def _to_the_right(table: Tensor, rows: Sequence[Row]) -> Tensor:
    width = table.shape[1]
    return torch.stack([row.roll(width - max(1, len(tokens))) for row, tokens in zip(table, rows, strict=True)])


def _plain(model: Any) -> Any:
    return model.get_base_model() if is_lora(model) else model
