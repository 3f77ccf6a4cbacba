"""Converts the previews that the recipe wrote during training to HTML that contains their data."""

from __future__ import annotations

import base64
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

from markupsafe import Markup

from unisono.formatting import format_bytes, format_number, shorten

LARGEST_FILE = 4 * 2**20
LARGEST_TOTAL = 24 * 2**20
LONGEST_TEXT = 20_000
MAX_NAMES, MAX_EARLIER = 24, 5

_NAME = re.compile(r"step_(\d{8,18})_(.+)")
_IMAGES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
    ".svg": "image/svg+xml",
}
_VIDEOS = {".mp4": "video/mp4", ".webm": "video/webm"}
_NUMBERED = re.compile(r".*?_(\d{1,6})\.\w+")
_MAX_CAPTION_LINES = 4
_LISTS = ("captions.txt", "prompts.txt")
"""Caption files. Line i of such a file is the caption of the preview sample with the number i."""
_TEXTS = {".txt", ".md", ".json", ".csv", ".log"}


@dataclass
class Gallery:
    """The previews that the page shows, and those that it omits."""

    shown: dict[str, list[tuple[int, Markup]]] = field(default_factory=dict)
    """(Step, HTML) of the previews by name, newest first."""
    omitted: list[str] = field(default_factory=list)
    """Names of the previews that are not shown, each with the reason."""
    captions: dict[tuple[str, int], str] = field(default_factory=dict)
    """Captions by (name, step). a.txt has the caption of a.png; line 3 of captions.txt describes sample_02.mp4."""


def read_previews(folder: Path) -> Gallery:
    """Reads a run's previews/ folder: the newest preview of each name and, if there is room, a few earlier ones."""
    gallery, by_name = Gallery(), _list(folder / "previews")
    room = LARGEST_TOTAL
    earlier: list[tuple[str, int, Path]] = []
    for name, steps in list(by_name.items())[:MAX_NAMES]:
        (step, path), *rest = steps
        room = _take(gallery, name, step, path, room)
        every = -(-len(rest) // MAX_EARLIER) if rest else 1
        earlier += [(name, step, path) for step, path in rest[every - 1 :: every]]
    for name, step, path in earlier:
        room = _take(gallery, name, step, path, room)
    _set_captions(gallery, by_name)
    gallery.omitted += [f"{name}: too many names" for name in list(by_name)[MAX_NAMES:][:MAX_NAMES]]
    return gallery


def _set_captions(gallery: Gallery, by_name: dict[str, list[tuple[int, Path]]]) -> None:
    """Assigns captions to the images and videos."""
    texts = {(name, step): path for name, steps in by_name.items() for step, path in steps if name.endswith(".txt")}
    for name, steps in gallery.shown.items():
        if Path(name).suffix.lower() in _TEXTS:
            continue
        number = _NUMBERED.fullmatch(name)
        for step, _ in steps:
            own = texts.get((f"{Path(name).stem}.txt", step))
            several = next((texts[each, step] for each in _LISTS if (each, step) in texts), None)
            if own is not None and isinstance(text := _read(own, LARGEST_FILE), bytes):
                caption = text.decode("utf-8", errors="replace").strip()
                if caption.count("\n") < _MAX_CAPTION_LINES:  # a longer text, such as a table, has its own card
                    gallery.captions[name, step] = caption
            elif number and several is not None and isinstance(text := _read(several, LARGEST_FILE), bytes):
                lines = text.decode("utf-8", errors="replace").splitlines()
                if int(number[1]) < len(lines):
                    gallery.captions[name, step] = lines[int(number[1])]


def _list(folder: Path) -> dict[str, list[tuple[int, Path]]]:
    by_name: dict[str, list[tuple[int, Path]]] = {}
    if folder.is_symlink():  # the page shows nothing from outside the run folder
        return by_name
    try:
        entries = sorted(os.listdir(folder), reverse=True)  # newest first, because step numbers are padded with zeros
    except OSError:
        return by_name
    for entry in entries:
        match = _NAME.fullmatch(entry)
        if match:
            by_name.setdefault(match.group(2), []).append((int(match.group(1)), folder / entry))
    # A caption file is listed after the images, and numbered samples are listed after the caption file.
    has_images = any(Path(name).suffix.lower() in _IMAGES and not _NUMBERED.fullmatch(name) for name in by_name)
    return dict(sorted(by_name.items(), key=lambda each: _order(each[0], has_images)))


def _order(name: str, has_images: bool) -> tuple[int, str]:
    if name in _LISTS:
        return 1, name
    return 2 if has_images and _NUMBERED.fullmatch(name) else 0, name


def _take(gallery: Gallery, name: str, step: int, path: Path, room: int) -> int:
    """Adds a file to the gallery if it can be shown; returns the remaining room in bytes."""
    content = _read(path, min(LARGEST_FILE, room))
    if isinstance(content, str):
        gallery.omitted.append(f"{shorten(path.name, 120)}: {content}")
        return room
    gallery.shown.setdefault(name, []).append((step, _as_html(name, step, content)))
    return room - len(content)


def _read(path: Path, most: int) -> bytes | str:
    """Returns the content of a file, or the reason why it is not shown."""
    suffix = path.suffix.lower()
    if suffix not in _TEXTS and suffix not in _IMAGES and suffix not in _VIDEOS:
        return "neither an image, a short video nor text"
    try:
        # A symlink could lead out of the run folder, and opening a pipe would wait forever.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return "not a readable file"
    about = os.fstat(handle)
    if not stat.S_ISREG(about.st_mode):
        os.close(handle)
        return "not a regular file"
    with open(handle, "rb") as file:
        if suffix in _TEXTS:
            return file.read(min(LONGEST_TEXT + 1, most))
        if about.st_size == 0:
            return "empty"
        if about.st_size > most:
            return f"too large ({format_bytes(about.st_size)})"
        return file.read(most)


def _as_html(name: str, step: int, content: bytes) -> Markup:
    suffix = Path(name).suffix.lower()
    if suffix in _TEXTS:
        text = content.decode("utf-8", errors="replace")
        cut = "\n…" if len(content) > LONGEST_TEXT else ""
        return Markup("<pre>{}{}</pre>").format(text[:LONGEST_TEXT], cut)
    data = base64.b64encode(content).decode()
    if suffix in _VIDEOS:
        return Markup('<video controls muted loop src="data:{};base64,{}"></video>').format(_VIDEOS[suffix], data)
    description = f"{name} at step {format_number(step)}"
    return Markup('<img alt="{}" src="data:{};base64,{}">').format(description, _IMAGES[suffix], data)
