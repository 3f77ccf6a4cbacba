"""Trains a run's model in a hand-written PyTorch loop: the baseline for measuring unisono's overhead.

The loop is plain PyTorch: a DataLoader, DistributedDataParallel if there are several ranks, autocast,
`clip_grad_norm_`, an optimizer of torch.optim. It starts from the same weights and does the same work: the same samples
in the same order, the same loss, optimizer, learning rates, precision and average of the weights. Its losses must
therefore equal the run's losses, and the benchmark compares them step by step. It has no checkpoints, no metrics other
than the loss, and no checks.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from unisono.benching.hand_data import HandData, HandMicroBatch
from unisono.data.bits import Purpose, key_of
from unisono.data.noise import Noise
from unisono.data.seeding import seed_everything
from unisono.engine.recipe import Recipe
from unisono.engine.step.learning_rate import learning_rate_factor, learning_rate_scale
from unisono.engine.step.make_optimizer import from_settings, not_for_muon
from unisono.engine.step.precision import autocast
from unisono.engine.training_run import TrainingRun
from unisono.optim.adamw import AdamW
from unisono.parallel.blocks.repeated import repeated_blocks
from unisono.settings import PrecisionSettings, Settings


class LossOfModel(nn.Module):
    """A model whose forward pass is the recipe's loss, so that DistributedDataParallel can wrap it."""

    def __init__(self, model: nn.Module, recipe: Recipe, seed: int, precision: PrecisionSettings) -> None:
        super().__init__()
        self.model, self._recipe, self._seed, self._precision = model, recipe, seed, precision

    def forward(self, data: Any, positions: Tensor) -> tuple[Tensor, Any]:
        """Returns the sum of the losses of a batch, and the number of summed items."""
        with autocast(positions.device, self._precision):
            loss = self._recipe.loss(self.model, data, Noise(self._seed, positions))
        return loss.total, loss.count


