"""A copy in host memory of what this rank has to write, taken between two training steps.

After the copy the training loop may change its tensors while a thread writes. A tensor that every rank holds (ddp) is
copied and written by one of them only, chosen the same way on all, so N ranks need the host memory of one copy, not of
N. The buffers are kept for the next save, page-locked where the tensors are on a GPU.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

State = Mapping[str, torch.Tensor]
"""Tensors by name ("model.<name>", "ema.<name>", "optimizer.<name>.<slot>"): plain ones are the same on every rank,
DTensors are spread over all ranks."""

_WRAPPER = re.compile(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module|_fsdp[^.]*)(\.|$)")


class Snapshot:
    """Takes copies of a state for one rank; each copy replaces the one before it."""

    def __init__(self, rank: int, world: int, mesh: DeviceMesh | None) -> None:
        self._rank = rank
        self._world = world
        self._mesh = mesh
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, state: State) -> dict[str, torch.Tensor]:
        """Copies this rank's part of the state; on return the originals may change (waits for the GPU once)."""
        writers = writer_of_each(state, self._world)
        self._buffers = {name: buffer for name, buffer in self._buffers.items() if name in state}
        parts: dict[str, torch.Tensor] = {}
        devices: set[torch.device] = set()
        for name, tensor in state.items():
            tensor = tensor.detach()
            local = _local(tensor)
            if name in writers:
                if writers[name] == self._rank:
                    parts[name] = self._copy(name, local, devices)
            elif local.numel() > 0:  # an uneven split may leave a rank with nothing; nothing is not written
                parts[name] = self._as_shard(self._copy(name, local, devices), tensor)
        for device in devices:
            torch.cuda.synchronize(device)
        return parts

    def _copy(self, name: str, local: torch.Tensor, devices: set[torch.device]) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            # One storage per tensor: the safetensors writer refuses tensors that share one (tied weights, views).
            buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
            self._buffers[name] = buffer
        buffer.copy_(local, non_blocking=local.is_cuda)
        if local.is_cuda:
            devices.add(local.device)
        return buffer

    def _as_shard(self, buffer: torch.Tensor, original: torch.Tensor) -> DTensor:
        assert isinstance(original, DTensor) and self._mesh is not None
        if original.device_mesh.ndim != 1 or original.device_mesh.size() != self._world:
            raise ValueError(
                f"a sharded tensor must be spread over all {self._world} ranks, not {original.device_mesh}"
            )
        # Without shape and stride the whole would be taken as local size x ranks, which is wrong for uneven shards.
        return DTensor.from_local(
            buffer,
            self._mesh,
            original.placements,
            run_check=False,
            shape=original.shape,
            stride=original.stride(),
        )


def writer_of_each(state: State, world: int) -> dict[str, int]:
    """Which rank writes each tensor that all ranks hold: largest first, each to the rank with the least to write."""
    whole = {name: tensor for name, tensor in state.items() if not _is_sharded(tensor, world)}
    load = [0] * world
    writers: dict[str, int] = {}
    for name in sorted(whole, key=lambda name: (-whole[name].numel() * whole[name].element_size(), name)):
        writer = load.index(min(load))
        writers[name] = writer
        load[writer] += max(1, whole[name].numel() * whole[name].element_size())
    return writers


def shapes_of(state: State) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Whole shape and dtype of each tensor."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}


def fingerprint(state: State) -> str:
    """The same on two ranks exactly when they save the same names, shapes and dtypes in the same way."""
    lines = [f"{name} {tuple(t.shape)} {t.dtype} {isinstance(t, DTensor)}" for name, t in sorted(state.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def check_names(state: State) -> None:
    """Refuses names that carry a wrapper's prefix: such a checkpoint could only be loaded into the same wrapper."""
    for name in state:
        if _WRAPPER.search(name):
            raise ValueError(f"{name!r} carries the prefix of a wrapper; give the names of the bare model")


def _is_sharded(tensor: torch.Tensor, world: int) -> bool:
    return (
        world > 1
        and tensor.numel() > 0
        and isinstance(tensor, DTensor)
        and any(isinstance(placement, Shard) for placement in tensor.placements)
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    return tensor.to_local()
