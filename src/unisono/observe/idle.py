"""A GPU that waits for the host: small models are over before Python has launched the next kernels."""

from __future__ import annotations

STEPS = 50  # that are looked at together
_MOST = 0.9  # of them
_DATA = 0.1  # of a step's time: where the host waits for data so long, other things help


class Idle:
    """Counts the steps that the GPU had finished before the host had launched most of the next one."""

    def __init__(self, *, recordable: bool) -> None:
        """`recordable`: whether `--cuda_graph` could be asked for; without it there is nothing to advise."""
        self._looks = recordable
        self._steps = self._waited = 0
        self._data_ms = self._all_ms = 0.0

    def step(self, *, waited: bool) -> None:
        """A step is over."""
        self._steps += 1
        self._waited += waited

    def look(self, steps_ms: float, data_wait_ms: float) -> str | None:
        """What to tell the user, once; the times are of the steps since the last look."""
        self._all_ms += steps_ms
        self._data_ms += data_wait_ms
        if not self._looks or self._steps < STEPS:
            return None
        steps, waited = self._steps, self._waited
        data_is_slow = self._data_ms > _DATA * self._all_ms
        self._steps = self._waited = 0
        self._data_ms = self._all_ms = 0.0
        if waited < _MOST * steps or data_is_slow:
            return None
        self._looks = False
        return (
            f"the GPU waited for the CPU in {waited} of {steps} steps: --cuda_graph launches a whole step at once, "
            "if all batches have one shape"
        )
