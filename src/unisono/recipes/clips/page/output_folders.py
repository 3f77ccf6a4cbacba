"""A folder for the clips of each video, chosen before anything is scored."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class OutputFolders:
    """The folder of each video that can be used, and what is wrong with the others."""

    folders: dict[Path, Path] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def output_folders(videos: Sequence[Path], output_dir: Path) -> OutputFolders:
    """`output_dir`/name of the video; of several with the same name, the later ones get a number.

    A video that is named twice is used once.
    """
    chosen = OutputFolders()
    seen: dict[tuple[int, int], Path] = {}
    for video in videos:
        if video.is_dir():
            chosen.problems.append(f"{video} is a folder; give its videos, e.g. {video / '*.mp4'}")
            continue
        if not video.is_file():
            chosen.problems.append(f"{video}: there is no such file")
            continue
        status = os.stat(video)
        identity = (status.st_dev, status.st_ino)
        if identity in seen:
            chosen.notes.append(f"{video} is the same file as {seen[identity]}; it is used once")
            continue
        seen[identity] = video
        name = video.stem or video.name
        folder, number = output_dir / name, 1
        while folder in chosen.folders.values():
            number += 1
            folder = output_dir / f"{name}-{number}"
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            chosen.problems.append(
                f"{folder} is not an empty folder; nothing there is overwritten: use another --output_dir"
            )
            continue
        if number > 1:
            chosen.notes.append(f"another video is called {name}: the clips of {video} go to {folder}")
        chosen.folders[video] = folder
    return chosen
