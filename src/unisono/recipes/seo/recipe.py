"""The recipe `seo`: language models that rank, score and write pages for search.

Each task has its own module in `tasks/`: `bi_encoder` and `cross_encoder` (which page answers a query), `score` (a
number or a class for a page) and `snippet` (a title or a description). Every evaluation reports baselines next to the
model's metrics. `unisono seo SITE --run RUN` (`site/`) writes a report about a website.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from unisono.engine.recipe import Loss, Recipe, Work
from unisono.errors import ConfigError
from unisono.recipes.seo import settings
from unisono.recipes.seo.checks import check_config, check_kind

if TYPE_CHECKING:  # `unisono train seo --help` must not import torch
    from torch import Tensor, nn

    from unisono.data.noise import Noise
    from unisono.parallel.materialize import Weights
    from unisono.recipes.common.lora_base import LoraBase
    from unisono.recipes.seo.tasks.task import Task
    from unisono.settings import Settings


_PAIRS_AT_ONCE = 400
_EPOCHS = 3
CPU_STEPS = 120
"""Default maximum number of optimizer steps on a CPU, about 15 minutes on two cores."""
_CPU_MICRO_BATCH = 16  # limits activation memory; larger micro-batches are only slightly faster on a CPU


class Seo(Recipe):
    """Language models that rank, score and write pages for search."""

    many_shapes = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "batch_size": 64,
        "learning_rate": 5e-5,
        "weight_decay": 0.01,
        "warmup_steps": 50,
        "lr_schedule": "linear",
        "num_workers": 2,
        "eval_every": 500,
        "save_every": 500,
    }
    aliases: ClassVar[Mapping[str, str]] = settings.ALIASES
    fixed: ClassVar[Sequence[str]] = (
        *("task", "model_name", "method", "pooling", "label", "write"),
        # These must not change on resume: pages that were trained on could otherwise be reported as held out.
        *("data_path", "eval_data_path", "num_eval", "num_candidates", "hard_candidates", "rerank"),
        *("max_length", "query_length", "target_length", "num_negatives"),  # the content of a sample
        *("lora_rank", "lora_alpha", "lora_targets"),
    )
    Config = settings.Config

    @classmethod
    def presets(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the metric that selects the best checkpoint, and defaults that depend on the model and the device."""
        best = {"rank": ("eval/MRR@10", "max"), "score": ("eval/loss", "min"), "snippet": ("eval/loss", "min")}
        metric, mode = best.get(str(values["task"]), best["rank"])
        presets: dict[str, Any] = {"best_metric": metric, "best_mode": mode}
        if values["model_name"] == "tiny":
            presets["learning_rate"] = 1e-3
        if values["num_epochs"] is None and values["max_steps"] is None:  # the user has set neither
            presets["num_epochs"] = _EPOCHS
        if values["model_name"] != "tiny" and on_cpu(values):
            if "num_epochs" in presets:
                presets["max_steps"] = CPU_STEPS
            if isinstance(values["batch_size"], int):
                presets["micro_batch"] = max(1, min(_CPU_MICRO_BATCH, values["batch_size"]))
        if values["task"] == "rank" and values["method"] == "cross" and isinstance(values["rerank"], int):
            # One evaluation sample is a query with all the pages to rerank for it.
            presets["eval_batch_size"] = max(1, _PAIRS_AT_ONCE // max(1, values["rerank"]))
        return presets

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        check_config(config)
        self.has_frozen_weights = bool(config.lora_rank)
        self._base: LoraBase | None = None  # None once the base weights of a LoRA are recorded
        self._length_remarks: Sequence[str] = ()

    @cached_property
    def task(self) -> Task:
        """The object that implements the configured task: bi-encoder, cross-encoder, score or snippet."""
        config = self.config
        task: Task
        if config.task == "score":
            from unisono.recipes.seo.tasks.score import Score

            task = Score(config)
        elif config.task == "snippet":
            from unisono.recipes.seo.tasks.snippet import Snippet

            task = Snippet(config)
        elif config.method == "cross":
            from unisono.recipes.seo.tasks.cross_encoder import CrossEncoder

            task = CrossEncoder(config)
        else:
            from unisono.recipes.seo.tasks.bi_encoder import BiEncoder

            task = BiEncoder(config)
        if self.prepared is not None:
            task.folder = self.prepared
        self.metrics = task.metrics  # the engine reads this attribute
        return task

    @property
    def headline(self) -> Sequence[str]:  # type: ignore[override]
        """Names of the metrics shown during training, with their baselines."""
        return self.task.headline

    def check_settings(self, settings: Settings) -> None:
        """Rejects settings of other tasks, and strategies that do not work with a contrastive loss."""
        check_kind(self.config)
        run = settings.run
        if (run.max_steps, run.num_epochs) == (CPU_STEPS, _EPOCHS) and self.config.model_name != "tiny":
            self._length_remarks = [
                f"without a GPU the run ends after {CPU_STEPS} steps or {_EPOCHS} epochs, whichever comes first; "
                "change this with --num_epochs or --max_steps"
            ]
        if self.coupled and settings.parallel.strategy == "dp":
            raise ConfigError(
                "strategy dp cannot split the batches of --method bi; use ddp, which is also faster, or --method cross"
            )

    # Methods that the engine calls; most of them forward to the task -------------------------------------------------

    def prepare(self, work: Work) -> None:
        """Reads and tokenizes the data."""
        self.prepared = work.folder
        self._base = self._lora_base and self._lora_base.for_one_process(work)
        self.task.folder = work.folder
        self.task.prepare(work)

    def model(self) -> nn.Module:
        """Builds the task's model."""
        model, remark = self.task.model(), None
        if self.global_batch:  # only set for training, not for export
            self.task.get_ready(model, flash_attention=self.flash_attention)
            remark = self.task.start_remark(self.global_batch)
        self.remarks = [*self.task.remarks, *([remark] if remark else []), *self._length_remarks]
        return model

    def weights(self, model: nn.Module) -> Weights | None:
        """If a LoRA is trained, tells the engine that the base weights are loaded and not part of checkpoints."""
        from unisono.recipes.common.lora_base import AsLoaded

        return AsLoaded() if self._lora_base else None

    @cached_property
    def _lora_base(self) -> LoraBase | None:
        """The base weights of a LoRA; None without a LoRA. ConfigError if the run began with other base weights."""
        from unisono.recipes.common.lora_base import LoraBase
        from unisono.recipes.seo.models.load import place_of
        from unisono.recipes.seo.models.tiny import TINY

        name = self.config.model_name
        if not self.config.lora_rank or name == TINY or self.prepared is None:  # all weights are in the checkpoints
            return None
        base = LoraBase(self.prepared, [place_of(name)], self.base_precision)
        base.check(f"model_name {name}")
        return base

    def _record_base(self) -> None:
        if self._base is not None:
            self._base.record()
            self._base = None

    def dataset(self, split: str) -> Any:
        """Returns the dataset of a split, "train" or "eval"."""
        return self.task.dataset(split)

    def collate(self, items: list[Any]) -> Any:
        """Pads a batch to its longest text."""
        return self.task.collate(items)

    @property
    def coupled(self) -> bool:
        """Whether the loss compares the samples of a global batch with each other."""
        return self.task.coupled

    def loss(self, model: nn.Module, batch: Any, noise: Noise) -> Loss:
        """Returns the loss of a micro-batch of independent samples."""
        self._record_base()
        return self.task.loss(model, batch, noise)

    def embed(self, model: nn.Module, batch: Any, noise: Noise) -> Mapping[str, Tensor]:
        """Embeds the queries and pages of a micro-batch."""
        self._record_base()
        return self.task.embed(model, batch, noise)

    def couple_rows(self, rows: Mapping[str, Tensor], start: int, stop: int) -> Loss:
        """Returns the loss of a range of samples, compared with the whole global batch."""
        return self.task.couple_rows(rows, start, stop)

    def before_evaluation(self, model: nn.Module) -> None:
        """Embeds the held-out queries."""
        self.task.before_evaluation(model)

    def evaluate(self, model: nn.Module, batch: Any, noise: Noise) -> Mapping[str, Any]:
        """Returns the metrics of a batch and their baselines."""
        task = copy.copy(self.task)
        task.metrics = self.metrics  # the engine may pass copies, which it discards afterwards
        return task.evaluate(model, batch, noise)

    def preview(self, model: nn.Module, step: int) -> Mapping[str, Any] | None:
        """Returns the task's previews."""
        return self.task.preview(model, step)

    def export(self, model: nn.Module, folder: Path) -> None:
        """Writes a folder for transformers or sentence-transformers."""
        self.task.export(model, folder)


def on_cpu(values: Mapping[str, Any]) -> bool:
    """Returns whether a run with these settings trains on the CPU."""
    from unisono.devices import visible_gpus

    return (
        str(values["gpus"]) == "0" or (values["nproc"] is not None and values["gpus"] == "auto") or not visible_gpus()
    )
