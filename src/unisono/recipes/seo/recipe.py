"""The recipe `seo`: queries, pages and labels in, language models that rank, score or write pages out.

Three tasks share it, each in a file of its own: `rank.py` and `cross.py` (which page answers a query), `score.py` (a
number or a class of a page, from labels), `snippet.py` (a page's title or description). Nothing is learned without
labels, and every figure stands beside what plain words, or no skill at all, would give. Rules about pages, which nobody
has learned, are in `checks.py`; `unisono seo SITE --run RUN` puts both into one report.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from unisono.engine.recipe import Loss, Recipe, Work
from unisono.errors import ConfigError
from unisono.recipes.common.checks import check_paths, check_range
from unisono.recipes.seo import settings

if TYPE_CHECKING:  # `unisono train seo --help` need not wait for torch
    from torch import Tensor, nn

    from unisono.data.noise import Noise
    from unisono.parallel.materialize import Weights
    from unisono.recipes.common.lora_base import LoraBase
    from unisono.recipes.seo.tasks.task import Task
    from unisono.settings import Settings


_PAIRS_AT_ONCE = 400
_EPOCHS = 3
CPU_STEPS = 120
"""Optimizer steps on a CPU, at most, unless the user says how long: about a quarter of an hour on two cores."""
_CPU_MICRO_BATCH = 16  # memory is that of the activations of a micro-batch, and on a CPU more at once are no faster


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
        # What was trained on must not be held out later, and figures of one run must be of one question:
        *("data_path", "eval_data_path", "num_eval", "num_candidates", "hard_candidates", "rerank"),
        *("max_length", "query_length", "target_length", "num_negatives"),  # what a sample contains
        *("lora_rank", "lora_alpha", "lora_targets"),
    )
    Config = settings.Config

    @classmethod
    def presets(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Which number says what the best checkpoint is, and what suits the built-in set."""
        best = {"rank": ("eval/MRR@10", "max"), "score": ("eval/loss", "min"), "snippet": ("eval/loss", "min")}
        metric, mode = best.get(str(values["task"]), best["rank"])
        found: dict[str, Any] = {"best_metric": metric, "best_mode": mode}
        if values["model_name"] == "tiny":
            found["learning_rate"] = 1e-3
        if values["num_epochs"] is None and values["max_steps"] is None:  # what the user says counts alone
            found["num_epochs"] = _EPOCHS
        if values["model_name"] != "tiny" and on_cpu(values):
            if "num_epochs" in found:
                found["max_steps"] = CPU_STEPS
            if isinstance(values["batch_size"], int):
                found["micro_batch"] = max(1, min(_CPU_MICRO_BATCH, values["batch_size"]))
        if values["task"] == "rank" and values["method"] == "cross" and isinstance(values["rerank"], int):
            # A query comes with all the pages that are put in order: a batch of them is as large as one in training.
            found["eval_batch_size"] = max(1, _PAIRS_AT_ONCE // max(1, values["rerank"]))
        return found

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        check_config(config)
        self._base: LoraBase | None = None  # of a LoRA, until it is noted
        self._said: Sequence[str] = ()  # about how long it trains

    @cached_property
    def task(self) -> Task:
        """What is learned."""
        config = self.config
        found: Task
        if config.task == "score":
            from unisono.recipes.seo.tasks.score import Score

            found = Score(config)
        elif config.task == "snippet":
            from unisono.recipes.seo.tasks.snippet import Snippet

            found = Snippet(config)
        elif config.method == "cross":
            from unisono.recipes.seo.tasks.cross_encoder import CrossEncoder

            found = CrossEncoder(config)
        else:
            from unisono.recipes.seo.tasks.bi_encoder import BiEncoder

            found = BiEncoder(config)
        if self.prepared is not None:
            found.folder = self.prepared
        self.metrics = found.metrics  # where the engine looks for them
        return found

    @property
    def headline(self) -> Sequence[str]:  # type: ignore[override]
        """The figures of the task and those beside them."""
        return self.task.headline

    def check_settings(self, settings: Settings) -> None:
        """Refuses what would do nothing, and what a contrastive loss cannot be trained with."""
        check_kind(self.config)
        run = settings.run
        if (run.max_steps, run.num_epochs) == (CPU_STEPS, _EPOCHS) and self.config.model_name != "tiny":
            self._said = [
                f"without a GPU the default is {CPU_STEPS} steps or {_EPOCHS} epochs, whichever is shorter; "
                "--num_epochs or --max_steps says how long"
            ]
        if self.coupled and settings.parallel.strategy == "dp":
            raise ConfigError(
                "strategy dp cuts batches apart that are sorted by length; use ddp (or --method cross), which is faster"
            )

    # What the engine asks, the task answers --------------------------------------------------------------------------

    def prepare(self, work: Work) -> None:
        """Reads the data and keeps its tokens."""
        self.prepared = work.folder
        self._base = self._beside and self._beside.for_one_process(work)
        self.task.folder = work.folder
        self.task.prepare(work)

    def model(self) -> nn.Module:
        """The task's model."""
        found, said = self.task.model(), None
        if self.global_batch:  # it will be trained
            self.task.get_ready(found, flash_attention=self.flash_attention)
            said = self.task.said_at_start(self.global_batch)
        self.remarks = [*self.task.remarks, *([said] if said else []), *self._said]
        return found

    def weights(self, model: nn.Module) -> Weights | None:
        """Of a LoRA: those that are not trained lie in the model's folder, and need not be in every checkpoint."""
        from unisono.recipes.common.lora_base import AsLoaded

        return AsLoaded() if self._beside else None

    @cached_property
    def _beside(self) -> LoraBase | None:
        """What a LoRA is trained beside; refused where it is not what the run began with."""
        from unisono.recipes.common.lora_base import LoraBase
        from unisono.recipes.seo.models.load import place_of
        from unisono.recipes.seo.models.tiny import TINY

        name = self.config.model_name
        if not self.config.lora_rank or name == TINY or self.prepared is None:  # all weights are in the checkpoint
            return None
        base = LoraBase(self.prepared, [place_of(name)])
        base.check(f"model_name {name}")
        return base

    def _trains(self) -> None:
        if self._base is not None:
            self._base.record()
            self._base = None

    def dataset(self, split: str) -> Any:
        """The task's data."""
        return self.task.dataset(split)

    def collate(self, items: list[Any]) -> Any:
        """Padded to the longest."""
        return self.task.collate(items)

    @property
    def coupled(self) -> bool:
        """Whether each query is compared with the pages of all others."""
        return self.task.coupled

    def loss(self, model: nn.Module, batch: Any, noise: Noise) -> Loss:
        """The task's loss, where samples do not meet."""
        self._trains()
        return self.task.loss(model, batch, noise)

    def embed(self, model: nn.Module, batch: Any, noise: Noise) -> Mapping[str, Tensor]:
        """Vectors of queries and pages."""
        self._trains()
        return self.task.embed(model, batch, noise)

    def couple(self, rows: Mapping[str, Tensor]) -> Loss:
        """The loss of a whole global batch."""
        return self.task.couple(rows)

    def before_evaluation(self, model: nn.Module) -> None:
        """Vectors of the held-out queries."""
        self.task.before_evaluation(model)

    def evaluate(self, model: nn.Module, batch: Any, noise: Noise) -> Mapping[str, Any]:
        """The task's measures, beside those of plain words and of no skill."""
        task = copy.copy(self.task)
        task.metrics = self.metrics  # of a stand-in the engine gives us copies, which it forgets
        return task.evaluate(model, batch, noise)

    def preview(self, model: nn.Module, step: int) -> Mapping[str, Any] | None:
        """What a person wants to look at."""
        return self.task.preview(model, step)

    def export(self, model: nn.Module, folder: Path) -> None:
        """What transformers and sentence-transformers load."""
        self.task.export(model, folder)


def on_cpu(values: Mapping[str, Any]) -> bool:
    """Whether a run with these settings trains without a GPU."""
    from unisono.devices import visible_gpus

    return (
        str(values["gpus"]) == "0" or (values["nproc"] is not None and values["gpus"] == "auto") or not visible_gpus()
    )


def check_kind(config: settings.Config) -> None:
    """Refuses settings of another task. Not in a recipe's constructor: what an old run was told may be exported."""
    for name, kinds in settings.FOR.items():
        if config.kind not in kinds and getattr(config, name) != getattr(settings.Config, name):
            told = kinds[0] if len(kinds) == 1 else "task rank"
            raise ConfigError(f"{name} does something for {told} only, and this is {config.kind}; leave it out")


def check_config(config: settings.Config) -> None:
    """Refuses settings that cannot be trained with."""
    if not config.data_path:
        told = {"rank": "queries and pages", "score": "pages and labels", "snippet": "pages and titles"}[config.task]
        own = "" if config.task == "score" else ", or `debian`"
        raise ConfigError(f"data_path: expected data, for instance a .csv of {told}{own}")
    check_paths(config, ("data_path", "eval_data_path", "cache_dir", "model_name"))
    least: dict[str, float] = {"max_length": 8, "query_length": 4, "length_groups": 1, "num_negatives": 0}
    least |= {"rerank": 1, "target_length": 4, "scale": 1e-3, "lora_rank": 0, "lora_dropout": 0.0}
    most: dict[str, float] = {"max_length": 2**17, "query_length": 2**17, "length_groups": 64, "num_negatives": 1000}
    most |= {"rerank": 100}  # so many are kept of what plain words find
    most |= {"target_length": 1024, "scale": 1e4, "lora_rank": 4096, "lora_dropout": 0.99}
    check_range(config, least, most)
    if config.lora_alpha is not None and not 0 < config.lora_alpha < math.inf:
        raise ConfigError(f"lora_alpha: expected a number above 0, got {config.lora_alpha}")
    for name in ("num_eval", "num_candidates"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name}: expected at least 1, got {value}")
