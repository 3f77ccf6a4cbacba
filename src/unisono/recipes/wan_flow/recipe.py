"""The recipe `wan-flow`: pictures, films and captions in, a Wan transformer that draws such ones out.

Encode them once (`data.py`, `wan/data/cache.py`), take a Wan transformer from wherever it comes
(`wan/models/load.py`), teach it the velocity from data to noise (`flow.py`, `wan/objective.py`), look at what it draws
(`wan/sample.py`), and write it as diffusers loads it (`wan/models/pipeline.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from unisono.engine.recipe import Loss, Work
from unisono.errors import ConfigError
from unisono.recipes.wan.base import WanRecipe
from unisono.recipes.wan_flow import settings
from unisono.recipes.wan_flow.checks import check_config

if TYPE_CHECKING:  # `unisono train wan-flow --help` need not wait for torch
    from torch import Tensor, nn

    from unisono.data.noise import Noise
    from unisono.parallel.materialize import Weights
    from unisono.recipes.common.lora_base import LoraBase
    from unisono.recipes.wan.models.companions import Companions
    from unisono.recipes.wan.models.load import WanFolder
    from unisono.recipes.wan_flow.data import FolderData, ShapesData
    from unisono.recipes.wan_flow.flow import Flow
    from unisono.settings import Settings


class WanFlow(WanRecipe):
    """Flow-matching training of Wan 2.1 and 2.2, from scratch, whole or as a LoRA."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "batch_size": 1,
        "learning_rate": 1e-5,
        "warmup_steps": 100,
        "ema_decay": 0.9999,
        "mixed_precision": "bf16",
        "compile": True,
        "num_workers": 4,
        "eval_every": 500,
        "save_every": 500,
        "preview_every": 500,
    }
    aliases: ClassVar[Mapping[str, str]] = settings.ALIASES
    fixed: ClassVar[Sequence[str]] = ("expert", "lora_rank", "lora_alpha", "lora_targets", "model_config")
    Config = settings.Config

    @classmethod
    def presets(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """What suits the tiny model on a CPU, and a LoRA."""
        if str(values["model_config"]).lower() == "tiny":
            left_out = set()
            if values["num_epochs"] is not None:  # then the number of steps is the user's choice
                left_out.add("max_steps")
            if values["dataset_path"] not in (cls.Config.dataset_path, settings.TINY["dataset_path"]):
                left_out.add("num_previews")  # of small pictures there are many
            return {name: value for name, value in settings.TINY.items() if name not in left_out}
        return settings.LORA if values["lora_rank"] or values["lora_path"] else {}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        check_config(config)
        self._base: LoraBase | None = None  # of a LoRA, until it is noted

    @property
    def is_lora(self) -> bool:
        """Whether a LoRA is trained, and not all weights."""
        return bool(self.config.lora_rank or self.config.lora_path)

    @cached_property
    def found(self) -> WanFolder | None:
        """What model_path is."""
        from unisono.recipes.wan.models.experts import HIGH, LOW
        from unisono.recipes.wan.models.load import describe

        if not self.config.model_path:
            return None
        found = describe(self.config.model_path)
        if self.config.expert == "low" and list(found.transformers) == [HIGH] and not _is_whole(found):
            return replace(found, transformers={LOW: found.transformers[HIGH]})  # only the user knows which it is
        return found

    @cached_property
    def trained(self) -> list[str]:
        """Which transformers are trained, by diffusers' names."""
        from unisono.recipes.wan.models.experts import HIGH, LOW, parts_to_train

        named = (self.config.model_config or "").lower() == "a14b"
        found: Any = self.found.transformers if self.found else (HIGH, LOW) if named else (HIGH,)
        if self.config.expert != "both" and len(found) == 1 and (self.found is None or _is_whole(self.found)):
            raise ConfigError(
                f"expert {self.config.expert}: this model is one transformer for all noise levels; leave it out"
            )
        return parts_to_train(dict.fromkeys(found), self.config.expert)

    @cached_property
    def boundary(self) -> float | None:
        """The noise level at which one expert hands over to the other, where there are two."""
        from unisono.recipes.wan.models.load import BOUNDARY

        if self.found is not None:
            return self.found.boundary_ratio if len(self.found.transformers) > 1 else None
        return BOUNDARY if (self.config.model_config or "").lower() == "a14b" else None

    @cached_property
    def transformer(self) -> dict[str, Any]:
        """The configuration of the transformer, or of the experts, which are alike."""
        from unisono.recipes.wan.models.load import transformer_config

        return transformer_config(self.found, self.config.model_config, part=self.trained[0])

    @cached_property
    def companions(self) -> Companions:
        """VAE and text encoder."""
        from unisono.recipes.wan.models.companions import FromFolder, Tiny, without
        from unisono.recipes.wan.models.load import TEXT_LENGTH, describe

        parts = describe(self.config.parts_path, "parts_path") if self.config.parts_path else self.found
        if parts is not None and parts.kind == "pipeline":
            return FromFolder(parts, self.transformer)
        if (self.config.model_config or "").lower() == "tiny":
            return Tiny(self.transformer)
        return without(self.transformer, parts.text_length if parts else TEXT_LENGTH)

    @cached_property
    def _data(self) -> FolderData | ShapesData:
        from unisono.recipes.wan_flow.data import SHAPES, FolderData, ShapesData

        kind = ShapesData if self.config.dataset_path == SHAPES else FolderData
        return kind(self.config, self.companions, self._prompts)

    @cached_property
    def _prompts(self) -> list[str]:
        """The captions to draw that were asked for."""
        from unisono.recipes.wan.looking import prompts_in

        return prompts_in(self.config.preview_prompts, "preview_prompts")

    @cached_property
    def flow(self) -> Flow:
        """The objective."""
        from unisono.recipes.wan.models.experts import HIGH, LOW, parts_to_train, range_of
        from unisono.recipes.wan.models.load import BOUNDARY
        from unisono.recipes.wan.objective import NoiseLevels
        from unisono.recipes.wan_flow.flow import Flow

        config, by_size = self.config, self.config.shift == "auto"
        shift = 1.0 if by_size else float(config.shift)
        levels = NoiseLevels(config.sigma_sampling, config.logit_mean, config.logit_std, config.mode_scale, shift)
        parts, boundary = self.trained, self.boundary
        if boundary is None and config.expert != "both":  # one of two in a file of its own: only the user knows which
            parts, boundary = parts_to_train({HIGH: None, LOW: None}, config.expert), BOUNDARY
        low, high = range_of(parts, boundary, 1 if boundary is None else 2)
        space = self.companions.geometry.space
        return Flow(levels, low, high, by_size, space, config.caption_dropout, config.first_frame)

    def check_settings(self, settings: Settings) -> None:
        """Refuses to record steps of two experts: which samples each of them gets is decided anew in every step."""
        if settings.precision.cuda_graph and len(self.trained) > 1:
            raise ConfigError(
                "cuda_graph records a step once and for all, and with two experts each sample goes to the one of its "
                "noise level; leave cuda_graph out, or train one of them by --expert high or low"
            )

    def prepare(self, work: Work) -> None:
        """Encodes pictures, films and captions that are not in the cache yet, and finds the fastest kernel."""
        from unisono.recipes.wan_flow.data import check_there
        from unisono.recipes.wan_flow.early import check_model

        self.prepared = work.folder  # also for those who call it by themselves
        check_there(self.config)
        check_model(self)
        self._base = self._beside and self._beside.to_note(work)
        self._data.prepare(work)
        if not work.meet():
            self.kernel.measure(work, self.transformer, self._data.most_tokens())

    @cached_property
    def _beside(self) -> LoraBase | None:
        """What a LoRA is trained beside; refused where it is not what the run began with."""
        from unisono.recipes.common.lora_base import LoraBase

        if not self.is_lora or self.found is None or self.prepared is None:  # all weights are in the checkpoint
            return None
        base = LoraBase(self.prepared, (self.found.transformers[name] for name in self.trained))
        base.check(f"model_path {self.config.model_path}", " (with lora_path, to go on from the LoRA)")
        return base

    def model(self) -> nn.Module:
        """The transformer, or the experts; on meta, if the weights are in files."""
        from unisono.recipes.wan.models.attention import use
        from unisono.recipes.wan.models.block import use_fast_blocks
        from unisono.recipes.wan.models.experts import Experts
        from unisono.recipes.wan.models.islands import keep_time_embedding_exact
        from unisono.recipes.wan.models.load import build, build_meta

        make = build if self.found is None else build_meta
        transformers = {name: make(self.transformer) for name in self.trained}
        for name, transformer in transformers.items():
            self._check_and_adapt(name, transformer)
            keep_time_embedding_exact(transformer)
            use(self.kernel.name, transformer)
            use_fast_blocks(transformer)
        return Experts(transformers, self.boundary)

    def _check_and_adapt(self, name: str, transformer: Any) -> None:
        from unisono.recipes.wan.models.lora import add_lora, load_lora
        from unisono.recipes.wan_flow.early import check_weights, lora_targets

        config = self.config
        check_weights(self, name, transformer)
        if config.lora_path:
            load_lora(transformer, Path(config.lora_path).expanduser(), config.lora_alpha, name)
        elif config.lora_rank:
            add_lora(transformer, config.lora_rank, config.lora_alpha, lora_targets(config))

    @cached_property
    def files(self) -> dict[str, Any]:
        from unisono.recipes.wan.models.weights import open_weights

        assert self.found is not None
        return {name: open_weights(self.found.transformers[name]) for name in self.trained}

    def weights(self, model: nn.Module) -> Weights | None:
        """Those in the model's files, read row by row."""
        from unisono.recipes.wan.models.initial import FromFiles

        _ = self._beside  # a run may be exported long after it was prepared
        return None if self.found is None else FromFiles(self.files)

    def frozen(self) -> Mapping[str, nn.Module]:
        """VAE and text encoder, when there is no cache."""
        if not self.config.no_cache:
            return {}
        self._vae, self._text_encoder = self.companions.vae(), self.companions.text_encoder()
        return {"vae": self._vae.vae, "text_encoder": self._text_encoder.model}

    def dataset(self, split: str) -> Any:
        """Latents and embeddings, or frames and captions."""
        from unisono.recipes.wan.checks import check_positions

        data = self._data.dataset(split)
        if data is not None and hasattr(data, "shapes_there"):
            check_positions(data.shapes_there, self.transformer, self.companions.geometry.space)
        self.remarks = [*self._data.remarks]
        if self.config.model_config and self.config.lora_rank:
            self.remarks.append(
                "a LoRA beside weights that nobody has trained (--model_config): good for trying the commands; what it "
                "learns fits no other model"
            )
        return data

    def collate(self, items: list[Any]) -> Any:
        """A micro-batch of samples of one shape."""
        from unisono.recipes.wan_flow.flow import collated

        return collated(items)

    def _encoded(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """[batch, C, f, h, w] latents and [batch, length, width] text."""
        import torch

        from unisono.recipes.wan.models.text import pad

        if "latent" in batch:
            return batch["latent"], batch["text"]
        length = self.companions.text_length
        rows = [pad(row, length) for row in self._text_encoder.encode(batch["caption"], length)]
        return self._vae.encode_pictures(batch["frames"]), torch.stack(rows)

    def encoded_sample(self, item: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """The latent and the text of one sample of a data set."""
        latent, text = self._encoded(self.collate([item]))
        return latent[0], text[0]

    def text(self, caption: str) -> Tensor:
        """[text length, width] what the transformer gets for a caption."""
        from unisono.recipes.wan.models.text import pad

        length, kept = self.companions.text_length, self._data.text(caption)
        return kept if kept is not None else pad(self._text_encoder.encode([caption], length)[0], length)

    @cached_property
    def _no_caption(self) -> dict[Any, Tensor]:
        """What there is for no caption, and copies of it by device and type.

        A copy is never let go of: a recorded step (`cuda_graph`) reads from the very same memory each time.
        """
        return {None: self.text("")}

    def without_caption(self, like: Tensor) -> Tensor:
        """What the transformer gets for no caption, where `like` is and as it is."""
        if not self.config.caption_dropout and self.config.guidance == 1:
            return like.new_zeros(like.shape[-2:])
        kept = self._no_caption
        if (like.device, like.dtype) not in kept:
            kept[like.device, like.dtype] = kept[None].to(like.device, like.dtype)
        return kept[like.device, like.dtype]

    def loss(self, model: nn.Module, batch: Any, noise: Noise) -> Loss:
        """The error of the velocity: of each sample the mean over its elements, summed over samples."""
        from unisono.recipes.wan.models.islands import compute_type

        latent, text = self._encoded(batch)
        self.kernel.settle(model, latent.device.type, compute_type(latent))
        if self._base is not None:
            self._base.note()
            self._base = None
        return self.flow.loss(model, latent, text, self.without_caption(text), noise)  # type: ignore[arg-type]

    def evaluate(self, model: nn.Module, batch: Any, noise: Noise) -> Mapping[str, Any]:
        """The loss at fixed noise levels; of the built-in shapes also whether what is drawn is what was asked for."""
        from unisono.recipes.wan.models.islands import compute_type
        from unisono.recipes.wan_flow.previews import judged

        latent, text = self._encoded(batch)
        self.kernel.settle(model, latent.device.type, compute_type(latent))
        found = dict(self.flow.held_out(model, latent, text, noise, self.config.eval_levels))  # type: ignore[arg-type]
        if "colour" in batch:
            found |= judged(self, model, batch, text, noise)  # type: ignore[arg-type]
        return found

    def preview(self, model: nn.Module, step: int) -> Mapping[str, Any] | None:
        """What the model draws for some captions, always from the same noise."""
        from unisono.recipes.wan_flow.previews import draw

        return draw(self, model)  # type: ignore[arg-type]

    def export(self, model: nn.Module, folder: Path) -> None:
        """A folder for `WanPipeline.from_pretrained`, or LoRAs for `load_lora_weights`."""
        from unisono.recipes.wan_flow.out import write

        print(f"unisono: {write(self, dict(model.named_children()), folder)}", file=sys.stderr)


def _is_whole(found: WanFolder) -> bool:
    """Whether what was found is all of a model, and no expert in a file of its own."""
    return found.kind == "pipeline" or found.expand_timesteps
