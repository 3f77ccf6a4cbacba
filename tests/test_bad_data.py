"""Unreadable samples, killed workers and hanging workers."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing import active_children
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from recipes_for_tests import SentenceData
from unisono.data import workers as loader_workers
from unisono.data.loader import Cursor, Loader, MicroBatch
from unisono.data.order import Order
from unisono.errors import RecipeError, TrainingFailed
from unisono.settings import DataSettings

SAMPLES, SEED = 15, 3


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Iterator[None]:
    yield
    left = [child for child in active_children() if "loader worker" in child.name]
    for child in left:
        child.kill()
    assert not left


def cursor(start: int = 0, end: int = 45, rank: int = 0, world: int = 1, micro_batch: int = 2) -> Cursor:
    return Cursor(start=start, end=end, global_batch=6, micro_batch=micro_batch, rank=rank, world=world)


def as_rows(items: list[dict[str, Any]]) -> list[list[float]]:
    return [[item["id"], *item["tokens"].tolist(), *item["jitter"].tolist()] for item in items]


def open_loader(
    data: Dataset[Any],
    where: Cursor,
    workers: int = 0,
    collate: Callable[[list[Any]], Any] = as_rows,
    pin: bool = False,
    messages: list[str] | None = None,
) -> Loader:
    settings, order = DataSettings(num_workers=workers), Order(SAMPLES, SEED)
    return Loader(data, collate, order, where, settings, pin, None if messages is None else messages.append)


def read(data: Dataset[Any], where: Cursor, workers: int = 0) -> list[MicroBatch]:
    with closing(open_loader(data, where, workers)) as loader:
        return list(loader)


def by_position(micros: list[MicroBatch]) -> dict[int, list[float]]:
    """The sample at each position, without dummy samples."""
    result: dict[int, list[float]] = {}
    for micro in micros:
        assert len(micro.positions) == len(micro.data)
        if not micro.is_dummy:
            assert list(micro.positions) == sorted(micro.positions) and not result.keys() & set(micro.positions)
            result |= dict(zip(micro.positions, micro.data, strict=True))
    return result


class WithBadSamples(SentenceData):
    def __init__(self, *bad: int) -> None:
        super().__init__(SAMPLES, augment=True)
        self.bad = bad

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.bad:
            torch.rand(3)  # random numbers drawn before the failure must not matter
            raise ValueError(f"sample {index} is damaged\n" + 1000 * "!")
        return super().__getitem__(index)


class Flaky(SentenceData):
    """The first attempt to read a sample fails after drawing random numbers; the second succeeds."""

    def __init__(self) -> None:
        super().__init__(SAMPLES, augment=True)
        self.tries = 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = super().__getitem__(index)
        self.tries += 1
        if self.tries % 2:
            raise OSError("the network is down")
        return item


class Raising(SentenceData):
    def __init__(self, error: BaseException) -> None:
        super().__init__(SAMPLES, augment=True)
        self.error = error

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise self.error


class EndsItsWorker(SentenceData):
    """Kills the process that reads sample 7."""

    def __init__(self) -> None:
        super().__init__(SAMPLES, augment=True)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Hangs(SentenceData):
    """Each process reads a few samples and hangs at the next one."""

    def __init__(self, after: int) -> None:
        super().__init__(SAMPLES, augment=True)
        self.after = after

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.after -= 1
        while self.after < 0:
            time.sleep(1)
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2])
def test_bad_samples_are_skipped_and_reported_and_nothing_else_changes(workers: int, world: int) -> None:
    sound = by_position(read(SentenceData(SAMPLES, augment=True), cursor()))
    micros = [m for rank in range(world) for m in read(WithBadSamples(4, 11), cursor(rank=rank, world=world), workers)]
    bad = [sample for micro in micros for sample in micro.bad]
    order = Order(SAMPLES, SEED)
    expected = [position for position in range(45) if order[position] in (4, 11)]
    assert sorted(sample.position for sample in bad) == expected and len(expected) == 6
    assert all(sample.index == order[sample.position] for sample in bad)
    assert all(
        sample.error.startswith(f"ValueError: sample {sample.index} is damaged !!")
        and re.fullmatch(r".{300} \(test_bad_data\.py:\d+\)", sample.error)
        for sample in bad
    )
    assert all("raise ValueError" in sample.traceback for sample in bad)
    assert by_position(micros) == {position: item for position, item in sound.items() if position not in expected}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_can_be_read_at_the_second_attempt_changes_nothing(workers: int) -> None:
    micros = read(Flaky(), cursor(), workers)
    assert not any(micro.bad for micro in micros)
    assert by_position(micros) == by_position(read(SentenceData(SAMPLES, augment=True), cursor()))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_micro_batch_without_readable_samples_is_replaced_by_another_sample(workers: int) -> None:
    order = Order(SAMPLES, SEED)
    data = WithBadSamples(*(order[position] for position in (0, 2, 3)))
    first, second, third = read(data, cursor(end=6), workers)
    assert (list(first.positions), first.is_dummy, [s.position for s in first.bad]) == ([1], False, [0])
    assert (list(second.positions), second.is_dummy, [s.position for s in second.bad]) == ([1], True, [2, 3])
    assert second.data == first.data and second.chunk.positions == range(2, 4)
    assert (list(third.positions), third.is_dummy, third.bad) == ([4, 5], False, ())
    # A rank without its own samples does not report a bad sample that it only tried to read.
    (idle,) = [m for rank in range(3) for m in read(data, cursor(end=2, rank=rank, world=3)) if m.chunk.is_dummy]
    assert (list(idle.positions), idle.is_dummy, idle.bad) == ([1], True, ())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_without_readable_samples_is_an_error_that_names_the_first_sample(workers: int) -> None:
    first = Order(SAMPLES, SEED)[0]
    loader = open_loader(WithBadSamples(*range(SAMPLES)), cursor(), workers)
    with closing(loader), pytest.raises(RecipeError, match=rf"none of 6 samples .* sample {first} \(position 0\): Val"):
        next(loader)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_collate_names_the_samples_and_is_not_a_bad_sample(workers: int) -> None:
    def collate(items: list[Any]) -> Any:
        raise KeyError("width")

    order = Order(SAMPLES, SEED)
    loader = open_loader(SentenceData(SAMPLES, augment=True), cursor(), workers, collate)
    message = rf"collate\(\) failed on samples {order[0]}, {order[1]} \(from position 0\): KeyError: 'width'"
    with closing(loader), pytest.raises(RuntimeError, match=message):
        next(loader)


@pytest.mark.parametrize("workers", [0, 1])
def test_running_out_of_memory_does_not_make_a_sample_bad(workers: int) -> None:
    loader = open_loader(Raising(MemoryError("no memory")), cursor(), workers)
    with closing(loader), pytest.raises(MemoryError, match="no memory"):
        next(loader)


def test_a_batch_that_cannot_be_sent_by_its_worker_is_an_error() -> None:
    loader = open_loader(SentenceData(SAMPLES, augment=True), cursor(), 1, collate=lambda items: lambda: items)
    with closing(loader), pytest.raises(Exception, match="pickle"):
        next(loader)


@pytest.fixture
def pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enables pinning as on a machine with a GPU; without a GPU, the same code runs without page-locked memory."""
    if torch.accelerator.is_available():
        return
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(loader_workers, "pin_memory", lambda data: data)


