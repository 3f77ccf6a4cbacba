"""The frozen models that encode the data: a VAE and a text encoder, from a model's folder or built in (tiny)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unisono.checkpoint.tensor_file import TensorFile
from unisono.errors import ConfigError
from unisono.recipes.common.fingerprint import of_folders
from unisono.recipes.common.model_files import read_json
from unisono.recipes.wan.condition import image_encoder
from unisono.recipes.wan.condition.image_encoder import ImageEncoder
from unisono.recipes.wan.condition.kind import channels_of
from unisono.recipes.wan.models.load import WanFolder
from unisono.recipes.wan.models.text import TextEncoder, check_width
from unisono.recipes.wan.models.vae import Geometry, WanVae, check_channels, statistics
from unisono.recipes.wan.models.weights import reading_safetensors
from unisono.recipes.wan.sample import euler

if TYPE_CHECKING:
    from unisono.recipes.wan.tiny.models import PipelineParts


_SCHEDULERS = ("UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler", "DPMSolverMultistepScheduler")


class Encoders(ABC):
    """A VAE and a text encoder, which turn images, videos and captions into a transformer's inputs."""

    geometry: Geometry
    text_width: int
    text_length: int
    text_dtype: torch.dtype = torch.bfloat16

    def check_files(self) -> None:  # noqa: B027 (most have no files)
        """Raises ConfigError for missing or damaged files, without loading a model."""

    @abstractmethod
    def vae(self) -> WanVae:
        """Loads the VAE, on the CPU."""

    @abstractmethod
    def text_encoder(self) -> TextEncoder:
        """Loads the tokenizer and the text encoder, on the CPU."""

    @abstractmethod
    def fingerprints(self) -> tuple[str, str]:
        """Returns hashes of the VAE and of the text encoder."""

    def image_encoder(self) -> ImageEncoder:
        """Loads the image encoder, on the CPU."""
        raise ConfigError("no image encoder; pass --parts_path FOLDER, an image-to-video model in diffusers' layout")

    def image_fingerprint(self) -> str:
        """Returns a hash of the image encoder."""
        raise ConfigError("no image encoder; pass --parts_path FOLDER, an image-to-video model in diffusers' layout")

    image_tokens: int = 0
    """Number of tokens in the embedding of a given frame; 0 for a model without an image encoder."""

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Returns the mean and the standard deviation of the VAE's latents, each [C, 1, 1, 1]."""
        return self.vae().statistics

    def scheduler(self, shift: float) -> Any:
        """Returns the scheduler for previews."""
        return euler(shift)


class FolderEncoders(Encoders):
    """The encoders of a Wan model in diffusers' layout."""

    def __init__(self, folder: WanFolder, transformer: Mapping[str, Any]) -> None:
        self._folder = folder
        vae, text = (read_json(self._part(name) / "config.json", dict) for name in ("vae", "text_encoder"))
        check_channels(vae, transformer)
        check_width(text, transformer)
        self.geometry = Geometry.of(vae, int(transformer["patch_size"][1]))
        self.text_width, self.text_length = int(text["d_model"]), folder.text_length
        self._image_parts: tuple[Path, ...] = ()
        if transformer.get("image_dim"):
            self._image_parts = tuple(self._part(name) for name in image_encoder.FOLDERS)
            config = read_json(self._image_parts[0] / "config.json", dict)
            config = config.get("vision_config") or config  # CLIPModel contains the config of the vision model
            image_encoder.check_image_encoder(config, transformer, self.text_length)
            self.image_tokens = image_encoder.num_tokens(config)

    def check_files(self) -> None:
        """Checks the headers of the weights, the VAE's statistics, and the tokenizer's files."""
        for name in ("vae", "text_encoder", *(["image_encoder"] if self._image_parts else [])):
            files = sorted(self._part(name).glob("*.safetensors"))
            if not files:
                raise ConfigError(f"{self._part(name)} has no .safetensors file; use a complete copy of the model")
            for file in files:
                with reading_safetensors(file):
                    TensorFile(file)
        self.statistics()
        tokenizer = self._part("tokenizer")
        # Without these files, transformers silently creates a tokenizer with an empty vocabulary.
        vocabularies = [tokenizer / name for name in ("tokenizer.json", "spiece.model")]
        if not any(file.is_file() for file in vocabularies) or not (tokenizer / "tokenizer_config.json").is_file():
            raise ConfigError(
                f"{tokenizer} lacks tokenizer_config.json, or tokenizer.json (or spiece.model); use a complete copy of "
                "the model"
            )

    def vae(self) -> WanVae:
        """Loads the VAE in float32, on the CPU."""
        return WanVae.load(self._part("vae"))

    def text_encoder(self) -> TextEncoder:
        """Loads the tokenizer and the text encoder in `text_dtype`, on the CPU."""
        return TextEncoder.load(self._part("tokenizer"), self._part("text_encoder"), self.text_dtype)

    def image_encoder(self) -> ImageEncoder:
        """Loads the image encoder and the image processor in float32, on the CPU."""
        if not self._image_parts:
            return super().image_encoder()
        return ImageEncoder.load(*self._image_parts)

    def image_fingerprint(self) -> str:
        """Hashes the files of the image encoder and the image processor."""
        return image_encoder.fingerprint(*self._image_parts) if self._image_parts else super().image_fingerprint()

    def fingerprints(self) -> tuple[str, str]:
        """Hashes the files of the VAE and those of the text encoder."""
        text = [self._part("tokenizer"), self._part("text_encoder")]
        return of_folders([self._part("vae")]), of_folders(text, str(self.text_dtype))

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Reads the statistics from the VAE's config; does not load its weights."""
        config = read_json(self._part("vae") / "config.json", dict)
        return statistics({**config, "z_dim": self.geometry.channels})

    def scheduler(self, shift: float) -> Any:
        """Loads the scheduler from the model's folder; returns an Euler scheduler if it is missing or broken."""
        import diffusers

        folder = self._folder.part("scheduler")
        if folder is None:
            return euler(shift)
        config = read_json(folder / "scheduler_config.json", dict)
        if config.get("_class_name") not in _SCHEDULERS:
            return euler(shift)
        kind = getattr(diffusers, str(config["_class_name"]))
        try:  # a broken scheduler must not end the run
            scheduler = kind.from_config({name: value for name, value in config.items() if not name.startswith("_")})
            scheduler.set_timesteps(2)
        except Exception:
            return euler(shift)
        return scheduler

    def _part(self, name: str) -> Any:
        folder = self._folder.part(name)
        if folder is None:
            of_image = name in image_encoder.FOLDERS
            parts = "image encoder and image processor" if of_image else "VAE, text encoder and tokenizer"
            model = "an image-to-video model" if of_image else "a Wan model"
            raise ConfigError(
                f"{self._folder.path} has no {name}; pass --parts_path FOLDER, where FOLDER is {model} in diffusers' "
                f"layout that contains the {parts}"
            )
        return folder


