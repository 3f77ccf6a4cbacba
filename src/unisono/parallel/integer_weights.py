"""Checks whether FSDP can shard integer tensors, such as quantised weights."""

from __future__ import annotations

import inspect
from functools import cache

from torch import nn


@cache
def can_shard_integers() -> bool:
    """Whether torch can shard integers: in some versions, fully_shard fails on them or casts them (pytorch#177844).

    No release notes say which versions can, and a trial would need a process group. So this function inspects torch's
    source code. If that code changes, the result is False, and integers are replicated, which always works.
    """
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

        creates, casts = (inspect.getsource(it) for it in (FSDPParam._init_sharded_param, FSDPParam.init_dtype_attrs))
    except (ImportError, AttributeError, OSError, TypeError):
        return False
    return "requires_grad=param.requires_grad" in creates and "is_floating_point" in casts


def not_shardable(module: nn.Module) -> set[nn.Parameter]:
    """Returns the integer weights, if this version of torch cannot shard them: every rank then holds them whole."""
    if can_shard_integers():
        return set()
    return {parameter for parameter in module.parameters() if not parameter.is_floating_point()}
