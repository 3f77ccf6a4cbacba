"""Predicts the time of an optimizer step from its operations, its communication and the rates of a GPU."""

from __future__ import annotations

from dataclasses import dataclass, fields

from unisono.planning.speed.gpus import BANDWIDTH, LINK, Gpu
from unisono.planning.speed.work import Work

FUSED = 0.32
"""Bytes that compiled blocks move, as a fraction of those of separate elementwise operations; measured on Wan, H200."""
_LAUNCH_S = 8.5e-6
"""Seconds that Python, autograd and the driver take to launch one kernel; measured on the host of an H200."""
_FUSED_LAUNCHES = 0.9
"""Fraction of kernel launches that remain if blocks are compiled; measured on a small transformer."""
_BACKWARD = 2 / 3  # fraction of the computation time that the backward pass takes
_HIDDEN = 0.9  # fraction of the computation time that communication can overlap with


@dataclass(frozen=True)
class Traffic:
    """Communication time of a step in seconds, before any overlap with computation."""

    per_micro_batch: float = 0.0  # gathers and reductions in each micro-batch
    per_step: float = 0.0  # reductions once per step, which overlap with the last micro-batch's backward pass
    exposed: float = 0.0  # communication in each micro-batch that cannot overlap with computation
    tail: float = 0.0  # communication of the last bucket or block of a step, which cannot overlap with computation


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step by cause; their sum is the time of the step."""

    products: float
    attention: float
    elementwise: float
    launches: float  # time in which the GPU waits for the host to launch kernels
    communication: float  # communication that does not overlap with computation
    copies: float  # copies between host memory and the GPU that do not overlap with computation
    update: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return float(sum(getattr(self, part.name) for part in fields(self)))

    @property
    def bottleneck(self) -> str:
        """What limits the speed: kernel launches if the GPU waits for the host, otherwise the longest part."""
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
    """Describes how a rank computes one micro-batch."""

    work: Work
    compiled: bool
    recorded: bool = False  # whether the step is recorded as a CUDA graph
    tf32: bool = False
    copied_bytes: float = 0.0  # bytes copied from and to host memory while computing


def step_time(
    gpu: Gpu,
    micro: Micro,
    *,
    num_micro_batches: int,
    traffic: Traffic,
    update_bytes: float,
    update_copies: float = 0.0,
) -> StepTime:
    """Predicts the time of a step of `num_micro_batches` equal micro-batches.

    `update_bytes`: bytes that the optimizer moves in GPU memory. `update_copies`: bytes that it moves between host and
    GPU.
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
