"""The recipe `clips`: learns from labelled videos which moments are highlights.

`data/` reads the labels and decodes each video once into features on disk; `model.py` is a small network over windows
of clips, trained by `loss.py`; `evaluation.py` compares it with baselines on held-out videos. Afterwards,
`unisono clips VIDEO --run RUN` scores a video of any length (`scoring.py`) and cuts out its best moments (`cutting/`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from unisono.engine.recipe import Loss, Recipe, Work
from unisono.errors import ConfigError, UserError
from unisono.recipes.clips import settings

if TYPE_CHECKING:  # keeps `unisono train clips --help` from importing torch
    from torch import Tensor, nn

    from unisono.data.noise import Noise
    from unisono.recipes.clips.data.extract import Extracted, Extraction
    from unisono.recipes.clips.data.features import ExtractSettings

_INPUTS = "inputs.json"


class Clips(Recipe):
    """Highlight detection: which moments of a long video are worth cutting out."""

    many_shapes = True
    has_frozen_weights = False
    defaults: ClassVar[Mapping[str, Any]] = {
        "batch_size": 8,
        "learning_rate": 5e-4,
        "warmup_steps": 100,
        "num_epochs": 40,
        "num_workers": 4,
        "eval_every": 500,
        "save_every": 500,
        "best_metric": "eval/mAP",
        "best_mode": "max",
    }
    aliases: ClassVar[Mapping[str, str]] = settings.ALIASES
    fixed: ClassVar[Sequence[str]] = (
        # The split into training and held-out videos, and their labels:
        *("data_path", "media_path", "eval_data_path", "num_eval", "num_videos", "highest_score", "positive_from"),
        "shuffle_labels",
        # The contents of a sample:
        *("clip_seconds", "frames_per_clip", "frame_size", "features", "feature_seconds", "use", "window"),
        # The model. The weights would also load with a different number of heads, but compute a different function:
        *("width", "layers", "heads"),
    )
    headline: ClassVar[Sequence[str]] = (
        *("eval/loss", "eval/mAP", "eval/mAP_frame_difference", "eval/mAP_loudness", "eval/mAP_random"),
        *("eval/HIT@1", "eval/HIT@1_random", "eval/kendall_tau"),
    )
    Config = settings.Config

    _extractions: dict[str, Extraction | None]
    held_out: list[Extracted]
    """The videos of dataset("eval"), in the same order."""

    @classmethod
    def presets(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns defaults for the mirror set, which is meant for a CPU."""
        return settings.MIRROR_PRESETS if values["data_path"] == settings.MIRROR else {}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        from unisono.recipes.clips.checks import check_config

        check_config(config)

    # Before training -----------------------------------------------------------------------------------------------

    def prepare(self, work: Work) -> None:
        """Reads the labels, and extracts the features of the videos that are not in the cache yet."""
        from unisono.recipes.clips.data.extract import Extraction
        from unisono.recipes.clips.data.splits import make_mirror, read_splits

        self.prepared = work.folder  # set here too, for callers outside a run
        cache = Path(self.config.cache_dir).expanduser() if self.config.cache_dir else work.folder
        if self.config.data_path == settings.MIRROR:
            make_mirror(self.config, cache, work)
            if work.meet():
                return
        remarks: list[str] = []
        train, held_out = read_splits(self.config, cache, remarks.append)
        self.remarks = remarks
        self._extractions = {
            split: Extraction(cache / "clips", labelled, self.extraction_settings) if labelled else None
            for split, labelled in (("train", train), ("eval", held_out))
        }
        for extraction in self._extractions.values():
            if extraction is not None:
                extraction.fill(work, self.config.extract_workers)

    @cached_property
    def extraction_settings(self) -> ExtractSettings:
        """The settings that determine which features are extracted from each clip."""
        from unisono.recipes.clips.data.features import ExtractSettings

        config = self.config
        return ExtractSettings(
            clip_seconds=config.clip_seconds,
            frames_per_clip=config.frames_per_clip,
            size=config.frame_size,
            features=config.features,
        )

    # Data and model ------------------------------------------------------------------------------------------------

    def dataset(self, split: str) -> Any:
        """Returns windows of videos to train on, or whole videos to evaluate on."""
        from unisono.recipes.clips.data.datasets import Videos, Windows, shuffled

        extraction = self._extractions[split]
        if extraction is None:
            return None
        videos = extraction.open(self.config.leave_out_bad)
        self.remarks = [*self.remarks, *extraction.remarks]
        scores = [video.scores() for video in videos]
        if split == "train":
            self._record_inputs(videos[0])
            if self.config.shuffle_labels:
                scores = shuffled(scores, 0)
            return Windows(videos, scores, list(self._inputs), self.config.window)
        self.held_out = videos
        return Videos(videos, scores, list(self._inputs))

    def _record_inputs(self, video: Extracted) -> None:
        """Writes the names and shapes of the model's inputs to the run folder, from which `model()` reads them."""
        from unisono.recipes.clips.checks import selected_inputs
        from unisono.recipes.common.cache_files import write_cache_file

        selected = selected_inputs(self.config)
        available = [kind for kind in settings.INPUT_KINDS if kind in video.arrays]
        missing = [kind for kind in selected if kind not in available]
        if missing:
            raise ConfigError(f"use: these videos have no {missing[0]}; choose from {', '.join(available)}")
        used = selected or [kind for kind in available if kind != "stats" or available == ["stats"]]
        shapes = {kind: list(video.arrays[kind][1:]) for kind in available if kind in used}
        assert self.prepared is not None
        write_cache_file(self.prepared / _INPUTS, json.dumps(shapes).encode())

    @cached_property
    def _inputs(self) -> dict[str, tuple[int, ...]]:
        """The names of the model's inputs, with their shapes for one clip."""
        if self.prepared is None or not (file := self.prepared / _INPUTS).is_file():
            raise UserError(
                f"the run folder has no prepared/{_INPUTS}, which lists the inputs of the model; copy the whole folder"
            )
        return {kind: tuple(shape) for kind, shape in json.loads(file.read_text()).items()}

    def model(self) -> nn.Module:
        """Returns the network that scores the clips of a window."""
        from unisono.recipes.clips.model import Scorer

        config = self.config
        return Scorer(self._inputs, config.width, config.layers, config.heads, config.dropout)

    # Training ------------------------------------------------------------------------------------------------------

    def loss(self, model: nn.Module, batch: Any, noise: Noise) -> Loss:
        """Computes the score loss and the ranking loss, each averaged within a window and summed over windows."""
        from unisono.recipes.clips.loss import ranking_loss, score_loss

        logits: Tensor = model({kind: batch[kind] for kind in self._inputs})
        logits = logits.float() if logits.itemsize < 4 else logits  # `unisono verify` computes in float64
        scores = batch["scores"].to(logits)
        score, ranking = score_loss(logits, scores, self.config.score_loss), ranking_loss(logits, scores)
        total = score + self.config.ranking_weight * ranking
        metrics = {"score_loss": score.detach().sum(), "ranking_loss": ranking.detach().sum()}
        return Loss(total.sum(), len(total), metrics)

    def evaluate(self, model: nn.Module, batch: Any, noise: Noise) -> Mapping[str, Any]:
        """Computes the metrics of the model and of the baselines on whole videos."""
        from unisono.recipes.clips.evaluation import evaluate_videos
        from unisono.recipes.clips.loss import score_loss
        from unisono.recipes.clips.scoring import logits_of

        inputs = {kind: batch[kind] for kind in self._inputs}
        logits = logits_of(model, inputs, self.config.window).float()  # type: ignore[arg-type]
        loss = score_loss(logits, batch["scores"].to(logits), self.config.score_loss)
        names = [self.held_out[int(index)].source.name for index in batch["index"]]
        return {"loss": (loss.sum(), len(loss)), **evaluate_videos(logits, batch, names, self.config)}
