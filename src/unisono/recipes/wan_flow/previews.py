"""Previews: samples that the model generates from fixed captions and fixed noise, as images and videos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from unisono.data.bits import key_of, random_bits, to_unit
from unisono.recipes.wan.models.encoders import NoEncoders
from unisono.recipes.wan.models.experts import Experts
from unisono.recipes.wan.previews import FPS, decoded_frames, enlarged, mp4
from unisono.recipes.wan.sample import sample

if TYPE_CHECKING:
    from unisono.recipes.wan_flow.recipe import WanFlow

_NOISE = 0x9E37  # key of the previews' noise: the same in all runs
_AUTO_SHIFT = 3.0  # the scheduler's shift when the training shift follows each sample's size


class _Request(NamedTuple):
    """One preview to generate."""

    caption: str
    like: Tensor
    """A latent of the size to generate."""
    text: Tensor
    """The text embedding of the caption."""


def previews(recipe: WanFlow, model: Experts) -> Mapping[str, Any] | None:
    """Files by name: one image with a grid of all previews, their captions, and each video as MP4."""
    from unisono.recipes.wan.data.render import grid

    encoders = recipe.setup.encoders
    if isinstance(encoders, NoEncoders):  # the data are latents, and there is no VAE to decode them
        return None
    requests = _requests(recipe)
    if not requests:
        return None
    device = next(model.parameters()).device
    vae = encoders.vae()

    def frames_of(number: int) -> Tensor:
        request = requests[number]
        start = fixed_noise(number, request.like.shape).to(device)
        text = (request.text[None].to(device), recipe.without_caption(request.text)[None].to(device))
        latents = generate(recipe, model, start[None], text, like=request.like[None].to(device))
        return decoded_frames(vae, latents)[0]

    samples = recipe.over_ranks(frames_of, range(len(requests)))
    captions = [request.caption for request in requests]
    files: dict[str, Any] = {
        "samples.png": grid([enlarged(frames) for frames in samples], captions=captions),
        "captions.txt": "".join(f"{caption}\n" for caption in captions),
    }
    for number, frames in enumerate(samples):
        if len(frames) > 1:
            # With fps 0 each video has its own frame rate, so previews use a default.
            files[f"sample_{number:02d}.mp4"] = mp4(enlarged(frames), recipe.config.fps or FPS)
    return files


def _requests(recipe: WanFlow) -> list[_Request]:
    """The user's captions, or captions of the data, held-out samples first."""
    data = recipe.data.dataset("eval") or recipe.data.dataset("train")
    assert data is not None
    if recipe.preview_prompts:
        like = torch.zeros(data.shape(0)) if hasattr(data, "shape") else data[0]["latent"]
        return [_Request(caption, like, recipe.text(caption)) for caption in recipe.preview_prompts]
    number = min(recipe.config.num_previews, len(data))
    # The built-in shapes alternate, so the first samples show all of them; a folder is sorted by name.
    stride = len(data) // number if hasattr(data, "sources") and number else 1
    indices = [index * stride for index in range(number)]
    return [_Request(caption_of(data, index), *recipe.encoded_sample(data[index])) for index in indices]


def caption_of(data: Any, index: int) -> str:
    """The caption of a sample."""
    if hasattr(data, "sources"):
        return data.sources[index].caption or ""
    return str(data.shapes.plan(index).caption)


def fixed_noise(number: int, shape: torch.Size) -> Tensor:
    """The noise that preview `number` starts from, the same on every machine."""
    bits = random_bits(key_of(_NOISE, number), torch.arange(2 * shape.numel()))
    uniform = to_unit(bits, torch.float64).clamp(1e-12).view(2, *shape)
    return (torch.sqrt(-2 * torch.log(uniform[0])) * torch.cos(2 * torch.pi * uniform[1])).float()  # Box-Muller


def generate(recipe: WanFlow, model: Experts, noise: Tensor, text: tuple[Tensor, Tensor], like: Tensor) -> Tensor:
    """Samples latents from noise. A low-noise expert was not trained on pure noise, so it starts from noised `like`."""
    config, flow = recipe.config, recipe.setup.flow
    shift = _AUTO_SHIFT if config.shift == "auto" else float(config.shift)
    settings = {"steps": config.preview_steps, "guidance": config.guidance, "low": flow.low, "high": flow.high}
    dtype = recipe.compute_dtype(model, noise)
    embeddings = (text[0].to(dtype), text[1].to(dtype))
    with torch.compiler.set_stance("force_eager"):  # the compiled blocks are for other shapes
        return sample(model, noise, embeddings, recipe.setup.encoders.scheduler(shift), like=like, **settings)
