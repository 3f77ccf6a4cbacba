"""What the recipe's tasks have in common: each is the part of the recipe that depends on what is learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.engine.recipe import Loss, Work
from unisono.recipes.seo.settings import Config

if TYPE_CHECKING:
    from torch import Tensor, nn

    from unisono.data.noise import Noise


class Task:
    """One task. The recipe asks it for whatever the engine asks the recipe for: see `engine/recipe.py`."""

    coupled = False
    """Whether the loss compares samples with each other: `embed` and `couple` then take the place of `loss`."""

    headline: Sequence[str] = ()
    """Which numbers of an evaluation are shown while it trains."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.folder = Path()
        """What prepare() has left; the recipe sets it, also when a run is exported."""
        self.remarks: list[str] = []
        """What the user should be told once, when the run begins."""
        self.metrics: dict[str, Any] = {}
        """What adds up over an evaluation, merged over the ranks by the engine; filled by dataset("eval")."""

    def said_at_start(self, global_batch: int) -> str | None:
        """What the user should know about a step of so many samples."""
        return None

    def prepare(self, work: Work) -> None:
        """Reads the data and keeps its tokens, shared over the ranks."""
        raise NotImplementedError

    def model(self) -> nn.Module:
        """The module to train."""
        raise NotImplementedError

    def get_ready(self, model: nn.Module, *, flash_attention: bool) -> None:
        """What is settled before a model is trained; not for one that is only used."""

    def dataset(self, split: str) -> Any:
        """ "train" or "eval"."""
        raise NotImplementedError

    def collate(self, items: list[Any]) -> Any:
        """Items of one micro-batch, padded to the longest of them."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any, noise: Noise) -> Loss:
        """A sum and a count."""
        raise NotImplementedError

    def embed(self, model: nn.Module, batch: Any, noise: Noise) -> Mapping[str, Tensor]:
        """Of a coupled task: what its loss needs of each sample, one row each."""
        raise NotImplementedError

    def couple(self, rows: Mapping[str, Tensor]) -> Loss:
        """Of a coupled task: the loss of a whole global batch, from the rows of all its samples."""
        raise NotImplementedError

    def before_evaluation(self, model: nn.Module) -> None:
        """What an evaluation needs before its first batch; every rank does the same."""

    def evaluate(self, model: nn.Module, batch: Any, noise: Noise) -> Mapping[str, Any]:
        """(sum, count) pairs, or objects that are merged over the ranks."""
        raise NotImplementedError

    def preview(self, model: nn.Module, step: int) -> Mapping[str, Any] | None:
        """What a person wants to look at."""
        return None

    def export(self, model: nn.Module, folder: Path) -> None:
        """The folder that transformers (and sentence-transformers) load."""
        raise NotImplementedError
