"""A dataset from a folder of images and videos or from tar shards; cached, or encoded in every step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from unisono.engine.recipe import Work
from unisono.errors import ConfigError
from unisono.formatting import format_count
from unisono.recipes.common.streams import VIDEO_SUFFIXES
from unisono.recipes.wan.condition.cached import ConditionSettings
from unisono.recipes.wan.condition.kind import ConditionKind
from unisono.recipes.wan.data.cache import Cache, CacheSettings
from unisono.recipes.wan.data.cached import CachedSamples, ShapedSamples
from unisono.recipes.wan.data.crop import Crop
from unisono.recipes.wan.data.shards import are_shards, read_shards
from unisono.recipes.wan.data.sources import Source, read_sources
from unisono.recipes.wan.data.uncached import SampleSizes, UncachedSamples
from unisono.recipes.wan.models.encoders import Encoders


def check_paths_exist(config: Any) -> None:
    """Raises ConfigError if a dataset's folder is missing; runs before a model is downloaded."""
    for name in ("dataset_path", "eval_dataset_path"):
        path = getattr(config, name)
        if path and are_shards(path):
            _check_for_shards(name, path, config)
        elif path and path != "shapes" and not Path(path).expanduser().exists():
            raise ConfigError(
                f"{name} {path}: no such folder; expected images and videos with a text file each, or try "
                "--model_config tiny --dataset_path shapes, which draws its own data"
            )


def _check_for_shards(name: str, path: str, config: Any) -> None:
    if not path.endswith(".tar"):
        raise ConfigError(f"{name} {path}: expected tar shards, such as s3://bucket/clips-{{000..099}}.tar")
    unsupported = {"no_cache": config.no_cache, "masked_loss": config.masked_loss}
    if setting := next((setting for setting, is_set in unsupported.items() if is_set), None):
        raise ConfigError(f"{setting}: tar shards need the cache and do not support masks; remove {setting}")


