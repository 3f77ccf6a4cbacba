"""Finds the parts of a video that match a query, by comparing embeddings of the transcript and of the query.

A sentence alone often does not state its topic ("It was expensive"), so passages of neighbouring sentences are compared
too. The score of a sentence is the mean of its own similarity and that of the best-matching passage that contains it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.errors import UserError
from unisono.recipes.clips.scoring import Scored
from unisono.recipes.clips.video.footage import Footage
from unisono.recipes.clips.words.transcript import Transcript, joined
from unisono.recipes.common.minilm import minilm_folder

CLIP_SECONDS = 2.0
_PASSAGE_WORDS = 60
_MOST_TOKENS = 256  # maximum sequence length that the model was trained with
_AT_ONCE = 32

Embed = Callable[[Sequence[str]], NDArray[np.float32]]


def searched(video: Path, transcript: Transcript, query: str, embed: Embed) -> Scored:
    """Scores each two-second clip of a video by the relevance of its speech to the query; silence scores 0."""
    footage = Footage(video)
    scores = np.zeros(max(1, math.ceil(footage.duration / CLIP_SECONDS - 1e-6)))
    for sentence, value in zip(transcript.sentences, relevance(transcript, query, embed), strict=True):
        first = int(sentence.start // CLIP_SECONDS)
        last = min(len(scores), math.ceil(sentence.end / CLIP_SECONDS))
        for clip in range(first, last):
            overlap = min(sentence.end, (clip + 1) * CLIP_SECONDS) - max(sentence.start, clip * CLIP_SECONDS)
            scores[clip] += value * max(0.0, overlap) / CLIP_SECONDS
    return Scored(scores.clip(0.0, 1.0), CLIP_SECONDS, footage.duration, footage.has_sound)


def relevance(transcript: Transcript, query: str, embed: Embed) -> NDArray[np.float64]:
    """Returns the relevance of each sentence to the query, from 0 to 1."""
    texts = [sentence.text for sentence in transcript.sentences]
    spans = [_passage(texts, first) for first in range(len(texts))]
    vectors = embed([query, *texts, *(joined(texts[first:last]) for first, last in spans)])
    similar = np.maximum(vectors[1:] @ vectors[0], 0.0).astype(np.float64)
    alone, best = similar[: len(texts)], np.zeros(len(texts))
    for (first, last), value in zip(spans, similar[len(texts) :], strict=True):
        best[first:last] = np.maximum(best[first:last], value)
    return np.asarray((alone + best) / 2)


def _passage(texts: Sequence[str], first: int) -> tuple[int, int]:
    last, num_words = first + 1, len(texts[first].split())
    while last < len(texts) and num_words + len(texts[last].split()) <= _PASSAGE_WORDS:
        num_words += len(texts[last].split())
        last += 1
    return first, last


def minilm(device: str = "cpu") -> Embed:
    """Returns a function that embeds texts with all-MiniLM-L6-v2, from the installed package."""
    folder = minilm_folder("--query")
    try:
        import torch
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging
    except ImportError:
        raise UserError('--query needs transformers: pip install "unisono[seo]"') from None
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    model: Any = AutoModel.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False, use_safetensors=True
    )
    model = model.to(device).eval()

    @torch.inference_mode()
    def embed(texts: Sequence[str]) -> NDArray[np.float32]:
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))  # sorting by length reduces padding
        vectors = np.zeros((len(texts), model.config.hidden_size), np.float32)
        for at in range(0, len(order), _AT_ONCE):
            rows = order[at : at + _AT_ONCE]
            inputs = tokenizer(
                [texts[row] for row in rows],
                padding=True,
                truncation=True,
                max_length=_MOST_TOKENS,
                return_tensors="pt",
            ).to(device)
            mask = inputs["attention_mask"][..., None].to(torch.float32)
            states = model(**inputs).last_hidden_state * mask
            pooled = torch.nn.functional.normalize(states.sum(1) / mask.sum(1).clamp_min(1e-9), dim=-1)
            vectors[rows] = pooled.float().cpu().numpy()
        return vectors

    return embed
