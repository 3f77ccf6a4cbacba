"""Checks of settings, made before anything is loaded or written."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from typing import Any

from unisono.config.values import shown
from unisono.errors import ConfigError


def check_paths(config: Any, names: Iterable[str]) -> None:
    """Refuses what cannot be the name of a file or folder."""
    for name in names:
        if not _can_be_a_path(getattr(config, name) or ""):
            raise ConfigError(f"{name}: no file or folder can be called {shown(getattr(config, name))}")


def check_range(config: Any, least: Mapping[str, float], most: Mapping[str, float]) -> None:
    """Refuses numbers that are too small or too large."""
    for name, bound in least.items():
        if not getattr(config, name) >= bound:  # so that what is not a number is refused too
            raise ConfigError(f"{name}: expected at least {bound}, got {getattr(config, name)}")
    for name, bound in most.items():
        if not getattr(config, name) <= bound:
            raise ConfigError(f"{name}: expected at most {bound}, got {getattr(config, name)}")


def _can_be_a_path(text: str) -> bool:
    place = os.path.expanduser(text)
    if place == text and text.startswith("~"):  # the home of nobody
        return False
    try:
        os.stat(place)
    except ValueError:  # a zero, or half a character
        return False
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG and not any(sign < " " for sign in text)
    return True
