"""Lets a rank run forward and backward passes under FSDP without the other ranks, to see whether they fit into memory.

If a rank runs out of memory in the middle of a pass, the others wait in a collective that it never joins. So a trial
communicates nothing. Instead of gathering a weight, each rank repeats its own shard, which takes the same memory and
has values of the same size. Instead of summing gradients, it keeps a part of its own gradients. Afterwards, FSDP is
reset to its state before the pass.

This module uses internals of FSDP2. In a version of torch without them, `is_possible` returns False and the run makes
no trials.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

_COMMUNICATION = ("_all_gather_comm", "_reduce_scatter_comm", "_training_state", "_to_sharded")


def is_possible(root: nn.Module) -> bool:
    """Whether this version of torch lets FSDP compute without the other ranks."""
    try:
        groups = _groups(root)
    except AttributeError:
        return False
    return bool(groups) and all(hasattr(group, name) for group in groups for name in _COMMUNICATION)


@contextmanager
def alone(root: FSDPModule) -> Iterator[None]:
    """A context in which passes of a sharded model communicate nothing; their results are meaningless."""
    groups = _groups(root)  # type: ignore[arg-type]
    before = [(group._all_gather_comm, group._reduce_scatter_comm) for group in groups]
    for group in groups:
        group._all_gather_comm, group._reduce_scatter_comm = _RepeatShard(), _KeepOwnPart()
    syncs = [(group.reduce_grads, group.all_reduce_grads) for group in groups]
    root.set_requires_all_reduce(False)  # disables the all-reduce between replicas
    try:
        yield
    finally:
        for group, (all_gather, reduce_scatter) in zip(groups, before, strict=True):
            group._all_gather_comm, group._reduce_scatter_comm = all_gather, reduce_scatter
        for group, (reduces, all_reduces) in zip(groups, syncs, strict=True):
            group.reduce_grads, group.all_reduce_grads = reduces, all_reduces
        _forget_pass(root)


class _Communication:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _RepeatShard(_Communication):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        for part in output_tensor.view(group.size(), -1):
            if part.data_ptr() != input_tensor.data_ptr():  # FSDP gathers in place
                part.copy_(input_tensor)


class _KeepOwnPart(_Communication):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])


def _states(root: nn.Module) -> list[Any]:
    return [module._get_fsdp_state() for module in root.modules() if isinstance(module, FSDPModule)]


def _groups(root: nn.Module) -> list[Any]:
    """Returns FSDP's parameter groups; up to torch 2.12 each module has at most one."""
    groups = []
    for state in _states(root):
        several = getattr(state, "_fsdp_param_groups", None)
        groups += [state._fsdp_param_group] if several is None else list(several)
    return [group for group in groups if group is not None]


def _forget_pass(root: FSDPModule) -> None:
    """Resets FSDP to its state between two steps, even if a pass stopped in the middle."""
    groups = _groups(root)  # type: ignore[arg-type]
    device = groups[0].device
    if device.type == "cuda":  # other streams may still use the tensors that are freed here
        torch.cuda.synchronize(device)
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    else:
        _reset_by_hand(root, groups)
    for group in groups:
        for weight in group.fsdp_params:  # frees gradients that the pass has not summed across ranks
            weight.unsharded_accumulated_grad = None
            if hasattr(weight, "_unsharded_param"):
                weight._unsharded_param.grad = None


def _reset_by_hand(root: FSDPModule, groups: Sequence[Any]) -> None:
    """Does the same as `reset_iter_state`, for versions of torch without that function."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    for state in _states(root):  # type: ignore[arg-type]
        state._training_state = TrainingState.IDLE
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
    for group in groups:
        group.comm_ctx.all_gather_state = None
        if hasattr(group.comm_ctx, "reduce_scatter_state"):
            group.comm_ctx.reduce_scatter_state = None
        group.comm_ctx.post_forward_order.clear()
        for name in ("_all_gather_result", "_post_reduce_event", "_all_reduce_state", "_partial_reduce_output"):
            setattr(group, name, None)
        group._reshard_after_forward_event = None
        group._post_forward_indices.clear()
        group._training_state = TrainingState.IDLE
        group._to_sharded()
