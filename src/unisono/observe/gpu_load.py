"""Samples the utilization and the power of this rank's GPU in a background thread, without using CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread

from unisono.devices import open_nvml, query_nvml

EVERY_S = 1.0
"""Seconds between two samples; NVML itself averages the utilization over up to a second."""


class GpuLoad:
    """Measures the mean utilization and power of a GPU between two calls of `take`."""

    def __init__(self, uuid: str, every_s: float = EVERY_S) -> None:
        self._uuid, self._every_s = uuid, every_s
        self._lock, self._stop = Lock(), Event()
        self._samples: dict[str, list[float]] = {}
        self.newest: dict[str, float] = {}
        """The newest sample: gpu_util (0 to 1) and gpu_power_w, as far as NVML reports them."""
        self._thread = Thread(target=self._run, name="gpu load", daemon=True)
        self._thread.start()

    def take(self) -> dict[str, float]:
        """Returns the means of gpu_util (0 to 1) and gpu_power_w since the last call, as far as NVML reports them."""
        with self._lock:
            samples, self._samples = self._samples, {}
        return {name: sum(values) / len(values) for name, values in samples.items()}

    def close(self) -> None:
        """Stops sampling."""
        self._stop.set()
        self._thread.join(timeout=self._every_s)

    def _run(self) -> None:
        with watch_gpu(self._uuid) as read:
            while read is not None and not self._stop.wait(self._every_s):
                utilization, watts = read()
                sample = {"gpu_util": utilization, "gpu_power_w": watts}
                self.newest = {name: value for name, value in sample.items() if value is not None}
                with self._lock:
                    for name, value in self.newest.items():
                        self._samples.setdefault(name, []).append(value)


@contextmanager
def watch_gpu(uuid: str) -> Iterator[Callable[[], tuple[float | None, float | None]] | None]:
    """Yields a function that returns a GPU's utilization (0 to 1) and its power in watts.

    Yields None if NVML does not list the GPU. The function returns None for a value that NVML does not report.
    """
    with open_nvml() as nvml:
        handle = None if nvml is None else query_nvml(nvml, None, nvml.nvmlDeviceGetHandleByUUID, uuid)
        if handle is None:
            yield None
            return

        def read() -> tuple[float | None, float | None]:
            load = query_nvml(nvml, None, nvml.nvmlDeviceGetUtilizationRates, handle)
            milliwatts = query_nvml(nvml, None, nvml.nvmlDeviceGetPowerUsage, handle)
            return None if load is None else load.gpu / 100, None if milliwatts is None else milliwatts / 1e3

        yield read
