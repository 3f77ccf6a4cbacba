"""Starts to gather a block's weights while the block before it computes.

FSDP gathers a block when the host reaches it. If the host is slower than the GPU, that is too late, and the GPU waits
for the weights; so each block also starts to gather the next block. Backward needs no such help: FSDP itself
prefetches in the reverse of the order in which forward passes ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn
from torch.distributed.fsdp import FSDPModule


class ForwardPrefetch:
    """Makes each block prefetch the next block in the list that holds them.

    The result is the same even if blocks run in another order: a block that was gathered too early is used when its
    turn comes, or dropped at the end of the backward pass. A pass without backward would not drop it, and its weights
    would be stale in a later step, so such passes do not prefetch.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self._next: list[tuple[FSDPModule, FSDPModule]] = []
        self._enabled = False
        sharded = set(blocks)
        for container in model.modules():
            if isinstance(container, nn.ModuleList | nn.Sequential):
                in_order = [child for child in dict.fromkeys(container) if child in sharded]
                self._next += pairwise(in_order)  # type: ignore[arg-type]  # all are FSDPModules

    def enable(self, enabled: bool) -> None:
        """Sets whether the next forward passes prefetch."""
        if enabled != self._enabled:
            self._enabled = enabled
            for block, following in self._next:
                block.set_modules_to_forward_prefetch([following] if enabled else [])
