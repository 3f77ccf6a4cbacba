"""Reads the JSON files of models, which are not trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from unisono.errors import ConfigError

_Json = TypeVar("_Json", dict[str, Any], list[Any])


def read_json(path: Path, kind: type[_Json]) -> _Json:
    """Reads a JSON file whose top level must be of type `kind`, an object (dict) or a list."""
    if not path.is_file():  # opening a FIFO would block forever
        raise ConfigError(f"{path} is missing; copy or download the model again")
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}); copy or download the model again") from None
    if not isinstance(value, kind):
        raise ConfigError(f"{path}: expected a JSON {'object' if kind is dict else 'list'}")
    return value
