"""Ranks decide together: after one small exchange, all ranks have the same values."""

from __future__ import annotations

import math
import os
import socket
import time

import pytest

from ranks import RanksFailed, run_ranks

# ---- run in each rank ----


def _joined():
    import torch

    from unisono.cluster.agree import Agreement
    from unisono.cluster.environment import detect
    from unisono.cluster.process_group import join_process_group

    world = detect(os.environ)
    join_process_group(world, torch.device("cpu"), timeout_s=30)
    return world, Agreement()


def agree_on_flags():
    from unisono.cluster.process_group import leave_process_group

    world, agreement = _joined()
    flags = {"stop": float(world.rank == 1), "skip": 0, "step": 7 + world.rank, "large": 2**40 + world.rank}
    if world.rank == 0:  # the order of a rank's flags must not matter
        flags = dict(reversed(flags.items()))
    pending = agreement.start(flags)
    first, again = pending.read(), pending.read()
    nan = agreement.start({"loss": math.nan if world.rank == 0 else 1.0}).read()
    everybody = agreement.all_gather({"rank": world.rank})
    main = agreement.broadcast(f"from {world.rank}")
    leave_process_group()
    leave_process_group()
    return [first, again, nan["loss"] == math.inf, everybody, main]


def agree_while_gradients_are_reduced():
    import torch
    import torch.distributed as dist

    from unisono.cluster.process_group import leave_process_group

    world, agreement = _joined()
    sums, flags, waited = [], [], []
    for step in range(30):
        # Started in a different order on each rank: with one group for both, the values would be mixed up.
        gradient = torch.full((1000,), float(step))
        if world.rank == 0:
            pending = agreement.start({"step": step})
            work = dist.all_reduce(gradient, async_op=True)
        else:
            work = dist.all_reduce(gradient, async_op=True)
            pending = agreement.start({"step": step + 100})
        work.wait()
        time.sleep(0.002)
        start = time.perf_counter()
        flags.append(pending.read()["step"])
        waited.append(time.perf_counter() - start)
        sums.append(gradient[0].item())
    leave_process_group()
    return [sums, flags, sorted(waited)[7]]


def one_rank_fails_and_one_hangs():
    if os.environ["RANK"] == "0":
        raise ValueError("the reason")
    time.sleep(60)


# ---- claims ----


def test_all_ranks_get_the_maximum_of_each_flag():
    for flags, again, nan_is_infinite, everybody, main in run_ranks("agree_on_flags", __file__, 3):
        assert flags == {"large": 2**40 + 2, "skip": 0, "step": 9, "stop": 1}
        assert again == flags
        assert nan_is_infinite
        assert everybody == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert main == "from 0"


def test_one_process_agrees_with_itself_without_a_group():
    first, again, nan_is_infinite, everybody, main = agree_on_flags()
    assert first == again == {"large": 2**40, "skip": 0, "step": 7, "stop": 0}
    assert (nan_is_infinite, everybody, main) == (True, [{"rank": 0}], "from 0")


def test_agreement_does_not_mix_with_gradients_and_costs_nothing_when_read_late():
    for sums, flags, waited in run_ranks("agree_while_gradients_are_reduced", __file__, 2):
        assert sums == [2.0 * step for step in range(30)]
        assert flags == [step + 100 for step in range(30)]
        assert waited < 0.001, f"reading took {waited * 1e6:.0f} µs (lower quartile)"


def test_when_a_rank_fails_the_others_are_killed_and_the_reason_is_reported():
    start = time.monotonic()
    with pytest.raises(RanksFailed, match=r"(?s)the reason.*rank 1: still running"):
        run_ranks("one_rank_fails_and_one_hangs", __file__, 2)
    assert time.monotonic() - start < 40


def test_an_error_about_a_port_in_use_names_the_process_that_holds_it():
    import torch

    from unisono.cluster.environment import World
    from unisono.cluster.process_group import join_process_group
    from unisono.errors import UserError

    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        world = World("slurm", rank=0, size=2, local_size=2, master_port=port)  # under srun rank 0 hosts the store
        with pytest.raises(
            UserError, match=rf"port {port} \(MASTER_PORT\) is already in use by process {os.getpid()} "
        ):
            join_process_group(world, torch.device("cpu"), timeout_s=10)


def meet_with_different_restart_counts():
    """As under torchrun on two machines after a crash on one: the counts differ, and the store contains old keys."""
    import torch
    import torch.distributed as dist

    from unisono.cluster.environment import World
    from unisono.cluster.process_group import join_process_group, leave_process_group

    rank = int(os.environ["RANK"])
    sums = []
    for attempt in range(3):
        world = World(
            "torchrun",
            rank=rank,
            size=2,
            node=rank,
            num_nodes=2,
            master_addr="127.0.0.1",
            master_port=int(os.environ["MASTER_PORT"]),
            restart_count=attempt * rank,
        )
        join_process_group(world, torch.device("cpu"), timeout_s=20)
        value = torch.tensor([rank + 1.0])
        dist.all_reduce(value)
        sums.append(value.item())
        leave_process_group()
    return sums


def test_ranks_on_two_machines_connect_although_their_restart_counts_differ():
    assert run_ranks("meet_with_different_restart_counts", __file__, 2) == [[3.0] * 3] * 2
