"""The previews that the recipe wrote while it trained, embedded as HTML."""

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
MOST_NAMES, MOST_EARLIER = 24, 5

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
_MOST_CAPTION_LINES = 4
_LISTS = ("captions.txt", "prompts.txt")
"""Caption files: line i belongs to the preview sample numbered i."""
_TEXTS = {".txt", ".md", ".json", ".csv", ".log"}


@dataclass
class Gallery:
    """The previews as HTML, newest of each name first, and what was left out."""

    shown: dict[str, list[tuple[int, Markup]]] = field(default_factory=dict)
    """Name -> (step, HTML), newest first."""
    left_out: list[str] = field(default_factory=list)
    captions: dict[tuple[str, int], str] = field(default_factory=dict)
    """(Name, step) -> what stands below it: line 3 of captions.txt belongs to sample_02.mp4, a.txt to a.png."""


def read_previews(folder: Path) -> Gallery:
    """Reads previews/ of a run: the newest of each name, and a few earlier ones as long as there is room."""
    gallery, found = Gallery(), _list(folder / "previews")
    room = LARGEST_TOTAL
    earlier: list[tuple[str, int, Path]] = []
    for name, steps in list(found.items())[:MOST_NAMES]:
        (step, path), *rest = steps
        room = _take(gallery, name, step, path, room)
        every = -(-len(rest) // MOST_EARLIER) if rest else 1
        earlier += [(name, step, path) for step, path in rest[every - 1 :: every]]
    for name, step, path in earlier:
        room = _take(gallery, name, step, path, room)
    _set_captions(gallery, found)
    gallery.left_out += [f"{name}: too many names" for name in list(found)[MOST_NAMES:][:MOST_NAMES]]
    return gallery


def _set_captions(gallery: Gallery, found: dict[str, list[tuple[int, Path]]]) -> None:
    """Puts texts below the pictures and videos that they belong to."""
    texts = {(name, step): path for name, steps in found.items() for step, path in steps if name.endswith(".txt")}
    for name, steps in gallery.shown.items():
        if Path(name).suffix.lower() in _TEXTS:
            continue
        number = _NUMBERED.fullmatch(name)
        for step, _ in steps:
            own = texts.get((f"{Path(name).stem}.txt", step))
            several = next((texts[each, step] for each in _LISTS if (each, step) in texts), None)
            if own is not None and isinstance(text := _read(own, LARGEST_FILE), bytes):
                caption = text.decode("utf-8", errors="replace").strip()
                if caption.count("\n") < _MOST_CAPTION_LINES:  # a table would be unreadable; it has its own card
                    gallery.captions[name, step] = caption
            elif number and several is not None and isinstance(text := _read(several, LARGEST_FILE), bytes):
                lines = text.decode("utf-8", errors="replace").splitlines()
                if int(number[1]) < len(lines):
                    gallery.captions[name, step] = lines[int(number[1])]


def _list(folder: Path) -> dict[str, list[tuple[int, Path]]]:
    found: dict[str, list[tuple[int, Path]]] = {}
    if folder.is_symlink():  # nothing from outside the run's folder gets onto the page
        return found
    try:
        entries = sorted(os.listdir(folder), reverse=True)  # step numbers are padded: newest first
    except OSError:
        return found
    for entry in entries:
        match = _NAME.fullmatch(entry)
        if match:
            found.setdefault(match.group(2), []).append((int(match.group(1)), folder / entry))
    # A list of captions comes right after the pictures, with the numbered samples behind it.
    pictures = [name for name in found if Path(name).suffix.lower() in _IMAGES and not _NUMBERED.fullmatch(name)]
    return dict(sorted(found.items(), key=lambda each: _order(each[0], bool(pictures))))


def _order(name: str, pictures: bool) -> tuple[int, str]:
    if name in _LISTS:
        return 1, name
    return 2 if pictures and _NUMBERED.fullmatch(name) else 0, name


def _take(gallery: Gallery, name: str, step: int, path: Path, room: int) -> int:
    """Puts a file into the gallery if it is fit to be shown; the room that is left then."""
    content = _read(path, min(LARGEST_FILE, room))
    if isinstance(content, str):
        gallery.left_out.append(f"{shorten(path.name, 120)}: {content}")
        return room
    gallery.shown.setdefault(name, []).append((step, _as_html(name, step, content)))
    return room - len(content)


def _read(path: Path, most: int) -> bytes | str:
    """The content of a file, or why it is not shown."""
    suffix = path.suffix.lower()
    if suffix not in _TEXTS and suffix not in _IMAGES and suffix not in _VIDEOS:
        return "neither an image, a short video nor text"
    try:
        # A link could lead out of the run's folder, a pipe would wait for ever.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return "not a file that can be read"
    about = os.fstat(handle)
    if not stat.S_ISREG(about.st_mode):
        os.close(handle)
        return "not a plain file"
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