class TinyEncoders(Encoders):
    """The encoders of the tiny model, which are part of this package."""

    text_dtype = torch.float32

    def __init__(self, transformer: Mapping[str, Any]) -> None:
        from unisono.recipes.wan.tiny.models import TEXT_LENGTH, tiny_vae_config

        vae = tiny_vae_config()
        check_channels(vae, transformer)
        self.geometry = Geometry.of(vae, int(transformer["patch_size"][1]))
        self.text_width, self.text_length = int(transformer["text_dim"]), TEXT_LENGTH

    def parts(self) -> PipelineParts:
        """Creates all parts of the tiny pipeline except the transformer."""
        from unisono.recipes.wan.tiny.models import tiny_pipeline_parts

        return tiny_pipeline_parts()

    def vae(self) -> WanVae:
        """Returns the tiny VAE."""
        return WanVae(self.parts().vae)

    def text_encoder(self) -> TextEncoder:
        """Returns the tiny text encoder, whose weights are random."""
        parts = self.parts()
        return TextEncoder(parts.tokenizer, parts.text_encoder)

    def fingerprints(self) -> tuple[str, str]:
        """Hashes the weights of the VAE and those of the text encoder."""
        return self.vae().fingerprint(), self.text_encoder().fingerprint()


@dataclass
class NoEncoders(Encoders):
    """No encoders: the dataset must contain latents and embeddings."""

    geometry: Geometry
    text_width: int
    text_length: int

    def vae(self) -> WanVae:
        """Raises ConfigError, because there is no VAE."""
        raise ConfigError(
            "no VAE to encode images and videos with; pass --parts_path FOLDER, a Wan model in diffusers' layout, or a "
            "latent (name.latent.safetensors) for every sample"
        )

    def text_encoder(self) -> TextEncoder:
        """Raises ConfigError, because there is no text encoder."""
        raise ConfigError(
            "no text encoder for captions; pass --parts_path FOLDER, a Wan model in diffusers' layout, or an embedding "
            "(name.safetensors) for every sample, --caption_dropout 0 and --guidance 1"
        )

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Raises ConfigError, because the statistics belong to a VAE."""
        raise ConfigError(
            "latents raw: normalising them needs the VAE's statistics, but there is no VAE; pass --parts_path FOLDER, "
            "a Wan model in diffusers' layout"
        )

    def fingerprints(self) -> tuple[str, str]:
        """Returns placeholders, because there are no models to hash."""
        return "none", "none"


def no_encoders(transformer: Mapping[str, Any], text_length: int) -> NoEncoders:
    """Derives the VAE's geometry from the transformer's number of channels, which no two published VAEs share."""
    _, channels = channels_of(transformer)
    geometry = Geometry(channels, 4, 16 if channels == 48 else 8, int(transformer["patch_size"][1]))
    return NoEncoders(geometry, int(transformer["text_dim"]), text_length)
