"""Makes the captions and the title of a clip from the transcript of its video."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from unisono.recipes.clips.words.transcript import Piece, Sentence, Transcript, joined

_LINE = 42  # maximum number of characters per line, as usual for subtitles
_LONGEST_S = 6.0
_SHORTEST_S = 0.2  # captions that the clip's start or end would shorten further are dropped, as nobody could read them
_TITLE = 80
_FILLERS = re.compile(r"^((so|and|but|well|okay|ok|um|uh|er|you know|i mean)\b[\s,]*)+", re.IGNORECASE)


def captions_of(transcript: Transcript, start: float, end: float) -> list[Piece]:
    """Returns the captions of a part of the video, with times relative to the start of that part.

    Joins words into lines of readable length; does not change captions that come from a file.
    """
    pieces = transcript.captions
    if transcript.has_words:
        pieces = tuple(caption for sentence in transcript.sentences for caption in _lines(sentence))
    shifted = []
    for piece in pieces:
        first, last = max(piece.start, start) - start, min(piece.end, end) - start
        if last - first >= min(_SHORTEST_S, piece.end - piece.start) > 0:
            shifted.append(Piece(first, last, piece.text))
    return shifted


def write_captions(stem: Path, captions: Sequence[Piece]) -> list[Path]:
    """Writes STEM.srt and STEM.vtt, which players load with the clip; returns their paths."""
    files = {".srt": [], ".vtt": ["WEBVTT", ""]}  # type: dict[str, list[str]]
    for number, caption in enumerate(captions, 1):
        text = caption.text.replace("-->", "→")  # players would parse a line with "-->" as times
        files[".srt"] += [str(number), _times(caption, ","), text, ""]
        escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        files[".vtt"] += [_times(caption, "."), escaped, ""]
    written = []
    for ending, lines in files.items():
        path = stem.with_name(f"{stem.name}{ending}")
        with path.open("x", encoding="utf-8", newline="\n", errors="replace") as file:
            file.write("\n".join(lines))
        written.append(path)
    return written


def title_of(sentences: Sequence[Sentence]) -> str:
    """Returns a title: the first sentence with enough content, shortened at a word boundary."""
    texts = [_FILLERS.sub("", sentence.text).strip() for sentence in sentences]
    good = [text for text in texts if len(text.split()) >= 4 or len(text) >= 20]
    text = next(iter(good or [text for text in texts if text]), "")
    text = text[:1].upper() + text[1:]
    if len(text) > _TITLE:
        text = f"{text[:_TITLE].rsplit(None, 1)[0].rstrip(',;:')} …"
    return text.removesuffix(".")


def _lines(sentence: Sentence) -> list[Piece]:
    """Splits a sentence into one-line captions of about equal length."""
    total = len(sentence.text)
    most = max(1.0, total / max(1, -(-total // _LINE)))
    lines: list[list[Piece]] = [[]]
    for piece in sentence.pieces:
        current = lines[-1]
        long = current and len(joined(each.text for each in [*current, piece])) > min(most + 8, _LINE)
        if current and (long or piece.end - current[0].start > _LONGEST_S):
            lines.append([])
        lines[-1].append(piece)
    return [Piece(line[0].start, line[-1].end, joined(each.text for each in line)) for line in lines]


def _times(caption: Piece, point: str) -> str:
    return f"{_clock(caption.start, point)} --> {_clock(caption.end, point)}"


def _clock(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"
