"""The recipe `wan-flow`: pictures, films and captions in, a Wan transformer that draws such ones out.

Encode them once (`data.py`, `wan/data/cache.py`), take a Wan transformer from wherever it comes
(`wan/models/load.py`), teach it the velocity from data to noise (`flow.py`, `wan/objective.py`), look at what it draws
(`wan/sample.py`), and write it as diffusers loads it (`wan/models/pipeline.py`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from unisono.engine.recipe import Loss, Recipe, Work
from unisono.errors import ConfigError
from unisono.recipes.wan_flow import settings
from unisono.recipes.wan_flow.checks import check_config

if TYPE_CHECKING:  # `unisono train wan-flow --help` need not wait for torch
    import torch
    from torch import Tensor, nn

    from unisono.data.noise import Noise
    from unisono.parallel.materialize import Weights
    from unisono.recipes.wan.models.companions import Companions
    from unisono.recipes.wan.models.load import WanFolder
    from unisono.recipes.wan_flow.data import FolderData, ShapesData
    from unisono.recipes.wan_flow.flow import Flow


class WanFlow(Recipe):
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
            by_epochs = values["num_epochs"] is not None  # then the number of steps is the user's choice
            return {name: value for name, value in settings.TINY.items() if not (by_epochs and name == "max_steps")}
        return settings.LORA if values["lora_rank"] else {}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        check_config(config)
        self._kernel_file: Path | None = None
        self._kernel_is_sure = False

    @cached_property
    def _found(self) -> WanFolder | None:
        """What model_path is."""
        from unisono.recipes.wan.models.load import describe

        return describe(self.config.model_path) if self.config.model_path else None

    @cached_property
    def _trained(self) -> list[str]:
        """Which transformers are trained, by diffusers' names."""
        from unisono.recipes.wan.models.experts import HIGH, LOW, parts_to_train

        named = (self.config.model_config or "").lower() == "a14b"
        found: Any = self._found.transformers if self._found else (HIGH, LOW) if named else (HIGH,)
        whole = self._found is None or self._found.kind == "pipeline" or self._found.expand_timesteps
        if self.config.expert != "both" and len(found) == 1 and whole:
            raise ConfigError(
                f"expert {self.config.expert}: this model is one transformer for all noise levels; leave it out"
            )
        return parts_to_train(dict.fromkeys(found), self.config.expert)

    @cached_property
    def _boundary(self) -> float | None:
        from unisono.recipes.wan.models.load import BOUNDARY

        if self._found is not None:
            return self._found.boundary_ratio if len(self._found.transformers) > 1 else None
        return BOUNDARY if (self.config.model_config or "").lower() == "a14b" else None

    @cached_property
    def _transformer(self) -> dict[str, Any]:
        """The configuration of the transformer, or of the experts, which are alike."""
        from unisono.recipes.wan.models.load import transformer_config

        return transformer_config(self._found, self.config.model_config, part=self._trained[0])

    @cached_property
    def companions(self) -> Companions:
        """VAE and text encoder."""
        from unisono.recipes.wan.models.companions import FromFolder, Tiny, without
        from unisono.recipes.wan.models.load import TEXT_LENGTH, describe

        parts = describe(self.config.parts_path) if self.config.parts_path else self._found
        if parts is not None and parts.kind == "pipeline":
            return FromFolder(parts, self._transformer)
        if (self.config.model_config or "").lower() == "tiny":
            return Tiny(self._transformer)
        return without(self._transformer, parts.text_length if parts else TEXT_LENGTH)

    @cached_property
    def _data(self) -> FolderData | ShapesData:
        from unisono.recipes.wan_flow.data import SHAPES, FolderData, ShapesData

        kind = ShapesData if self.config.dataset_path == SHAPES else FolderData
        return kind(self.config, self.companions, self._prompts)

    @cached_property
    def _prompts(self) -> list[str]:
        """The captions to draw that were asked for."""
        from unisono.recipes.wan_flow.previews import prompts_in

        return prompts_in(self.config.preview_prompts)

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
        parts, boundary = self._trained, self._boundary
        if boundary is None and config.expert != "both":  # one of two in a file of its own: only the user knows which
            parts, boundary = parts_to_train({HIGH: None, LOW: None}, config.expert), BOUNDARY
        low, high = range_of(parts, boundary, 1 if boundary is None else 2)
        space = self.companions.geometry.space
        return Flow(levels, low, high, by_size, space, config.caption_dropout, config.first_frame)

    def prepare(self, work: Work) -> None:
        """Encodes pictures, films and captions that are not in the cache yet, and finds the fastest kernel."""
        self._data.prepare(work)
        if self.config.attention == "auto" and work.device.startswith("cuda"):
            import torch

            # Another kind of GPU, on which a run may go on, has other kernels.
            gpu = "".join(sign if sign.isalnum() else "_" for sign in torch.cuda.get_device_name(work.device))
            self._kernel_file = work.folder / f"attention_{gpu}.json"
            for file in work.share([self._kernel_file]):
                self._measure(file, work)

    def _measure(self, file: Path, work: Work) -> None:
        import torch

        from unisono.recipes.wan.models.attention import choose, measure

        if file.exists():
            return
        config, geometry = self._transformer, self.companions.geometry
        height, width = self.config.height or 480, self.config.width or 832
        frames = 1 + self.config.num_frames // geometry.time
        tokens = geometry.tokens((0, frames, height // geometry.space, width // geometry.space))
        heads, head_width = int(config["num_attention_heads"]), int(config["attention_head_dim"])
        times = measure(heads, head_width, tokens, torch.bfloat16, work.device)
        chosen = choose(times)
        file.write_text(json.dumps({"kernel": chosen, "milliseconds": times, "tokens": tokens}))
        told = ", ".join(f"{kernel} {ms:.2f}" for kernel, ms in times.items())
        work.message(f"attention of {tokens:,} tokens in ms: {told}; taking {chosen}")

    def model(self) -> nn.Module:
        """The transformer, or the experts; on meta, if the weights are in files."""
        from unisono.recipes.wan.models.attention import use
        from unisono.recipes.wan.models.experts import Experts
        from unisono.recipes.wan.models.islands import keep_time_embedding_exact
        from unisono.recipes.wan.models.load import build, build_meta

        make = build if self._found is None else build_meta
        transformers = {name: make(self._transformer) for name in self._trained}
        kernel = self._kernel()
        for name, transformer in transformers.items():
            self._check_and_adapt(name, transformer)
            keep_time_embedding_exact(transformer)
            use(kernel, transformer)
        return Experts(transformers, self._boundary)

    def _check_and_adapt(self, name: str, transformer: Any) -> None:
        from unisono.recipes.wan.models.lora import TARGETS, add_lora, load_lora
        from unisono.recipes.wan.models.weights import check_fit

        config = self.config
        if self._found is not None:
            check_fit(transformer, self._files[name])
        if config.lora_path:
            load_lora(transformer, Path(config.lora_path).expanduser(), config.lora_alpha, name)
        elif config.lora_rank:
            targets = [target.strip() for target in config.lora_targets.split(",") if target.strip()]
            add_lora(transformer, config.lora_rank, config.lora_alpha, targets or TARGETS)

    def _kernel(self) -> str:
        if self._kernel_file is None or not self._kernel_file.exists():
            return str(self.config.attention)
        return str(json.loads(self._kernel_file.read_text())["kernel"])

    def settle_kernel(self, model: nn.Module, device_type: str, dtype: torch.dtype) -> None:
        """Before the first forward pass, when it is known in which type a run computes: leaves a kernel that cannot."""
        from unisono.recipes.wan.models.attention import can_compute

        if self._kernel_is_sure:
            return
        self._kernel_is_sure = True
        if can_compute(kernel := self._kernel(), device_type, dtype):
            return
        if self.config.attention != "auto":
            type_name = str(dtype).removeprefix("torch.")
            raise ConfigError(
                f"attention {kernel} does not compute in {type_name} on a {device_type} device; use --mixed_precision "
                "bf16 on a GPU, or --attention auto"
            )
        for transformer in model.children():
            transformer.reset_attention_backend()  # type: ignore[operator]

    @cached_property
    def _files(self) -> dict[str, Any]:
        from unisono.recipes.wan.models.weights import open_weights

        assert self._found is not None
        return {name: open_weights(self._found.transformers[name]) for name in self._trained}

    def weights(self, model: nn.Module) -> Weights | None:
        """Those in the model's files, read row by row."""
        from unisono.recipes.wan.models.initial import FromFiles

        return None if self._found is None else FromFiles(self._files)

    def full_precision(self, model: nn.Module) -> Sequence[str]:
        """Norms, modulation and the time embedding."""
        from unisono.recipes.wan.models.islands import full_precision_weights

        return full_precision_weights(model)

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The transformer blocks."""
        return [block for transformer in model.children() for block in transformer.blocks]  # type: ignore[union-attr]

    def frozen(self) -> Mapping[str, nn.Module]:
        """VAE and text encoder, when there is no cache."""
        if not self.config.no_cache:
            return {}
        self._vae, self._text_encoder = self.companions.vae(), self.companions.text_encoder()
        return {"vae": self._vae.vae, "text_encoder": self._text_encoder.model}

    def dataset(self, split: str) -> Any:
        """Latents and embeddings, or frames and captions."""
        from unisono.recipes.wan_flow.checks import check_positions

        data = self._data.dataset(split)
        if data is not None and hasattr(data, "shapes_there"):
            check_positions(data.shapes_there, self._transformer, self.companions.geometry.space)
        self.remarks = self._data.remarks
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
        from unisono.recipes.wan_flow.flow import compute_type

        latent, text = self._encoded(batch)
        self.settle_kernel(model, latent.device.type, compute_type(latent))
        return self.flow.loss(model, latent, text, self.without_caption(text), noise)  # type: ignore[arg-type]

    def evaluate(self, model: nn.Module, batch: Any, noise: Noise) -> Mapping[str, Any]:
        """The loss at fixed noise levels; of the built-in shapes also whether what is drawn is what was asked for."""
        from unisono.recipes.wan_flow.flow import compute_type
        from unisono.recipes.wan_flow.previews import judged

        latent, text = self._encoded(batch)
        self.settle_kernel(model, latent.device.type, compute_type(latent))
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
        from unisono.recipes.wan.models.companions import Tiny
        from unisono.recipes.wan.models.experts import HIGH, LOW
        from unisono.recipes.wan.models.load import describe
        from unisono.recipes.wan.models.lora import lora_state, save_lora
        from unisono.recipes.wan.models.pipeline import write_pipeline

        transformers = dict(model.named_children())
        if self.config.lora_rank:
            states = {name: lora_state(transformer) for name, transformer in transformers.items()}
            told = save_lora(folder, states.get(HIGH), states.get(LOW))
        else:
            companions, source = self.companions, self._found
            if self.config.parts_path:  # which has all other parts, and perhaps a transformer that this is not
                parts = describe(self.config.parts_path)
                others = {name: kind for name, kind in parts.components.items() if name not in (HIGH, LOW)}
                source = replace(parts, transformers={}, components=others, boundary_ratio=None)
            two = self._boundary if len(transformers) > 1 or self._found is not None else None
            told = write_pipeline(
                folder,
                transformers.get(HIGH),
                transformers.get(LOW),
                source=companions.parts() if isinstance(companions, Tiny) else source,
                boundary_ratio=two,
            )
        print(f"unisono: {told}", file=sys.stderr)
