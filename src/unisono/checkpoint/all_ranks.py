"""Runs a function on every rank, and makes all ranks raise if it fails on one of them.

If one rank raised alone, the others would wait for it forever in the next collective. So a rank that fails still joins
the exchange of results, with its error message, and all ranks raise the same exception.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from unisono.errors import UnisonoError
from unisono.formatting import describe_exception

T = TypeVar("T")


class RanksFailed(Exception):
    """One or more ranks failed; the message names them with the reasons and is the same on every rank."""


def on_all_ranks(work: Callable[[], T], *, world: int, group: dist.ProcessGroup | None) -> list[T]:
    """Runs `work` on every rank and returns all results to all; raises RanksFailed on all ranks if it fails on any."""
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
    return [result for result, _ in outcomes]  # type: ignore[misc]  # without failures, every result is a T


def describe_failure(error: BaseException) -> str:
    """Describes an exception in one line, without its class if the message is enough."""
    return describe_exception(error, bare=(OSError, RanksFailed, UnisonoError))
