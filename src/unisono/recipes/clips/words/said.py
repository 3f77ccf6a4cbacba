"""The speech in one clip: its title, text and caption files."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

from unisono.recipes.clips.words.captions import captions_of, title_of, write_captions
from unisono.recipes.clips.words.transcript import Transcript, joined


@dataclass(frozen=True)
class Said:
    """The words of a clip."""

    title: str
    text: str
    files: list[str]
    """Names of the caption files, next to the clip."""
    track: str
    """The captions as a data URL, because browsers do not load caption files that are next to a local page."""


def said_in(transcript: Transcript | None, clip: Path, start: float, end: float) -> Said | None:
    """Writes the caption files of a clip that shows this part of the video; returns None without a transcript."""
    if transcript is None:
        return None
    sentences = transcript.between(start, end)
    captions = captions_of(transcript, start, end)
    text = joined(sentence.text for sentence in sentences)
    if not captions:
        return Said(title_of(sentences), text, [], "")
    files = write_captions(clip.with_suffix(""), captions)
    track = base64.b64encode(files[-1].read_bytes()).decode()
    return Said(title_of(sentences), text, [file.name for file in files], f"data:text/vtt;base64,{track}")
