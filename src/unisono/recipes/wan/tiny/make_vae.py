"""Trains the tiny VAE: `python -m unisono.recipes.wan.tiny.make_vae --output FILE`.

Trains it from scratch on `Shapes`, still and moving, on the CPU, in a few minutes.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from unisono.errors import ConfigError
from unisono.recipes.wan.tiny.models import AutoencoderKLWan, tiny_vae, untrained_vae
from unisono.recipes.wan.tiny.shapes import Shapes

_SIZE = 32
_LEARNING_RATE, _WARMUP = 4e-3, 50
_KL_WEIGHT = 1e-4
_NUM_FOR_STATISTICS = 480  # number of drawings from which to compute the latents' mean and standard deviation
_NUM_FOR_PSNR = 96
_FIRST_LOG_VARIANCE = -5.0  # initial log-variance of the posterior; with the default, noise would drown the latents


class BatchKind(NamedTuple):
    """One kind of training batch."""

    num_frames: int
    num_samples: int
    at_once: int


# Includes clips of nine frames, because the third latent frame takes a different path through the VAE than the second.
_BATCHES = (BatchKind(1, 2400, 32), BatchKind(5, 1440, 8), BatchKind(1, 2400, 32), BatchKind(9, 720, 6))
"""The kinds of batches; each optimizer step uses the next one, in rotation."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="make_vae", description="Train the tiny VAE on drawn shapes.")
    parser.add_argument("--output", type=Path, required=True, help="safetensors file to write")
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    parser.add_argument("--steps", type=int, default=2000, help="optimizer steps (default: %(default)s)")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="random seed of the initial weights and the sample order (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    try:
        _check(options.output, options.force, options.steps)
        vae = train(options.steps, options.seed)
        save(vae, options.output)
    except ConfigError as error:
        print(f"make_vae: {error}", file=sys.stderr)
        return error.exit_code
    saved = tiny_vae(options.output)  # loaded from the file, to measure the effect of half precision too
    for num_frames in (1, 5, 9):
        print(f"PSNR on held-out drawings, frames {num_frames}: {psnr(saved, num_frames, _NUM_FOR_PSNR):.1f} dB")
    return 0


def train(steps: int, seed: int = 0) -> AutoencoderKLWan:
    """Trains a VAE on the shapes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae = untrained_vae()
        torch.nn.init.constant_(vae.quant_conv.bias[vae.config.z_dim :], _FIRST_LOG_VARIANCE)
        optimizer = torch.optim.AdamW(vae.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = _learning_rate(step, steps)
            kind = _BATCHES[step % len(_BATCHES)]
            drawings = Shapes(kind.num_samples, kind.num_frames, _SIZE)
            chosen = torch.randint(kind.num_samples, (kind.at_once,)).tolist()
            frames = torch.stack([drawings[index]["frames"] for index in chosen])
            posterior = vae.encode(frames).latent_dist
            decoded = _decode_without_clamp(vae, posterior.sample())
            # A weak pull towards N(0, 1) keeps the latents smooth, which makes them easy to learn.
            divergence = 0.5 * (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean()
            loss = F.mse_loss(decoded, frames) + 0.5 * F.l1_loss(decoded, frames) + _KL_WEIGHT * divergence
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
            optimizer.step()
            if step % 100 == 0 or step == steps - 1:
                print(f"step {step}: loss {loss.item():.4f}", flush=True)
    return vae.eval().requires_grad_(False)


def save(vae: AutoencoderKLWan, file: Path) -> None:
    """Writes the weights in half precision, with the mean and standard deviation of the drawings' latents."""
    from safetensors.torch import save as to_bytes

    with torch.no_grad():
        latents = [vae.encode(_frames(_NUM_FOR_STATISTICS, num_frames)).latent_dist.mean for num_frames in (1, 5)]
    by_channel = torch.cat([part.transpose(0, 1).flatten(1) for part in latents], dim=1)
    tensors = {name: tensor.half().contiguous() for name, tensor in vae.state_dict().items()}
    # Does not use save_file, which creates files that only their owner may read.
    file.write_bytes(to_bytes({**tensors, "latents_mean": by_channel.mean(1), "latents_std": by_channel.std(1)}))


@torch.no_grad()
def psnr(vae: AutoencoderKLWan, num_frames: int, num_samples: int) -> float:
    """Returns the peak signal-to-noise ratio of reconstructed held-out drawings, in decibels."""
    frames = _frames(num_samples, num_frames, split="eval")
    decoded = vae.decode(vae.encode(frames).latent_dist.mean).sample
    return -10 * math.log10(((decoded - frames) / 2).square().mean().item())


def _decode_without_clamp(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """Decodes like `vae.decode`, but without the clamp to [-1, 1], whose zero gradient would stall training."""
    vae.clear_cache()
    latents = vae.post_quant_conv(latents)
    parts = []
    for i in range(latents.shape[2]):
        # For each frame, the decoder reads its list of cached features of earlier frames from the start.
        index = [0]
        parts.append(
            vae.decoder(latents[:, :, i : i + 1], feat_cache=vae._feat_map, feat_idx=index, first_chunk=i == 0)
        )
    vae.clear_cache()
    return torch.cat(parts, dim=2)


def _learning_rate(step: int, steps: int) -> float:
    return _LEARNING_RATE * min(1.0, (step + 1) / _WARMUP) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _frames(num_samples: int, num_frames: int, split: str = "train") -> Tensor:
    """Returns the frames of a split's first drawings, [samples, 3, frames, size, size]."""
    drawings = Shapes(num_samples, num_frames, _SIZE, split=split)
    return torch.stack([drawings[i]["frames"] for i in range(num_samples)])


def _check(output: Path, force: bool, steps: int) -> None:
    if steps < 1:
        raise ConfigError(f"--steps {steps}: expected at least 1")
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise ConfigError(f"--output {output}: expected a file in a folder that exists")
    if output.exists() and not force:
        raise ConfigError(f"{output} already exists; pass --force to overwrite it")


if __name__ == "__main__":
    sys.exit(main())
