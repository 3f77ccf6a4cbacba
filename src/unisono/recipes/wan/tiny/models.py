"""Tiny Wan models that need no download: they use the same classes as the published models, in smaller sizes.

The VAE is trained (`make_vae.py` writes the weights next to this file), and the text encoder is random and frozen. A
run trains the transformer.
"""

from __future__ import annotations

import math
import string
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

import torch
from torch import Tensor

from unisono.data.bits import key_of, random_bits, to_unit
from unisono.errors import ConfigError
from unisono.recipes.wan.condition.kind import MASK_CHANNELS
from unisono.recipes.wan.tiny.shapes import COLOURS, DIRECTIONS, SHAPES, WORDINGS

# Type checkers cannot see the methods of these classes, and in some cases not even the classes.
AutoencoderKLWan: TypeAlias = Any
FlowMatchEulerDiscreteScheduler: TypeAlias = Any
T5TokenizerFast: TypeAlias = Any
UMT5EncoderModel: TypeAlias = Any

TEXT_LENGTH = 16
"""Number of text tokens that the tiny transformer attends to; the published models have 512."""

VAE_WEIGHTS = Path(__file__).with_name("vae.safetensors")

_TEXT_DIM = 64
_LATENT_CHANNELS = 8
_STATISTICS = ("latents_mean", "latents_std")
_SPECIAL_PIECES = ("<pad>", "</s>", "<unk>")  # tokens 0, 1 and 2, as in UMT5


class PipelineParts(NamedTuple):
    """All parts of a `WanPipeline` except the transformer."""

    tokenizer: T5TokenizerFast
    text_encoder: UMT5EncoderModel
    vae: AutoencoderKLWan
    scheduler: FlowMatchEulerDiscreteScheduler


def tiny_transformer_config(*, given_frames: bool = False) -> dict[str, Any]:
    """Returns arguments for a `WanTransformer3DModel` of 0.7 M parameters; with `given_frames`, for image to video."""
    return {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 4,
        "attention_head_dim": 24,
        "in_channels": 2 * _LATENT_CHANNELS + MASK_CHANNELS if given_frames else _LATENT_CHANNELS,
        "out_channels": _LATENT_CHANNELS,
        "text_dim": _TEXT_DIM,
        "freq_dim": 256,
        "ffn_dim": 384,
        "num_layers": 4,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "rope_max_seq_len": 64,
    }


def tiny_vae_config() -> dict[str, Any]:
    """Returns arguments for a tiny `AutoencoderKLWan`: 4 frames of 4 x 4 pixels become one latent position."""
    return {
        "base_dim": 16,
        "z_dim": _LATENT_CHANNELS,
        "dim_mult": [1, 1, 1],
        "num_res_blocks": 0,
        "temperal_downsample": [True, True],
        "is_residual": True,  # as in Wan 2.2; this halves the number of training steps
        "scale_factor_temporal": 4,
        "scale_factor_spatial": 4,
        "latents_mean": [0.0] * _LATENT_CHANNELS,
        "latents_std": [1.0] * _LATENT_CHANNELS,
    }


def untrained_vae(**other: Any) -> AutoencoderKLWan:
    """Creates the tiny VAE with randomly initialised weights; `other` overrides arguments."""
    import diffusers

    return diffusers.AutoencoderKLWan(**{**tiny_vae_config(), **other})  # type: ignore[no-untyped-call]


def tiny_vae(weights: Path = VAE_WEIGHTS) -> AutoencoderKLWan:
    """Loads the tiny VAE, which was trained on `Shapes`; its config contains the statistics of the shapes' latents."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = {name: tensor.float() for name, tensor in load_file(weights).items()}
        statistics = {name: [float(value) for value in tensors.pop(name)] for name in _STATISTICS}
        with torch.random.fork_rng(devices=[]):  # the constructor draws random weights, which are replaced
            vae = untrained_vae(**statistics)
        vae.load_state_dict(tensors)
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise ConfigError(
            f"{weights} does not contain the weights of the tiny VAE ({error}); "
            "train it again: python -m unisono.recipes.wan.tiny.make_vae --output FILE"
        ) from None
    return vae.eval().requires_grad_(False)


def tiny_tokenizer() -> T5TokenizerFast:
    """Creates a tokenizer that knows the words of the captions and spells out all other words."""
    import transformers

    words = sorted({*" ".join(WORDINGS).split(), *COLOURS, *SHAPES, *DIRECTIONS, "moving"} - {"{colour}", "{shape}"})
    letters = string.ascii_letters + string.digits + string.punctuation
    vocab = [(piece, 0.0) for piece in _SPECIAL_PIECES]
    # The tokenizer chooses the split with the best score: known words become one piece, others are split into letters.
    vocab += [(f"▁{word}", -1.0) for word in words]
    vocab += [(piece, -8.0) for piece in ("▁", *letters)]
    kind: Any = transformers.T5TokenizerFast  # type: ignore[attr-defined]
    return kind(vocab=vocab, extra_ids=0, model_max_length=TEXT_LENGTH)


def tiny_text_encoder() -> UMT5EncoderModel:
    """Creates a tiny UMT5 with random weights that are the same on every machine."""
    import transformers

    config = transformers.UMT5Config(
        vocab_size=len(tiny_tokenizer()), d_model=_TEXT_DIM, d_kv=16, d_ff=128, num_layers=2, num_heads=4
    )
    with torch.random.fork_rng(devices=[]):  # these random weights, whose last bits depend on the machine, are replaced
        untyped: Any = transformers.UMT5EncoderModel  # its constructor has types only in some versions
        encoder = untyped(config)
    with torch.no_grad():
        for name, weight in encoder.named_parameters():
            if weight.dim() > 1:
                weight.copy_(_uniform(name, weight.shape) * _spread(name, weight.shape[1], config.d_kv))
    return encoder.eval().requires_grad_(False)


def tiny_pipeline_parts() -> PipelineParts:
    """Creates all parts of a pipeline except the transformer."""
    import diffusers

    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0)  # type: ignore[no-untyped-call]
    return PipelineParts(tiny_tokenizer(), tiny_text_encoder(), tiny_vae(), scheduler)


def _uniform(name: str, shape: torch.Size) -> Tensor:
    """Draws uniform numbers of mean 0 and variance 1. Normal ones need logarithms, which machines round differently."""
    bits = random_bits(key_of(crc32(name.encode())), torch.arange(shape.numel()))
    return ((to_unit(bits, torch.float32) - 0.5) * math.sqrt(12)).view(shape)


def _spread(name: str, fan_in: int, width_of_a_head: int) -> float:
    """Returns the standard deviation with which T5 initialises this weight."""
    if "shared" in name or "embed_tokens" in name:
        return 1.0
    if "relative_attention_bias" in name:
        return 1 / math.sqrt(_TEXT_DIM)
    return 1 / math.sqrt(fan_in * width_of_a_head if name.endswith(".q.weight") else fan_in)
