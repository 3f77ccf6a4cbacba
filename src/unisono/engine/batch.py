"""The arithmetic of the effective batch.

The global batch defines the optimizer step. How it is divided across devices and micro-batches follows from it and must
not change the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from unisono.data.order import num_micro_batches
from unisono.errors import ConfigError
from unisono.settings import LARGEST_BATCH, BatchSettings

_SMALL_BATCH = 2**20  # number of samples; smaller steps are quick even if they read the dataset many times
_MOST_PASSES = 16


@dataclass(frozen=True)
class BatchPlan:
    """The batch of an optimizer step: `global_batch` samples, in micro-batches of at most `micro_batch` per device."""

    global_batch: int
    micro_batch: int
    devices: int

    @property
    def accumulation(self) -> int:
        """Number of micro-batches per device and optimizer step."""
        return num_micro_batches(self.global_batch, self.devices, self.micro_batch)

    @property
    def share(self) -> int:
        """The largest number of samples that one device computes per step."""
        return -(-self.global_batch // self.devices)


def plan_batch(
    settings: BatchSettings,
    explicit: Callable[[str], bool],
    *,
    devices: int,
    requested_devices: int | None = None,
    stored: int | None = None,
) -> BatchPlan:
    """Plans the batch of an optimizer step.

    `requested_devices` is the number of devices that the user requested, if fewer are available; `stored` is the
    effective batch of a resumed run. In both cases, the number of accumulated micro-batches is adjusted, and the
    effective batch stays the same.
    """
    plan = _plan(settings, explicit, devices, max(devices, requested_devices or devices), stored)
    if plan.global_batch > LARGEST_BATCH:
        raise ConfigError(
            f"the effective batch would be {plan.global_batch:,} samples; the limit is {LARGEST_BATCH:,}; "
            "lower batch_size or gradient_accumulation_steps"
        )
    return plan


def check_against_data(plan: BatchPlan, num_samples: int) -> None:
    """Rejects a step that would read the whole dataset many times, because it would take minutes without any output."""
    if plan.global_batch > max(_SMALL_BATCH, _MOST_PASSES * num_samples):
        raise ConfigError(
            f"one optimizer step of {plan.global_batch:,} samples would read the dataset ({num_samples:,} samples) "
            f"{plan.global_batch // max(1, num_samples):,} times; lower batch_size or global_batch_size (a resumed "
            "run reads its batch from the checkpoint, which may be damaged)"
        )


def _plan(
    settings: BatchSettings, explicit: Callable[[str], bool], devices: int, requested: int, stored: int | None
) -> BatchPlan:
    size, accumulation = settings.batch_size, settings.gradient_accumulation_steps
    global_batch = settings.global_batch_size
    if stored is not None:
        if global_batch is not None and explicit("global_batch_size") and global_batch != stored:
            raise ConfigError(
                f"global_batch_size {global_batch} differs from this run's {stored}; a run keeps its effective batch: "
                "remove the flag, or use a new output_dir"
            )
        return BatchPlan(stored, min(size, stored), devices)
    if global_batch is None:
        return BatchPlan(size * requested * (accumulation or 1), size, devices)
    if explicit("batch_size") and accumulation is not None and size * requested * accumulation != global_batch:
        nearest = size * requested * max(1, round(global_batch / (size * requested)))
        raise ConfigError(
            f"batch_size {size} x {requested} device{'s' * (requested > 1)} x gradient_accumulation_steps "
            f"{accumulation} = {size * requested * accumulation} is not global_batch_size {global_batch}; remove one "
            f"of them, or use global_batch_size {nearest} with gradient_accumulation_steps "
            f"{nearest // (size * requested)}"
        )
    if accumulation is not None and not explicit("batch_size"):
        size = -(-global_batch // (devices * accumulation))
    return BatchPlan(global_batch, min(size, global_batch), devices)


def overruled(settings: BatchSettings, explicit: Callable[[str], bool], devices: int, stored: int | None) -> list[str]:
    """Returns notes on flags that would change the effective batch of a resumed run (`stored` samples)."""
    size, accumulation = settings.batch_size, settings.gradient_accumulation_steps
    if stored is None or size * devices * (accumulation or 1) == stored:
        return []
    reminder = f"this run keeps its effective batch of {stored} samples"
    remarks = []
    if explicit("batch_size"):
        remarks.append(f"{reminder}: batch_size {size} only limits the micro-batch per device")
    if explicit("gradient_accumulation_steps"):
        remarks.append(
            f"{reminder}: gradient_accumulation_steps {accumulation} is ignored; the effective batch is fixed"
        )
    return remarks


def with_micro_batch(plan: BatchPlan, requested: int | str | None, known_to_fit: int, *, on_gpu: bool) -> BatchPlan:
    """Returns the plan with the `requested` micro-batch size, at most `known_to_fit` samples (0: no size was tried)."""
    size = plan.micro_batch
    if isinstance(requested, int):
        size = requested
    elif requested == "auto" and on_gpu:  # on the CPU, the system would kill a process that runs out of memory
        size = plan.share
    return replace(plan, micro_batch=min(size, plan.share, known_to_fit or size))
