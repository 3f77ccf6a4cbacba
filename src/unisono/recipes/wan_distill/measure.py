"""How near the student is to its teacher on prompts that neither was trained with, and how much faster it draws."""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from unisono.engine.memory import is_out_of_memory
from unisono.recipes.wan.models.experts import Experts
from unisono.recipes.wan.objective import noised
from unisono.recipes.wan.sample import sample
from unisono.recipes.wan_distill import losses

if TYPE_CHECKING:
    from unisono.recipes.wan_distill.recipe import WanDistill
    from unisono.recipes.wan_distill.setup import Setup

_DRAWS, _ENOUGH_S = 4, 10.0  # of the student, to be timed; fewer where they take long
_FEWEST = 3  # blocks of the teacher that must have been timed: one may have met a busy moment


class Took(NamedTuple):
    """How long a model draws."""

    seconds: float
    """For a sample, as many at once as the teacher draws: a median."""
    number: int
    """Timed draws of so many, those that began cold left out."""


def held_out(recipe: WanDistill, model: Experts, batch: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Errors of the velocity by noise level and of what is drawn in the end, and how long drawing takes."""
    data, text, drawing = batch["data"], batch["text"].to(dtype), recipe.setup.drawing
    count = torch.tensor(float(len(data)), dtype=torch.float64, device=data.device)
    errors, sizes, levels = [], [], []
    for place in range(batch["sigma"].shape[1]):
        sigma, target = batch["sigma"][:, place], batch["velocity"][:, place].to(data.dtype)
        noise = drawing.noise(batch["position"][:, place]).to(data.dtype)
        said = model(noised(data, noise, sigma), sigma, text).to(data.dtype)
        errors.append(losses.velocity_matching(said, target).double().sum())
        sizes.append(target.square().flatten(1).mean(1).double().sum())
        levels.append(sigma.double().sum())
    curve, size = torch.stack(errors), torch.stack(sizes)
    drawn = draw(recipe.setup, model, batch["begin"], text)
    missed = (drawn - data).square().flatten(1).sum(1) / data.square().flatten(1).sum(1)
    found = {
        "velocity_error": (curve.mean(), count),
        "latent_error": (missed.double().sum(), count),
        "velocity_error_by_level": (curve, count.expand(len(curve))),
        "relative_error_by_level": (curve, size),
        "sigma_by_level": (torch.stack(levels), count.expand(len(curve))),
    }
    found |= {name: (count * value, count) for name, value in speed(recipe.teacher_took, recipe.student_took).items()}
    if int(batch["label"].min()) >= 0:
        found |= judged(recipe.setup, drawn, batch["label"], "") | judged(
            recipe.setup, data, batch["label"], "teacher_"
        )
    return {"loss": found["velocity_error"], **found}


def speed(teacher: Took | None, student: Took | None) -> dict[str, float]:
    """The seconds for a sample of both, and how many times as fast the student is, where that can be said."""
    found = {} if student is None else {"seconds_per_sample": student.seconds}
    if teacher is not None:
        found["teacher_seconds_per_sample"] = teacher.seconds
        if student is not None and teacher.number >= _FEWEST:
            found["times_as_fast"] = teacher.seconds / student.seconds
    return found


def time_student(recipe: WanDistill, model: Experts) -> Took | None:
    """How long the student draws as many samples at once as the teacher did.

    Not where each rank has a part of it: gathering the parts would be measured too, and a student that somebody draws
    with is whole.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return None
    setup, device = recipe.setup, next(model.parameters()).device
    number = setup.drawing.block
    took: list[float] = []
    try:
        begin = setup.drawing.noise(torch.arange(number, device=device))
        text = setup.rows(setup.config.negative_prompt).to(device, recipe.settled(model, begin))
        text = text.expand(number, -1, -1).contiguous()
        while len(took) < 2 or (len(took) < _DRAWS and sum(took) < _ENOUGH_S):
            began = time.perf_counter()
            draw(setup, model, begin, text).sum().item()  # waits for the device
            took.append(time.perf_counter() - began)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None  # the teacher had the device for itself
    timed = took[1:]  # the first one chooses kernels and finds memory
    return Took(median(timed) / number, len(timed))


def draw(setup: Setup, model: Experts, begin: Tensor, text: Tensor) -> Tensor:
    """What the student draws from noise, without guidance."""
    with torch.compiler.set_stance("force_eager"):  # compiled for other shapes
        scheduler, steps = setup.student_scheduler()
        return sample(model, begin, (text, text), scheduler, steps=steps, guidance=1.0)


def judged(setup: Setup, latents: Tensor, label: Tensor, prefix: str) -> dict[str, Any]:
    """Of the built-in shapes: how many show the colour and the shape of their prompt."""
    from unisono.recipes.wan.tiny.judge import trained_judge

    colours, shapes = trained_judge().judge(setup.companions.vae().decode(latents.float().cpu()))
    right = {"colour": colours == label[:, 0].cpu(), "shape": shapes == label[:, 1].cpu()}
    return {f"{prefix}{name}": (hits.double().sum(), len(hits)) for name, hits in right.items()}
