"""Metrics on held-out samples: the loss at fixed noise levels and, for the built-in shapes, sample accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unisono.recipes.wan.condition.inputs import Condition
from unisono.recipes.wan.models.experts import Experts
from unisono.recipes.wan_flow.previews import generate

if TYPE_CHECKING:
    from unisono.data.noise import Noise
    from unisono.recipes.wan_flow.loss import FlowLoss
    from unisono.recipes.wan_flow.recipe import WanFlow


def loss_by_level(
    flow: FlowLoss,
    model: Experts,
    latent: Tensor,
    text: Tensor,
    noise: Noise,
    num_levels: int,
    mask: Tensor | None = None,
    condition: Condition | None = None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Computes the loss at evenly spaced quantiles of the noise levels; returns it as a curve and as a mean."""
    draws, levels = noise.normal(*latent.shape[1:]), flow.levels_for(latent)
    losses, sigmas, cosines = [], [], []
    for number in range(num_levels):
        quantile = torch.full((len(latent),), (number + 0.5) / num_levels, device=latent.device)
        sigma = levels.within(quantile, flow.low, flow.high).to(latent.dtype)
        each, weights, metrics = flow.errors(model, latent, text, sigma, draws, None, mask, condition)
        losses.append(each.double().sum())
        sigmas.append(sigma.double().sum())
        cosines.append(metrics["velocity_cosine"].double())
    count = torch.tensor(float(len(latent)), device=latent.device, dtype=torch.float64)
    weight = count if weights is None else weights.double().sum()
    curves = {"loss_by_level": (torch.stack(losses), weight), "sigma_by_level": (torch.stack(sigmas), count)}
    return {
        "loss": (torch.stack(losses).mean(), weight),
        "velocity_cosine": (torch.stack(cosines).mean(), count),
        **{name: (curve, number.expand(num_levels)) for name, (curve, number) in curves.items()},
    }


def shape_metrics(
    recipe: WanFlow,
    model: Experts,
    batch: Mapping[str, Any],
    text: Tensor,
    noise: Noise,
    condition: Condition | None = None,
) -> dict[str, tuple[Tensor, int]]:
    """Generates samples, and counts those that show the colour and the shape named in their captions.

    For an image-to-video model, also counts the samples that move as their captions say, and returns the error of the
    first frame.
    """
    from unisono.recipes.wan.tiny.classifier import recognised
    from unisono.recipes.wan.tiny.motion import first_frame_errors, moves

    latent = batch["latent"]
    empty = recipe.without_caption(text[0])[None].expand(len(latent), -1, -1).to(text)
    latents = generate(recipe, model, noise.normal(*latent.shape[1:]), (text, empty), like=latent, condition=condition)
    vae = recipe.setup.encoders.vae()
    frames = vae.decode(latents.cpu())
    measured = recognised(frames, batch["colour"], batch["kind"])
    measured["colour_and_shape"] = measured["colour"] & measured["shape"]
    if "given" in batch:
        measured["moves"] = moves(frames, batch["direction"])
        errors = first_frame_errors(vae, frames, batch["given"])
        measured |= dict(zip(("first_frame_error", "first_frame_error_of_vae"), errors, strict=True))
    return {name: (values.double().sum(), len(latent)) for name, values in measured.items()}
