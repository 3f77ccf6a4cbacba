"""Records which base weights a LoRA run uses, because with other weights the LoRA would silently give wrong results."""

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
    """The fingerprint of a LoRA run's frozen weights, which its checkpoints do not contain, and their precision."""

    def __init__(self, folder: Path, parts: Iterable[Path], base_precision: str) -> None:
        """`folder` contains the run's prepared files; `parts` are the folders or files of the model."""
        self._file, self._fingerprint, self._precision = folder / _FILE, of_model(parts), base_precision

    def check(self, setting: str, hint: str = "") -> None:
        """Raises ConfigError if the run was trained with different base weights, or with another base_precision."""
        recorded = self._recorded()
        if recorded is None:
            return
        if recorded["fingerprint"] != self._fingerprint:
            raise ConfigError(
                f"{setting}: this run's LoRA was trained with different base weights; use the model that the run "
                f"started with, or a new output_dir{hint}"
            )
        if (before := recorded.get("base_precision", "auto")) != self._precision:
            raise ConfigError(
                f"base_precision {self._precision}: this run's LoRA was trained with base_precision {before}; use that "
                f"again, or a new output_dir{hint}"
            )

    def for_one_process(self, work: Work) -> LoraBase | None:
        """Returns this object on the process that records the fingerprint, and None on all others."""
        return self if work.share([self]) else None

    def record(self) -> None:
        """Writes the fingerprint. Call it when training starts, because the user may replace the model before that."""
        if self._recorded() is None:
            recorded = {"fingerprint": self._fingerprint, "base_precision": self._precision}
            write_cache_file(self._file, json.dumps(recorded).encode())

    def _recorded(self) -> dict[str, str] | None:
        try:
            recorded = json.loads(self._file.read_bytes())
        except (OSError, ValueError):
            return None
        is_valid = isinstance(recorded, dict) and isinstance(recorded.get("fingerprint"), str)
        return recorded if is_valid else None


class AsLoaded:
    """Returned by `Recipe.weights` if model() has already loaded the weights."""

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Never called, because no weight is on the meta device."""
        raise AssertionError(f"{name} is on the meta device")
