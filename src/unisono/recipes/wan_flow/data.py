"""The samples of a run: a folder's, cached or encoded in every step, or the built-in shapes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from unisono.engine.recipe import Work
from unisono.errors import ConfigError
from unisono.recipes.common.streams import FILMS
from unisono.recipes.wan.data.cache import Cache, CacheSettings
from unisono.recipes.wan.data.cached import Cached, ShapedSamples
from unisono.recipes.wan.data.cut import Cut
from unisono.recipes.wan.data.on_the_fly import Measured, OnTheFly
from unisono.recipes.wan.data.sources import Source, read_sources
from unisono.recipes.wan.models.companions import Companions

SHAPES = "shapes"
TINY_SIZE = 32
NUM_EVAL_SHAPES = 96  # four of each pair of colour and shape


def check_there(config: Any) -> None:
    """Refuses folders that are not there, before a model is fetched from afar."""
    for name in ("dataset_path", "eval_dataset_path"):
        path = getattr(config, name)
        if path and path != SHAPES and not Path(path).expanduser().exists():
            raise ConfigError(
                f"{name} {path}: there is no such folder; put pictures and films with a text file each into one, or "
                "try --model_config tiny --dataset_path shapes, which draws its own data"
            )


class FolderData:
    """Pictures and films of a folder, with what is held out for evaluation."""

    def __init__(self, config: Any, companions: Companions, prompts: Sequence[str]) -> None:
        self._config, self._companions, self._prompts = config, companions, prompts
        self._cut = Cut(config.num_frames, config.height, config.width, config.max_pixels, config.fps, config.window)
        self._parts: dict[str, Cache | Measured] = {}
        self._opened: dict[str, Cached | OnTheFly] = {}
        self.remarks: list[str] = []

    def prepare(self, work: Work) -> None:
        """Encodes what is not in the cache yet; without one, only looks at the files."""
        config = self._config
        paths = {"train": config.dataset_path, "eval": config.eval_dataset_path}
        place = Path(config.cache_dir).expanduser() if config.cache_dir else work.folder / "cache"
        for split, path in paths.items():
            if path:
                sources = self._sources(path, split, work)
                if split == "train":
                    self._check_held_out(len(sources))
                self._parts[split] = self._of(sources, place, self._prompts if split == "train" else ())
                self._opened.pop(split, None)
        for part in self._parts.values():
            if isinstance(part, Cache):
                part.fill(work, self._companions.text_encoder, self._companions.vae)
            else:
                part.fill(work)

    def _sources(self, path: str, split: str, work: Work) -> list[Source]:
        sources = read_sources(Path(path).expanduser(), leave_out_bad=self._config.leave_out_bad, said=work.message)
        films = sum(source.media is not None and source.media.suffix.lower() in FILMS for source in sources)
        if films and self._config.num_frames == 1:
            many = "1 film is" if films == 1 else f"{films:,} films are"
            self.remarks.append(f"{path}: {many} used with a single frame (--num_frames 1; 5, 9, 13, ... take more)")
        return sources

    def _of(self, sources: list[Source], place: Path, prompts: Sequence[str]) -> Cache | Measured:
        config, companions = self._config, self._companions
        if config.no_cache:
            return Measured(place, sources, self._cut, companions.geometry)
        vae, text = companions.fingerprints()
        sizes = companions.text_width, companions.text_length
        raw = config.latents == "raw" and any(source.latent is not None for source in sources)
        settings = CacheSettings(
            *(vae, text, companions.geometry, *sizes, self._cut, companions.text_dtype),
            statistics=companions.statistics() if raw else None,
        )
        without_caption = [""] if config.caption_dropout or config.guidance != 1 else []
        return Cache(place, sources, settings, [*without_caption, *prompts])

    def dataset(self, split: str) -> ShapedSamples | None:
        """The samples of a split."""
        config = self._config
        if split == "eval" and config.eval_dataset_path:
            return self._open("eval")
        everything = self._open("train")
        if not config.num_eval:
            return everything if split == "train" else None
        self._check_held_out(len(everything))  # again: some may have been left out
        held_out = {number * len(everything) // config.num_eval for number in range(config.num_eval)}
        return everything.part([index for index in range(len(everything)) if (index in held_out) == (split == "eval")])

    def _check_held_out(self, there: int) -> None:
        if 0 < self._config.num_eval >= there:
            raise ConfigError(f"num_eval {self._config.num_eval}: there are {there} samples, and some must be left")

    def _open(self, split: str) -> Cached | OnTheFly:
        # Once: of a million samples it takes a while, and every preview asks for some.
        if split not in self._opened:
            self._opened[split] = data = self._parts[split].open(self._config.leave_out_bad)
            self.remarks += [remark for remark in data.remarks if remark not in self.remarks]
        return self._opened[split]

    def most_tokens(self) -> int:
        """Of a sample, in the transformer; after everybody's prepare()."""
        there = self._open("train").shapes_there
        return max(self._companions.geometry.tokens(shape) for shape in there)

    def text(self, caption: str) -> Tensor | None:
        """[text length, width] what the transformer gets for a caption that was named before; None without a cache."""
        cache = self._parts["train"]
        return cache.text(caption) if isinstance(cache, Cache) else None


class ShapesData:
    """The built-in set: coloured shapes, drawn by code."""

    def __init__(self, config: Any, companions: Companions, prompts: Sequence[str]) -> None:
        from unisono.recipes.wan.tiny.shapes import Shapes

        self._companions, self._prompts = companions, prompts
        size, frames = config.height or TINY_SIZE, config.num_frames
        if config.width not in (0, size):
            raise ConfigError(f"shapes are drawn in squares: height {config.height} and width {config.width} differ")
        self._shapes = {
            "train": Shapes(config.num_shapes, frames, size, split="train"),
            "eval": Shapes(NUM_EVAL_SHAPES, frames, size, split="eval"),
        }
        self._folder = Path()
        self.remarks: list[str] = []

    def prepare(self, work: Work) -> None:
        """Draws and encodes them."""
        from unisono.recipes.wan.tiny.encoded import encode, is_encoded

        vae = self._companions.vae()
        self._folder = work.folder / "shapes" / vae.fingerprint()
        missing = [split for split in self._shapes if not is_encoded(self._shapes[split], self._place(split))]
        if missing:
            work.message(f"drawing and encoding {sum(len(self._shapes[split]) for split in missing):,} shapes")
        for split in missing:
            encode(work, self._shapes[split], self._place(split), vae)

    def dataset(self, split: str) -> Any:
        """The samples of a split."""
        from unisono.recipes.wan.tiny.encoded import read

        shapes = self._shapes[split]
        captions = {shapes.plan(index).caption for index in range(len(shapes))}
        return read(shapes, self._place(split), self._rows(captions))

    def most_tokens(self) -> int:
        """Of each sample, in the transformer."""
        geometry, shapes = self._companions.geometry, self._shapes["train"]
        side = shapes.size // geometry.space
        return geometry.tokens((0, 1 + shapes.num_frames // geometry.time, side, side))

    def text(self, caption: str) -> Tensor:
        """[text length, width] what the transformer gets for a caption."""
        return self._rows({caption})[caption]

    def _rows(self, captions: set[str]) -> dict[str, Tensor]:
        from unisono.recipes.wan.tiny.encoded import rows_of

        return rows_of(captions, self._companions.text_encoder(), self._companions.text_length)

    def _place(self, split: str) -> Path:
        shapes = self._shapes[split]
        return self._folder / f"{split}_{len(shapes)}x{shapes.num_frames}x{shapes.size}"
