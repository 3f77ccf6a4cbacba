"""Detects that the GPU waits for the CPU, because a model's kernels finish before Python launches the next ones."""

from __future__ import annotations

STEPS = 50  # number of steps per measurement
_IDLE_FRACTION = 0.9  # advise the user if the GPU waited in at least this fraction of the steps
_DATA_FRACTION = 0.1  # give no advice if the host waits for data for more than this fraction of the time


class GpuIdleDetector:
    """Counts the steps that the GPU finished before the host had launched most of the next step."""

    def __init__(self, *, can_use_cuda_graph: bool) -> None:
        """The detector gives no advice if this run cannot use the setting cuda_graph."""
        self._active = can_use_cuda_graph
        self._reset()

    def step(self, *, waited: bool) -> None:
        """Counts a step; `waited` says whether the GPU waited for the host."""
        self._steps += 1
        self._waited += waited

    def advice(self, steps_ms: float, data_wait_ms: float) -> str | None:
        """Returns advice for the user, at most once; the times cover the steps since the last call."""
        self._all_ms += steps_ms
        self._data_ms += data_wait_ms
        if not self._active or self._steps < STEPS:
            return None
        steps, waited, data_is_slow = self._steps, self._waited, self._data_ms > _DATA_FRACTION * self._all_ms
        self._reset()
        if waited < _IDLE_FRACTION * steps or data_is_slow:
            return None
        self._active = False
        return (
            f"the GPU waited for the CPU in {waited} of {steps} steps; if all batches have the same shape, try "
            "--cuda_graph, which launches a whole step at once"
        )

    def _reset(self) -> None:
        self._steps = self._waited = 0
        self._data_ms = self._all_ms = 0.0
