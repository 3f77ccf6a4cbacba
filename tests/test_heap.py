"""A run on the CPU keeps freed memory from step to step."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from command_line import environment
from recipes_for_tests import Sentences
from unisono import Loss, train
from unisono.engine.memory.cpu_heap import kept_heap
from unisono.engine.start import session

CODE = """
import ctypes, torch
from pathlib import Path
from unisono.engine.memory.cpu_heap import kept_heap

library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def left(sizes):  # after memory of these sizes in MiB has come and gone: the last first, so that nothing lies above it
    taken = [library.malloc(size << 20) for size in sizes]
    for place, size in zip(taken, sizes):
        ctypes.memset(place, 1, size << 20)
    for place in reversed(taken):
        library.free(place)
    return resident() - start

start = resident()
small, large = [16] * 16, [64] * 4
print(left(small), left(small), left(large))
with kept_heap(torch.device("cpu")):
    print(*(left(small) for _ in range(8)))
    print(left(large))
print(resident() - start)

def tensors():  # aligned, and with small things between them: there are holes
    [*[torch.ones(2**22) for _ in range(16)], torch.ones(2**24)]
    return resident() - start

with kept_heap(torch.device("cpu")):
    print(*(tensors() for _ in range(8)))
"""
MIB = 2**20


def test_on_the_cpu_freed_memory_is_retained_during_a_run_and_returned_afterwards() -> None:
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=environment(), check=True)
    reported = [[int(word) / MIB for word in line.split()] for line in ended.stdout.splitlines()]
    before, [first, *_, last], [large], [after], tensors = reported
    assert max(before) < 64 and after < 32
    assert 240 < first <= last < 1.1 * first  # freed memory is reused
    assert large < 1.1 * last  # the largest blocks still come from the system
    assert tensors[0] > 240 and tensors[-3] == tensors[-2] == tensors[-1] < 1.75 * tensors[0]


@pytest.mark.parametrize(("device", "variables"), [("cuda", {}), ("cpu", {"MALLOC_TRIM_THRESHOLD_": "131072"})])
def test_on_other_systems_or_with_user_settings_nothing_changes(
    device: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("the C library was asked"))
    with kept_heap(torch.device(device)):
        pass


def test_the_allocator_is_tuned_during_every_step_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[torch.device] = []
    steps: list[list[torch.device]] = []

    @contextmanager
    def spy(device: torch.device) -> Iterator[None]:
        inside.append(device)
        yield
        inside.clear()

    class Spied(Sentences):
        def loss(self, model: nn.Module, batch: Any, noise: Any) -> Loss:
            steps.append(list(inside))
            return super().loss(model, batch, noise)

    monkeypatch.setattr(session, "kept_heap", spy)
    train(Spied, gpus="0", max_steps=2, output_dir=str(tmp_path))
    assert len(steps) >= 2 and all(step == [torch.device("cpu")] for step in steps) and not inside
