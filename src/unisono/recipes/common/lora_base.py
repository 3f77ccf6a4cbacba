"""Records which base weights a LoRA run uses, because its LoRA would silently give wrong results with any others."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.engine.recipe import Work
from unisono.errors import ConfigError
from unisono.recipes.common.cache_files import write_cache_file
from unisono.recipes.common.fingerprint import of_model

if TYPE_CHECKING:
    from torch import Tensor

_FILE = "base.json"


class LoraBase:
    """The fingerprint of a LoRA run's frozen weights, which its checkpoints do not contain."""

    def __init__(self, folder: Path, parts: Iterable[Path]) -> None:
        """`folder` contains the run's prepared files; `parts` are the folders or files of the model."""
        self._file, self._fingerprint = folder / _FILE, of_model(parts)

    def check(self, setting: str, hint: str = "") -> None:
        """Raises ConfigError if the run was trained with different base weights."""
        if self._recorded() not in (None, self._fingerprint):
            raise ConfigError(
                f"{setting}: this run's LoRA was trained with different base weights; use the model that the run "
                f"started with, or a new output_dir{hint}"
            )

    def for_one_process(self, work: Work) -> LoraBase | None:
        """Returns this object on the process that records the fingerprint, and None on all others."""
        return self if work.share([self]) else None

    def record(self) -> None:
        """Writes the fingerprint. Call it when training starts, because the user may change the model until then."""
        if self._recorded() is None:
            write_cache_file(self._file, json.dumps({"fingerprint": self._fingerprint}).encode())

    def _recorded(self) -> str | None:
        try:
            return str(json.loads(self._file.read_bytes())["fingerprint"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


class AsLoaded:
    """Returned by `Recipe.weights` if model() has already loaded the weights."""

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Never called, because no weight is on the meta device."""
        raise AssertionError(f"{name} is on the meta device")
