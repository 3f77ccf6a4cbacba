"""What a run must remember, besides tensors: one small page of JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class TrainState:
    """Where a run stands. Everything else follows from it, the config and the tensors."""

    global_batch: int
    step: int = 0  # optimizer steps taken, skipped ones included
    samples: int = 0  # samples consumed: the position in the endless stream
    skipped: int = 0  # steps skipped for a non-finite loss or gradient
    skipped_in_a_row: int = 0
    expected_count: float = 0.0  # power of two near the last global count; 0 before the first step
    num_samples: int = 0  # size of the data set, which the order depends on
    loss_scale: dict[str, float] | None = None
    best: dict[str, Any] | None = None
    last_metrics: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As a JSON value."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TrainState:
        """From a JSON value."""
        return cls(**data)
