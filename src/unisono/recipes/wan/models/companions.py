"""What stands beside a transformer: a VAE, a text encoder, a scheduler; from a model's folder, or the tiny ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unisono.errors import ConfigError
from unisono.recipes.common.fingerprint import of_folders
from unisono.recipes.common.model_files import read_json
from unisono.recipes.wan.models.load import WanFolder
from unisono.recipes.wan.models.text import TextEncoder, check_width
from unisono.recipes.wan.models.vae import Geometry, Latents, check_channels, statistics
from unisono.recipes.wan.sample import euler

if TYPE_CHECKING:
    from unisono.recipes.wan.tiny.models import PipelineParts


_SCHEDULERS = ("UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler", "DPMSolverMultistepScheduler")


class Companions(ABC):
    """The frozen models that make of pictures and captions what a transformer is trained on."""

    geometry: Geometry
    text_width: int
    text_length: int
    text_dtype: torch.dtype = torch.bfloat16

    def check_files(self) -> None:  # noqa: B027 (most have none)
        """Says (ConfigError) what is missing or damaged, without loading anything."""

    @abstractmethod
    def vae(self) -> Latents:
        """Loads the VAE, on the CPU."""

    @abstractmethod
    def text_encoder(self) -> TextEncoder:
        """Loads tokenizer and text encoder, on the CPU."""

    @abstractmethod
    def fingerprints(self) -> tuple[str, str]:
        """Names of the VAE and of the text encoder by what they compute."""

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the VAE's latents, each [C, 1, 1, 1]."""
        return self.vae().statistics

    def scheduler(self, shift: float) -> Any:
        """What previews are sampled with."""
        return euler(shift)


class FromFolder(Companions):
    """Those of a Wan model in diffusers' layout."""

    def __init__(self, folder: WanFolder, transformer: Mapping[str, Any]) -> None:
        self._folder = folder
        vae, text = (read_json(self._part(name) / "config.json", dict) for name in ("vae", "text_encoder"))
        check_channels(vae, transformer)
        check_width(text, transformer)
        self.geometry = Geometry.of(vae, int(transformer["patch_size"][1]))
        self.text_width, self.text_length = int(text["d_model"]), folder.text_length

    def check_files(self) -> None:
        """The headers of the weights, the VAE's statistics, and the tokenizer's files."""
        from safetensors import SafetensorError, safe_open

        for name in ("vae", "text_encoder"):
            files = sorted(self._part(name).glob("*.safetensors"))
            if not files:
                raise ConfigError(f"{self._part(name)} has no .safetensors file; use a complete copy of the model")
            for file in files:
                try:
                    safe_open(str(file), framework="pt")
                except (SafetensorError, OSError) as error:
                    raise ConfigError(
                        f"{file} cannot be read as safetensors ({error}); copy or download it again"
                    ) from None
        self.statistics()
        tokenizer = self._part("tokenizer")
        # Without them transformers makes a tokenizer that knows no word, and says nothing.
        words = [tokenizer / name for name in ("tokenizer.json", "spiece.model")]
        if not any(file.is_file() for file in words) or not (tokenizer / "tokenizer_config.json").is_file():
            raise ConfigError(
                f"{tokenizer} lacks tokenizer_config.json, or tokenizer.json (or spiece.model); use a complete copy of "
                "the model"
            )

    def vae(self) -> Latents:
        """Loads the VAE in 32 bit, on the CPU."""
        return Latents.load(self._folder.path)

    def text_encoder(self) -> TextEncoder:
        """Loads tokenizer and text encoder in 16 bit, on the CPU."""
        return TextEncoder.load(self._folder.path, self.text_dtype)

    def fingerprints(self) -> tuple[str, str]:
        """By their files."""
        text = [self._part("tokenizer"), self._part("text_encoder")]
        return of_folders([self._part("vae")]), of_folders(text, str(self.text_dtype))

    def statistics(self) -> tuple[Tensor, Tensor]:
        """From the VAE's config: its weights are not needed for that."""
        told = read_json(self._part("vae") / "config.json", dict)
        return statistics({**told, "z_dim": self.geometry.channels})

    def scheduler(self, shift: float) -> Any:
        """The one that comes with the model."""
        import diffusers

        place = self._folder.part("scheduler")
        if place is None:
            return euler(shift)
        told = read_json(place / "scheduler_config.json", dict)
        if told.get("_class_name") not in _SCHEDULERS:
            return euler(shift)
        kind = getattr(diffusers, str(told["_class_name"]))
        try:  # whether it can do anything: a preview must not end a run
            scheduler = kind.from_config({name: value for name, value in told.items() if not name.startswith("_")})
            scheduler.set_timesteps(2)
        except Exception:
            return euler(shift)
        return scheduler

    def _part(self, name: str) -> Any:
        place = self._folder.part(name)
        if place is None:
            raise ConfigError(
                f"{self._folder.path} has no {name}; give --parts_path FOLDER, a Wan model in diffusers' layout, for "
                "VAE, text encoder and tokenizer"
            )
        return place


class Tiny(Companions):
    """Those of the tiny model, which come along."""

    text_dtype = torch.float32

    def __init__(self, transformer: Mapping[str, Any]) -> None:
        from unisono.recipes.wan.tiny.models import TEXT_LENGTH, tiny_vae_config

        vae = tiny_vae_config()
        check_channels(vae, transformer)
        self.geometry = Geometry.of(vae, int(transformer["patch_size"][1]))
        self.text_width, self.text_length = int(transformer["text_dim"]), TEXT_LENGTH

    def parts(self) -> PipelineParts:
        """All parts of a pipeline but the transformer."""
        from unisono.recipes.wan.tiny.models import tiny_pipeline_parts

        return tiny_pipeline_parts()

    def vae(self) -> Latents:
        """The small VAE."""
        return Latents(self.parts().vae)

    def text_encoder(self) -> TextEncoder:
        """The small text encoder, whose weights are random."""
        parts = self.parts()
        return TextEncoder(parts.tokenizer, parts.text_encoder)

    def fingerprints(self) -> tuple[str, str]:
        """By their weights."""
        return self.vae().fingerprint(), self.text_encoder().fingerprint()


@dataclass
class Missing(Companions):
    """None: latents and embeddings must lie beside the data."""

    geometry: Geometry
    text_width: int
    text_length: int

    def vae(self) -> Latents:
        """Refuses."""
        raise ConfigError(
            "there is no VAE to encode pictures and films with; give --parts_path FOLDER, a Wan model in diffusers' "
            "layout, or a latent (name.latent.safetensors) for every sample"
        )

    def text_encoder(self) -> TextEncoder:
        """Refuses."""
        raise ConfigError(
            "there is no text encoder for captions; give --parts_path FOLDER, a Wan model in diffusers' layout, or "
            "an embedding (name.safetensors) for every sample, --caption_dropout 0 and --guidance 1"
        )

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Refuses."""
        raise ConfigError(
            "latents raw: they are normalised with the VAE's statistics, and there is no VAE; give --parts_path "
            "FOLDER, a Wan model in diffusers' layout"
        )

    def fingerprints(self) -> tuple[str, str]:
        """Of nothing."""
        return "none", "none"


def without(transformer: Mapping[str, Any], text_length: int) -> Missing:
    """What is known without VAE and text encoder: the published ones' geometry follows from the channels."""
    channels = int(transformer["in_channels"])
    geometry = Geometry(channels, 4, 16 if channels == 48 else 8, int(transformer["patch_size"][1]))
    return Missing(geometry, int(transformer["text_dim"]), text_length)
