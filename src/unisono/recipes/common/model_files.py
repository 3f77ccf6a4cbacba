"""Small files that say what a model is; they may be anybody's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from unisono.errors import ConfigError

_Json = TypeVar("_Json", dict[str, Any], list[Any])


def read_json(path: Path, kind: type[_Json]) -> _Json:
    """The JSON object or list in a file, a model's or the user's own."""
    if not path.is_file():  # a pipe would be waited for, for ever
        raise ConfigError(f"{path} is missing; copy or download the model again")
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}); mend it, or copy it again") from None
    if not isinstance(value, kind):
        raise ConfigError(f"{path} does not hold a JSON {'object' if kind is dict else 'list'}; expected one")
    return value
