"""Predicts the time of an optimizer step from its work, its traffic and the rates of a GPU."""

from __future__ import annotations

from dataclasses import dataclass, fields

from unisono.planning.speed.gpus import BANDWIDTH, LINK, Gpu
from unisono.planning.speed.work import Work

FUSED = 0.32
"""Fraction of the bytes of separate elementwise operations that compiled blocks move; measured on Wan on an H200."""
_LAUNCH_S = 8.5e-6
"""Seconds in which Python, autograd and the driver launch one kernel; measured on the host of an H200."""
_FUSED_LAUNCHES = 0.9
"""Fraction of the launches that remains if blocks are compiled; measured on a small transformer."""
_BACKWARD = 2 / 3  # part of the computation
_HIDDEN = 0.9  # part of a computation behind which communication can hide


@dataclass(frozen=True)
class Traffic:
    """Communication time of a step in seconds, before any overlap with computation."""

    per_micro_batch: float = 0.0  # gathers and reductions that each micro-batch repeats
    per_step: float = 0.0  # reductions after the last micro-batch's backward pass, which they overlap with
    exposed: float = 0.0  # what nothing overlaps with, per micro-batch
    tail: float = 0.0  # the last bucket or block of a step, which nothing hides


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step by cause; their sum is the time of the step."""

    products: float
    attention: float
    elementwise: float
    launches: float  # what the GPU waits for the host
    communication: float  # as far as computation does not hide it
    copies: float  # between host memory and the GPU, as far as computation does not hide them
    update: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return float(sum(getattr(self, part.name) for part in fields(self)))

    @property
    def bottleneck(self) -> str:
        """What limits the speed, in words: the host if the GPU waits for it, otherwise what takes most of the time."""
        if self.launches > 0:
            return "kernel launches"
        names = {
            "products": "matrix products",
            "attention": "attention",
            "elementwise": "memory bandwidth",
            "communication": "communication",
            "copies": "copies from the host",
            "update": "optimizer",
        }
        return names[max(names, key=lambda name: float(getattr(self, name)))]


@dataclass(frozen=True)
class Micro:
    """How a rank computes one micro-batch."""

    work: Work
    compiled: bool
    recorded: bool = False  # as a CUDA graph
    tf32: bool = False
    copied_bytes: float = 0.0  # from host memory and back, while computing


def step_time(
    gpu: Gpu,
    micro: Micro,
    *,
    num_micro_batches: int,
    traffic: Traffic,
    update_bytes: float,
    update_copies: float = 0.0,
) -> StepTime:
    """The time of a step of `num_micro_batches` equal micro-batches.

    `update_bytes`: what the optimizer moves in GPU memory; `update_copies`: what it moves between host and GPU.
    """
    work, rate = micro.work, gpu.rate
    products = sum(
        flops / rate("tf32" if micro.tf32 and kind == "fp32" else kind) for kind, flops in work.products.items()
    )
    bandwidth = BANDWIDTH * gpu.memory_bandwidth
    products = max(products, work.product_bytes / bandwidth if products else 0.0)
    attention = work.attention / gpu.attention_rate
    elementwise = work.other_bytes * (FUSED if micro.compiled else 1.0) / bandwidth
    on_gpu = products + attention + elementwise
    launching = 0.0 if micro.recorded else work.launches * (_FUSED_LAUNCHES if micro.compiled else 1.0) * _LAUNCH_S
    launches = max(launching - on_gpu, 0.0)
    computing = on_gpu + launches
    hidden = _HIDDEN * computing
    communication = num_micro_batches * (max(traffic.per_micro_batch - hidden, 0.0) + traffic.exposed)
    spare = max(hidden - traffic.per_micro_batch, 0.0)
    communication += max(traffic.per_step - _BACKWARD * spare, 0.0) + traffic.tail
    copies = num_micro_batches * max(micro.copied_bytes / (LINK * gpu.host_link) - hidden, 0.0)
    return StepTime(
        products=num_micro_batches * products,
        attention=num_micro_batches * attention,
        elementwise=num_micro_batches * elementwise,
        launches=num_micro_batches * launches,
        communication=communication,
        copies=copies + update_copies / (LINK * gpu.host_link),
        update=update_bytes / bandwidth,
    )
