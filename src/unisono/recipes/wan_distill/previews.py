"""What teacher and student draw from the same prompts and the same noise, side by side."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unisono.recipes.wan.looking import decoded, enlarged
from unisono.recipes.wan.models.experts import Experts
from unisono.recipes.wan.models.islands import compute_type
from unisono.recipes.wan_distill.measure import draw

if TYPE_CHECKING:
    from unisono.recipes.wan_distill.recipe import WanDistill

_PAIRS_ACROSS = 4
_FPS = 16.0


def side_by_side(recipe: WanDistill, model: Experts) -> Mapping[str, Any]:
    """One picture with the teacher on the left of each pair and the student on the right; and films as films."""
    from unisono.recipes.wan.data.media import from_unit
    from unisono.recipes.wan.data.show import grid, write_film

    device = next(model.parameters()).device
    setup = recipe.setup
    vae, samples = setup.companions.vae(), setup.rollouts("preview").open()

    def both(number: int) -> tuple[Tensor, Tensor]:
        begin = samples.drawing.begin(*samples.items[number])[None].to(device)
        rows = setup.rows(samples.items[number][0])[None].to(device, compute_type(begin))
        latents = torch.cat([samples.data(number)[None].to(device), draw(setup, model, begin, rows)])
        vae.to(device)
        teacher, student = (from_unit(decoded(vae, latent[None].float())[0]).cpu() for latent in latents)
        vae.to("cpu")
        return teacher, student

    pairs = recipe.over_ranks(both, range(len(samples)))
    pictures = [enlarged(frames) for pair in pairs for frames in pair]
    files: dict[str, Any] = {
        "teacher_student.png": grid(pictures, 2 * min(_PAIRS_ACROSS, len(pairs)) if _still(pairs) else 0)
    }
    files["prompts.txt"] = "".join(f"{prompt}\n" for prompt, _ in samples.items)
    if not _still(pairs):
        for number, pair in enumerate(pairs):
            film = io.BytesIO()
            write_film(enlarged(torch.cat(pair, dim=2)), film, _FPS)
            files[f"teacher_student_{number:02d}.mp4"] = film.getvalue()
    return files


def _still(pairs: list[tuple[Tensor, Tensor]]) -> bool:
    return all(len(frames) == 1 for pair in pairs for frames in pair)