class FolderData:
    """The images and videos of a folder or of tar shards, split into training and held-out samples."""

    def __init__(self, config: Any, encoders: Encoders, prompts: Sequence[str], condition: ConditionKind) -> None:
        self._given = condition if condition.has_channels else None
        self._config, self._encoders, self._prompts = config, encoders, prompts
        self._crop = Crop(config.num_frames, config.height, config.width, config.max_pixels, config.fps, config.window)
        self._indices: dict[str, Cache | SampleSizes] = {}
        self._opened: dict[str, CachedSamples | UncachedSamples] = {}
        self.remarks: list[str] = []

    def prepare(self, work: Work) -> None:
        """Encodes the samples that are not in the cache yet; without a cache, only reads their sizes."""
        config = self._config
        paths = {"train": config.dataset_path, "eval": config.eval_dataset_path}
        folder = Path(config.cache_dir).expanduser() if config.cache_dir else work.folder / "cache"
        for split, path in paths.items():
            if path:
                sources = self._sources(path, work)
                if split == "train":
                    self._check_held_out(len(sources))
                self._indices[split] = self._index(sources, folder, self._prompts if split == "train" else ())
                self._opened.pop(split, None)
        for index in self._indices.values():
            if isinstance(index, Cache):
                index.fill(work, self._encoders.text_encoder, self._encoders.vae, self._encoders.image_encoder)
            else:
                index.fill(work)

    def _sources(self, path: str, work: Work) -> list[Source]:
        skips = self._config.leave_out_bad
        if are_shards(path):
            sources = self._packed(path, work)
        else:
            sources = read_sources(Path(path).expanduser(), leave_out_bad=skips, report=work.message)
        num_videos = sum(source.suffix in VIDEO_SUFFIXES for source in sources)
        if num_videos and self._config.num_frames == 1:
            videos = format_count(num_videos, "video")
            self.remarks.append(
                f"{path}: --num_frames 1 uses a single frame of each video ({videos}); use 5, 9, 13, … for more"
            )
        self._check_masks(path, [source.name for source in sources if source.mask is None], len(sources))
        return sources

    def _packed(self, path: str, work: Work) -> list[Source]:
        if self._given is not None:
            raise ConfigError(f"{path}: image-to-video models need a folder of videos; tar shards have no given frames")
        index_dir = Path(self._config.cache_dir).expanduser() / "index" if self._config.cache_dir else None
        samples = read_shards(path, index_dir, work, leave_out_bad=self._config.leave_out_bad, report=work.message)
        return [Source(sample.name, None, sample.caption, packed=sample.media) for sample in samples]

    def _check_masks(self, path: str, without: Sequence[str], num_samples: int) -> None:
        """Raises ConfigError if masked_loss is set but no mask exists; adds remarks about missing and unused masks."""
        examples = ", ".join(without[:3]) + (", …" if len(without) > 3 else "")
        if not self._config.masked_loss:
            if len(without) < num_samples:
                masks = format_count(num_samples - len(without), "mask")
                self.remarks.append(
                    f"{path}: {masks} beside the samples are not used; --masked_loss weights the loss by them"
                )
        elif len(without) == num_samples and path == self._config.dataset_path:
            raise ConfigError(
                f"masked_loss: {path} has no masks; add a mask for each sample (for clip.mp4: clip.mask.png or "
                "clip.mask.mp4), or remove masked_loss"
            )
        elif without:
            self.remarks.append(
                f"{path}: {len(without):,} of {num_samples:,} samples have no mask, so they count fully: {examples}"
            )

    def _index(self, sources: list[Source], folder: Path, prompts: Sequence[str]) -> Cache | SampleSizes:
        config, encoders = self._config, self._encoders
        if config.no_cache:
            return SampleSizes(folder, sources, self._crop, encoders.geometry, config.masked_loss, self._given)
        vae, text = encoders.fingerprints()
        sizes = encoders.text_width, encoders.text_length
        raw = config.latents == "raw" and any(source.latent is not None for source in sources)
        settings = CacheSettings(
            *(vae, text, encoders.geometry, *sizes, self._crop, encoders.text_dtype),
            statistics=encoders.statistics() if raw else None,
            masked=config.masked_loss,
            condition=self._condition_settings(),
        )
        without_caption = [""] if config.caption_dropout or config.guidance != 1 else []
        return Cache(folder, sources, settings, [*without_caption, *prompts])

    def _condition_settings(self) -> ConditionSettings | None:
        if self._given is None:
            return None
        return ConditionSettings(self._given, self._encoders.image_fingerprint() if self._given.has_embedding else "")

    def dataset(self, split: str) -> ShapedSamples | None:
        """Opens the samples of a split; None if the split has none."""
        config = self._config
        if split == "eval" and config.eval_dataset_path:
            return self._open("eval")
        samples = self._open("train")
        if not config.num_eval:
            return samples if split == "train" else None
        self._check_held_out(len(samples))  # checked again, because leave_out_bad may have removed samples
        held_out = {number * len(samples) // config.num_eval for number in range(config.num_eval)}
        return samples.subset([index for index in range(len(samples)) if (index in held_out) == (split == "eval")])

    def _check_held_out(self, num_samples: int) -> None:
        if 0 < self._config.num_eval >= num_samples:
            raise ConfigError(
                f"num_eval {self._config.num_eval}: the dataset has {num_samples} samples, and some must remain for "
                "training"
            )

    def _open(self, split: str) -> CachedSamples | UncachedSamples:
        # Opens the samples only once, because every preview needs some of them, and opening a million samples is slow.
        if split not in self._opened:
            self._opened[split] = data = self._indices[split].open(self._config.leave_out_bad)
            self.remarks += [remark for remark in data.remarks if remark not in self.remarks]
        return self._opened[split]

    def most_tokens(self) -> int:
        """Returns the largest number of transformer tokens in a sample; valid after all ranks have run prepare()."""
        return max(self._encoders.geometry.tokens(shape) for shape in self._open("train").distinct_shapes)

    def text(self, caption: str) -> Tensor | None:
        """Returns the cached text embedding of a caption, [text length, width]; None without a cache."""
        cache = self._indices["train"]
        return cache.text(caption) if isinstance(cache, Cache) else None
