"""Generates previews: samples from teacher and student, side by side, for the same prompts and noise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unisono.recipes.wan.models.experts import Experts
from unisono.recipes.wan.models.float32_weights import compute_dtype
from unisono.recipes.wan.previews import decoded_frames, enlarged, mp4
from unisono.recipes.wan_distill.evaluation import generate

if TYPE_CHECKING:
    from unisono.recipes.wan_distill.recipe import WanDistill

_PAIRS_ACROSS = 4


def previews(recipe: WanDistill, model: Experts) -> Mapping[str, Any]:
    """Generates the previews; returns files by name: an image of all pairs (teacher left), and each video as MP4."""
    from unisono.recipes.wan.data.render import grid, labelled

    device = next(model.parameters()).device
    setup, trained = recipe.setup, recipe.objective.student(model)
    vae, samples = setup.encoders.vae(), setup.rollouts("preview").open()

    def both(number: int) -> tuple[Tensor, Tensor]:
        initial_noise = samples.spec.initial_noise(*samples.items[number])[None].to(device)
        text = setup.text(samples.items[number][0])[None].to(device, compute_dtype(initial_noise))
        latents = torch.cat([samples.data(number)[None].to(device), generate(setup, trained, initial_noise, text)])
        teacher, student = decoded_frames(vae, latents)
        return teacher, student

    pairs = recipe.over_ranks(both, range(len(samples)))
    panels = [enlarged(frames) for pair in pairs for frames in pair]
    captions = [f"{who}: {prompt}" for prompt, _ in samples.items for who in ("teacher", "student")]
    across = 2 * min(_PAIRS_ACROSS, len(pairs)) if _are_images(pairs) else 0
    files: dict[str, Any] = {"teacher_student.png": grid(panels, across, captions)}
    files["prompts.txt"] = "".join(f"{prompt}\n" for prompt, _ in samples.items)
    if not _are_images(pairs):
        for number, pair in enumerate(pairs):
            sides = [labelled(enlarged(frames), who) for frames, who in zip(pair, ("teacher", "student"), strict=True)]
            files[f"teacher_student_{number:02d}.mp4"] = mp4(torch.cat(sides, dim=2))
    return files


def _are_images(pairs: list[tuple[Tensor, Tensor]]) -> bool:
    return all(len(frames) == 1 for pair in pairs for frames in pair)
