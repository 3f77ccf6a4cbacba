"""The recipe `clips`: videos and what people thought of their parts in, a model that finds the best parts out.

Labels in every form people have (`labels.py`), each video decoded once (`extract.py`), a small network that looks,
listens and compares (`model.py`, `loss.py`), measured beside scorers without skill (`metrics.py`, `baselines.py`).
`unisono clips VIDEO --run RUN` then scores a video of any length (`scoring.py`) and cuts it (`cutting.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from unisono.engine.recipe import Loss, Recipe, Work
from unisono.errors import ConfigError, UserError
from unisono.recipes.clips import settings

if TYPE_CHECKING:  # `unisono train clips --help` need not wait for torch
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from unisono.data.noise import Noise
    from unisono.recipes.clips.extract import Extracted, Extraction
    from unisono.recipes.clips.features import ExtractSettings
    from unisono.recipes.clips.labels import Labelled

MIRROR = "mirror"
_EVERY = 5  # one video of so many is held out, where nobody says how many
_KINDS = ("frames", "mel", "stats", "features")
_INPUTS = "inputs.json"


class Clips(Recipe):
    """Which moments of a long video are worth cutting out."""

    many_shapes = True
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
        "clip_seconds",
        "frames_per_clip",
        "frame_size",
        "features",
        "use",
        "width",
        "layers",
    )
    headline: ClassVar[Sequence[str]] = (
        *("eval/loss", "eval/mAP", "eval/mAP_frame_difference", "eval/mAP_loudness", "eval/mAP_random"),
        *("eval/HIT@1", "eval/HIT@1_random", "eval/kendall_tau"),
    )
    Config = settings.Config

    @classmethod
    def presets(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """What suits the built-in set on a CPU."""
        return settings.MIRROR if values["data_path"] == MIRROR else {}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        check_config(config)

    @cached_property
    def extraction_settings(self) -> ExtractSettings:
        """What is computed of each clip."""
        from unisono.recipes.clips.features import ExtractSettings

        config = self.config
        return ExtractSettings(
            clip_seconds=config.clip_seconds,
            frames_per_clip=config.frames_per_clip,
            size=config.frame_size,
            features=config.features,
        )

    # Before training -----------------------------------------------------------------------------------------------

    def prepare(self, work: Work) -> None:
        """Reads the labels and computes what is not there yet of each video."""
        self.prepared = work.folder  # also for those who call it by themselves
        if self.config.data_path == MIRROR:
            self._make_mirror(work)
            if work.meet():
                return
        said: list[str] = []
        labelled, held_out = self._labelled(said)
        folder = Path(self.config.cache_dir).expanduser() if self.config.cache_dir else work.folder
        self._extractions = {
            split: self._extraction(folder / "clips", some) for split, some in (("train", labelled), ("eval", held_out))
        }
        self.remarks = said
        for extraction in self._extractions.values():
            if extraction is not None:
                extraction.fill(work, self.config.extract_workers)

    def _extraction(self, folder: Path, labelled: Sequence[Labelled]) -> Extraction | None:
        from unisono.recipes.clips.extract import Extraction

        return Extraction(folder, labelled, self.extraction_settings) if labelled else None

    def _make_mirror(self, work: Work) -> None:
        """The built-in set, written once."""
        from unisono.recipes.clips.synthetic import make

        for split, number in (("train", self.config.num_videos), ("eval", max(1, self.config.num_videos // 4))):
            for folder in work.share([self._mirror(split)]):
                if not (folder / "labels.csv").is_file():
                    work.message(f"making {number} videos in {folder}")
                    part = folder.with_name(f"{folder.name}.part")
                    if part.exists():
                        _remove_own(part)
                    make(part, number, split=split, size=self.config.frame_size)
                    part.rename(folder)

    def _mirror(self, split: str) -> Path:
        assert self.prepared is not None
        base = Path(self.config.cache_dir).expanduser() if self.config.cache_dir else self.prepared
        return base / f"mirror_{split}_{self.config.num_videos}x{self.config.frame_size}"

    def _labelled(self, said: list[str]) -> tuple[list[Labelled], list[Labelled]]:
        """To learn from, and held out."""
        config = self.config
        if config.data_path == MIRROR:
            return self._read(str(self._mirror("train")), said), self._read(str(self._mirror("eval")), said)
        labelled = self._read(config.data_path, said)
        if config.eval_data_path:
            return labelled, self._read(config.eval_data_path, said)
        names = list(dict.fromkeys(each.name for each in labelled))  # all queries about a video are on one side
        number = config.num_eval if config.num_eval is not None else len(names) // _EVERY
        if not number and config.num_eval is None:
            said.append(
                f"no video is held out, so nothing will tell how good the model is: one of {_EVERY} would be, and "
                f"data_path has only {len(names)}; give --num_eval 1, or --eval_data_path with other labels"
            )
        if number >= len(names):
            raise ConfigError(
                f"num_eval {number}: data_path {config.data_path} has {len(names)} videos; some must be left"
            )
        held_out = {names[(2 * place + 1) * len(names) // (2 * number)] for place in range(number)}
        return [each for each in labelled if each.name not in held_out], [
            each for each in labelled if each.name in held_out
        ]

    def _read(self, path: str, said: list[str]) -> list[Labelled]:
        from unisono.recipes.clips.labels import read_labels

        config = self.config
        return read_labels(
            Path(path).expanduser(),
            config.clip_seconds,
            media=Path(config.media_path).expanduser() if config.media_path else None,
            highest_score=config.highest_score,
            feature_seconds=config.feature_seconds,
            leave_out_bad=config.leave_out_bad,
            said=said.append,
        )

    # Model and data ------------------------------------------------------------------------------------------------

    @cached_property
    def _inputs(self) -> dict[str, tuple[int, ...]]:
        """What the model is given of each clip, and its shape."""
        if self.prepared is None or not (file := self.prepared / _INPUTS).is_file():
            raise UserError(f"this run's folder has no prepared/{_INPUTS}, which says what the model is made for")
        return {name: tuple(shape) for name, shape in json.loads(file.read_text()).items()}

    def _note_inputs(self, video: Extracted) -> None:
        from unisono.recipes.common.whole_files import write_whole

        asked = [name.strip() for name in self.config.use.split(",") if name.strip()]
        there = [name for name in _KINDS if name in video.arrays]
        missing = [name for name in asked if name not in there]
        if missing:
            raise ConfigError(f"use: there is no {missing[0]} of these videos; there is {', '.join(there)}")
        used = asked or [name for name in there if name != "stats" or there == ["stats"]]
        shapes = {name: list(video.arrays[name][1:]) for name in there if name in used}
        assert self.prepared is not None
        write_whole(self.prepared / _INPUTS, json.dumps(shapes).encode())

    def dataset(self, split: str) -> Any:
        """Windows to learn from, whole videos to evaluate with."""
        from unisono.recipes.clips.data import Videos, Windows, shuffled

        extraction = self._extractions[split]
        if extraction is None:
            return None
        videos = extraction.open(self.config.leave_out_bad)
        self.remarks = [*self.remarks, *extraction.remarks]
        if split == "train":
            self._note_inputs(videos[0])
        scores = [self._scores(video) for video in videos]
        if split == "train":
            if self.config.shuffle_labels:
                scores = shuffled(scores, 0)
            return Windows(videos, scores, list(self._inputs), self.config.window)
        self.held_out = videos
        return Videos(videos, scores, list(self._inputs))

    def _scores(self, video: Extracted) -> NDArray[np.float32]:
        scores: NDArray[np.float32] = video.source.scores_for(
            video.num_clips, duration=video.duration, cut_off=bool(video.remark)
        )
        return scores

    def model(self) -> nn.Module:
        """The scorer."""
        from unisono.recipes.clips.model import Scorer

        config = self.config
        return Scorer(self._inputs, config.width, config.layers, config.heads, config.dropout)

    # Training ------------------------------------------------------------------------------------------------------

    def loss(self, model: nn.Module, batch: Any, noise: Noise) -> Loss:
        """The error of the scores and of their order: of each window the mean, summed over windows."""
        from unisono.recipes.clips.loss import ranking_loss, score_loss

        logits: Tensor = model({name: batch[name] for name in self._inputs})
        logits = logits.float() if logits.itemsize < 4 else logits  # verify computes in 64 bit, and means it
        scores = batch["scores"].to(logits)
        each, order = score_loss(logits, scores, self.config.score_loss), ranking_loss(logits, scores)
        total = each + self.config.ranking_weight * order
        return Loss(total.sum(), len(total), {"score_loss": each.detach().sum(), "ranking_loss": order.detach().sum()})

    def evaluate(self, model: nn.Module, batch: Any, noise: Noise) -> Mapping[str, Any]:
        """Every measure, beside scorers without skill."""
        import torch

        from unisono.recipes.clips.baselines import kinds_for, scores
        from unisono.recipes.clips.features import STATS
        from unisono.recipes.clips.loss import score_loss
        from unisono.recipes.clips.metrics import of_video
        from unisono.recipes.clips.scoring import logits_of

        config = self.config
        logits = logits_of(model, {name: batch[name] for name in self._inputs}, config.window).float()  # type: ignore[arg-type]
        loss = score_loss(logits, batch["scores"].to(logits), config.score_loss)
        found: dict[str, list[float]] = {}
        for row, said in enumerate(torch.sigmoid(logits).cpu().numpy()):
            truth = batch["scores"][row].cpu().numpy()
            name = self.held_out[int(batch["index"][row])].source.name
            stats = batch["stats"][row].cpu().numpy() if "stats" in batch else truth[:, None]
            scorers = {"": said} | {
                f"_{kind}": scores(kind, stats, STATS, video=name)
                for kind in kinds_for(STATS if "stats" in batch else ())
            }
            for suffix, given in scorers.items():
                measured = of_video(truth, given, config.clip_seconds, positive_from=config.positive_from)
                for measure, value in measured.items():
                    found.setdefault(f"{measure}{suffix}", []).extend([] if math.isnan(value) else [value])
        sums = {name: (torch.tensor(sum(values), dtype=torch.float64), len(values)) for name, values in found.items()}
        return {"loss": (loss.sum(), len(loss)), **sums}

    _extractions: dict[str, Extraction | None]
    held_out: list[Extracted]
    """The videos of dataset("eval"), in its order."""


def check_config(config: Any) -> None:
    """Refuses numbers out of range and settings that contradict each other."""
    from unisono.recipes.common.checks import check_paths, check_range

    check_paths(config, ("data_path", "media_path", "eval_data_path", "cache_dir"))
    if not config.data_path:
        raise ConfigError(
            "no labels: give --data_path FOLDER (videos and labels.csv with video,start,end,score), or --data_path "
            "mirror to try it out with nothing downloaded"
        )
    least = {"num_videos": 4, "extract_workers": 1, "frames_per_clip": 1, "frame_size": 16, "width": 8, "layers": 1}
    most = {"frame_size": 1024, "frames_per_clip": 1000, "width": 16_384, "layers": 1000, "window": 100_000}
    check_range(config, least | {"heads": 1, "window": 2, "ranking_weight": 0}, most)
    check_range(config, {"positive_from": 0}, {"positive_from": 1})
    for name in ("clip_seconds", "highest_score", "feature_seconds"):
        if getattr(config, name) is not None and not 0 < getattr(config, name) < math.inf:
            raise ConfigError(f"{name}: expected a number above 0, got {getattr(config, name)}")
    if config.width % config.heads:
        raise ConfigError(f"width {config.width} cannot be shared by {config.heads} heads; make it a multiple")
    if not 0 <= config.dropout < 1:
        raise ConfigError(f"dropout: expected a share from 0 to 1, got {config.dropout}")
    if config.num_eval is not None and config.num_eval < 0:
        raise ConfigError(f"num_eval: expected at least 0, got {config.num_eval}")
    if config.eval_data_path and config.num_eval:
        raise ConfigError("eval_data_path and num_eval both hold out videos; leave one of them out")
    unknown = {name.strip() for name in config.use.split(",") if name.strip()} - set(_KINDS)
    if unknown:
        raise ConfigError(f"use: {sorted(unknown)[0]!r} is unknown; expected some of {', '.join(_KINDS)}")


def _remove_own(folder: Path) -> None:
    """Removes what a killed process of ours has half written: videos and labels of the built-in set, nothing else."""
    for file in folder.glob("*.mp4"):
        file.unlink()
    (folder / "labels.csv").unlink(missing_ok=True)
    folder.rmdir()
