"""The arithmetic of the effective batch.

The global batch is what the mathematics sees; how it is cut over devices and micro-batches follows from it and must
not change the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from unisono.data.order import num_micro_batches
from unisono.errors import ConfigError
from unisono.settings import BatchSettings


@dataclass(frozen=True)
class BatchPlan:
    """One optimizer step: `global_batch` samples, in micro-batches of at most `micro_batch` on each of `devices`."""

    global_batch: int
    micro_batch: int
    devices: int

    @property
    def accumulation(self) -> int:
        """Micro-batches that each device computes per optimizer step."""
        return num_micro_batches(self.global_batch, self.devices, self.micro_batch)

    @property
    def share(self) -> int:
        """The most samples of a step that one device has to compute."""
        return -(-self.global_batch // self.devices)


def plan_batch(
    settings: BatchSettings,
    explicit: Callable[[str], bool],
    *,
    devices: int,
    asked_devices: int | None = None,
    stored: int | None = None,
) -> BatchPlan:
    """How a step's batch is made up.

    `asked_devices` is what the user asked for where fewer were found, `stored` the effective batch of the run that is
    continued: both keep the effective batch and change the accumulation.
    """
    asked = max(devices, asked_devices or devices)
    size, accumulation = settings.batch_size, settings.gradient_accumulation_steps
    wanted = settings.global_batch_size
    if stored is not None:
        if wanted is not None and explicit("global_batch_size") and wanted != stored:
            raise ConfigError(
                f"global_batch_size {wanted} differs from this run's {stored}; a run keeps its effective batch: "
                "leave the flag out, or start a new output_dir"
            )
        return BatchPlan(stored, min(size, stored), devices)
    if wanted is None:
        return BatchPlan(size * asked * (accumulation or 1), size, devices)
    if explicit("batch_size") and accumulation is not None and size * asked * accumulation != wanted:
        works = size * asked * max(1, round(wanted / (size * asked)))
        raise ConfigError(
            f"batch_size {size} x {asked} device{'s' * (asked > 1)} x gradient_accumulation_steps {accumulation} = "
            f"{size * asked * accumulation} is not global_batch_size {wanted}; leave one of them out, "
            f"or use global_batch_size {works} with gradient_accumulation_steps {works // (size * asked)}"
        )
    if accumulation is not None and not explicit("batch_size"):
        size = -(-wanted // (devices * accumulation))
    return BatchPlan(wanted, min(size, wanted), devices)


def with_micro_batch(plan: BatchPlan, asked: int | str | None, known: int, *, on_gpu: bool) -> BatchPlan:
    """The plan with as many samples at once as was `asked` for, and no more than is `known` to fit (0: not known)."""
    size = plan.micro_batch
    if isinstance(asked, int):
        size = asked
    elif asked == "auto" and on_gpu:  # memory of the host does not say when it is full
        size = plan.share
    return replace(plan, micro_batch=min(size, plan.share, known or size))
