"""The groups of ranks that together hold one copy of the weights.

Consecutive ranks form a group; each rank in the group holds a shard of every weight. With several groups (HSDP), every
group holds the same weights: they are replicas. The groups decide only where weights are stored. Gradients are always
sums over all ranks of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from unisono.cluster.process_group import COLLECTIVE_TIMEOUT

_NAMES = ("replicate", "shard")


@dataclass(frozen=True)
class ShardMesh:
    """The ranks of a run in groups of `size`; all ranks must use it for the first time at the same point."""

    rank: int
    world: int
    size: int  # number of ranks that together hold one copy of the weights
    device_type: str

    @property
    def shard(self) -> int:
        """The number of the shard that this rank holds: its rank within its group."""
        return self.rank % self.size

    @property
    def num_replicas(self) -> int:
        """Number of copies of the weights."""
        return self.world // self.size

    @cached_property
    def devices(self) -> DeviceMesh:
        """The mesh for FSDP: all ranks in one dimension, or replicas × shards."""
        if self.num_replicas == 1:
            # Use the run's own process group. If that is gloo and there are GPUs, init_device_mesh would create
            # another group with a short timeout. Up to torch 2.11, this group uses NCCL, which rejects a shared GPU.
            everyone = dist.group.WORLD
            assert everyone is not None
            return DeviceMesh.from_group(everyone, self.device_type)
        mesh = init_device_mesh(self.device_type, (self.num_replicas, self.size), mesh_dim_names=_NAMES)
        for group in mesh.get_all_groups():  # new groups have torch's short default timeout
            _set_pg_timeout(COLLECTIVE_TIMEOUT, group)
        return mesh

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same copy of the weights as this one; None for all ranks."""
        return None if self.num_replicas == 1 else self.devices.get_group("shard")

    @cached_property
    def hosts(self) -> DeviceMesh:
        """The same mesh for tensors in host memory."""
        return on_host(self.devices)


def on_host(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh with the same ranks and groups, for tensors in host memory."""
    if mesh.device_type == "cpu":
        return mesh
    if mesh.ndim == 1:
        return DeviceMesh.from_group(mesh.get_group(), "cpu")
    ranks = torch.as_tensor(mesh.mesh)
    return DeviceMesh.from_group(mesh.get_all_groups(), "cpu", mesh=ranks, mesh_dim_names=mesh.mesh_dim_names)
