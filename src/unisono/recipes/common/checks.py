"""Validates settings before a recipe loads or writes anything."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from typing import Any

from unisono.config.values import shown
from unisono.errors import ConfigError


def check_paths(config: Any, names: Iterable[str]) -> None:
    """Rejects settings that are not valid paths."""
    for name in names:
        if not _can_be_a_path(getattr(config, name) or ""):
            raise ConfigError(f"{name}: {shown(getattr(config, name))} is not a valid path")


def check_range(config: Any, least: Mapping[str, float], most: Mapping[str, float]) -> None:
    """Rejects numbers below `least` or above `most`; None is allowed, NaN is not."""
    for name, bound in least.items():
        value = getattr(config, name)
        if value is not None and not value >= bound:
            raise ConfigError(f"{name}: expected at least {bound}, got {value}")
    for name, bound in most.items():
        value = getattr(config, name)
        if value is not None and not value <= bound:
            raise ConfigError(f"{name}: expected at most {bound}, got {value}")


def _can_be_a_path(text: str) -> bool:
    path = os.path.expanduser(text)
    if path == text and text.startswith("~"):  # the home folder of an unknown user
        return False
    try:
        os.stat(path)
    except ValueError:  # contains a null byte or a lone surrogate
        return False
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG and not any(character < " " for character in text)
    return True
