"""Tokenizes texts, and hashes everything that the tokens depend on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_VERSION = 1


def whole_text(text: str) -> str:
    """Returns a text without lone surrogates, which JSON may contain but no tokenizer accepts."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


class Tokenize:
    """Tokenizes texts, truncates them to a limit, and counts the truncated ones."""

    def __init__(self, tokenizer: Any, limit: int, *, special_tokens: bool = True) -> None:
        self._tokenizer, self._limit, self._special = tokenizer, limit, special_tokens
        self.num_cut = 0

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the tokens of each text."""
        like: dict[str, Any] = {"add_special_tokens": self._special, "return_attention_mask": False, "verbose": False}
        texts = [whole_text(text) for text in texts]
        made = self._tokenizer(texts, truncation=True, max_length=self._limit, **like)
        rows: list[list[int]] = made["input_ids"]
        if made.encodings is not None:
            self.num_cut += sum(bool(each.overflowing) for each in made.encodings)
        else:  # a tokenizer in plain Python does not report overflow
            suspects = [text for text, row in zip(texts, rows, strict=True) if len(row) >= self._limit]
            whole = self._tokenizer(suspects, **like)["input_ids"] if suspects else []
            self.num_cut += sum(len(row) > self._limit for row in whole)
        nothing = self._tokenizer.eos_token_id or self._tokenizer.pad_token_id or 0
        return [row or [nothing] for row in rows]  # a text may have no character that the tokenizer knows


def fingerprint_of(files: Iterable[Path], *further: Any) -> str:
    """Returns a digest of the names, sizes and modification times of files, and of further values."""
    from unisono.recipes.common.fingerprint import combined

    facts = [(path.name, (stat := path.stat()).st_size, stat.st_mtime_ns) for path in files]
    return combined("texts", _VERSION, facts, *further)
