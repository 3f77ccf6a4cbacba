"""Reads config files that include others: `include: base.yaml`, or a list of files. The file's own keys override these.

An include is searched for in the folder of the file that names it and then in the folders above, because users write
paths relative to the project: in config/model/wide.yaml, `include: config/model/base.yaml` means the file in the same
folder. An include cannot lead out of the project: it must not be an absolute path, nor leave the current folder. (For a
config file outside the current folder, the project is the parent folder that contains the included path.)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.config.file import read_file
from unisono.config.values import shown
from unisono.errors import ConfigError

INCLUDE = "include"
_MOST_FILES = 100


@dataclass(frozen=True)
class Entry:
    """A key of a config file."""

    key: Any
    """The key as written in the file."""
    value: Any
    place: str
    """The file that contains the key."""
    order: int
    """Number of the file in reading order; if two files set the same field, the higher number wins."""


def read_with_includes(path: Path) -> dict[str, Entry]:
    """Returns the keys of a file and its includes, with underscores for hyphens. Its own keys take precedence."""
    entries: dict[str, Entry] = {}
    read: list[Path] = []
    _read(path, (), read, entries)
    return entries


def _read(path: Path, chain: tuple[Path, ...], read: list[Path], entries: dict[str, Entry]) -> None:
    content, real = read_file(path), path.resolve()
    chain = (*chain, real)
    for include in _includes(content, path):
        included = _find(include, path, real)
        if included in chain:
            cycle = " -> ".join(_short(file) for file in (*chain[chain.index(included) :], included))
            raise ConfigError(f"config file {path} includes itself: {cycle}; remove one of these includes")
        _read(included, chain, read, entries)
    read.append(real)
    # In a chain of files that each include the next one twice, the last file would be read 2 x 2 x 2 ... times.
    if len(read) > _MOST_FILES:
        raise ConfigError(f"config file {chain[0]} includes more than {_MOST_FILES} files; include each of them once")
    place = str(path) if len(chain) == 1 else _short(real)
    for name, (key, value) in _by_name(content, place).items():
        entries.pop(name, None)  # moves the key to the end, so that entries are in order of precedence
        entries[name] = Entry(key, value, place, len(read))


def _by_name(content: Mapping[Any, Any], place: str) -> dict[str, tuple[Any, Any]]:
    named: dict[str, tuple[Any, Any]] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name in named:
            raise ConfigError(f"{name} is set twice in {place}, with a hyphen and with an underscore")
        if name != INCLUDE:
            named[name] = (key, value)
    return named


def _includes(content: Mapping[Any, Any], path: Path) -> list[str]:
    value = content.get(INCLUDE)
    includes = value if isinstance(value, list) else [] if value is None else [value]
    for include in includes:
        if not isinstance(include, str) or not include.isprintable() or not include.strip():
            raise ConfigError(f"config file {path}: include: expected a file or a list of files, got {shown(value)}")
    return [str(include) for include in includes]


def _find(include: str, path: Path, real: Path) -> Path:
    """Returns the included file, with all symlinks resolved."""
    relative = Path(include)
    if relative.is_absolute():
        raise ConfigError(f"config file {path}: include {include} is an absolute path; write it relative to this file")
    top = _project(relative, real)
    outside = not Path(os.path.normpath(real.parent / relative)).is_relative_to(top)
    for folder in real.parents:
        candidate = _file(folder / relative)
        if candidate is not None and candidate.is_relative_to(top):
            return candidate
        outside |= candidate is not None
        if folder == top:
            break
    if outside:
        raise ConfigError(f"config file {path}: include {include} leads out of {top}; copy the file into that folder")
    searched = f"searched in its folder and up to {top}" if top != real.parent else "searched in its folder"
    raise ConfigError(f"config file {path}: include {include} does not exist ({searched})")


def _file(path: Path) -> Path | None:
    try:
        real = path.resolve()
        return real if real.is_file() else None
    except (OSError, RuntimeError):  # the name is too long, or there is a cycle of symlinks
        return None


def _project(relative: Path, real: Path) -> Path:
    """Returns the folder that an include must not leave."""
    here = Path.cwd().resolve()
    if real.is_relative_to(here):
        return here
    same_name = [folder.parent for folder in real.parents if (folder.name,) == relative.parts[:1]]
    return same_name[0] if same_name else real.parent


def _short(file: Path) -> str:
    here = Path.cwd().resolve()
    return str(file.relative_to(here) if file.is_relative_to(here) else file)
