"""unisono detects a GPU that waits for the host, and prints advice once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unisono.engine.step.optimizer_step import _Unread
from unisono.observe.gpu_idle import STEPS, GpuIdleDetector


def advice_after(waited: float, data: float = 0.0, intervals: int = 2, **options: Any) -> list[str]:
    """The advice after several intervals in which the GPU waited in a fraction of the steps."""
    idle, result = GpuIdleDetector(**{"can_use_cuda_graph": True, **options}), []
    for _ in range(intervals):
        for number in range(STEPS):
            idle.step(waited=number < waited * STEPS)
        result.append(idle.advice(10.0, 10.0 * data))
    return [text for text in result if text is not None]


def test_the_advice_is_given_once_and_names_the_remedy() -> None:
    (text,) = advice_after(0.96, intervals=3)
    assert "48 of 50 steps" in text and "--cuda_graph" in text


@pytest.mark.parametrize(
    "never",
    [{"waited": 0.8}, {"waited": 1.0, "data": 0.2}, {"waited": 1.0, "can_use_cuda_graph": False}],
    ids=["a busy GPU", "slow data", "a step that cannot be recorded, or is"],
)
def test_no_advice_is_given_for(never: dict[str, Any]) -> None:
    assert advice_after(**never) == []


def test_no_advice_before_enough_steps() -> None:
    idle, result = GpuIdleDetector(can_use_cuda_graph=True), []
    for number in range(STEPS):
        idle.step(waited=True)
        if number % 10 == 9:
            result.append(idle.advice(10.0, 0.0))
    assert result[:-1] == [None] * (len(result) - 1) and result[-1] is not None


class Event:
    def __init__(self, *, done: bool) -> None:
        self.done = done

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


@pytest.mark.parametrize(("event", "waited"), [(Event(done=True), True), (Event(done=False), False), (None, False)])
def test_a_finished_result_means_that_the_gpu_waited(event: Any, waited: bool) -> None:
    unread = _Unread(0, 0, 1, 0.1, ["total"], None, None, torch.ones(1), event)  # type: ignore[arg-type]
    assert unread.has_arrived is waited
    assert unread.read() == {"total": 1.0}
