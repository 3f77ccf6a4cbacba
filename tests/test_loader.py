"""The loader returns the same micro-batches with any number of workers, and seeds each sample separately."""

from __future__ import annotations

import os
import random
import time
from collections import Counter, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset

from recipes_for_tests import SentenceData
from unisono.data.loader import Cursor, Loader, to_device
from unisono.data.order import Order
from unisono.data.prefetch_stream import PrefetchStream, is_worth_prefetching
from unisono.settings import DataSettings


def cursor(start: int = 0, end: int | None = 45, rank: int = 0, world: int = 1, micro_batch: int = 2) -> Cursor:
    return Cursor(start=start, end=end, global_batch=4, micro_batch=micro_batch, rank=rank, world=world)


def read(where: Cursor, workers: int = 0, seed: int = 0) -> list[tuple[list[int], list[list[float]]]]:
    """(positions, items) of every micro-batch; an item is its id, its tokens and its random numbers."""
    data = SentenceData(15, augment=True)
    loader = Loader(data, _plain, Order(15, seed), where, DataSettings(num_workers=workers), pin=False)
    result = [(list(micro.chunk.positions), micro.data) for micro in loader]
    loader.close()
    return result


def _plain(items: list[dict[str, Any]]) -> list[list[float]]:
    return [[item["id"], *item["tokens"].tolist(), *item["jitter"].tolist()] for item in items]


class WhoReads(Dataset[int]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        return os.getpid()


@settings(max_examples=60, deadline=None)
@given(
    start=st.integers(0, 1000),
    num_samples=st.integers(1, 60),
    global_batch=st.integers(1, 20),
    micro_batch=st.integers(1, 8),
    world=st.integers(1, 7),
)
def test_ranks_run_in_lockstep_and_every_position_counts_once(
    start: int, num_samples: int, global_batch: int, micro_batch: int, world: int
) -> None:
    end = start + num_samples
    ranks = [list(Cursor(start, end, global_batch, micro_batch, rank, world).chunks()) for rank in range(world)]
    assert len({len(chunks) for chunks in ranks}) == 1
    shape = [chunk.last for chunk in ranks[0]]
    assert all([chunk.last for chunk in chunks] == shape for chunks in ranks)
    assert sum(shape) == -(-num_samples // global_batch) and shape[-1]  # one last micro-batch per step
    chunks = [chunk for chunks in ranks for chunk in chunks]
    assert all(1 <= len(chunk.positions) <= micro_batch for chunk in chunks)
    assert all(start <= position < end for chunk in chunks for position in chunk.positions)
    counted = Counter(position for chunk in chunks if not chunk.is_dummy for position in chunk.positions)
    assert counted == Counter(range(start, end))


def test_an_endless_stream_continues() -> None:
    chunks = cursor(end=None, start=10**12).chunks()
    assert [next(chunks).positions for _ in range(3)] == [range(10**12 + i, 10**12 + i + 2) for i in (0, 2, 4)]


def test_workers_do_not_change_what_is_read() -> None:
    alone = read(cursor())
    assert read(cursor(), workers=2) == alone
    assert read(cursor(), workers=3) == alone
    assert read(cursor(), seed=1) != alone


def test_reading_from_the_middle_gives_the_rest() -> None:
    whole = read(cursor())
    assert read(cursor(start=20), workers=1) == whole[10:]


def test_an_item_is_the_same_on_any_rank_in_any_micro_batch() -> None:
    def items(*cursors: Cursor) -> dict[int, list[float]]:
        return {
            p: item for c in cursors for positions, data in read(c) for p, item in zip(positions, data, strict=True)
        }

    one = items(cursor())
    assert len(one) == 45
    assert items(*(cursor(rank=rank, world=3, micro_batch=1) for rank in range(3))) == one
    epochs = [{item[0]: item[1:] for p, item in one.items() if p // 15 == epoch} for epoch in range(3)]
    for number in range(15):  # in every epoch a sample is augmented differently
        assert epochs[0][number] != epochs[1][number] != epochs[2][number] != epochs[0][number]


def test_random_numbers_drawn_in_training_do_not_change_the_items() -> None:
    torch.manual_seed(1)
    first = read(cursor())
    torch.manual_seed(2), random.seed(5), np.random.seed(7)
    assert read(cursor()) == first


def test_workers_are_separate_processes_and_end_when_the_loader_closes() -> None:
    loader = Loader(WhoReads(), list, Order(1000, 0), cursor(end=None), DataSettings(num_workers=2), pin=False)
    readers = {pid for _ in range(8) for pid in next(loader).data}
    assert len(readers) == 2 and os.getpid() not in readers
    loader.close()
    deadline = time.monotonic() + 10
    while any(_is_alive(pid) for pid in readers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_is_alive(pid) for pid in readers)


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


Pair = namedtuple("Pair", "a b")


@dataclass(frozen=True)
class Page:
    words: Tensor
    number: int


def test_a_nested_batch_is_moved_to_the_device() -> None:
    x, i = torch.ones(2), torch.arange(2)
    batch = {"list": [x, i], "pair": Pair(x, "text"), "page": Page(x, 3), "tuple": (i, None), "plain": 1.5}
    result = to_device(batch, torch.device("meta"), torch.float64)
    assert result["list"][0].device.type == result["tuple"][0].device.type == "meta"
    assert result["list"][0].dtype == result["pair"].a.dtype == result["page"].words.dtype == torch.float64
    assert result["list"][1].dtype == torch.int64
    assert isinstance(result["pair"], Pair) and result["pair"].b == "text"
    assert result["page"].number == 3 and result["tuple"][1] is None and result["plain"] == 1.5
    assert to_device(x, torch.device("cpu")).dtype == torch.float32


def test_only_large_plain_host_tensors_are_copied_on_the_prefetch_stream() -> None:
    gpu, large = torch.device("cuda"), torch.empty(2**18)
    assert is_worth_prefetching(large, gpu)
    for other in (large[:-1], torch.nn.Parameter(large), large.to("meta"), torch.eye(2**10).to_sparse()):
        assert not is_worth_prefetching(other, gpu)
    assert not is_worth_prefetching(large, torch.device("cpu"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_large_batch_is_copied_while_the_gpu_computes_and_stays_as_long_as_it_is_read() -> None:
    device, batches = torch.device("cuda"), [torch.full((2**22,), float(i)).pin_memory() for i in range(20)]
    prefetch = PrefetchStream.on(device)

    def read_all(asleep: int) -> Tensor:
        read = []
        for batch in batches:
            with torch.cuda.stream(prefetch.stream):
                torch.cuda._sleep(10**5)  # the copy is late, so its reader must wait for it
            placed = to_device({"x": batch}, device)["x"]
            torch.cuda._sleep(asleep)  # and its reader runs after the next copy
            read.append(placed.mean())
            del placed
        return torch.stack(read)

    for asleep in (1, 10**6):
        assert read_all(asleep).tolist() == [float(i) for i in range(20)]
    torch.cuda.synchronize()  # loads all kernels, for which the GPU waits
    torch.cuda._sleep(2 * 10**9)
    sleeping, copied = torch.cuda.Event(), torch.cuda.Event()
    sleeping.record()
    placed = to_device(batches[3], device)
    copied.record(prefetch.stream)
    copied.synchronize()
    assert not sleeping.query(), "the copy did not wait for it"
    assert placed.mean().item() == 3
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    read_all(10**6)
    assert torch.cuda.max_memory_reserved() - before < 5 * batches[0].nbytes, "no more than a few are there at a time"
