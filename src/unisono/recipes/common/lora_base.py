"""Records the base weights of a LoRA run, because with other base weights it would silently be another model."""

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
        """`folder` is the run's folder of prepared files; `parts` are folders or files of the model."""
        self._file, self._fingerprint = folder / _FILE, of_model(parts)

    def check(self, setting: str, hint: str = "") -> None:
        """Rejects base weights other than those that the run was trained with."""
        if self._recorded() not in (None, self._fingerprint):
            raise ConfigError(
                f"{setting}: this run's LoRA was trained with other base weights; use the model that the run started "
                f"with, or a new output_dir{hint}"
            )

    def for_one_process(self, work: Work) -> LoraBase | None:
        """Returns itself on the one process that records it, None on the others."""
        return self if work.share([self]) else None

    def record(self) -> None:
        """Writes the fingerprint. Call it when training starts: until then a user may still change the model."""
        if self._recorded() is None:
            write_cache_file(self._file, json.dumps({"fingerprint": self._fingerprint}).encode())

    def _recorded(self) -> str | None:
        try:
            return str(json.loads(self._file.read_bytes())["fingerprint"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


class AsLoaded:
    """The result of `Recipe.weights` for a model that model() already filled from files."""

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Never called, because no weight is on the meta device."""
        raise AssertionError(f"{name} is on the meta device")
