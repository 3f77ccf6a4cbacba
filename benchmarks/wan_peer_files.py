"""What both programs of benchmarks/wan_peer.py read: random weights, latents and text embeddings."""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

from wan_peer_variants import LOSS_SHAPE, Model, Shape

NUM_SAMPLES = 4
LOSS_SAMPLES = 72
ZEROS, ONES = 0.0, -1.0
Weight = tuple[str, tuple[int, ...], float]
"""Name, shape and standard deviation of a weight; ZEROS and ONES instead of a deviation are constants."""


def weights_of(model: Model) -> Iterator[Weight]:
    """The weights of a transformer under the names of Wan's own repository."""
    d, f = model.dim, model.ffn_dim
    yield "patch_embedding.weight", (d, 16, 1, 2, 2), 0.125
    yield "patch_embedding.bias", (d,), 0.02
    yield from _linear("text_embedding.0", d, 4096)
    yield from _linear("text_embedding.2", d, d)
    yield from _linear("time_embedding.0", d, 256)
    yield from _linear("time_embedding.2", d, d)
    yield from _linear("time_projection.1", 6 * d, d)
    for number in range(model.num_layers):
        block = f"blocks.{number}"
        yield f"{block}.modulation", (1, 6, d), d**-0.5
        for attention in ("self_attn", "cross_attn"):
            for name in "qkvo":
                yield from _linear(f"{block}.{attention}.{name}", d, d)
            for name in ("norm_q", "norm_k"):
                yield f"{block}.{attention}.{name}.weight", (d,), ONES
        yield f"{block}.norm3.weight", (d,), ONES
        yield f"{block}.norm3.bias", (d,), ZEROS
        yield from _linear(f"{block}.ffn.0", f, d)
        yield from _linear(f"{block}.ffn.2", d, f)
    yield "head.modulation", (1, 2, d), d**-0.5
    yield from _linear("head.head", 64, d)


def _linear(name: str, num_out: int, num_in: int) -> Iterator[Weight]:
    yield f"{name}.weight", (num_out, num_in), 0.7 * num_in**-0.5
    yield f"{name}.bias", (num_out,), 0.02


def write_weights(file: Path, model: Model) -> None:
    """A safetensors file of random bf16 weights, drawn on the GPU and written by several threads; 28 GB take 20 s."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = list(weights_of(model))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape, _ in weights:
        begin, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    if file.exists() and file.stat().st_size == start + end:
        return
    started = time.monotonic()
    draft = file.with_suffix(".new")
    with draft.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.truncate(start + end)
        out.flush()

        def write(number: int, weight: Weight) -> None:
            name, shape, deviation = weight
            if deviation <= 0:
                tensor = torch.full(shape, -deviation, device=device, dtype=torch.bfloat16)
            else:
                generator = torch.Generator(device).manual_seed(number)
                tensor = torch.empty(shape, device=device, dtype=torch.bfloat16)
                tensor.normal_(0, deviation, generator=generator)
            data = memoryview(tensor.view(torch.uint8).flatten().cpu().numpy())
            offset = start + header[name]["data_offsets"][0]
            while data:
                written = os.pwrite(out.fileno(), data, offset)
                data, offset = data[written:], offset + written

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(write, range(len(weights)), weights))
    os.replace(draft, file)
    print(f"{file}: {end / 1e9:.1f} GB in {time.monotonic() - started:.1f} s", flush=True)


def samples(shape: Shape) -> Iterator[tuple[str, Any, Any]]:
    """Names, latents and text embeddings, in bf16."""
    import torch

    generator = torch.Generator().manual_seed(1)
    for number in range(NUM_SAMPLES):
        latent = torch.randn(shape.latent, generator=generator).bfloat16()
        text = (0.2 * torch.randn(shape.text, generator=generator)).bfloat16()
        yield f"clip{number}", latent, text


def write_unisono_data(folder: Path, shape: Shape) -> None:
    """The samples as docs/wan.md describes them."""
    folder.mkdir(parents=True)
    for name, latent, text in samples(shape):
        _write_sample(folder, name, latent, text)


def write_musubi_data(folder: Path, shape: Shape) -> None:
    """The same samples, written by musubi-tuner's own functions, which must be importable, and its configuration."""
    from musubi_tuner.dataset.cache_io import save_latent_cache_wan, save_text_encoder_output_cache_wan
    from musubi_tuner.dataset.image_video_dataset import ItemInfo

    videos, cache = folder / "videos", folder / "cache"
    videos.mkdir(parents=True)
    cache.mkdir()
    (width, height), frames = shape.size, shape.num_frames
    for name, latent, text in samples(shape):
        item = ItemInfo(name, "", (width, height), (width, height, frames), frame_count=frames)
        stem = f"{name}_00000-{frames:03d}_{width:04d}x{height:04d}_wan"
        item.latent_cache_path = str(cache / f"{stem}.safetensors")
        item.text_encoder_output_cache_path = str(cache / f"{name}_wan_te.safetensors")
        save_latent_cache_wan(item, latent, None, None, None)
        save_text_encoder_output_cache_wan(item, text)
    # Enough repeats that all steps belong to one epoch: at the start of an epoch, the loader starts again.
    lines = ["[general]", f"resolution = [{width}, {height}]", "caption_extension = '.txt'", "batch_size = 1"]
    lines += ["enable_bucket = true", "bucket_no_upscale = false", "", "[[datasets]]"]
    lines += [f"video_directory = '{videos}'", f"cache_directory = '{cache}'", f"target_frames = [{frames}]"]
    lines += ["frame_extraction = 'head'", "num_repeats = 16"]
    (folder / "dataset.toml").write_text("\n".join([*lines, ""]))


def write_loss_data(folder: Path) -> None:
    """Latents that a LoRA can learn: each is a mixture of the same four smooth patterns, named by its text."""
    import torch
    from torch.nn.functional import interpolate

    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(2)
    channels, frames, height, width = LOSS_SHAPE.latent
    coarse = torch.randn(4, channels * frames, 3, 3, generator=generator)
    patterns = interpolate(coarse, (height, width), mode="bicubic").view(4, *LOSS_SHAPE.latent)
    words = 0.2 * torch.randn(4, 16, LOSS_SHAPE.text[1], generator=generator)
    for number in range(LOSS_SAMPLES):
        mixture = torch.rand(4, generator=generator)
        mixture /= mixture.norm()
        latent = torch.einsum("p,p...->...", mixture, patterns)
        _write_sample(folder, f"mix{number:02d}", latent, torch.einsum("p,ptw->tw", mixture, words).bfloat16())


def _write_sample(folder: Path, name: str, latent: Any, text: Any) -> None:
    from safetensors.torch import save_file

    save_file({"latent": latent.float()}, folder / f"{name}.latent.safetensors")
    save_file({"embeddings": text}, folder / f"{name}.safetensors")


def place_for_weights(work: Path) -> Path:
    """Shared memory if 31 GB of weights fit beside 64 GiB for the programs, because a disk may be slow; else `work`."""
    shared = Path("/dev/shm")
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
        if shutil.disk_usage(shared).free > 33 * 2**30 and free_kib > 97 * 2**20:
            return shared / work.parent.name
    except (OSError, StopIteration):
        pass
    return work
