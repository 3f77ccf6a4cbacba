"""The gradient of a loss that compares the samples of a global batch with each other.

Such a loss is no sum over micro-batches: in a contrastive one every page is a wrong answer to all other queries. But it
depends on the model only through one row per sample, so the chain rule can be cut there:

    1. embed every micro-batch without a graph (the last one with), keep the rows
    2. gather the rows of all micro-batches and ranks; one exact loss, and its gradient with respect to the rows
    3. backward through each micro-batch, embedded once more with the same dropout, from its rows' gradients

Memory is that of one micro-batch, and any number of ranks and micro-batches gives what one big batch would. With one
micro-batch per rank nothing is computed twice. Every rank computes the whole loss: a matrix product of some thousand
rows costs less than another exchange between ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono.data.loader import BadSample, MicroBatch, on_device, place
from unisono.data.noise import Noise
from unisono.data.resident import gathered
from unisono.engine.gradient import Gradient, Lap, Summed, Try, flatten_loss, power_of_two_near, row_of
from unisono.engine.precision import autocast
from unisono.errors import RecipeError

Rows = Mapping[str, Tensor]
"""What a loss needs of some samples: one row each."""


class CoupledGradient(Gradient):
    """Computes such gradients on this rank, together with all others."""

    _kinds: list[tuple[str, Any]] | None = None  # names, shapes and types of the rows, the same on all ranks

    def _compute(self, micro_batches: Iterator[MicroBatch], wishes: Mapping[str, float]) -> Summed:
        step, this, lap = self._state.step + 1, Try(), Lap(self._device)
        spoilt = self._pulse.injector.spoils(step)
        self._guard.begin()
        self._expect(self._state.expected_count)
        micros: list[MicroBatch] = []
        embedded: list[Rows | None] = []
        bad: list[BadSample] = []
        while not micros or not micros[-1].chunk.last:
            self._pulse.at("data", step)
            micro = next(micro_batches)
            bad += micro.bad
            self._guard.see(micro.data)
            if not micros:
                self._strategy.begin_step(guarded=self._guard.wanted)
            if micro.chunk.last:
                self._guard.rewind()  # from here on each micro-batch comes by once more, or for the first time
            embedded.append(self._embed(micro, len(micros), this, graph=micro.chunk.last, last=not micros))
            micros.append(micro)
        lap.end()
        self._pulse.at("reduce", step)
        # Asked after the last forward pass, not before it: what follows at once needs everybody.
        mine = {"oom": this.failure is not None, "guard": self._guard.wanted, "bad": len(bad)}
        agreed = self._agreement.start({**wishes, **mine}).read()
        self._act_on(agreed, bad, this)
        gradients = self._couple(micros, embedded, this, spoilt)
        del embedded[:-1]
        self._backward_all(micros, embedded, gradients, this)
        return self._summed(this, agreed, lap)

    def _forward(self, micro: MicroBatch, number: int, this: Try, spoilt: bool) -> Tensor | None:
        """For its memory alone: a scaled number that depends on all rows."""
        rows = self._embed(micro, number, this, graph=True, last=False)
        return None if rows is None else self._scaled(torch.stack([each.sum() for each in _floating(rows)]).sum())

    def _embed(self, micro: MicroBatch, number: int, this: Try, *, graph: bool, last: bool) -> Rows | None:
        """The rows of a micro-batch; None, and the failure noted, when memory ran out (or had run out before)."""
        if this.failure is not None:
            return None
        try:
            self._pulse.at("forward", self._state.step + 1)
            self._seed_dropout(number)
            data = place(gathered(micro.data), self._device, self._floating)
            positions = on_device(micro.positions, self._device)
            if graph:
                with self._strategy.accumulating(last=last):
                    rows = self._strategy.rows(self._rows, data, positions)
            else:
                with torch.no_grad():
                    rows = self._strategy.rows(self._rows, data, positions)
            return _checked(rows, len(micro.positions))
        except Exception as error:
            self._note_failure(error, this)
            return None

    def _rows(self, model: nn.Module, data: Any, positions: Tensor) -> dict[str, Tensor]:
        with autocast(self._device, self._settings.precision):
            rows = self._recipe.embed(model, data, Noise(self._settings.run.seed, positions))
        if not isinstance(rows, Mapping) or not all(isinstance(each, Tensor) for each in rows.values()):
            raise RecipeError("embed() must return a mapping of tensors, one row for each sample of the batch")
        return {name: _wide(each) for name, each in sorted(rows.items())}

    def _couple(
        self, micros: Sequence[MicroBatch], embedded: Sequence[Rows | None], this: Try, spoilt: bool
    ) -> list[Rows]:
        """The loss of all rows; its gradient with respect to those of each micro-batch here."""
        # Not in the `try`: who fails here leaves others waiting for its rows, and nobody can be told any more.
        where = [on_device(micro.positions, self._device) - min(micro.chunk.global_batch) for micro in micros]
        whole = self._gather(micros, embedded, where)
        try:
            usable = self._usable(micros[0])
            leaves = {name: each if usable is None else each[usable] for name, each in whole.items()}
            for each in _floating(leaves):
                each.requires_grad_()
            results = flatten_loss(self._recipe.couple(leaves))
            if spoilt:
                results["total"] = results["total"] * torch.nan
            self._take_sums(results, this)
            floating = [name for name, each in leaves.items() if each.is_floating_point()]
            found = torch.autograd.grad(results["total"], [leaves[name] for name in floating], materialize_grads=True)
            gradients = dict(zip(floating, found, strict=True))
            if usable is not None:
                gradients = {
                    name: torch.zeros_like(whole[name]).index_copy(0, usable, each) for name, each in gradients.items()
                }
            return [{name: each[here] for name, each in gradients.items()} for here in where]
        except Exception as error:
            self._note_failure(error, this, final=not this.guarded)
            return []

    def _gather(
        self, micros: Sequence[MicroBatch], embedded: Sequence[Rows | None], where: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """The rows of the whole global batch in the order of the stream, whoever embedded them; 0 for those missing."""
        size = len(micros[0].chunk.global_batch)
        first = embedded[0]
        assert first is not None
        self._agree_on_rows(first)
        whole = {}
        for name, like in first.items():
            exchanged = torch.uint8 if like.dtype == torch.bool else like.dtype  # truths cannot be summed
            all_rows = torch.zeros(size, *like.shape[1:], dtype=exchanged, device=like.device)
            for micro, rows, here in zip(micros, embedded, where, strict=True):
                if not micro.stand_in:
                    assert rows is not None
                    all_rows.index_copy_(0, here, rows[name].detach().to(exchanged))
            if self._world > 1:
                dist.all_reduce(all_rows)  # each row is on one rank, and 0 on the others: exact, whatever their shares
            whole[name] = all_rows.to(like.dtype)
        return whole

    def _agree_on_rows(self, rows: Rows) -> None:
        """Once: rows that differ between ranks cannot be gathered."""
        kinds = [(name, (tuple(each.shape[1:]), str(each.dtype))) for name, each in rows.items()]
        if self._kinds is None:
            everybody = self._agreement.agree_all(kinds)
            if any(other != everybody[0] for other in everybody):
                raise RecipeError(f"embed(): rows differ between ranks (here {kinds}); keep names, shapes and types")
        elif kinds != self._kinds:
            raise RecipeError(f"embed(): rows were {self._kinds} and now are {kinds}; keep names, shapes and types")
        self._kinds = kinds

    def _usable(self, micro: MicroBatch) -> Tensor | None:
        """Which rows of the global batch are there; None for all of them."""
        if not self.bad:
            return None
        start, missing = min(micro.chunk.global_batch), {sample.position for sample in self.bad}
        there = [place for place in range(len(micro.chunk.global_batch)) if place + start not in missing]
        return torch.tensor(there, device=self._device)

    def _take_sums(self, results: Mapping[str, Tensor], this: Try) -> None:
        self._names = self._names or list(results)
        self._check_names(list(results))
        row = row_of(results)
        if self._state.expected_count == 0.0:  # the one point where the host waits for the device
            self._state.expected_count = power_of_two_near(float(row[1].item()))
            self._expect(self._state.expected_count)
        # All ranks have the same sums, and add them up.
        this.sums = row if self._strategy.place.rank == 0 else torch.zeros_like(row)

    def _backward_all(
        self, micros: Sequence[MicroBatch], kept: list[Rows | None], gradients: Sequence[Rows], this: Try
    ) -> None:
        """First the last micro-batch, whose graph is in `kept`, then the others, each embedded once more."""
        numbers = [len(micros) - 1, *range(len(micros) - 1)]
        for number in numbers:
            last = number == numbers[-1]
            rows = kept.pop() if kept else self._embed(micros[number], number, this, graph=True, last=last)
            if rows is None or this.failure is not None:
                return
            total = self._descend(rows, gradients[number], 0.0 if micros[number].stand_in else 1.0)
            rows = None
            self._backward(total, this, last=last)
            del total  # the graph is not kept while the next micro-batch is embedded

    def _descend(self, rows: Rows, gradients: Rows, weight: float) -> Tensor:
        """A number whose gradient, through the rows, is that of the loss."""
        pairs = [(rows[name] * gradient).sum() for name, gradient in gradients.items()]
        return self._scaled(torch.stack(pairs).sum()) * weight


def _checked(rows: Rows, samples: int) -> Rows:
    for name, each in rows.items():
        if each.dim() == 0 or len(each) != samples:
            found = f"{len(each)} rows" if each.dim() else "a single number"
            raise RecipeError(f"embed(): {name} is {found} for {samples} samples; give one row for each")
    return rows


def _wide(rows: Tensor) -> Tensor:
    """With no less than 32 bit: the loss is computed of them."""
    return rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows


def _floating(rows: Rows) -> list[Tensor]:
    return [each for each in rows.values() if each.is_floating_point()]
