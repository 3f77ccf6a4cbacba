"""Creates torch's process group for this rank and destroys it again.

Collectives on CUDA tensors use NCCL, those on CPU tensors use gloo. If two ranks share a GPU, all collectives use gloo
unless the user asks for NCCL (`backend.py`). A run of one process has no group.

Ranks find each other's addresses through a TCPStore. Under an elastic agent the store outlives a restart, and the
restarted ranks would read the addresses of dead ones (pytorch#135712). So each attempt uses its own key prefix.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from unisono.cluster.backend import Backend, GroupBackend, choose_backend
from unisono.cluster.ports import port_in_use
from unisono.errors import UserError

if TYPE_CHECKING:
    from unisono.cluster.environment import World

ATTEMPT = "UNISONO_ATTEMPT"
"""Environment variable: the launcher's name for this attempt, the same on all machines."""

COLLECTIVE_TIMEOUT = timedelta(days=7)
"""Timeout of every collective. It is long on purpose: `cluster/hangs` detects a hang and names the rank that caused it,
while a collective's timeout fires on a healthy peer (and NCCL's prints pages of text)."""

_GLOO_RELEASE_S = 0.05

_attempt = ""  # the name of this attempt; set by `join_process_group`
_hosted: list[TCPStore] = []  # keeps the server alive until rank 0 exits, because other ranks may still query it


def join_process_group(
    world: World, device: torch.device, *, alone: bool = False, timeout_s: float = 600.0, backend: Backend = "auto"
) -> GroupBackend:
    """Creates the process group of the run once all ranks have joined; returns how they communicate.

    A run of one process has no group unless `alone` is set (ddp and fsdp need one). `timeout_s` limits how long a rank
    waits for the others to join; collectives have their own timeout (`COLLECTIVE_TIMEOUT`).
    """
    global _attempt
    on_gpu = device.type == "cuda"

    def chosen(gpus_are_shared: bool) -> GroupBackend:
        return choose_backend(
            backend, on_gpu=on_gpu, gpus_are_shared=gpus_are_shared, rank=world.rank, num_nodes=world.num_nodes
        )

    choice = chosen(gpus_are_shared=False)  # if the backend cannot be used, raises before this rank waits for others
    if world.size == 1:
        if alone:
            dist.init_process_group(choice.name, store=HashStore(), rank=0, world_size=1)
        return choice
    timeout = timedelta(seconds=timeout_s)
    agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = _store(world, timeout, host=world.rank == 0 and not agent_hosts)
    name = os.environ.get(ATTEMPT)
    if name is None:
        name = f"attempt{world.restart_count}"
        if world.num_nodes > 1 and "TORCHELASTIC_RUN_ID" in os.environ:
            # torchrun's agents count restarts independently, so the counts of two machines differ after a restart.
            # A store that rank 0 hosts is new in each attempt and needs no distinct name.
            name = _agree_on_attempt_name(store, world, timeout_s) if agent_hosts else "attempt"
    _attempt = name
    own_store = PrefixStore(name, store)
    if choice.uses_nccl:
        choice = chosen(_gpus_are_shared(own_store, world, device))
    os.environ.update(choice.forced)  # NCCL reads these variables when it creates its first communicator
    for variable, value in choice.defaults.items():
        os.environ.setdefault(variable, value)
    dist.init_process_group(
        backend=choice.name,
        store=own_store,
        rank=world.rank,
        world_size=world.size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if choice.uses_nccl else None,
    )
    return choice


def leave_process_group(*, together: bool = False) -> None:
    """Destroys the process group if there is one; never raises, because nothing depends on the group by then.

    If `together` is set, a rank waits here until all ranks have arrived. srun and mpirun kill the remaining ranks as
    soon as one exits with a code other than 0, such as the 75 of a rank that stopped with a checkpoint.
    """
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            if together:
                dist.all_reduce(torch.zeros(1))
            # A gloo thread needs the GIL to release the tensors of the last collective. Destroying the group earlier
            # would deadlock, because destroy_process_group holds the GIL while it waits for that thread.
            time.sleep(_GLOO_RELEASE_S)
            dist.destroy_process_group()


def open_store(world: World, name: str, timeout_s: float) -> Store:
    """Opens another connection to this attempt's store for a thread, because a blocking call blocks its connection."""
    store = TCPStore(
        world.master_addr,
        world.master_port,
        is_master=False,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )
    return PrefixStore(f"{_attempt}/{name}", store)


def _gpus_are_shared(store: Store, world: World, device: torch.device) -> bool:
    """Whether two ranks use the same GPU. All ranks get the same answer."""
    # Compare UUIDs, because every rank's GPU is cuda:0 if a scheduler shows each rank only one GPU.
    store.set(f"gpu/{world.rank}", str(torch.cuda.get_device_properties(device).uuid))
    uuids = store.multi_get([f"gpu/{rank}" for rank in range(world.size)])
    return len(set(uuids)) < world.size


def _store(world: World, timeout: timedelta, *, host: bool) -> TCPStore:
    address = f"{world.master_addr}:{world.master_port}"
    try:
        store = TCPStore(world.master_addr, world.master_port, is_master=host, timeout=timeout, wait_for_workers=False)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise port_in_use(world.master_port, "MASTER_PORT") from None
        raise UserError(
            f"rank {world.rank} cannot {'listen' if host else 'reach rank 0'} at {address}; "
            "check MASTER_ADDR and MASTER_PORT, and the firewall between the machines"
        ) from error
    if host:
        _hosted.append(store)
    return store


def _agree_on_attempt_name(store: Store, world: World, timeout_s: float) -> str:
    """Returns a name for this attempt that all ranks share. The store may still hold keys of earlier attempts.

    Every other rank publishes a random token. Rank 0 answers every token it sees, including the tokens of dead ranks,
    with the name of the attempt, until each living rank has confirmed that name. Tokens are never reused, so no rank
    can take the answer of an earlier attempt for a new one.
    """
    token = uuid.uuid4().hex
    if world.rank != 0:
        store.set(f"unisono/token/{world.rank}", token)
        name: str = store.get(f"unisono/answer/{token}").decode()
        store.set(f"unisono/confirmed/{name}/{world.rank}", "")
        return name
    deadline = time.monotonic() + timeout_s
    for rank in range(1, world.size):
        request = f"unisono/token/{rank}"
        while not store.check([f"unisono/confirmed/{token}/{rank}"]):
            if store.check([request]):
                store.set(f"unisono/answer/{store.get(request).decode()}", token)
            if time.monotonic() > deadline:
                raise UserError(f"rank {rank} of {world.size} did not join within {timeout_s:.0f} s; was it started?")
            time.sleep(0.02)
    return token
