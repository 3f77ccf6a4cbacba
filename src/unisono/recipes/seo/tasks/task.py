"""The interface of a task: the part of the recipe that differs between ranking, scoring and writing."""

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
    """Base class of all tasks. The recipe forwards the engine's calls to a task; see `engine/recipe.py`."""

    coupled = False
    """Whether the loss compares samples with each other; if so, `embed` and `couple_rows` replace `loss`."""

    headline: Sequence[str] = ()
    """Names of the evaluation metrics that are shown during training."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.folder = Path()
        """The folder with the files that prepare() writes; the recipe also sets it for an export."""
        self.remarks: list[str] = []
        """Messages to print once, when the run begins."""
        self.metrics: dict[str, Any] = {}
        """Metric objects, which the engine merges across ranks; filled by dataset("eval")."""

    def start_remark(self, global_batch: int) -> str | None:
        """Returns a message about the negatives in a step with this global batch size."""
        return None

    def prepare(self, work: Work) -> None:
        """Reads and tokenizes the data; the ranks share the work."""
        raise NotImplementedError

    def model(self) -> nn.Module:
        """Builds the model to train."""
        raise NotImplementedError

    def get_ready(self, model: nn.Module, *, flash_attention: bool) -> None:
        """Prepares a model for training; not called for an export."""

    def dataset(self, split: str) -> Any:
        """Returns the dataset of a split, "train" or "eval"."""
        raise NotImplementedError

    def collate(self, items: list[Any]) -> Any:
        """Pads the items of a micro-batch to the longest."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any, noise: Noise) -> Loss:
        """Returns the sum of the losses of a micro-batch, and their count."""
        raise NotImplementedError

    def embed(self, model: nn.Module, batch: Any, noise: Noise) -> Mapping[str, Tensor]:
        """Returns one row per sample, as input for `couple_rows`; only for a coupled task."""
        raise NotImplementedError

    def couple_rows(self, rows: Mapping[str, Tensor], start: int, stop: int) -> Loss:
        """Returns the loss of the samples start to stop, compared with all samples; only for a coupled task."""
        raise NotImplementedError

    def before_evaluation(self, model: nn.Module) -> None:
        """Called on every rank before the first batch of an evaluation; all ranks do the same work."""

    def evaluate(self, model: nn.Module, batch: Any, noise: Noise) -> Mapping[str, Any]:
        """Returns metrics as (sum, count) pairs, or as objects that the engine merges across ranks."""
        raise NotImplementedError

    def preview(self, model: nn.Module, step: int) -> Mapping[str, Any] | None:
        """Returns example outputs for the user to look at."""
        return None

    def export(self, model: nn.Module, folder: Path) -> None:
        """Writes a folder for transformers or sentence-transformers."""
        raise NotImplementedError
