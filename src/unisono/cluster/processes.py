"""The ranks find each other.

One call makes torch's process group: collectives on CUDA tensors go over NCCL, on CPU tensors over gloo; everything
over gloo when ranks share a GPU, which NCCL refuses. A run of one process has no group at all.

The store in which ranks leave their addresses may outlive an attempt (torchelastic's agent hosts it), and restarted
ranks would then read the addresses of dead ones (pytorch#135712): each attempt gets a namespace of its own.
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

from unisono.cluster.ports import port_in_use
from unisono.errors import UserError

if TYPE_CHECKING:
    from unisono.cluster.environment import World

ATTEMPT = "UNISONO_ATTEMPT"
"""Variable in which unisono's launcher names the attempt, the same on all machines."""

PATIENCE = timedelta(days=7)
"""Time-out of every collective: who hangs is found out by `unisono.cluster.hang`, which names the rank, and not by a
peer's time-out, which names nobody (and in NCCL's case writes walls of text)."""

_LET_GO_S = 0.05

_attempt = ""  # the name of this attempt, once joined
_hosted: list[TCPStore] = []  # the server lives as long as rank 0: the others may still ask it while they leave


def join(
    world: World, device: torch.device, *, alone: bool = False, timeout_s: float = 600.0, gloo: bool = False
) -> None:
    """Joins the other ranks of the run; returns when all are there.

    A run of one process has nothing to join, unless it asks for a group of its own with `alone` (ddp and fsdp need
    one). `timeout_s` is how long a rank looks for the others; collectives have a time-out of their own (PATIENCE).
    `gloo`: NCCL is not used between GPUs either.
    """
    global _attempt
    if world.size == 1:
        if alone:
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and not gloo else "gloo"
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        return
    timeout = timedelta(seconds=timeout_s)
    agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = _store(world, timeout, host=world.rank == 0 and not agent_hosts)
    name = os.environ.get(ATTEMPT)
    if name is None:
        name = f"attempt{world.restart_count}"
        if world.num_nodes > 1 and "TORCHELASTIC_RUN_ID" in os.environ:
            # Each of torchrun's agents counts the restarts for itself: after the first one their counts differ. A store
            # that rank 0 hosts is new in each attempt.
            name = _meet(store, world, timeout_s) if agent_hosts else "attempt"
    _attempt = name
    own_store = PrefixStore(name, store)
    nccl = device.type == "cuda" and not gloo and not _gpus_are_shared(own_store, world, device)
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if nccl else "gloo",
        store=own_store,
        rank=world.rank,
        world_size=world.size,
        timeout=PATIENCE,
        device_id=device if nccl else None,
    )


def leave(*, together: bool = False) -> None:
    """Leaves the group, if there is one; never complains, because nothing depends on it any more.

    `together`: nobody before the others have finished too. srun and mpirun kill the rest when a rank ends with another
    code than 0, and the 75 of a rank that stopped is one.
    """
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            if together:
                dist.all_reduce(torch.zeros(1))
            # A thread of gloo's lets go of the last collective's tensors, and needs python's lock for it. A group that
            # is destroyed before that waits for the thread, with the lock in its hands: for ever.
            time.sleep(_LET_GO_S)
            dist.destroy_process_group()


def another_store(world: World, name: str, timeout_s: float) -> Store:
    """A connection of its own to this attempt's store, for another thread: a client that waits blocks all its users."""
    store = TCPStore(
        world.master_addr,
        world.master_port,
        is_master=False,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )
    return PrefixStore(f"{_attempt}/{name}", store)


def _gpus_are_shared(store: Store, world: World, device: torch.device) -> bool:
    """Whether two ranks compute on the same GPU, which NCCL refuses. All ranks find the same answer."""
    # By UUID: a scheduler may show each rank one GPU, and every rank then calls its own cuda:0.
    store.set(f"gpu/{world.rank}", str(torch.cuda.get_device_properties(device).uuid))
    found = store.multi_get([f"gpu/{rank}" for rank in range(world.size)])
    return len(set(found)) < world.size


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


def _meet(store: Store, world: World, timeout_s: float) -> str:
    """A name for this attempt that all ranks share, agreed over a store that may hold the traces of earlier attempts.

    Every rank calls with a word of its own; rank 0 answers whatever calls it sees, also those of dead ranks, until
    each living rank has confirmed. Nobody can take an old answer for a new one because no word is used twice.
    """
    word = uuid.uuid4().hex
    if world.rank != 0:
        store.set(f"unisono/call/{world.rank}", word)
        name: str = store.get(f"unisono/answer/{word}").decode()
        store.set(f"unisono/heard/{name}/{world.rank}", "")
        return name
    deadline = time.monotonic() + timeout_s
    for rank in range(1, world.size):
        call = f"unisono/call/{rank}"
        while not store.check([f"unisono/heard/{word}/{rank}"]):
            if store.check([call]):
                store.set(f"unisono/answer/{store.get(call).decode()}", word)
            if time.monotonic() > deadline:
                raise UserError(f"rank {rank} of {world.size} did not show up in {timeout_s:.0f} s; was it started?")
            time.sleep(0.02)
    return word
