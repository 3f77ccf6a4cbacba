"""Shards frozen modules that are too large for one device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from unisono.parallel.blocks.repeated import repeated_blocks
from unisono.parallel.integer_weights import not_shardable
from unisono.parallel.materialize import Weights, fill_shard, read_into
from unisono.parallel.shard_mesh import ShardMesh


def shard_frozen(
    module: nn.Module, mesh: ShardMesh, device: torch.device, weights: Weights, exact: Sequence[str] = ()
) -> None:
    """Shards a module on the meta device across ranks and fills its shards, in place; its buffers must be real.

    The module computes in the types of its weights. The weights in `exact`, which may have another type, are
    replicated.
    """
    module.requires_grad_(False).eval()
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    if mesh.world > 1:
        whole = {parameter for name, parameter in module.named_parameters() if name in exact} | not_shardable(module)
        for part in [*repeated_blocks(module), module]:
            fully_shard(part, mesh=mesh.devices, reshard_after_forward=True, ignored_params=whole)
    module.to_empty(device=device)
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])
        for name, parameter in module.named_parameters():
            if isinstance(parameter, DTensor):
                fill_shard(name, parameter.to_local(), mesh.shard, mesh.size, parameter.shape[0], weights)
            else:
                read_into(parameter, name, weights)
