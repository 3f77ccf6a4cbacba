"""The recipe `wan-flow`: trains a Wan transformer on images, videos and captions by flow matching.

`setup.py` derives the model from the settings (`wan/models/load.py` reads pretrained weights). `data/` encodes the
samples once into a cache (`wan/data/cache.py`). The transformer learns the velocity from data to noise (`loss.py`,
`wan/objective.py`). `previews.py` shows what it generates, and `export.py` writes a pipeline that diffusers loads.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from unisono.engine.recipe import Loss, Work
from unisono.errors import ConfigError
from unisono.recipes.wan.recipe import WanRecipe
from unisono.recipes.wan.settings import DEFAULTS, TINY_NAMES
from unisono.recipes.wan_flow import settings
from unisono.recipes.wan_flow.checks import check_config

if TYPE_CHECKING:  # keeps `unisono train wan-flow --help` from importing torch
    import torch
    from torch import Tensor, nn

    from unisono.data.noise import Noise
    from unisono.parallel.materialize import Weights
    from unisono.recipes.common.lora_base import LoraBase
    from unisono.recipes.wan.condition.inputs import Condition
    from unisono.recipes.wan_flow.data.folder import FolderData
    from unisono.recipes.wan_flow.data.shapes import ShapesData
    from unisono.recipes.wan_flow.setup import Setup
    from unisono.settings import Settings


class WanFlow(WanRecipe):
    """Flow-matching training of Wan 2.1 and 2.2: from scratch, all weights, or a LoRA."""

    defaults: ClassVar[Mapping[str, Any]] = DEFAULTS | {"batch_size": 1, "learning_rate": 1e-5, "ema_decay": 0.9999}
    aliases: ClassVar[Mapping[str, str]] = settings.ALIASES
    fixed: ClassVar[Sequence[str]] = (
        # The split into training and held-out samples:
        *("dataset_path", "eval_dataset_path", "num_eval", "num_shapes"),
        # What a sample contains:
        *("parts_path", "height", "width", "max_pixels", "num_frames", "fps", "window", "latents", "text_dtype"),
        "condition",
        # The model and the meaning of its weights. model_path may change: a LoRA's base is identified by its content,
        # and a run that trains all weights has them in its checkpoints.
        *("model_config", "expert", "adapter", "lokr_factor", "lora_rank", "lora_alpha", "lora_targets", "lora_path"),
    )
    Config = settings.Config

    @classmethod
    def presets(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the defaults for the tiny model on a CPU and for a LoRA."""
        model = str(values["model_config"]).lower()
        if model in TINY_NAMES:
            tiny = settings.TINY if model == "tiny" else settings.TINY_I2V
            excluded = set()
            if values["num_epochs"] is not None:  # the user has chosen the length of the run in epochs
                excluded.add("max_steps")
            if values["dataset_path"] not in (cls.Config.dataset_path, tiny["dataset_path"]):
                excluded.add("num_previews")  # the preset's number of previews suits only the small built-in shapes
            return {name: value for name, value in tiny.items() if name not in excluded}
        return settings.LORA if values["lora_rank"] or values["lora_path"] else {}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        check_config(config)
        self.has_frozen_weights = bool(config.lora_rank or config.lora_path)
        self._base_to_record: LoraBase | None = None  # None once the first step has recorded the base weights

    @cached_property
    def setup(self) -> Setup:
        """The model and the objective of the run, derived from the settings."""
        from unisono.recipes.wan_flow.setup import Setup

        return Setup(self.config)

    @cached_property
    def data(self) -> FolderData | ShapesData:
        """The training and held-out samples."""
        from unisono.recipes.wan_flow.data.folder import FolderData
        from unisono.recipes.wan_flow.data.shapes import ShapesData

        kind = ShapesData if self.config.dataset_path == "shapes" else FolderData
        return kind(self.config, self.setup.encoders, self.preview_prompts, self.setup.condition)

    @cached_property
    def preview_prompts(self) -> list[str]:
        """The captions in the setting preview_prompts."""
        from unisono.recipes.wan.previews import prompts_in

        return prompts_in(self.config.preview_prompts, "preview_prompts")

    def check_settings(self, settings: Settings) -> None:
        """Rejects cuda_graph with two experts, because each expert gets other samples in every step."""
        super().check_settings(settings)
        if settings.precision.cuda_graph and len(self.setup.trained) > 1:
            raise ConfigError(
                "cuda_graph replays one recorded step, but with two experts the noise level decides which expert gets "
                "a sample; remove cuda_graph, or train one expert with --expert high or low"
            )

    def metric_names(self) -> Collection[str]:
        """Returns the names of the evaluation metrics; only the built-in shapes have metrics of generated samples."""
        config, shapes = self.config, self.config.dataset_path == "shapes"
        if not (shapes or config.num_eval or config.eval_dataset_path):
            return ()
        recognised = ("colour", "shape", "colour_and_shape") if shapes else ()
        is_given_frames = shapes and str(config.model_config).lower() == "tiny-i2v"
        motion = ("moves", "first_frame_error", "first_frame_error_of_vae") if is_given_frames else ()
        return ("loss", "velocity_cosine", *recognised, *motion)

    def prepare(self, work: Work) -> None:
        """Encodes images, videos and captions that are not in the cache yet, and measures attention kernels."""
        from unisono.recipes.wan_flow.data.folder import check_paths_exist
        from unisono.recipes.wan_flow.model_checks import check_model

        self.prepared = work.folder  # set here too, for callers that run prepare() without the engine
        check_paths_exist(self.config)
        check_model(self.setup)
        self._base_to_record = self._lora_base and self._lora_base.for_one_process(work)
        self.data.prepare(work)
        if not work.meet():
            self.kernel.measure(work, self.setup.transformer, self.data.most_tokens())

    @cached_property
    def _lora_base(self) -> LoraBase | None:
        """The frozen base weights of a LoRA; raises ConfigError if the run started with different base weights."""
        from unisono.recipes.common.lora_base import LoraBase

        setup = self.setup
        if not setup.is_lora or setup.pretrained is None or self.prepared is None:  # no base weights to compare
            return None
        parts = (setup.pretrained.transformers[name] for name in setup.trained)
        base = LoraBase(self.prepared, parts, self.base_precision)
        base.check(f"model_path {self.config.model_path}", " (with lora_path, to continue the LoRA)")
        return base

    def model(self) -> nn.Module:
        """Builds the transformer or the two experts; on the meta device if their weights come from files."""
        from unisono.recipes.wan.models.experts import Experts
        from unisono.recipes.wan.models.load import build, build_meta

        setup = self.setup
        make = build if setup.pretrained is None else build_meta
        transformers = {name: make(setup.transformer) for name in setup.trained}
        for name, transformer in transformers.items():
            self._add_lora(name, transformer)
            self.optimised(transformer)
        return Experts(transformers, setup.boundary)

    def _add_lora(self, name: str, transformer: Any) -> None:
        from unisono.recipes.wan.models.lora import add_lora, load_lora, open_lora
        from unisono.recipes.wan_flow.model_checks import check_weights, lora_targets

        config = self.config
        check_weights(self.setup, name, transformer)
        if config.lora_path and self.is_estimate:
            lora = open_lora(transformer, Path(config.lora_path).expanduser(), part=name)
            add_lora(transformer, lora.rank, config.lora_alpha, lora.layers, initialise=False, kind=lora.kind)
        elif config.lora_path:
            load_lora(transformer, Path(config.lora_path).expanduser(), config.lora_alpha, name)
        elif config.lora_rank:
            targets = lora_targets(config, transformer)
            options = {"initialise": not self.is_estimate, "kind": config.adapter, "lokr_factor": config.lokr_factor}
            add_lora(transformer, config.lora_rank, config.lora_alpha, targets, **options)

    def weights(self, model: nn.Module) -> Weights | None:
        """Returns the pretrained weights, read from their files row by row; None when training from scratch."""
        from unisono.recipes.wan.models.weights import ExpertWeights

        _ = self._lora_base  # checks the base again: a run may be exported long after prepare()
        return None if self.setup.pretrained is None else ExpertWeights(self.setup.weight_files)

    def frozen_linears(self, part: str, module: nn.Module) -> Sequence[str] | None:
        """Returns the linear layers in the transformer blocks.

        The encoders are never quantised, so that embeddings are the same with and without a cache.
        """
        return None if part == "model" else ()

    @property
    def predicts_memory(self) -> bool:
        """Returns False without a cache, because the prediction does not include the encoders."""
        return not self.config.no_cache

    def frozen(self) -> Mapping[str, nn.Module]:
        """Returns the VAE, the text encoder and the image encoder (if any) when there is no cache."""
        if not self.config.no_cache:
            return {}
        encoders = self.setup.encoders
        self._vae, self._text_encoder = encoders.vae(), encoders.text_encoder()
        modules = {"vae": self._vae.model, "text_encoder": self._text_encoder.model}
        if self.setup.condition.has_embedding:
            self._image_encoder = encoders.image_encoder()
            modules["image_encoder"] = self._image_encoder.model
        return modules

    def dataset(self, split: str) -> Any:
        """Returns a dataset of latents and text embeddings or, without a cache, of frames and captions."""
        from unisono.recipes.wan.checks import check_positions, check_tokens

        data = self.data.dataset(split)
        if data is not None and hasattr(data, "distinct_shapes"):
            check_positions(data.distinct_shapes, self.setup.transformer, self.setup.encoders.geometry.spatial_factor)
            check_tokens(data.distinct_shapes, self.setup.transformer["patch_size"], self.context_size)
        self.remarks = [*self.data.remarks]
        if self.config.model_config and self.config.lora_rank:
            self.remarks.append(
                "training a LoRA on random weights (--model_config): this tries out the commands, but the LoRA fits no "
                "other model"
            )
        return data

    def example(self) -> Any:
        """Returns a sample of the largest size that the settings allow."""
        import torch

        from unisono.recipes.wan.condition.image_encoder import IMAGE_TOKENS
        from unisono.recipes.wan.condition.inputs import condition_shape

        config, encoders = self.config, self.setup.encoders
        flow, geometry = self.setup.flow, encoders.geometry
        # Compute and cache these values now: they need real numbers, which a memory prediction does not have.
        flow.levels.cdf(flow.low), flow.levels.cdf(flow.high)
        pixels = config.height * config.width or config.max_pixels
        height = config.height or int(pixels**0.5)
        width = config.width or pixels // height
        frames = 1 + (config.num_frames - 1) // geometry.temporal_factor
        size = (geometry.channels, frames, height // geometry.spatial_factor, width // geometry.spatial_factor)
        even = (*size[:2], *(side - side % geometry.patch for side in size[2:]))
        text = torch.empty(encoders.text_length, encoders.text_width, dtype=encoders.text_dtype, device="meta")
        sample = {"latent": torch.empty(even, device="meta"), "text": text}
        if config.masked_loss:
            sample["mask"] = torch.empty(1, *even[1:], device="meta")
        kind = self.setup.condition
        if kind.has_channels:
            sample["condition"] = torch.empty(condition_shape(geometry, even), device="meta")
        if kind.has_embedding:
            image = (kind.num_frames, encoders.image_tokens or IMAGE_TOKENS, self.setup.transformer["image_dim"])
            sample["image"] = torch.empty(image, device="meta")
        return sample

    def collate(self, items: list[Any]) -> Any:
        """Collates samples of one shape into a micro-batch."""
        from unisono.recipes.wan_flow.loss import collated

        return collated(items)

    def _encoded(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Returns the batch's latents [batch, C, f, h, w] and text embeddings [batch, length, width]."""
        import torch

        if "latent" in batch:
            return batch["latent"], batch["text"]
        return self._vae.encode_frames(batch["frames"]), torch.stack(self._embeddings(batch["caption"]))

    def _embeddings(self, captions: Sequence[str]) -> list[Tensor]:
        """Computes the text embedding of each caption, [text length, width], with the frozen text encoder."""
        from unisono.recipes.wan.models.text import pad

        length = self.setup.encoders.text_length
        return [pad(rows, length) for rows in self._text_encoder.encode(captions, length)]

    def _inputs(self, model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Like `_encoded`, but casts the text embeddings to the dtype that the model computes in."""
        latent, text = self._encoded(batch)
        return latent, text.to(self.compute_dtype(model, latent))

    def _condition(self, batch: Mapping[str, Any], dtype: torch.dtype | None = None) -> Condition | None:
        """Returns the condition of an image-to-video model, with embeddings in `dtype`; None for other models."""
        import torch

        from unisono.recipes.wan.condition.inputs import Condition, condition_channels

        kind = self.setup.condition
        if not kind.has_channels:
            return None
        if "condition" in batch:
            channels, image = batch["condition"], batch.get("image")
        else:
            pairs = zip(batch["given"], batch["frames"], strict=True)
            channels = torch.stack([condition_channels(self._vae, given, len(frames)) for given, frames in pairs])
            embed = self._image_encoder.encode if kind.has_embedding else None
            image = embed and torch.stack([embed(given) for given in batch["given"]])
        return Condition(channels, None if image is None else image.to(dtype=dtype))

    def encoded_sample(self, item: Mapping[str, Any]) -> tuple[Tensor, Tensor, Condition | None]:
        """Returns the latent, the text embedding and the condition (with one row) of one sample of a dataset."""
        batch = self.collate([item])
        latent, text = self._encoded(batch)
        return latent[0], text[0], self._condition(batch)

    def text(self, caption: str) -> Tensor:
        """Returns the text embedding of a caption, [text length, width]."""
        cached = self.data.text(caption)
        return cached if cached is not None else self._embeddings([caption])[0]

    @cached_property
    def _no_caption(self) -> dict[Any, Tensor]:
        """The embedding of the empty caption (key None), and copies of it, keyed by device and dtype.

        Copies are never freed, because a recorded step (`cuda_graph`) reads from the same memory in every replay.
        """
        return {None: self.text("")}

    def without_caption(self, like: Tensor) -> Tensor:
        """Returns the embedding of the empty caption, on the device and in the dtype of `like`."""
        if self.is_estimate or (not self.config.caption_dropout and self.config.guidance == 1):
            return like.new_zeros(like.shape[-2:])
        copies = self._no_caption
        if (like.device, like.dtype) not in copies:
            copies[like.device, like.dtype] = copies[None].to(like.device, like.dtype)
        return copies[like.device, like.dtype]

    def flops(self, batch: Any) -> float | None:
        """Returns the number of the transformer's operations for a batch; None without a cache."""
        from unisono.recipes.wan.flops import forward_flops, training_flops

        if "latent" not in batch:
            return None
        context = batch["text"].shape[1]
        if "image" in batch:
            context += batch["image"].shape[1:3].numel()
        forward = forward_flops(self.setup.transformer, batch["latent"].shape, context)
        return training_flops(forward, lora=self.setup.is_lora)

    def loss(self, model: nn.Module, batch: Any, noise: Noise) -> Loss:
        """Returns the squared error of the velocity: the mean over each sample's elements, summed over samples."""
        latent, text = self._inputs(model, batch)
        if self._base_to_record is not None and not self.is_estimate:
            self._base_to_record.record()
            self._base_to_record = None
        inputs = (self.without_caption(text), noise, batch.get("mask"), self._condition(batch, text.dtype))
        return self.setup.flow.loss(model, latent, text, *inputs)  # type: ignore[arg-type]

    def evaluate(self, model: nn.Module, batch: Any, noise: Noise) -> Mapping[str, Any]:
        """Returns the loss at fixed noise levels; for the built-in shapes, also the accuracy of generated samples."""
        from unisono.recipes.wan_flow.evaluation import loss_by_level, shape_metrics

        latent, text = self._inputs(model, batch)
        condition = self._condition(batch, text.dtype)
        inputs = (latent, text, noise, self.config.eval_levels, batch.get("mask"), condition)
        metrics = loss_by_level(self.setup.flow, model, *inputs)  # type: ignore[arg-type]
        if "colour" not in batch:
            return metrics
        return {**metrics, **shape_metrics(self, model, batch, text, noise, condition)}  # type: ignore[arg-type]

    def preview(self, model: nn.Module, step: int) -> Mapping[str, Any] | None:
        """Generates samples from some captions, always from the same noise."""
        from unisono.recipes.wan_flow.previews import previews

        return previews(self, model)  # type: ignore[arg-type]

    def export(self, model: nn.Module, folder: Path) -> None:
        """Writes the transformers in the chosen format (a pipeline for diffusers by default), or LoRA files."""
        from unisono.recipes.wan_flow.export import write_model

        transformers = dict(model.named_children())
        print(f"unisono: {write_model(self.setup, transformers, folder, self.export_format)}", file=sys.stderr)
