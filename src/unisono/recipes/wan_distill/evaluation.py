"""Metrics on held-out prompts: the distance between student and teacher, and the student's speed-up."""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from unisono.engine.step.out_of_memory import is_out_of_memory
from unisono.recipes.wan.models.experts import Experts
from unisono.recipes.wan.objective import noised
from unisono.recipes.wan.sample import sample
from unisono.recipes.wan_distill import loss_terms as losses

if TYPE_CHECKING:
    from unisono.recipes.wan_distill.recipe import WanDistill
    from unisono.recipes.wan_distill.setup import Setup

_MOST_BATCHES, _ENOUGH_S = 4, 10.0  # maximum number of timed student batches, and seconds after which to stop earlier
_FEWEST_BLOCKS = 3  # minimum number of timed teacher blocks, because other load may have slowed down a single block


class SampleTime(NamedTuple):
    """The measured time in which a model generates a sample."""

    seconds: float
    """Median seconds per sample, in batches of rollout_batch samples."""
    number: int
    """Number of timed batches, without warm-up."""


def held_out_metrics(
    recipe: WanDistill, model: Experts, batch: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, Any]:
    """Returns the objective's own metrics, the error of the generated latents, and the time per sample."""
    data, text = batch["data"], batch["text"].to(dtype)
    count = torch.tensor(float(len(data)), dtype=torch.float64, device=data.device)
    student = recipe.objective.student(model)
    metrics = recipe.objective.metrics(student, batch, text)
    generated = generate(recipe.setup, student, batch["initial_noise"], text)
    distance = (generated - data).square().flatten(1).sum(1) / data.square().flatten(1).sum(1)
    metrics["latent_error"] = (distance.double().sum(), count)
    metrics |= {name: (count * value, count) for name, value in speed(recipe.teacher_time, recipe.student_time).items()}
    if int(batch["label"].min()) >= 0:
        metrics |= _shape_metrics(recipe.setup, generated, batch["label"], "")
        metrics |= _shape_metrics(recipe.setup, data, batch["label"], "teacher_")
    return metrics


def velocity_metrics(setup: Setup, model: Experts, batch: Mapping[str, Any], text: Tensor) -> dict[str, Any]:
    """Returns the error of the velocity: overall and by noise level."""
    data, spec = batch["data"], setup.rollout_spec
    count = torch.tensor(float(len(data)), dtype=torch.float64, device=data.device)
    errors, sizes, levels = [], [], []
    for level in range(batch["sigma"].shape[1]):
        sigma, target = batch["sigma"][:, level], batch["velocity"][:, level].to(data.dtype)
        noise = spec.noise(batch["position"][:, level]).to(data.dtype)
        predicted = model(noised(data, noise, sigma), sigma, text).to(data.dtype)
        errors.append(losses.velocity_matching(predicted, target).double().sum())
        sizes.append(target.square().flatten(1).mean(1).double().sum())
        levels.append(sigma.double().sum())
    curve, size = torch.stack(errors), torch.stack(sizes)
    return {
        "velocity_error": (curve.mean(), count),
        "velocity_error_by_level": (curve, count.expand(len(curve))),
        "relative_error_by_level": (curve, size),
        "sigma_by_level": (torch.stack(levels), count.expand(len(curve))),
    }


def speed(teacher: SampleTime | None, student: SampleTime | None) -> dict[str, float]:
    """Returns the seconds per sample of both models and the student's speed-up, as far as they were measured."""
    metrics = {} if student is None else {"seconds_per_sample": student.seconds}
    if teacher is not None:
        metrics["teacher_seconds_per_sample"] = teacher.seconds
        if student is not None and teacher.number >= _FEWEST_BLOCKS:
            metrics["times_as_fast"] = teacher.seconds / student.seconds
    return metrics


def time_student(recipe: WanDistill, model: Experts) -> SampleTime | None:
    """Measures how long the student takes to generate a batch as large as the teacher's batches.

    Returns None if the student is sharded or ranks share a sample: the time would include communication that inference
    does not need, and ranks could time different numbers of batches.
    """
    if recipe.context.size > 1 or any(isinstance(module, FSDPModule) for module in model.modules()):
        return None
    setup, device, student = recipe.setup, next(model.parameters()).device, recipe.objective.student(model)
    batch_size = setup.rollout_spec.block
    seconds: list[float] = []
    try:
        initial_noise = setup.rollout_spec.noise(torch.arange(batch_size, device=device))
        text = setup.text(setup.config.negative_prompt).to(device, recipe.compute_dtype(model, initial_noise))
        text = text.expand(batch_size, -1, -1).contiguous()
        while len(seconds) < 2 or (len(seconds) < _MOST_BATCHES and sum(seconds) < _ENOUGH_S):
            start = time.perf_counter()
            generate(setup, student, initial_noise, text).sum().item()  # .item() waits for the device
            seconds.append(time.perf_counter() - start)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None  # a batch that fit for the teacher may not fit next to the training state
    timed = seconds[1:]  # the first batch chooses kernels and allocates memory
    return SampleTime(median(timed) / batch_size, len(timed))


def generate(setup: Setup, model: Experts, initial_noise: Tensor, text: Tensor) -> Tensor:
    """Generates samples with the student, without guidance."""
    with torch.compiler.set_stance("force_eager"):  # the blocks were compiled for other shapes
        scheduler, steps = setup.student_scheduler()
        return sample(model, initial_noise, (text, text), scheduler, steps=steps, guidance=1.0)


def _shape_metrics(setup: Setup, latents: Tensor, labels: Tensor, prefix: str) -> dict[str, Any]:
    """Counts the samples that show the colour and the shape named in their prompts (built-in shapes only)."""
    from unisono.recipes.wan.tiny.classifier import recognised

    frames = setup.encoders.vae().decode(latents.float().cpu())
    correct = recognised(frames, labels[:, 0], labels[:, 1])
    return {f"{prefix}{name}": (hits.double().sum(), len(hits)) for name, hits in correct.items()}
