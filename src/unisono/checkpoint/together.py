"""One piece of work on every rank, with one outcome for all of them.

A rank that fails alone leaves the others waiting for it for ever (seen with a leftover folder that only rank 0 tripped
over). So a failing rank still comes to the exchange, with its error in words, and all ranks raise the same exception.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from unisono.errors import UnisonoError
from unisono.formatting import describe_exception

T = TypeVar("T")


class RanksFailed(Exception):
    """Some rank could not do its part; the message says which one and why, and is the same on every rank."""


def together(work: Callable[[], T], *, world: int, group: dist.ProcessGroup | None) -> list[T]:
    """Does `work` on every rank and gives every rank all results, or raises RanksFailed on all if it failed on any."""
    outcome: tuple[T | None, str | None]
    try:
        outcome = (work(), None)
    except Exception as error:
        outcome = (None, describe_failure(error))
    outcomes: list[tuple[T | None, str | None]] = [outcome]
    if world > 1:
        outcomes = [outcome] * world
        dist.all_gather_object(outcomes, outcome, group=group)
    failures = [(rank, error) for rank, (_, error) in enumerate(outcomes) if error is not None]
    if failures:
        texts = {error for _, error in failures}
        if len(failures) == world and len(texts) == 1:
            raise RanksFailed(texts.pop())
        raise RanksFailed("; ".join(f"rank {rank}: {error}" for rank, error in failures))
    return [result for result, _ in outcomes]  # type: ignore[misc]  # no failure: every result is a T


def describe_failure(error: BaseException) -> str:
    """An exception in one line; the class is left out where the message stands for itself."""
    return describe_exception(error, bare=(OSError, RanksFailed, UnisonoError))
