"""Reads transcripts: SubRip (.srt), WebVTT (.vtt), and the JSON files of whisper, whisperX and faster-whisper.

A transcript is untrusted text. Captions with times that run backwards, markup and control characters are removed, and a
file that is not a transcript raises a one-line error.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unisono.errors import UserError
from unisono.plain_files import open_regular, parse_json
from unisono.recipes.clips.words.transcript import Piece, Transcript, transcript_of

ENDINGS = (".json", ".srt", ".vtt")
"""File types in order of preference: JSON comes first, because only JSON files contain the times of words."""

_LARGEST = 64 << 20  # maximum file size in bytes; a day of speech with word times takes about 20 MB
_TIME = r"(?:(\d{1,4}):)?(\d{1,2}):(\d{1,2})[.,](\d{1,3})"
_TIMES = re.compile(rf"^\s*{_TIME}\s*-->\s*{_TIME}")
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>|<\d[\d:.]*>|\{\\[^{}]*\}")


def beside(video: Path) -> Path | None:
    """Returns the transcript of the same name next to a video: talk.json, talk.srt, talk.vtt or talk.en.srt."""
    stem = video.stem
    for ending in ENDINGS:
        if (exact := video.with_name(f"{stem}{ending}")).is_file() and (ending != ".json" or _is_whisper(exact)):
            return exact
    try:
        others = sorted(video.parent.iterdir())
    except OSError:
        return None
    pattern = re.compile(rf"{re.escape(stem)}\.[A-Za-z-]{{2,10}}\.(srt|vtt)")
    return next((each for each in others if pattern.fullmatch(each.name) and each.is_file()), None)


def read_transcript(path: Path) -> Transcript:
    """Reads a transcript; raises UserError if the file is not a transcript."""
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        raise UserError(f"{path}: expected a transcript whose name ends in .srt, .vtt or .json")
    try:
        text = _text(path)
        captions, words = _whisper(parse_json(text)) if ending == ".json" else (list(_captions(text)), [])
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise UserError(f"{path} is not a transcript that unisono can read ({error})") from None
    if not captions:
        raise UserError(f"{path} contains no captions with times")
    return transcript_of(path.name, captions, words)


def _text(path: Path) -> str:
    with open_regular(path) as file:
        data = b""
        while len(data) <= _LARGEST and (part := file.read(1 << 20)):
            data += part
    if len(data) > _LARGEST:
        raise ValueError(f"larger than {_LARGEST >> 20} MiB")
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("cp1252", errors="replace")  # old subtitles


def _captions(text: str) -> Iterator[Piece]:
    """Yields the captions of SubRip or WebVTT; each has a line with times, and text up to the next empty line."""
    last_start = 0.0
    lines = iter([*text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), ""])
    for line in lines:
        match = _TIMES.match(line)
        if match is None:
            continue
        numbers = match.groups()
        start, end = _seconds(*numbers[:4]), _seconds(*numbers[4:])
        said: list[str] = []
        for following in lines:
            if not following.strip():
                break
            said.append(following)
        clean = plain("\n".join(said))
        if clean and end > start >= last_start:
            last_start = start
            yield Piece(start, end, clean)


def _seconds(hours: str | None, minutes: str, seconds: str, fraction: str) -> float:
    return int(hours or 0) * 3600 + int(minutes) * 60 + int(seconds) + int(fraction.ljust(3, "0")) / 1000


def plain(text: str) -> str:
    """Removes markup and control characters from a text and joins it into one line."""
    without_tags = html.unescape(_TAG.sub("", text))
    return " ".join("".join(each if each.isprintable() else " " for each in without_tags).split())


def _whisper(document: Any) -> tuple[list[Piece], list[Piece]]:
    """Returns the captions and words in a whisper JSON file; no words unless every segment has word times."""
    if isinstance(document, dict):
        document = document.get("segments")
    if not isinstance(document, list):
        raise ValueError('expected an object with "segments", as whisper writes it')
    captions, words, all_have_words = list[Piece](), list[Piece](), True
    for segment in document:
        piece = _piece(segment, "text")
        if piece is None or (captions and piece.start < captions[-1].start):
            continue
        captions.append(piece)
        listed = segment.get("words")
        of_segment = [word for each in listed if (word := _piece(each, "word"))] if isinstance(listed, list) else []
        all_have_words &= bool(of_segment)
        words += [word for word in of_segment if not words or word.start >= words[-1].start]
    return captions, words if all_have_words else []


def _piece(item: Any, key: str) -> Piece | None:
    if not isinstance(item, dict) or not isinstance(item.get(key), str):
        return None
    start, end = item.get("start"), item.get("end")
    numbers = [each for each in (start, end) if isinstance(each, int | float) and not isinstance(each, bool)]
    text = plain(item[key])
    if len(numbers) < 2 or not all(map(math.isfinite, numbers)) or not 0 <= numbers[0] <= numbers[1] or not text:
        return None  # whisperX writes no times for some words, such as numbers
    return Piece(float(numbers[0]), float(numbers[1]), text)


def _is_whisper(path: Path) -> bool:
    """Whether a JSON file next to a video is a transcript rather than other data about the video."""
    try:
        return bool(_whisper(json.loads(_text(path)))[0])
    except (OSError, ValueError, RecursionError):
        return False
