"""Reads the files that list a dataset folder's samples, in the formats of common training scripts.

metadata.csv           one column for the file and one for its caption (DiffSynth, the hub's image folders)
metadata.jsonl         the same, one JSON object per line (musubi)
metadata.json          the same as one JSON list (VideoX-Fun)
videos2caption.json    the same, but a caption may also be a list of texts (FastVideo)
videos.txt, prompts.txt    two lists, one file or caption per line (finetrainers)
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from unisono.config.values import shown
from unisono.errors import ConfigError
from unisono.recipes.common.tree import Tree

TABLES = ("metadata.csv", "metadata.jsonl", "metadata.json", "videos2caption.json")
MEDIA_LISTS = ("videos.txt", "video.txt", "images.txt", "image.txt")
CAPTION_LISTS = ("prompts.txt", "prompt.txt", "captions.txt", "caption.txt")

_MEDIA = ("video", "image", "file", "file_name", "file_path", "video_path", "image_path", "path")
_CAPTION = ("prompt", "caption", "text", "cap")
_MOST_BYTES = 2**32


@dataclass(frozen=True)
class Row:
    """One sample of a metadata file."""

    where: str  # the file and the line, for messages
    media: str
    caption: str | None
    num_captions: int = 1


def rows_of(tree: Tree, table: str) -> Iterator[Row]:
    """Yields the samples that a table lists, in its order."""
    read = {".csv": _csv, ".jsonl": _jsonl, ".json": _json}[table[table.rindex(".") :].lower()]
    return read(tree, table)


def rows_of_lists(tree: Tree, media_list: str, caption_list: str) -> Iterator[Row]:
    """Yields the samples of two lists: line n of one is the file, line n of the other its caption."""
    media, captions = (
        [line.strip() for _, line in tree.lines(each, _MOST_BYTES)] for each in (media_list, caption_list)
    )
    while media and not media[-1]:
        media.pop()
    while len(captions) > len(media) and not captions[-1]:
        captions.pop()
    if len(media) != len(captions):
        raise ConfigError(
            f"{tree.path(media_list)} has {len(media)} lines and {tree.path(caption_list)} has {len(captions)}; "
            "line n of the second file must be the caption of line n of the first"
        )
    for number, (path, caption) in enumerate(zip(media, captions, strict=True), 1):
        where = f"{tree.path(media_list)}, line {number}"
        if not path:
            raise ConfigError(f"{where}: the line is empty; expected the name of a file")
        yield Row(where, path, caption)


def _csv(tree: Tree, table: str) -> Iterator[Row]:
    where = tree.path(table)
    # strict=True, because otherwise an unclosed quote would turn the rest of the file into one caption.
    reader = csv.reader((f"{line}\n" for _, line in tree.lines(table, _MOST_BYTES)), strict=True)
    try:
        header = [name.strip().lower() for name in next(reader, [])]
        _reject_duplicates(header, str(where))
        if not set(header) & set(_MEDIA) or not set(header) & set(_CAPTION):
            raise ConfigError(
                f"{where}: the columns are {shown(', '.join(header))}; expected one of "
                f"{', '.join(_MEDIA)} for the file, and one of {', '.join(_CAPTION)} for its caption"
            )
        for fields in reader:
            line = f"{where}, line {reader.line_num}"
            if not any(field.strip() for field in fields):
                continue
            if len(fields) != len(header):
                raise ConfigError(
                    f"{line}: {len(fields)} fields, but the header has {len(header)} columns; "
                    "put captions with commas or quotes in double quotes"
                )
            yield _row(line, dict(zip(header, (field.strip() for field in fields), strict=True)))
    except csv.Error as error:
        raise ConfigError(f"{where}, line {reader.line_num}: invalid CSV ({error})") from None


def _jsonl(tree: Tree, table: str) -> Iterator[Row]:
    for number, line in tree.lines(table, _MOST_BYTES):
        if line.strip():
            where = f"{tree.path(table)}, line {number}"
            yield _row(where, _parsed(line, where))


def _json(tree: Tree, table: str) -> Iterator[Row]:
    where = str(tree.path(table))
    entries = _parsed("\n".join(line for _, line in tree.lines(table, _MOST_BYTES)), where)
    if not isinstance(entries, list):
        raise ConfigError(f"{where}: expected a list of samples, [{{...}}, ...], got {shown(entries)}")
    for number, entry in enumerate(entries, 1):
        yield _row(f"{where}, entry {number}", entry)


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=lambda pairs: _once(pairs, where))
    except json.JSONDecodeError as error:
        place = f" (line {error.lineno}, column {error.colno})" if error.lineno > 1 else f" (column {error.colno})"
        raise ConfigError(f"{where}: invalid JSON: {error.msg}{place}") from None
    except (ValueError, RecursionError) as error:  # e.g. for a number with a million digits, or a million brackets
        raise ConfigError(f"{where}: invalid JSON: {type(error).__name__}") from None


def _once(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    _reject_duplicates([name for name, _ in pairs], where)
    return dict(pairs)


def _reject_duplicates(names: list[str], where: str) -> None:
    """Raises ConfigError if a name occurs twice, because programs disagree on which occurrence counts."""
    twice = next((name for name in (*_MEDIA, *_CAPTION) if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{where}: {twice} occurs {names.count(twice)} times; keep one of them")


def _row(where: str, entry: Any) -> Row:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: expected an object with a file and its caption, {{...}}, got {shown(entry)}")
    media = next((entry[key] for key in _MEDIA if entry.get(key)), None)
    if not isinstance(media, str):
        raise ConfigError(f"{where}: names no file; expected one of {', '.join(_MEDIA)}, got {shown(entry)}")
    captions = [entry[key] for key in _CAPTION if entry.get(key) is not None]
    # An empty text is the caption only if the sample has no other text.
    caption = next((each for each in captions if each), captions[0] if captions else None)
    num_captions = 1
    if isinstance(caption, list) and all(isinstance(each, str) for each in caption):
        num_captions, caption = len(caption), caption[0] if caption else None
    if caption is not None and not isinstance(caption, str):
        raise ConfigError(f"{where}: the caption must be text, got {shown(caption)}")
    return Row(where, media, None if caption is None else caption.strip(), num_captions)
