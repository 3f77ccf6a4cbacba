"""The loss of embedding rows that are compared with each other, and its gradient with respect to the rows.

A recipe with `couple` computes the loss of all rows at once: a contrastive loss of B rows then needs a matrix of B x B
numbers. A recipe with `couple_rows` computes the loss for a range of anchors, which are rows that are compared with all
rows. Ranges of anchors can be divided between ranks, and computed one after the other within a rank. The largest matrix
then has only as many rows as one range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.data.order import split
from unisono.engine.recipe import Recipe
from unisono.engine.step.sums import flatten_loss, row_of
from unisono.errors import RecipeError

Rows = Mapping[str, Tensor]
"""The inputs of the loss: tensors with one row per sample."""


@dataclass(frozen=True)
class Compared:
    """Sums of the loss, and the number of anchors they belong to."""

    names: list[str]
    sums: Tensor
    num_anchors: int


def floating(rows: Rows) -> dict[str, Tensor]:
    """Returns the floating-point tensors among the rows; only these have a gradient."""
    return {name: each for name, each in rows.items() if each.is_floating_point()}


def compare_all(recipe: Recipe, rows: Rows, gradients: Rows, *, inject_nan: bool) -> Compared:
    """Computes the loss of all rows at once and adds its gradient to `gradients`."""
    for each in floating(rows).values():
        each.requires_grad_()
    results = flatten_loss(recipe.couple(rows))
    _add_gradient(results, rows, gradients, inject_nan=inject_nan)
    return Compared(list(results), row_of(results), _num_rows(rows))


def compare_anchors(
    recipe: Recipe, rows: Rows, anchors: range, at_once: int, gradients: Rows, *, inject_nan: bool
) -> Compared:
    """Computes the loss of the `anchors`, at most `at_once` together, and adds its gradient to `gradients`.

    If `anchors` is empty, it computes one row with weight 0, because every rank must know the names of the sums.
    """
    for each in floating(rows).values():
        each.requires_grad_()
    names: list[str] = []
    sums: Tensor | None = None
    for part in split(anchors, -(-len(anchors) // at_once)) or [range(min(1, _num_rows(rows)))]:
        results = flatten_loss(recipe.couple_rows(rows, part.start, part.stop))
        names = names or list(results)
        if list(results) != names:
            raise RecipeError("couple_rows(): metrics differ between ranges of rows; keep their names")
        if anchors:
            _add_gradient(results, rows, gradients, inject_nan=inject_nan)
        part_sums = row_of(results) if anchors else torch.zeros_like(row_of(results))
        sums = part_sums if sums is None else sums + part_sums
        del results  # frees the graph, and with it the matrix, before the next range
    assert sums is not None
    return Compared(names, sums, len(anchors))


def _add_gradient(results: dict[str, Tensor], rows: Rows, gradients: Rows, *, inject_nan: bool) -> None:
    if inject_nan:
        results["total"] = results["total"] * torch.nan
    inputs = [rows[name] for name in gradients]
    parts = torch.autograd.grad(results["total"], inputs, materialize_grads=True)
    for gradient, part in zip(gradients.values(), parts, strict=True):
        gradient.add_(part)


def _num_rows(rows: Rows) -> int:
    return len(next(iter(rows.values())))
