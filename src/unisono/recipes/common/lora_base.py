"""Which weights a LoRA belongs to, kept with its run: beside others it would be another model, without a word."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.engine.recipe import Work
from unisono.errors import ConfigError
from unisono.recipes.common.fingerprint import of_model
from unisono.recipes.common.whole_files import write_whole

if TYPE_CHECKING:
    from torch import Tensor

_FILE = "base.json"


class LoraBase:
    """The frozen weights of a LoRA's run, which are not in its checkpoints, by their fingerprint."""

    def __init__(self, folder: Path, parts: Iterable[Path]) -> None:
        """`folder` is what is prepared of a run; `parts` are folders or files of the model."""
        self._file, self._fingerprint = folder / _FILE, of_model(parts)

    def check(self, setting: str, further: str = "") -> None:
        """Refuses other weights than those that the run has been trained with."""
        if self._known() not in (None, self._fingerprint):
            raise ConfigError(
                f"{setting}: these are not the weights that this run's LoRA was trained beside so far; give the model "
                f"that it began with, or start a new output_dir{further}"
            )

    def to_note(self, work: Work) -> LoraBase | None:
        """Itself for the one process that is to note it, none for the others."""
        return self if work.share([self]) else None

    def note(self) -> None:
        """Keeps the fingerprint. Not before training begins: until then a user may still change the model."""
        if self._known() is None:
            write_whole(self._file, json.dumps({"fingerprint": self._fingerprint}).encode())

    def _known(self) -> str | None:
        try:
            return str(json.loads(self._file.read_bytes())["fingerprint"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


class AsLoaded:
    """What `Recipe.weights` gives for a model that model() has filled from files: frozen ones come from there again."""

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Nobody asks: no weight is on meta."""
        raise AssertionError(f"{name} is on meta")
