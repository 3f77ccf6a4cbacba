"""Chooses the output folder of each video, before anything is scored."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class OutputFolders:
    """The output folder of each usable video, and the problems with the other videos."""

    folders: dict[Path, Path] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def output_folders(videos: Sequence[Path], output_dir: Path) -> OutputFolders:
    """Chooses `output_dir`/NAME for the video NAME.mp4; further videos of the same name get NAME-2, NAME-3 …

    A video that is listed twice is used only once.
    """
    chosen = OutputFolders()
    videos_by_inode: dict[tuple[int, int], Path] = {}
    for video in videos:
        if video.is_dir():
            chosen.problems.append(f"{video} is a folder; pass video files, for instance {video / '*.mp4'}")
            continue
        if not video.is_file():
            chosen.problems.append(f"{video}: there is no such file")
            continue
        status = os.stat(video)
        inode = (status.st_dev, status.st_ino)
        if inode in videos_by_inode:
            chosen.notes.append(f"{video} is the same file as {videos_by_inode[inode]}; it is used once")
            continue
        videos_by_inode[inode] = video
        name = video.stem or video.name
        folder, number = output_dir / name, 1
        while folder in chosen.folders.values():
            number += 1
            folder = output_dir / f"{name}-{number}"
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            chosen.problems.append(
                f"{folder} already exists and is not empty; its files are not overwritten: choose another --output_dir"
            )
            continue
        if number > 1:
            chosen.notes.append(f"another video is also called {name}, so the clips of {video} go to {folder}")
        chosen.folders[video] = folder
    return chosen