def as_tensors(items: list[dict[str, Any]]) -> list[torch.Tensor]:
    """A batch in shared memory, which has to be fetched while the worker is alive."""
    return [torch.cat([torch.tensor([float(item["id"])]), item["tokens"], item["jitter"]]) for item in items]


def as_long_texts(items: list[dict[str, Any]]) -> list[str]:
    """A batch that is larger than the pipe's buffer, so that its worker is killed while sending it."""
    return [str(item["id"]) * 400_000 + str(item["jitter"].tolist()) for item in items]


@pytest.mark.parametrize("collate", [as_tensors, as_long_texts])
@pytest.mark.parametrize("pin", [False, True])
def test_killed_workers_are_replaced_and_every_sample_is_read_once(
    collate: Callable[[list[Any]], Any], pin: bool, pinning: None
) -> None:
    data, messages = SentenceData(SAMPLES, augment=True), list[str]()
    with closing(open_loader(data, cursor(), 0, collate)) as loader:
        expected = [(list(micro.positions), micro.data) for micro in loader]
    result = []
    with closing(open_loader(data, cursor(), 2, collate, pin, messages)) as loader:
        for number, micro in enumerate(loader):
            result.append((list(micro.positions), micro.data))
            if number % 5 == 2:
                time.sleep(0.1)  # now both workers are ahead, and the pipe of as_long_texts is full
                living = sorted(active_children(), key=lambda child: child.name)
                living[number % len(living)].kill()
    assert [positions for positions, _ in result] == [positions for positions, _ in expected]
    for (_, got), (_, target) in zip(result, expected, strict=True):
        assert all(
            torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(got, target, strict=True)
        )
    assert 3 <= len(messages) <= 5
    assert all("loader worker" in text and "was killed by SIGKILL" in text for text in messages)


