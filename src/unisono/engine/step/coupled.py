"""The gradient of a loss that compares the samples of a global batch with each other, such as a contrastive loss.

Such a loss is not a sum over micro-batches: every page is a negative example for all other queries. But it depends on
the model only through one row per sample, so the chain rule can be split there:

    1. embed every micro-batch without an autograd graph (the last micro-batch with one), and keep the rows
    2. gather the rows of all micro-batches and ranks; compute the exact loss and its gradient with respect to the rows
    3. embed each micro-batch again with the same dropout, and run backward from the gradients of its rows

It needs the memory of one micro-batch, and any number of ranks and micro-batches gives the result of one large batch.
With one micro-batch per rank nothing is computed twice. If the recipe can compute the loss of a range of rows
(`couple_rows`), each rank computes the loss of its share of the rows, a micro-batch of rows at a time, and the ranks
sum their gradients. Otherwise every rank computes the whole loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono.data.loader import BadSample, MicroBatch, positions_tensor, to_device
from unisono.data.noise import Noise
from unisono.data.order import share_of
from unisono.data.resident import gathered
from unisono.engine.step.accumulate import Attempt, GradientAccumulator, StepSums
from unisono.engine.step.comparison import Compared, Rows, compare_all, compare_anchors, floating
from unisono.engine.step.device_timer import DeviceTimer
from unisono.engine.step.out_of_memory import IN_COUPLE
from unisono.engine.step.precision import autocast
from unisono.engine.step.sums import power_of_two_near
from unisono.errors import RecipeError


class CoupledGradientAccumulator(GradientAccumulator):
    """Computes the gradient of a coupled loss, together with all other ranks."""

    _kinds: list[tuple[str, Any]] | None = None  # names, shapes and types of the rows, the same on all ranks

    def _compute(self, micro_batches: Iterator[MicroBatch], requests: Mapping[str, float]) -> StepSums:
        step, attempt, lap = self._state.step + 1, Attempt(), DeviceTimer(self._device)
        inject_nan = self._heartbeat.injector.makes_loss_nan(step)
        self._begin()
        micros: list[MicroBatch] = []
        embedded: list[Rows | None] = []
        bad: list[BadSample] = []
        while not micros or not micros[-1].chunk.last:
            micro = self._next_micro_batch(micro_batches, bad, is_first=not micros)
            if micro.chunk.last:
                self._guard.buffers.rewind()  # earlier passes run again, and only then may they change buffers
            embedded.append(self._embed(micro, len(micros), attempt, graph=micro.chunk.last, last=not micros))
            micros.append(micro)
        lap.end()
        self._heartbeat.at("reduce", step)
        # Checked after the last forward pass, because the next operation is a collective.
        with self._waits.waiting():
            agreed = self._start_exchange(requests, bad, attempt).read()
        self._act_on(agreed, bad, attempt)
        gradients = self._couple(micros, embedded, attempt, inject_nan)
        del embedded[:-1]
        self._backward_all(micros, embedded, gradients, attempt)
        return self._summed(attempt, agreed, lap)

    def _forward(self, micro: MicroBatch, number: int, attempt: Attempt, inject_nan: bool) -> Tensor | None:
        """Returns a scaled number that depends on all rows, for a memory trial."""
        rows = self._embed(micro, number, attempt, graph=True, last=False)
        return (
            None if rows is None else self._scaled(torch.stack([each.sum() for each in floating(rows).values()]).sum())
        )

    def _embed(self, micro: MicroBatch, number: int, attempt: Attempt, *, graph: bool, last: bool) -> Rows | None:
        """Returns the rows of a micro-batch; None if memory ran out now or earlier in this attempt."""
        if attempt.failure is not None:
            return None
        try:
            self._heartbeat.at("forward", self._state.step + 1)
            self._seed_dropout(number)
            data = to_device(gathered(micro.data), self._device, self._floating)
            positions = positions_tensor(micro.positions, self._device)
            if graph:
                self.flops.begin(micro)
                with self.flops.counting(), self._strategy.accumulating(last=last):
                    rows = self._strategy.rows(self._rows, data, positions)
            else:
                with torch.no_grad():
                    rows = self._strategy.rows(self._rows, data, positions)
            return _checked(rows, len(micro.positions))
        except Exception as error:
            self._note_failure(error, attempt)
            return None

    def _rows(self, model: nn.Module, data: Any, positions: Tensor) -> dict[str, Tensor]:
        self.flops.see(data)
        with autocast(self._device, self._settings.precision):
            rows = self._recipe.embed(model, data, Noise(self._settings.run.seed, positions))
        if not isinstance(rows, Mapping) or not all(isinstance(each, Tensor) for each in rows.values()):
            raise RecipeError("embed() must return a mapping of tensors, one row for each sample of the batch")
        return {name: _wide(each) for name, each in sorted(rows.items())}

    def _couple(
        self, micros: Sequence[MicroBatch], embedded: Sequence[Rows | None], attempt: Attempt, inject_nan: bool
    ) -> list[Rows]:
        """Computes the loss of all rows; returns its gradient with respect to the rows of each local micro-batch."""
        # Outside of the `try`: a rank that fails here cannot notify the others, which wait in the all-reduce.
        where = [positions_tensor(micro.positions, self._device) - min(micro.chunk.global_batch) for micro in micros]
        whole = self._gather(micros, embedded, where)
        usable = self._usable(micros[0])
        rows = {name: each if usable is None else each[usable] for name, each in whole.items()}
        gradients = {name: torch.zeros_like(each) for name, each in floating(rows).items()}
        compared: Compared | None = None
        try:
            if self._recipe.couples_by_rows:
                anchors = share_of(self._strategy.placement.rank, self._world, 0, len(next(iter(rows.values()))))
                at_once = max(len(micro.positions) for micro in micros)
                compared = compare_anchors(self._recipe, rows, anchors, at_once, gradients, inject_nan=inject_nan)
            else:
                compared = compare_all(self._recipe, rows, gradients, inject_nan=inject_nan)
        except Exception as error:
            self._note_failure(error, attempt, final=not attempt.guarded, where=IN_COUPLE)
        # A rank that ran out of memory joins these collectives: others are notified after their backward passes.
        self._take_sums(compared, attempt)
        if self._recipe.couples_by_rows and self._world > 1:
            with self._waits.waiting():
                for each in gradients.values():
                    dist.all_reduce(each)
        if usable is not None:
            gradients = {
                name: torch.zeros_like(whole[name]).index_copy(0, usable, each) for name, each in gradients.items()
            }
        return [{name: each[here] for name, each in gradients.items()} for here in where]

    def _gather(
        self, micros: Sequence[MicroBatch], embedded: Sequence[Rows | None], where: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """Returns the global batch's rows from all ranks, in the order of the sample stream; missing rows are 0."""
        size = len(micros[0].chunk.global_batch)
        first = embedded[0]
        assert first is not None
        self._agree_on_rows(first)
        whole = {}
        for name, like in first.items():
            exchanged = torch.uint8 if like.dtype == torch.bool else like.dtype  # booleans cannot be summed
            all_rows = torch.zeros(size, *like.shape[1:], dtype=exchanged, device=like.device)
            for micro, rows, here in zip(micros, embedded, where, strict=True):
                if not micro.is_dummy:
                    assert rows is not None
                    all_rows.index_copy_(0, here, rows[name].detach().to(exchanged))
            if self._world > 1:
                with self._waits.waiting():
                    dist.all_reduce(all_rows)  # each row is nonzero on one rank only, so the sum is exact
            whole[name] = all_rows.to(like.dtype)
        return whole

    def _agree_on_rows(self, rows: Rows) -> None:
        """Checks once that rows have the same names, shapes and types on all ranks, as the all-reduce needs."""
        kinds = [(name, (tuple(each.shape[1:]), str(each.dtype))) for name, each in rows.items()]
        if self._kinds is None:
            from_ranks = self._agreement.all_gather(kinds)
            if any(other != from_ranks[0] for other in from_ranks):
                raise RecipeError(f"embed(): rows differ between ranks (here {kinds}); keep names, shapes and types")
        elif kinds != self._kinds:
            raise RecipeError(f"embed(): rows were {self._kinds} and now are {kinds}; keep names, shapes and types")
        self._kinds = kinds

    def _usable(self, micro: MicroBatch) -> Tensor | None:
        """Returns the indices of the rows whose samples could be read; None if all samples could be read."""
        if not self.bad:
            return None
        start, missing = min(micro.chunk.global_batch), {sample.position for sample in self.bad}
        readable = [row for row in range(len(micro.chunk.global_batch)) if row + start not in missing]
        return torch.tensor(readable, device=self._device)

    def _take_sums(self, compared: Compared | None, attempt: Attempt) -> None:
        """Records the sums of the loss; None if memory ran out. In the first step, the ranks agree on the count."""
        by_rows = self._recipe.couples_by_rows
        if by_rows and (not self._names or self._own.expected_count == 0.0):
            counted = None
            if compared is not None:
                counted = compared.names, float(compared.sums[1].item()), float(compared.num_anchors)
            self._agree_on_sums(counted, attempt)
        if compared is None:
            return
        self._names = self._names or compared.names
        self._check_names(compared.names)
        if self._own.expected_count == 0.0:  # the only host-device sync
            self._own.expected_count = power_of_two_near(float(compared.sums[1].item()))
            self._expect(self._own.expected_count)
        # The all-reduce adds up the sums of all ranks. If each rank has computed the whole loss, only one contributes.
        is_own = by_rows or self._strategy.placement.rank == 0
        attempt.sums = compared.sums if is_own else torch.zeros_like(compared.sums)

    def _backward_all(
        self, micros: Sequence[MicroBatch], kept: list[Rows | None], gradients: Sequence[Rows], attempt: Attempt
    ) -> None:
        """Runs backward for the last micro-batch, whose graph is in `kept`.

        Then embeds each of the other micro-batches again, and runs backward for it.
        """
        numbers = [len(micros) - 1, *range(len(micros) - 1)]
        for number in numbers:
            last = number == numbers[-1]
            rows = kept.pop() if kept else self._embed(micros[number], number, attempt, graph=True, last=last)
            if rows is None or attempt.failure is not None:
                return
            total = self._descend(rows, gradients[number], 0.0 if micros[number].is_dummy else 1.0)
            rows = None
            self._backward(total, attempt, last=last)
            del total  # frees the autograd graph before the next micro-batch is embedded

    def _descend(self, rows: Rows, gradients: Rows, weight: float) -> Tensor:
        """Returns a number whose gradient through the rows is the gradient of the loss."""
        pairs = [(rows[name] * gradient).sum() for name, gradient in gradients.items()]
        return self._scaled(torch.stack(pairs).sum()) * weight


def _checked(rows: Rows, samples: int) -> Rows:
    for name, each in rows.items():
        if each.dim() == 0 or len(each) != samples:
            actual = f"{len(each)} rows" if each.dim() else "a single number"
            raise RecipeError(f"embed(): {name} is {actual} for {samples} samples; return one row per sample")
    return rows


def _wide(rows: Tensor) -> Tensor:
    """Returns the rows in at least 32-bit precision, in which the loss is computed."""
    return rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