class HandLoop:
    """The loop of one rank."""

    def __init__(self, run: TrainingRun, model: nn.Module, data: HandData, *, is_even: bool, draws: bool) -> None:
        """`model` is on the device and has the initial weights of the run.

        `is_even`: all micro-batches of all ranks count the same number of items, so the mean of their means is the
        overall mean. `draws`: loss() draws random numbers (dropout), so it must be seeded as in the run.
        """
        settings, placement = run.settings, run.components.strategy.placement
        self._settings, self._placement, self._recipe = settings, placement, run.components.recipe
        self._data, self._is_even, self._draws = data, is_even, draws
        self._total_steps, self._accumulation = run.length.steps, run.batch.accumulation
        named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
        self._weights = [weight for _, weight in named]
        self._optimizer = _make_optimizer(self._recipe, named, model, settings)
        scale = learning_rate_scale(run.batch.global_batch, settings.optim)
        self._peaks = [group["lr"] * scale for group in self._optimizer.param_groups]
        decay = settings.ema.ema_decay
        self._average = [weight.detach().clone() for weight in self._weights] if decay > 0 else []
        self._loss: nn.Module = LossOfModel(model, self._recipe, settings.run.seed, settings.precision)
        if run.components.strategy.name == "ddp":
            self._loss = _in_ddp(self._loss, settings, placement.device)
        self._expected = 1.0
        self._step = 0
        self._sums: list[tuple[Tensor, Any]] = []  # summed loss and count of each micro-batch of this rank
        self._ends: list[int] = []  # length of `_sums` after each step

    def expect(self, count: float) -> None:
        """Sets the number of items that an uneven step divides by until it knows the true number."""
        self._expected = count

    def train(self, steps: int) -> None:
        """Trains for `steps` steps."""
        for _ in range(steps):
            self._train_step()

    def _train_step(self) -> None:
        self._recipe.clock.set(self._step, self._total_steps)
        self._set_learning_rate()
        for number, micro in enumerate(self._data.step()):
            is_waiting = isinstance(self._loss, DistributedDataParallel) and not micro.is_last
            with self._loss.no_sync() if is_waiting else nullcontext():  # type: ignore[operator]
                self._forward_and_backward(micro, number)
        self._ends.append(len(self._sums))
        if not self._is_even:
            self._divide_by_count()
        if self._settings.optim.grad_clip > 0:
            clip_grad_norm_(self._weights, self._settings.optim.grad_clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._average:
            self._update_average()
        self._step += 1
        if self._step % self._settings.observe.log_every == 0:
            float(self._sums[-1][0])  # wait for the loss, as a loop that prints it does

    def _forward_and_backward(self, micro: HandMicroBatch, number: int) -> None:
        if self._draws:
            key = (self._settings.run.seed, self._step, self._placement.data_rank, number)
            seed_everything(key_of(Purpose.DROPOUT, *key), self._placement.devices)
        total, count = self._loss(micro.data, micro.positions)
        if self._is_even:
            scaled = total / (count * self._accumulation)
        else:
            total, count = total * micro.weight, count * micro.weight
            scaled = total / self._expected
        scaled.backward()
        self._sums.append((total.detach(), count))

    def _divide_by_count(self) -> None:
        """Divides the gradients by the number of items in the whole global batch, as token-level losses require."""
        count = self._summed(self._ends[-2] if len(self._ends) > 1 else 0, self._ends[-1])[1]
        world = self._placement.world
        if world > 1:
            dist.all_reduce(count)
        gradients = [weight.grad for weight in self._weights if weight.grad is not None]
        torch._foreach_mul_(gradients, (self._expected * world / count).to(gradients[0].dtype))

    def _summed(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        device = self._placement.device
        totals, counts = zip(*self._sums[begin:end], strict=True)
        total = torch.stack([each.double() for each in totals]).sum()
        return total, torch.stack([torch.as_tensor(n, dtype=torch.float64, device=device) for n in counts]).sum()

    def _set_learning_rate(self) -> None:
        own = self._recipe.learning_rate(self._step)
        if own is None:
            factor = learning_rate_factor(self._step, self._total_steps, self._settings.optim)
            rates = [peak * factor for peak in self._peaks]
        elif isinstance(own, int | float):
            rates = [own * (peak / self._peaks[0]) if self._peaks[0] else own for peak in self._peaks]
        else:
            rates = [float(rate) for rate in own]
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _update_average(self) -> None:
        ema = self._settings.ema
        decay = min(ema.ema_decay, (1 + self._step) / (10 + self._step)) if ema.ema_warmup else ema.ema_decay
        torch._foreach_lerp_(self._average, [weight.detach() for weight in self._weights], 1 - decay)

    def losses(self) -> list[float]:
        """Returns the loss of each step so far, over all ranks; every rank must call it."""
        begins = [0, *self._ends[:-1]]
        sums = torch.stack([torch.stack(self._summed(*ends)) for ends in zip(begins, self._ends, strict=True)])
        if self._placement.world > 1:
            dist.all_reduce(sums)
        return [float(total / count) for total, count in sums]

    def close(self) -> None:
        """Stops the loader's workers."""
        self._data.close()


def _make_optimizer(recipe: Recipe, named: Any, model: nn.Module, settings: Settings) -> Optimizer:
    """Builds the run's optimizer; uses torch's own AdamW where the run uses unisono's AdamW kernel."""
    own = recipe.optimizer(list(named))
    if own is not None:
        return own
    blocks = recipe.blocks(model)
    blocks = repeated_blocks(model) if blocks is None else list(blocks)
    optimizer = from_settings(named, settings.optim, not_for_muon=not_for_muon(model, blocks))
    if not isinstance(optimizer, AdamW):
        return optimizer
    optim = settings.optim
    return torch.optim.AdamW(
        [weight for _, weight in named],
        lr=optim.learning_rate,
        betas=(optim.beta1, optim.beta2),
        eps=optim.epsilon,
        weight_decay=optim.weight_decay,
        fused=True,
    )


def _in_ddp(loss: nn.Module, settings: Settings, device: torch.device) -> DistributedDataParallel:
    parallel = settings.parallel
    # Pass the option only if it differs from the default, because torch 2.13 renamed it.
    buffers: dict[str, Any] = {} if parallel.broadcast_buffers else {"broadcast_buffers": False}
    return DistributedDataParallel(
        loss,
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=parallel.bucket_cap_mb,
        find_unused_parameters=parallel.find_unused_parameters,
        gradient_as_bucket_view=parallel.gradient_as_bucket_view,
        static_graph=parallel.static_graph,
        **buffers,
    )
