"""A transcript: sentences with times, built from the words or captions of a file.

Captions end where a line on the screen ends, not where a sentence ends. The pieces of a file (words if it has their
times, otherwise captions) are therefore joined until a piece ends with a full stop, a pause follows, or the sentence
reaches the maximum length. A sentence begins and ends at the boundary of a piece, never in the middle of a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_END = re.compile(r"[.!?…。！？؟।][\"'”’»)\]]*$")
_NO_END = re.compile(r"(^|\s)(\w|Mr|Mrs|Ms|Dr|Prof|St|vs|etc|e\.g|i\.e|No)\.$", re.IGNORECASE)
_PAUSE_S = 1.2  # a longer pause ends a sentence even without a full stop
_LONGEST_S = 30.0  # automatic captions may have no full stops at all
_WIDE = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]$")  # scripts that need no space when lines are joined


@dataclass(frozen=True)
class Piece:
    """A word or a caption of several words, with its start and end in seconds."""

    start: float
    end: float
    text: str


@dataclass(frozen=True)
class Sentence:
    """The pieces of one sentence."""

    pieces: tuple[Piece, ...]

    @property
    def start(self) -> float:
        """The start of the first piece, in seconds."""
        return self.pieces[0].start

    @property
    def end(self) -> float:
        """The end of the last piece, in seconds."""
        return max(piece.end for piece in self.pieces)

    @property
    def text(self) -> str:
        """What is said."""
        return joined(piece.text for piece in self.pieces)


@dataclass(frozen=True)
class Transcript:
    """The transcript of a video."""

    name: str
    """The file's name."""
    sentences: tuple[Sentence, ...]
    captions: tuple[Piece, ...]
    """The captions as they appear in the file."""
    has_words: bool
    """Whether the sentences' pieces are words rather than captions."""

    def between(self, start: float, end: float) -> list[Sentence]:
        """Returns the sentences with at least half of their duration in this time range."""
        return [each for each in self.sentences if start <= (each.start + each.end) / 2 < end]


def transcript_of(name: str, captions: Sequence[Piece], words: Sequence[Piece] = ()) -> Transcript:
    """Builds a transcript from captions, sorted by time, or from all words if their times are known."""
    return Transcript(name, tuple(_sentences(words or captions)), tuple(captions), bool(words))


def joined(texts: Iterable[str]) -> str:
    """Joins pieces of text with spaces, except between pieces in scripts that use no spaces."""
    result = ""
    for text in filter(None, (" ".join(each.split()) for each in texts)):
        result += text if not result or _WIDE.search(result) else f" {text}"
    return result


def _sentences(pieces: Iterable[Piece]) -> Iterable[Sentence]:
    current: list[Piece] = []
    for piece in pieces:
        if current:
            last_end = max(each.end for each in current)
            if piece.start - last_end > _PAUSE_S or piece.end - current[0].start > _LONGEST_S:
                yield Sentence(tuple(current))
                current = []
        current.append(piece)
        text = piece.text.strip()
        if _END.search(text) and not _NO_END.search(text):
            yield Sentence(tuple(current))
            current = []
    if current:
        yield Sentence(tuple(current))
