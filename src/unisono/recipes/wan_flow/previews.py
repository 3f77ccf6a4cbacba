"""What a model draws, to look at and, for the built-in shapes, to judge."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unisono.data.bits import key_of, random_bits, to_unit
from unisono.recipes.wan.looking import decoded, enlarged
from unisono.recipes.wan.models.companions import Missing
from unisono.recipes.wan.models.experts import Experts
from unisono.recipes.wan.models.islands import compute_type
from unisono.recipes.wan.sample import sample

if TYPE_CHECKING:
    from unisono.data.noise import Noise
    from unisono.recipes.wan_flow.recipe import WanFlow

_NOISE = 0x9E37  # names the noise of previews: the same in all runs


def draw(recipe: WanFlow, model: Experts) -> Mapping[str, Any] | None:
    """One picture of everything that was drawn, and films as films."""
    from unisono.recipes.wan.data.media import from_unit
    from unisono.recipes.wan.data.show import grid, write_film

    if isinstance(recipe.companions, Missing):  # latents of others, and nothing here that makes pictures of them
        return None
    wanted = _wanted(recipe)
    if not wanted:
        return None
    device = next(model.parameters()).device
    vae = recipe.companions.vae()

    def drawn(number: int) -> Tensor:
        _, latent, rows = wanted[number]
        start = fixed_noise(number, latent.shape).to(device)
        text = (rows[None].to(device), recipe.without_caption(rows)[None].to(device))
        latents = _sampled(recipe, model, start[None], text, like=latent[None].to(device))
        vae.to(device)
        frames = from_unit(decoded(vae, latents)[0]).cpu()
        vae.to("cpu")
        return frames

    pictures = recipe.over_ranks(drawn, range(len(wanted)))
    files: dict[str, Any] = {"samples.png": grid([enlarged(frames) for frames in pictures])}
    files["captions.txt"] = "".join(f"{caption}\n" for caption, _, _ in wanted)
    for number, frames in enumerate(pictures):
        if len(frames) > 1:
            film = io.BytesIO()
            write_film(enlarged(frames), film, recipe.config.fps or 16.0)
            files[f"sample_{number:02d}.mp4"] = film.getvalue()
    return files


def _wanted(recipe: WanFlow) -> list[tuple[str, Tensor, Tensor]]:
    """Captions, each with a latent of the size to draw, and the rows that the transformer gets for it."""
    data = recipe._data.dataset("eval") or recipe._data.dataset("train")
    assert data is not None
    if recipe._prompts:
        like = torch.zeros(data.shape(0)) if hasattr(data, "shape") else data[0]["latent"]
        return [(caption, like, recipe.text(caption)) for caption in recipe._prompts]
    number = min(recipe.config.num_previews, len(data))
    # The built-in shapes come in turn, so the first ones show them all; a folder is sorted by name.
    spread = len(data) // number if hasattr(data, "sources") and number else 1
    chosen = [index * spread for index in range(number)]
    return [(caption_of(data, index), *recipe.encoded_sample(data[index])) for index in chosen]


def caption_of(data: Any, index: int) -> str:
    """The caption of a sample."""
    if hasattr(data, "sources"):
        return data.sources[index].caption or ""
    return str(data.shapes.plan(index).caption)


def fixed_noise(number: int, shape: torch.Size) -> Tensor:
    """The noise that preview `number` begins with, on every machine."""
    bits = random_bits(key_of(_NOISE, number), torch.arange(2 * shape.numel()))
    even = to_unit(bits, torch.float64).clamp(1e-12).view(2, *shape)
    return (torch.sqrt(-2 * torch.log(even[0])) * torch.cos(2 * torch.pi * even[1])).float()


def judged(
    recipe: WanFlow, model: Experts, batch: Mapping[str, Any], text: Tensor, noise: Noise
) -> dict[str, tuple[Tensor, int]]:
    """How many samples drawn from captions show the colour and the shape that the caption names."""
    from unisono.recipes.wan.tiny.judge import trained_judge

    latent = batch["latent"]
    empty = recipe.without_caption(text[0])[None].expand(len(latent), -1, -1).to(text)
    latents = _sampled(recipe, model, noise.normal(*latent.shape[1:]), (text, empty), like=latent)
    colours, kinds = trained_judge().judge(recipe.companions.vae().decode(latents.cpu()))
    right = {"colour": colours == batch["colour"].cpu(), "shape": kinds == batch["kind"].cpu()}
    found = {name: (hits.double().sum(), len(latent)) for name, hits in right.items()}
    return {**found, "colour_and_shape": ((right["colour"] & right["shape"]).double().sum(), len(latent))}


def _sampled(recipe: WanFlow, model: Experts, noise: Tensor, text: tuple[Tensor, Tensor], like: Tensor) -> Tensor:
    """Samples from noise; an expert that never saw pure noise begins with `like`, hidden as far as it knows."""
    config, flow = recipe.config, recipe.flow
    shift = 3.0 if config.shift == "auto" else float(config.shift)
    settings = {"steps": config.preview_steps, "guidance": config.guidance, "low": flow.low, "high": flow.high}
    dtype = compute_type(noise)
    recipe.kernel.settle(model, noise.device.type, dtype)
    rows = (text[0].to(dtype), text[1].to(dtype))
    with torch.compiler.set_stance("force_eager"):  # compiled for other shapes
        return sample(model, noise, rows, recipe.companions.scheduler(shift), like=like, **settings)
