"""Copies this rank's part of a checkpoint to host memory, between two training steps.

Training can then change its tensors while a thread writes the copy. If several ranks have the same tensor (ddp) or the
same shard (hsdp), only one of them copies and writes it, so all ranks together need the host memory of one copy. The
next save reuses the buffers. For tensors on a GPU the buffers are page-locked, and `warm_up` allocates them in advance.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from unisono.parallel.shard_mesh import on_host

State = Mapping[str, torch.Tensor]
"""Tensors by name ("model.<name>", "ema.<name>", "optimizer.<name>.<slot>"). Plain tensors are equal on every rank.
DTensors are sharded across all ranks, or across groups of ranks that each have a complete set of shards."""

_SMALL = 2**20  # bytes
_WRAPPER = re.compile(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module|_fsdp[^.]*)(\.|$)")


class Snapshot:
    """Copies this rank's part of a state; each copy overwrites the previous one."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        self._world = world
        self._host_meshes: dict[DeviceMesh, DeviceMesh] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._warming: threading.Thread | None = None

    @property
    def is_warming_up(self) -> bool:
        """Whether buffers are still being allocated."""
        return self._warming is not None and self._warming.is_alive()

    def warm_up(self, state: State) -> None:
        """Allocates page-locked buffers for tensors of the same shapes as `state`, in a thread; copies nothing."""
        self._join()
        # Keep only the properties of the tensors, because a reference in the thread would keep their memory allocated.
        to_allocate = [(name, t.shape, t.dtype, t.device) for name, _, t in self._share(state) if t.is_cuda]
        if not to_allocate:
            return

        def allocate() -> None:
            # If memory runs out, the save reports it. By default a new thread uses GPU 0, which another rank may use.
            with suppress(RuntimeError), torch.cuda.device(to_allocate[0][3]):
                for name, shape, dtype, _ in to_allocate:
                    if not _fits(self._buffers.get(name), shape, dtype):
                        self._buffers[name] = torch.empty(shape, dtype=dtype, pin_memory=True)

        self._warming = threading.Thread(target=allocate, name="warm-up-saves", daemon=True)
        self._warming.start()

    def take(self, state: State) -> dict[str, torch.Tensor]:
        """Copies this rank's part of the state and waits for the GPU. On return, the tensors may change."""
        self._join()
        self._buffers = {name: buffer for name, buffer in self._buffers.items() if name in state}
        parts: dict[str, torch.Tensor] = {}
        devices: set[torch.device] = set()
        for name, tensor, local in self._share(state):
            copy = self._copy(name, local, devices)
            parts[name] = self._as_shard(copy, tensor) if _is_sharded(tensor, self._world) else copy
        for device in devices:
            torch.cuda.synchronize(device)
        return parts

    def _share(self, state: State) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yields (name, tensor, local part) of each tensor of which this rank writes a part."""
        writers, replicas = writer_of_each(state, self._world), replica_of_each(state, self._world)
        for name, tensor in state.items():
            local = _local(tensor.detach())
            if writers.get(name, self._rank) != self._rank:
                continue
            if name in replicas and replicas[name] != _replica(tensor)[0]:
                continue
            if name in writers or local.numel() > 0:  # the last shards of an uneven split may be empty
                yield name, tensor.detach(), local

    def _join(self) -> None:
        if self._warming is not None:
            self._warming.join()
            self._warming = None

    def _copy(self, name: str, local: torch.Tensor, devices: set[torch.device]) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or not _fits(buffer, local.shape, local.dtype):
            # Every buffer has its own storage, because safetensors rejects tensors that share one (tied weights,
            # views).
            buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
            self._buffers[name] = buffer
        buffer.copy_(local, non_blocking=local.is_cuda)
        if local.is_cuda:
            devices.add(local.device)
        return buffer

    def _as_shard(self, buffer: torch.Tensor, original: torch.Tensor) -> DTensor:
        assert isinstance(original, DTensor)
        mesh = original.device_mesh
        if mesh.size() != self._world:
            raise ValueError(f"a sharded tensor must be on all {self._world} ranks, not on {mesh}")
        if mesh not in self._host_meshes:
            self._host_meshes[mesh] = on_host(mesh)
        # Without shape and stride, DTensor assumes local size x ranks, which is wrong for uneven shards.
        return DTensor.from_local(
            buffer,
            self._host_meshes[mesh],
            original.placements,
            run_check=False,
            shape=original.shape,
            stride=original.stride(),
        )


def writer_of_each(state: State, world: int) -> dict[str, int]:
    """Returns, for each tensor that all ranks have in full, the rank that writes it.

    Tensors are assigned in order of size, the largest first, each to the rank with the fewest bytes so far. If the
    state also contains sharded tensors, rank 0 writes all small unsharded ones, such as the optimizer's step counters.
    A rank that resumes then needs only its own file and rank 0's, instead of the files of all ranks.
    """
    sizes = {
        name: max(1, tensor.numel() * tensor.element_size())
        for name, tensor in state.items()
        if not _is_sharded(tensor, world)
    }
    has_shards = len(sizes) < len(state)
    writers = {name: 0 for name, size in sizes.items() if has_shards and size <= _SMALL}
    load = [sum(sizes[name] for name in writers), *[0] * (world - 1)]
    for name in sorted(sizes.keys() - writers.keys(), key=lambda name: (-sizes[name], name)):
        writers[name] = load.index(min(load))
        load[writers[name]] += sizes[name]
    return writers


def replica_of_each(state: State, world: int) -> dict[str, int]:
    """Returns, for each sharded tensor, the number of the replica that writes it.

    Tensors are assigned in order of size, the largest first, each to the replica with the fewest bytes so far.
    """
    shards = {name: tensor for name, tensor in state.items() if _is_sharded(tensor, world)}
    num_replicas = max((_replica(tensor)[1] for tensor in shards.values()), default=1)
    load, replicas = [0] * num_replicas, {}
    for name in sorted(shards, key=lambda name: (-shards[name].numel() * shards[name].element_size(), name)):
        replicas[name] = load.index(min(load))
        load[replicas[name]] += shards[name].numel() * shards[name].element_size()
    return replicas


def _replica(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the number of the replica that this rank's shard of a tensor belongs to, and the number of replicas."""
    assert isinstance(tensor, DTensor)
    number, count = 0, 1
    for dimension, placement in enumerate(tensor.placements):
        if not isinstance(placement, Shard):
            size = tensor.device_mesh.size(dimension)
            number, count = number * size + tensor.device_mesh.get_local_rank(dimension), count * size
    return number, count


def shapes_of(state: State) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Returns the whole shape and the dtype of each tensor, by name."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}


def fingerprint(state: State) -> str:
    """Returns a hash of names, shapes, dtypes and kinds of tensors, to check that all ranks save the same ones."""
    lines = [f"{name} {tuple(t.shape)} {t.dtype} {isinstance(t, DTensor)}" for name, t in sorted(state.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def check_names(state: State) -> None:
    """Rejects names with a wrapper's prefix, because such a checkpoint could be loaded only into the same wrapper."""
    for name in state:
        if _WRAPPER.search(name):
            raise ValueError(f"{name!r} has a wrapper's prefix; use the names of the unwrapped model")


def _is_sharded(tensor: torch.Tensor, world: int) -> bool:
    return (
        world > 1
        and tensor.numel() > 0
        and isinstance(tensor, DTensor)
        and any(isinstance(placement, Shard) for placement in tensor.placements)
    )


def _fits(buffer: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype) -> bool:
    return buffer is not None and buffer.shape == shape and buffer.dtype == dtype


def _local(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    return tensor.to_local()
