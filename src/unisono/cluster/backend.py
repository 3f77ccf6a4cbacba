"""Chooses the communication backend of a run, and the environment variables that NCCL needs for it.

NCCL refuses two ranks on one GPU of one host. If every rank has its own NCCL_HOSTID, NCCL treats the ranks as different
hosts and connects them by sockets. This makes it possible to test NCCL on one GPU. It is slow, because all data passes
through host memory and the ranks share the GPU in time slices. So `auto` uses gloo between ranks that share a GPU, and
only `nccl` uses NCCL there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from unisono.errors import ConfigError

Backend = Literal["auto", "gloo", "nccl"]

_NCCL = "cpu:gloo,cuda:nccl"
SLOW = (
    "backend nccl between ranks that share a GPU sends all data over sockets, which is slow and meant for tests; "
    "remove --backend to train"
)


@dataclass(frozen=True)
class GroupBackend:
    """How the ranks of a run communicate."""

    name: str
    """torch's name: one backend, or one for each device type."""
    forced: Mapping[str, str] = field(default_factory=dict)
    """Environment variables to set before the group is created, even if the user has set them."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Environment variables to set if the user has not."""
    warning: str | None = None

    @property
    def uses_nccl(self) -> bool:
        """Whether tensors on GPUs are sent over NCCL."""
        return self.name == _NCCL


def choose_backend(
    requested: Backend, *, on_gpu: bool, gpus_are_shared: bool, rank: int, num_nodes: int
) -> GroupBackend:
    """Chooses the backend of this rank; all ranks of a run get the same `name`.

    `gpus_are_shared`: two ranks of the run, not necessarily this one, use the same GPU.
    """
    if requested == "nccl" and not on_gpu:
        raise ConfigError(f"backend nccl needs GPUs, and rank {rank} has none; remove --backend: CPU ranks use gloo")
    if requested == "gloo" or not on_gpu or (requested == "auto" and gpus_are_shared):
        return GroupBackend("gloo")
    if not gpus_are_shared:
        return GroupBackend(_NCCL)
    # Override the host id, because a value that all ranks inherit would make them one host again.
    defaults = {"NCCL_CUMEM_ENABLE": "0"}
    if num_nodes == 1:
        defaults["NCCL_SOCKET_IFNAME"] = "lo"
    return GroupBackend(_NCCL, {"NCCL_HOSTID": f"unisono-rank{rank}"}, defaults, SLOW)
