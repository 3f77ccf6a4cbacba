"""Generates previews: images and videos from fixed captions and fixed noise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from unisono.data.bits import key_of, random_bits, to_unit
from unisono.recipes.wan.condition.inputs import Condition
from unisono.recipes.wan.data.render import labelled
from unisono.recipes.wan.models.encoders import NoEncoders
from unisono.recipes.wan.models.experts import Experts
from unisono.recipes.wan.models.vae import WanVae
from unisono.recipes.wan.previews import FPS, decoded_frames, enlarged, mp4
from unisono.recipes.wan.sample import sample

if TYPE_CHECKING:
    from unisono.recipes.wan_flow.recipe import WanFlow

_NOISE = 0x9E37  # key of the previews' noise, the same in all runs
_ACROSS = 8  # frames per video in the grid
_AUTO_SHIFT = 3.0  # the scheduler's shift if the training shift is auto


class _Request(NamedTuple):
    """One preview to generate."""

    caption: str
    like: Tensor
    """A latent with the shape to generate."""
    text: Tensor
    """The text embedding of the caption."""
    condition: Condition | None
    """The given frames of an image-to-video model, one row; None for other models."""


def previews(recipe: WanFlow, model: Experts) -> Mapping[str, Any] | None:
    """Generates the previews; returns files by name: a grid of all previews, their captions, and each video as MP4."""
    from unisono.recipes.wan.data.render import grid

    encoders = recipe.setup.encoders
    if isinstance(encoders, NoEncoders):  # the data are latents, and there is no VAE to decode them
        return None
    requests = _requests(recipe)
    if not requests:
        return None
    device = next(model.parameters()).device
    vae = encoders.vae()

    def frames_of(number: int) -> list[Tensor]:
        request = requests[number]
        start = fixed_noise(number, request.like.shape).to(device)
        text = (request.text[None].to(device), recipe.without_caption(request.text)[None].to(device))
        condition = None if request.condition is None else request.condition.to(device)
        latents = generate(recipe, model, start[None], text, like=request.like[None].to(device), condition=condition)
        given = [] if condition is None else given_frames(recipe, vae, condition)
        return [*given, decoded_frames(vae, latents)[0]]

    samples = recipe.over_ranks(frames_of, range(len(requests)))
    captions = [request.caption for request in requests]
    rows = [with_given([enlarged(frames) for frames in sample]) for sample in samples]
    files: dict[str, Any] = {
        "samples.png": grid([torch.cat(row) for row in rows], columns=most_columns(rows), captions=captions),
        "captions.txt": "".join(f"{caption}\n" for caption in captions),
    }
    for number, (*given, frames) in enumerate(rows):
        if len(frames) > 1:
            video = torch.cat([*(picture.expand_as(frames) for picture in given), frames], dim=2)
            # With fps 0, the training videos have different frame rates, so previews use a default.
            files[f"sample_{number:02d}.mp4"] = mp4(video, recipe.config.fps or FPS)
    return files


def given_frames(recipe: WanFlow, vae: WanVae, condition: Condition) -> list[Tensor]:
    """Decodes the given frames of one sample from their latents, uint8 [1, H, W, 3] each."""
    latent = condition.channels[:, vae.geometry.temporal_factor :]
    if recipe.setup.condition.num_frames == 1:
        return [decoded_frames(vae, latent[:, :, :1])[0]]  # the first latent frame can be decoded without the others
    frames = decoded_frames(vae, latent)[0]
    return [frames[:1], frames[-1:]]


def with_given(sample: list[Tensor]) -> list[Tensor]:
    """Labels a sample's given frames, and adds equal space above the other frames; no effect without given frames."""
    *given, frames = sample
    if not given:
        return sample
    names = ("given: first", "given: last")
    return [*(labelled(picture, name) for picture, name in zip(given, names, strict=False)), labelled(frames, "")]


def most_columns(rows: list[list[Tensor]]) -> int:
    """Returns the grid's number of columns, with one more per given frame; 0 for the usual number."""
    return 0 if len(rows[0]) == 1 else _ACROSS + len(rows[0]) - 1


def _requests(recipe: WanFlow) -> list[_Request]:
    """Returns the previews to generate: of the user's captions, or of held-out (else training) samples' captions."""
    data = recipe.data.dataset("eval") or recipe.data.dataset("train")
    assert data is not None
    if recipe.preview_prompts:
        like = torch.zeros(data.shape(0)) if hasattr(data, "shape") else data[0]["latent"]
        needs_frames = recipe.setup.condition.has_channels
        condition = recipe.encoded_sample(data[0])[2] if needs_frames else None
        return [_Request(caption, like, recipe.text(caption), condition) for caption in recipe.preview_prompts]
    number = min(recipe.config.num_previews, len(data))
    # The built-in shapes alternate, so the first samples show all of them; a folder is sorted by name.
    stride = len(data) // number if hasattr(data, "sources") and number else 1
    indices = [index * stride for index in range(number)]
    return [_Request(caption_of(data, index), *recipe.encoded_sample(data[index])) for index in indices]


def caption_of(data: Any, index: int) -> str:
    """Returns the caption of a sample."""
    if hasattr(data, "sources"):
        return data.sources[index].caption or ""
    return str(data.shapes.plan(index).caption)


def fixed_noise(number: int, shape: torch.Size) -> Tensor:
    """Draws the noise that preview `number` starts from, the same on every machine."""
    bits = random_bits(key_of(_NOISE, number), torch.arange(2 * shape.numel()))
    uniform = to_unit(bits, torch.float64).clamp(1e-12).view(2, *shape)
    return (torch.sqrt(-2 * torch.log(uniform[0])) * torch.cos(2 * torch.pi * uniform[1])).float()  # Box-Muller


def generate(
    recipe: WanFlow,
    model: Experts,
    noise: Tensor,
    text: tuple[Tensor, Tensor],
    like: Tensor,
    condition: Condition | None = None,
) -> Tensor:
    """Samples latents from noise. A low-noise expert, which never saw pure noise, starts from `like` with noise."""
    config, flow = recipe.config, recipe.setup.flow
    shift = _AUTO_SHIFT if config.shift == "auto" else float(config.shift)
    settings = {"steps": config.preview_steps, "guidance": config.guidance, "low": flow.low, "high": flow.high}
    dtype = recipe.compute_dtype(model, noise)
    embeddings = (text[0].to(dtype), text[1].to(dtype))
    if condition is not None and condition.image is not None:
        condition = condition._replace(image=condition.image.to(dtype))
    with torch.compiler.set_stance("force_eager"):  # the compiled blocks are for other shapes
        return sample(
            model, noise, embeddings, recipe.setup.encoders.scheduler(shift), like=like, condition=condition, **settings
        )
