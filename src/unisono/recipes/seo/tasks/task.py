"""The interface of a task: the part of the recipe that depends on what is learned."""

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
    """One task. The recipe forwards the engine's calls to it; see `engine/recipe.py`."""

    coupled = False
    """Whether the loss compares samples with each other; `embed` and `couple` then replace `loss`."""

    headline: Sequence[str] = ()
    """Metrics of an evaluation that are shown during training."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.folder = Path()
        """The folder that prepare() wrote to; the recipe also sets it for an export."""
        self.remarks: list[str] = []
        """Lines that are printed once, when the run begins."""
        self.metrics: dict[str, Any] = {}
        """Metric objects that the engine merges over the ranks; filled by dataset("eval")."""

    def start_remark(self, global_batch: int) -> str | None:
        """A line about a step with this global batch."""
        return None

    def prepare(self, work: Work) -> None:
        """Reads and tokenizes the data; the ranks share the work."""
        raise NotImplementedError

    def model(self) -> nn.Module:
        """The module to train."""
        raise NotImplementedError

    def get_ready(self, model: nn.Module, *, flash_attention: bool) -> None:
        """Prepares a model for training; not called for an export."""

    def dataset(self, split: str) -> Any:
        """ "train" or "eval"."""
        raise NotImplementedError

    def collate(self, items: list[Any]) -> Any:
        """Pads the items of a micro-batch to the longest."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any, noise: Noise) -> Loss:
        """A sum and a count."""
        raise NotImplementedError

    def embed(self, model: nn.Module, batch: Any, noise: Noise) -> Mapping[str, Tensor]:
        """For a coupled task: one row per sample, as input of the loss."""
        raise NotImplementedError

    def couple(self, rows: Mapping[str, Tensor]) -> Loss:
        """For a coupled task: the loss of a global batch, from the rows of all its samples."""
        raise NotImplementedError

    def before_evaluation(self, model: nn.Module) -> None:
        """Called before the first batch of an evaluation; every rank does the same."""

    def evaluate(self, model: nn.Module, batch: Any, noise: Noise) -> Mapping[str, Any]:
        """(sum, count) pairs, or metric objects that are merged over the ranks."""
        raise NotImplementedError

    def preview(self, model: nn.Module, step: int) -> Mapping[str, Any] | None:
        """Examples to look at."""
        return None

    def export(self, model: nn.Module, folder: Path) -> None:
        """Writes a folder for transformers or sentence-transformers."""
        raise NotImplementedError