def test_a_sample_that_kills_every_worker_is_named() -> None:
    order, messages = Order(SAMPLES, SEED), list[str]()
    position = next(position for position in range(SAMPLES) if order[position] == 7)
    result: list[int] = []
    loader = open_loader(EndsItsWorker(), cursor(), 2, as_tensors, messages=messages)
    with closing(loader), pytest.raises(TrainingFailed, match=r"while it was reading sample 7 .* 3 workers in a row"):
        for micro in loader:
            result += micro.positions
    assert result == list(range(position // 2 * 2))  # everything before the bad sample, and nothing after it
    assert "while it was reading sample 7" in messages[-1]


def test_a_worker_that_is_killed_while_idle_is_replaced() -> None:
    # Torch's own loaders install a SIGCHLD handler that raises at any line of the main thread.
    from torch.utils.data import DataLoader

    before, messages = signal.getsignal(signal.SIGCHLD), list[str]()
    try:
        list(DataLoader([1, 2], num_workers=1))  # type: ignore[arg-type]
        assert signal.getsignal(signal.SIGCHLD) != before or callable(before)
        with closing(open_loader(SentenceData(SAMPLES, augment=True), cursor(), 2, messages=messages)) as loader:
            result = [next(loader)]
            for child in active_children():
                child.kill()
            deadline = time.monotonic() + 0.5
            while time.monotonic() < deadline:
                time.sleep(0.01)  # training
            assert not messages
            result += loader
        assert by_position(result) == by_position(read(SentenceData(SAMPLES, augment=True), cursor()))
        assert len(messages) == 2
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_loader_that_hangs_can_be_interrupted_and_closed() -> None:
    def ring(number: int, frame: Any) -> None:
        raise TimeoutError("interrupted")

    loader = open_loader(Hangs(after=2), cursor(), 2)
    next(loader)
    before = signal.signal(signal.SIGUSR2, ring)
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGUSR2))
    timer.start()
    try:
        with pytest.raises(TimeoutError):
            list(loader)
        next(iter(active_children())).kill()  # one dead, one hanging
    finally:
        timer.join()
        signal.signal(signal.SIGUSR2, before)
        start = time.monotonic()
        loader.close()
    assert time.monotonic() - start < 30
    assert not active_children()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_new_loader_continues_mid_stream_with_other_micro_batches(workers: int) -> None:
    data = SentenceData(SAMPLES, augment=True)
    with closing(open_loader(data, cursor(micro_batch=4), workers)) as loader:
        result = [next(loader) for _ in range(4)]  # two steps of six samples
        next(loader)  # out of memory: this step is repeated
    for start, micro_batch in ((12, 2), (30, 1)):
        end = 30 if start == 12 else 45
        with closing(open_loader(data, cursor(start=start, micro_batch=micro_batch), workers)) as loader:
            while not result or result[-1].positions[-1] + 1 < end:
                result.append(next(loader))
    assert by_position(result) == by_position(read(data, cursor()))


def test_a_dataset_can_call_get_worker_info() -> None:
    class Asks(SentenceData):
        def __getitem__(self, index: int) -> Any:
            info = get_worker_info()
            return None if info is None else (info.id, info.num_workers)

    for workers, expected in ((0, [None, None]), (2, [(0, 2), (1, 2)])):
        with closing(open_loader(Asks(SAMPLES, augment=False), cursor(), workers, list)) as loader:
            assert [next(loader).data[0] for _ in range(2)] == expected


def test_spawned_workers_read_the_same_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "Process", multiprocessing.get_context("spawn").Process)
    data = SentenceData(SAMPLES, augment=True)
    assert by_position(read(data, cursor(), 1)) == by_position(read(data, cursor()))
    data.secret = lambda: None  # type: ignore[attr-defined]
    with pytest.raises(RecipeError, match=r"cannot be sent to a loader worker .*--num_workers 0"):
        read(data, cursor(), 1)
