"""Tests and times a real all-reduce between real processes, before a run needs it (`unisono doctor`).

`measure` starts the ranks as `python -m unisono.cluster.allreduce ...`. They rendezvous through a file, which needs no
free port. They all-reduce known numbers and check the sum, and rank 0 writes the timings. A failure is reported in one
line: the error of the rank that failed, or the ranks that were still waiting at the timeout.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

from unisono.cluster.lifetime import die_with_parent
from unisono.errors import TrainingFailed

SMALL_BYTES = 8
LARGE_BYTES = {"gloo": 16 * 2**20, "nccl": 256 * 2**20}


@dataclass(frozen=True)
class Measurement:
    """Latency and bandwidth of the all-reduce."""

    num_ranks: int
    latency_us: float
    """Median time of an all-reduce of a few bytes."""
    gb_per_s: float
    """Bytes of one rank's tensor divided by the median time of its all-reduce."""


def measure(
    backend: Literal["gloo", "nccl"],
    num_ranks: int,
    *,
    timeout_s: float = 60.0,
    environ: Mapping[str, str] | None = None,
) -> Measurement:
    """Runs the all-reduce on this machine; raises TrainingFailed with the reason if it fails or times out."""
    package_root = str(Path(__file__).parents[2])
    inherited = os.environ.get("PYTHONPATH")
    env = {
        **os.environ,
        **(environ or {}),
        "PYTHONPATH": os.pathsep.join([package_root, *([inherited] if inherited else [])]),
        "OMP_NUM_THREADS": "1",
    }
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(prefix="unisono-allreduce-") as folder:
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(num_ranks):
                command = [sys.executable, "-m", __name__, backend, str(rank), str(num_ranks), folder, str(timeout_s)]
                with open(f"{folder}/{rank}.err", "wb") as errors:
                    ranks.append(subprocess.Popen(command, env=env, stderr=errors, stdout=errors))
            _wait(ranks, deadline, timeout_s, Path(folder))
            return Measurement(num_ranks, **json.loads(Path(folder, "measured.json").read_text()))
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def _wait(ranks: list[subprocess.Popen[bytes]], deadline: float, timeout_s: float, folder: Path) -> None:
    """Returns when all ranks succeeded; raises for the first that fails, because the others fail as a consequence."""
    while True:
        codes = [process.poll() for process in ranks]
        for rank, code in enumerate(codes):
            if code not in (None, 0):
                raise TrainingFailed(f"rank {rank} exited with status {code}: {_reason(folder / f'{rank}.err')}")
        waiting = [str(rank) for rank, code in enumerate(codes) if code is None]
        if not waiting:
            return
        if time.monotonic() > deadline:
            raise TrainingFailed(f"not done after {timeout_s:g} s; still waiting: rank {', '.join(waiting)}")
        time.sleep(0.02)


def _reason(log: Path) -> str:
    """Returns the last line of a rank's log that names an error, ignoring indented lines; else the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line[:1].strip()]
    errors = [line for line in lines if "Error" in line.partition(":")[0]]
    return next(iter(errors[-1:] or lines[-1:]), "it printed no message")


def _rank(backend: str, rank: int, size: int, folder: str, timeout_s: float) -> None:
    import torch
    import torch.distributed as dist

    from unisono.cluster.process_group import leave_process_group

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )

    def median_seconds(num_bytes: int, repeats: int) -> float:
        times = []
        for repeat in range(repeats + 2):
            tensor = torch.full((num_bytes // 4,), float(rank + 1), device=device)
            dist.barrier()
            started = time.perf_counter()
            dist.all_reduce(tensor)
            if device.type == "cuda":
                torch.cuda.synchronize()
            if repeat >= 2:  # the first iterations set up connections
                times.append(time.perf_counter() - started)
            if not torch.all(tensor == size * (size + 1) / 2):
                raise ArithmeticError(f"the all-reduce of 1..{size} returned {tensor[0].item()}, a wrong sum")
        return statistics.median(times)

    latency = median_seconds(SMALL_BYTES, repeats=50)
    num_bytes = LARGE_BYTES[backend]
    speed = num_bytes / median_seconds(num_bytes, repeats=5) / 1e9
    if rank == 0:
        Path(folder, "measured.json").write_text(json.dumps({"latency_us": latency * 1e6, "gb_per_s": speed}))
    leave_process_group()


if __name__ == "__main__":
    die_with_parent()
    _rank(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], float(sys.argv[5]))
