"""Lists and reads the files in a data folder, but never a file outside it.

Data folders are not trusted: a metadata file may name `../../etc/passwd`, and a symbolic link may point there. This
module looks files up in the folder's listing, and follows a link only if its target is also in the folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from unisono.config.values import shown
from unisono.errors import ConfigError
from unisono.observe.folder import EVENTS, RUN

_RUN_FILES = {RUN, EVENTS}  # from its first step on, a run folder contains both files


class Outside(ConfigError):
    """Raised for a path that leads outside the folder."""

    def __init__(self, path: object, folder: Path, *, is_link: bool = False) -> None:
        self.is_link = is_link
        super().__init__(f"{path} leads outside {folder}; copy the file into the folder")


class Tree:
    """A data folder. Paths are relative to it and use `/`; hidden files are ignored."""

    def __init__(self, folder: Path, *, follow_links: bool = False) -> None:
        """With `follow_links`, links to files may lead outside the folder; only for folders that the user trusts."""
        self.folder, self._follow_links = folder, follow_links
        self._root = folder.resolve()
        # A snapshot in the Hugging Face cache consists of links into the cache's `blobs` folder.
        self._allowed = [self._root]
        if self._root.parent.name == "snapshots":
            self._allowed.append(self._root.parent.parent / "blobs")
        self.not_followed: list[str] = []  # links to folders that `walk` skipped
        self._listings: dict[str, dict[str, os.DirEntry[str]]] = {}

    def walk(self) -> Iterator[str]:
        """Yields the paths of all files, folder by folder; skips run folders and links to folders."""
        folders = [""]
        while folders:
            folder = folders.pop()
            if folder and self._listing(folder).keys() >= _RUN_FILES:
                continue
            for name, entry in self._listing(folder).items():
                path = f"{folder}/{name}" if folder else name
                if entry.is_dir(follow_symlinks=False):
                    folders.append(path)
                elif _leads_to(entry.is_dir):
                    self.not_followed.append(path)
                elif _leads_to(entry.is_file):
                    yield path

    def relative(self, path: str) -> str:
        """Makes a path relative to the folder; raises Outside if it leads outside."""
        for root in (self._root, self.folder.absolute()) if os.path.isabs(path) else ("",):
            inside = os.path.relpath(path, root) if root else os.path.normpath(path)
            if inside != ".." and not inside.startswith("../"):
                return inside
        raise Outside(shown(path), self.folder)

    def __contains__(self, path: str) -> bool:
        """Returns whether the file exists; raises Outside if it is a link that leads outside."""
        *folders, name = path.split("/")
        for depth, folder in enumerate(folders):
            entry = self._listing("/".join(folders[:depth])).get(folder)
            if entry is None or not entry.is_dir(follow_symlinks=False):
                return False
        entry = self._listing("/".join(folders)).get(name)
        if entry is None or not _leads_to(entry.is_file):
            return False
        if entry.is_symlink() and not self._follow_links:
            target = Path(entry.path).resolve()
            if not any(target.is_relative_to(root) for root in self._allowed):
                raise Outside(f"the link {self.path(path)}", self.folder, is_link=True)
        return True

    def path(self, path: str) -> Path:
        """Returns the path on disk of a file in the folder."""
        return self.folder / path

    def lines(self, path: str, most_bytes: int) -> Iterator[tuple[int, str]]:
        """Yields (line number, line) pairs of a text file, counted from 1; raises ConfigError if it is not UTF-8."""
        where = self.path(path)
        try:
            size = where.stat().st_size
            if size > most_bytes:
                raise ConfigError(f"{where} has {size:,} bytes; expected at most {most_bytes:,}")
            with where.open("rb") as file:
                for number, line in enumerate(file, 1):
                    # str.splitlines would also split at other characters, such as form feeds.
                    yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise ConfigError(f"{where}, line {number}: not UTF-8 text; save the file as UTF-8") from None
        except OSError as error:
            raise ConfigError(f"{where} cannot be read ({error.strerror})") from None

    def _listing(self, folder: str) -> dict[str, os.DirEntry[str]]:
        if folder not in self._listings:
            try:
                with os.scandir(self.folder / folder) as entries:
                    self._listings[folder] = {entry.name: entry for entry in entries if entry.name[0] != "."}
            except OSError as error:
                raise ConfigError(f"{self.folder / folder} cannot be listed ({error.strerror})") from None
        return self._listings[folder]


def _leads_to(kind: Callable[[], bool]) -> bool:
    """Returns the result of an entry's `is_file` or `is_dir`; False for a circular link."""
    try:
        return kind()
    except OSError:
        return False


def one_line(text: str) -> str:
    """Escapes unprintable characters: a file name may contain line breaks and terminal escape sequences."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
