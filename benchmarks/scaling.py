"""Measures the cost of each part of a run on 8, 64, 512 and 4,096 ranks, on one machine without a GPU.

    python benchmarks/scaling.py --output benchmarks/results

Most parts are functions of (rank, number of ranks), so one process can do the work of one rank of 4,096. Communication
is measured with up to 64 ranks, which are threads of one process connected by gloo over the loopback interface. Numbers
for more ranks are extrapolated, and marked.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import machine, versions
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from unisono.checkpoint.find import validate
from unisono.checkpoint.load import load_whole
from unisono.checkpoint.manifest import FileEntry, Manifest, hash_file
from unisono.checkpoint.shards import shard_name, write_shards
from unisono.data.cursor import Cursor
from unisono.data.order import Order
from unisono.data.shapes import Shapes
from unisono.engine.recorder import MAX_RANKS_LISTED
from unisono.observe.straggler import StragglerDetector

RANKS = (8, 64, 512, 4096)
SAMPLES = 10**9
PER_RANK = 4  # samples per rank in a global batch
TENSORS = 300  # number of tensors in a checkpoint: weights, averages and optimizer state
HEADERS = 100  # number of tensors per shard in the measurement that writes every shard to a real file
THREADS = (8, 16, 32, 64)
FLAGS = 5  # numbers in the exchange of a step


def seconds(function: Callable[[], Any], at_least: float = 0.1) -> float:
    """Seconds of the fastest of several calls, because other processes may slow down any of them."""
    times, until = list[float](), time.perf_counter() + at_least
    while len(times) < 3 or time.perf_counter() < until:
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return min(times)


class Videos:
    """A dataset of 10⁹ samples in five shapes."""

    def shape(self, index: int) -> tuple[int, int]:
        return (16, 8 * (1 + index % 5))


def order() -> dict[str, Any]:
    """Times the computation of a rank's next micro-batch, for samples of one shape and of several."""
    stream = Order(SAMPLES, seed=0)
    alike, shaped, peak = {}, {}, {}
    for world in RANKS:
        cursor = Cursor(SAMPLES // 2, None, PER_RANK * world, PER_RANK, world - 1, world)
        by_shape = replace(cursor, shapes=Shapes(Videos(), stream))

        def one_step(cursor: Cursor = cursor) -> None:
            chunk = next(iter(cursor.chunks()))
            stream.indices(torch.tensor(list(chunk.positions)).numpy())

        alike[world] = seconds(one_step)
        shaped[world] = seconds(lambda cursor=by_shape: list(islice(cursor.chunks(), 1)), 0.3)
        tracemalloc.start()
        one_step()
        peak[world] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return {"alike_s": alike, "shaped_s": shaped, "peak_bytes": peak}


def exchange(world: int, rounds: int = 30) -> tuple[float, float]:
    """Seconds to create a gloo group and for one exchange of flags, with ranks as threads."""
    store, barrier = dist.HashStore(), threading.Barrier(world)
    created, exchanged = [0.0] * world, [0.0] * world

    def run(rank: int) -> None:
        barrier.wait()
        began = time.perf_counter()
        group = dist.ProcessGroupGloo(dist.PrefixStore("group", store), rank, world, timedelta(seconds=120))
        created[rank] = time.perf_counter() - began
        values, options = torch.zeros(FLAGS, dtype=torch.float64), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        times = []
        for _ in range(rounds):
            barrier.wait()
            began = time.perf_counter()
            group.allreduce([values], options).wait()
            times.append(time.perf_counter() - began)
        exchanged[rank] = sorted(times)[len(times) // 4]
        barrier.wait()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(created), max(exchanged)


def agreement() -> dict[str, Any]:
    """Times the exchange of flags. In a ring, each of FLAGS numbers makes 2 (ranks - 1) hops, one after the other."""
    by_world = {world: exchange(world) for world in THREADS}
    largest = max(THREADS)
    return {
        "create_s": {world: created for world, (created, _) in by_world.items()},
        "exchange_s": {world: each for world, (_, each) in by_world.items()},
        "hop_s": by_world[largest][1] / (2 * (largest - 1)),
        # All ranks share this machine's cores, and each pair connects; a rank has ranks - 1 connections.
        "connect_s": by_world[largest][0] / (largest * (largest - 1) / 2),
    }


def planning(folder: Path) -> dict[str, Any]:
    """Times one rank's plan for its shard file and, for comparison, a plan for all ranks on rank 0."""
    own, together, pickled = {}, {}, {}
    for world in RANKS:
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (world,))
            state = {
                f"model.layer{number}": DTensor.from_local(
                    torch.zeros(1, 4), mesh, [Shard(0)], run_check=False, shape=torch.Size([world, 4]), stride=(4, 1)
                )
                for number in range(TENSORS)
            }
            own[world] = seconds(lambda state=state, world=world: write_shards(state, folder, rank=0, world=world))
            if world <= 512:
                planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
                planner.set_up_planner(state, is_coordinator=True)
                plan = planner.create_local_plan()
                plans = [_of_rank(plan, rank) for rank in range(world)]
                pickled[world] = sum(len(pickle.dumps(each)) for each in plans[:4]) / 4 * world
                began = time.perf_counter()
                received = [pickle.loads(pickle.dumps(each)) for each in plans]
                planner.create_global_plan(received)
                together[world] = time.perf_counter() - began
        finally:
            dist.destroy_process_group()
    return {"own_s": own, "together_s": together, "together_bytes": pickled}


def _of_rank(plan: Any, rank: int) -> Any:
    """Turns a plan into that of another rank, which holds other rows."""
    items = []
    for item in plan.items:
        chunk = replace(item.tensor_data.chunk, offsets=torch.Size([rank, 0]))
        data, index = replace(item.tensor_data, chunk=chunk), replace(item.index, offset=chunk.offsets)
        items.append(replace(item, tensor_data=data, index=index))
    return replace(plan, items=items)


def resume(root: Path) -> dict[str, Any]:
    """Times how one process checks and reads a checkpoint. Only the number of files matters: shards are small."""
    from safetensors.torch import save_file

    size, check, read = {}, {}, {}
    for world in RANKS:
        folder = root / f"step_{world:08d}"
        folder.mkdir()
        (folder / "state.json").write_text("{}")
        files = {"state.json": hash_file(folder / "state.json")}
        for rank in range(world):
            name = shard_name(rank, world)
            if world <= 512:
                offsets = {f"model.layer{number}": {"saved_offsets": [rank, 0]} for number in range(HEADERS)}
                tensors = {tensor: torch.zeros(1, 4) for tensor in offsets}
                save_file(tensors, folder / name, metadata={"DCP_SHARDING_INFO": json.dumps(offsets), "format": "pt"})
                files[name] = hash_file(folder / name)
            else:
                files[name] = FileEntry(10**9, "0" * 64)
        manifest = Manifest(world, world, {"recipe": "x"}, files)
        text = json.dumps(manifest.to_json(), indent=1)
        (folder / "manifest.json").write_text(text)
        size[world] = len(text)
        if world <= 512:
            if (reason := validate(folder, deep=False)) is not None:
                raise SystemExit(f"the simulated checkpoint is not valid: {reason}")
            check[world] = seconds(lambda folder=folder: validate(folder, deep=False))
            read[world] = seconds(lambda folder=folder: load_whole(folder, "model."), 0.0)
    return {"manifest_bytes": size, "check_s": check, "read_s": read}


def logging() -> dict[str, Any]:
    """Times rank 0's work on the numbers of all ranks, at a logged step and at the end of an evaluation."""
    logged, evaluated = {}, {}
    numbers = {name: 12.345 for name in ("step_ms", "own_ms", "data_wait_ms", "comm_ms", "compute_ms", "mfu")}
    metrics = {f"metric{number}": [1.5, 100.0] for number in range(20)}
    for world in RANKS:
        received, results = [pickle.dumps(numbers)] * world, [pickle.dumps(metrics)] * world

        def log(received: list[bytes] = received) -> None:
            ranks = [pickle.loads(each) for each in received]
            owns, waits = ([each[name] for each in ranks] for name in ("own_ms", "data_wait_ms"))
            StragglerDetector().check(owns, waits)

        def merge(results: list[bytes] = results) -> None:
            sums: dict[str, list[float]] = {}
            for part in map(pickle.loads, results):
                for name, (total, count) in part.items():
                    before = sums.setdefault(name, [0.0, 0.0])
                    sums[name] = [before[0] + total, before[1] + count]

        logged[world], evaluated[world] = seconds(log), seconds(merge)
    return {"logged_s": logged, "evaluated_s": evaluated}


def extrapolated(values: dict[int, float], world: int) -> tuple[float, bool]:
    """The value for a number of ranks, extrapolated linearly if it was not measured; and whether it was measured."""
    if world in values:
        return values[world], True
    largest = max(values)
    return values[largest] * world / largest, False


def rows_of(results: dict[str, Any]) -> list[tuple[str, str, list[str]]]:
    """(part, when, cells) of the table."""
    order, agree, plan, resume, log = (
        results[name] for name in ("order", "agreement", "planning", "resume", "logging")
    )

    def row(values: dict[int, float], show: Callable[[float], str]) -> list[str]:
        cells = [extrapolated(values, world) for world in RANKS]
        return [show(value) if measured else f"*{show(value)}*" for value, measured in cells]

    def by_law(law: Callable[[int], float], show: Callable[[float], str]) -> list[str]:
        return [f"*{show(law(world))}*" for world in RANKS]

    return [
        ("order: positions and samples of a micro-batch", "each step", row(order["alike_s"], time_text)),
        ("order: with samples of several shapes", "each step, in a worker", row(order["shaped_s"], time_text)),
        ("order: memory, of 10⁹ samples", "always", row(order["peak_bytes"], bytes_text)),
        (
            "agreement: exchange of flags, if waited for",
            "each step, overlapped",
            by_law(lambda n: 2 * (n - 1) * agree["hop_s"], time_text),
        ),
        ("log: numbers of all ranks, on rank 0", "each logged step", row(log["logged_s"], time_text)),
        ("checkpoint: plan and header of a rank's file", "each save, in the background", row(plan["own_s"], time_text)),
        ("checkpoint: manifest", "each save", row(resume["manifest_bytes"], bytes_text)),
        ("(not used) plan of all files on rank 0", "each save", row(plan["together_s"], time_text)),
        ("(not used) plans sent to rank 0", "each save", row(plan["together_bytes"], bytes_text)),
        ("resume: files and sizes checked", "each start", row(resume["check_s"], time_text)),
        ("resume: all headers read by one process", "each start", row(resume["read_s"], time_text)),
        (
            "start: connections of a rank's gloo group",
            "each start",
            by_law(lambda n: (n - 1) * agree["connect_s"], time_text),
        ),
        ("evaluation: metrics of all ranks merged", "each evaluation", row(log["evaluated_s"], time_text)),
    ]


def time_text(value: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"


def bytes_text(value: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.0f} B"


def table(results: dict[str, Any]) -> list[str]:
    lines = ["| part | when | " + " | ".join(f"{world:,} ranks" for world in RANKS) + " |"]
    lines += ["|---|---|" + "---|" * len(RANKS)]
    return lines + [f"| {part} | {when} | {' | '.join(cells)} |" for part, when, cells in rows_of(results)]


def report(results: dict[str, Any]) -> str:
    about, agree = results["machine"], results["agreement"]
    lines = ["# Costs by number of ranks", "", f"`{results['command']}`, {results['when']}", ""]
    lines += [f"{about['processor']}, {about['cores']} cores, load {about['load_average']}, {results['versions']}", ""]
    lines += [*table(results), "", "Numbers in italics are extrapolated.", ""]
    lines += ["Exchange of flags over gloo, ranks as threads on this machine's cores:", ""]
    lines += ["| ranks | create the group | one exchange |", "|---|---|---|"]
    for world in THREADS:
        created, each = time_text(agree["create_s"][world]), time_text(agree["exchange_s"][world])
        lines.append(f"| {world} | {created} | {each} |")
    lines += ["", f"One hop: {time_text(agree['hop_s'])}. One connection: {time_text(agree['connect_s'])}."]
    lines += [f"Up to {MAX_RANKS_LISTED} ranks, `metrics.jsonl` lists each rank's numbers.", ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        parts = {"order": order, "agreement": agreement, "logging": logging}
        results: dict[str, Any] = {name: part() for name, part in parts.items()}
        results |= {"planning": planning(Path(root)), "resume": resume(Path(root))}
    results |= {
        "command": "python benchmarks/scaling.py --output benchmarks/results",
        "when": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(["torch"]),
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "scaling.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.output / "scaling.md").write_text(report(results))
    print(report(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
