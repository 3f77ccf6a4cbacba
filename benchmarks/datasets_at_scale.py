"""Measures the index of 10⁸ samples, and the speed at which tar shards are read in a shuffled order.

    PYTHONPATH=src python benchmarks/datasets_at_scale.py [--samples 100000000] [--gigabytes 0.5] [--rounds 5]

Index: 10⁸ real samples do not fit on most disks. The shards are therefore sparse files
without data, and the benchmark generates their index rows instead of reading tar headers. Everything else is real: the
builder joins and stores the rows, and a fresh process opens the dataset by its shards, checks all of them, and looks up
a million samples at random. How fast headers are read is measured on real shards of small samples.

Throughput: one process reads real shards with `TarShards`, by index and in the order of `--shuffle_window`, in turns,
and announces samples 256 ahead, as a loader worker does. Before a cold pass, the benchmark removes the shards from the
page cache, and checks that they are gone. The raw stream (1 MiB blocks) and Python's `tarfile` stream show what the
disk and another reader do. Files go to `--folder` (default: a temporary folder), and are removed at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from machine import depends_on, machine, versions

from unisono.data.order import Order
from unisono.data.windows import Windows
from unisono.datasets import TarShards
from unisono.datasets.index import Kind, open_index
from unisono.datasets.sources import examine

HERE = Path(__file__).resolve().parent
PER_SHARD = 10_000  # samples in each shard of the large index
SAMPLE_BLOCKS = 200  # 512-byte blocks of each of these samples: shards of 1 GB
LOOKUPS = 10**6
SHARD_BYTES, SAMPLE_BYTES = 32 * 2**20, 110 * 2**10  # of the shards that are read: pictures of the size of ImageNet's
WINDOW_SHARDS = 8
AHEAD, MICRO_BATCH = 256, 32  # samples that are announced before they are read, and at once
WARM_ROUNDS = 3  # times as many, because they are short, and other programs affect them more
TARGET = 0.9
BLOCK = 512


def generated_rows(seed: int) -> np.ndarray[Any, Any]:
    """The rows of a shard as the indexer would return them: first block and number of blocks of each sample."""
    blocks = np.random.default_rng(seed).integers(
        SAMPLE_BLOCKS // 2, 3 * SAMPLE_BLOCKS // 2, PER_SHARD, dtype=np.uint32
    )
    return np.stack([np.cumsum(blocks, dtype=np.uint32) - blocks, blocks], axis=1)


def build_large_index(folder: Path, samples: int) -> dict[str, Any]:
    shards = folder / "shards"
    shards.mkdir()
    for number in range(samples // PER_SHARD):
        with open(shards / f"{number:06d}.tar", "wb") as file:
            file.truncate(PER_SHARD * SAMPLE_BLOCKS * 2 * BLOCK)
    sources = examine(sorted(map(str, shards.iterdir())))
    kind = Kind("tar-1", "uint32", 2, "samples", lambda source: generated_rows(int(Path(source.url).stem)))
    started = time.perf_counter()
    index = open_index(folder / "index", kind, sources)
    seconds = time.perf_counter() - started
    size = sum(file.stat().st_size for file in index.folder.iterdir())
    return {"samples": len(index), "shards": len(sources), "bytes": size, "join_s": seconds}


def memory_mib() -> dict[str, float]:
    """Memory of this process: its own pages, and pages of files that it has mapped."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {name: int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "RssAnon", "RssFile")}


def open_and_look_up(folder: Path) -> dict[str, Any]:
    """Runs in a fresh process."""
    order_of = np.random.default_rng(0)
    before = memory_mib()
    started = time.perf_counter()
    data = TarShards(folder / "shards", index_dir=folder / "index")
    opened_s = time.perf_counter() - started
    opened = memory_mib()
    total, started = 0, time.perf_counter()
    for _ in range(LOOKUPS // 1000):
        for index in order_of.integers(0, len(data), 1000).tolist():
            _, (_, blocks) = data._index.locate(index)
            total += int(blocks)
    lookup_s = time.perf_counter() - started
    return {
        "open_s": opened_s,
        "lookup_us": lookup_s / LOOKUPS * 1e6,
        "mean_blocks": total / LOOKUPS,
        "before": before,
        "opened": opened,
        "after": memory_mib(),
    }


def in_fresh_process(folder: Path) -> dict[str, Any]:
    output = subprocess.run(
        [sys.executable, __file__, "--look-up", str(folder)], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    result: dict[str, Any] = json.loads(output)
    return result


def write_shards(folder: Path, shards: int, per_shard: int, size: int) -> list[Path]:
    folder.mkdir()
    content, paths = np.random.default_rng(1).bytes(2 * size), []
    for shard in range(shards):
        paths.append(folder / f"{shard:03d}.tar")
        with tarfile.open(paths[-1], "w", format=tarfile.USTAR_FORMAT) as tar:
            for number in range(shard * per_shard, (shard + 1) * per_shard):
                for field, data in (("jpg", content[number % size :][:size]), ("cls", str(number).encode())):
                    info = tarfile.TarInfo(f"{number:09d}.{field}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        with open(paths[-1], "rb") as file:
            os.fsync(file.fileno())  # only pages that are on disk can be removed from the page cache
    return paths


def index_speed(folder: Path) -> float:
    """Samples of two small files that are indexed per second."""
    write_shards(folder / "small", 4, 10_000, 100)
    started = time.perf_counter()
    data = TarShards(folder / "small", index_dir=folder / "small_index")
    return len(data) / (time.perf_counter() - started)


def drop(paths: list[Path]) -> None:
    """Removes files from the page cache, and checks that. Pages that are just being read ahead need another try."""
    for _ in range(50):
        for path in paths:
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if not any(is_cached(path, offset) for path in paths for offset in range(0, SHARD_BYTES // 2, 2**20)):
            return
        time.sleep(0.1)
    raise SystemExit("parts of the shards are still in the page cache: a cold pass would not be cold")


def is_cached(path: Path, offset: int) -> bool:
    with open(path, "rb") as file:
        try:
            return os.preadv(file.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT) == 1
        except BlockingIOError:
            return False


def raw_stream(paths: list[Path]) -> Iterator[int]:
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while block := file.read(2**20):
                yield len(block)


def tarfile_stream(paths: list[Path]) -> Iterator[int]:
    for path in paths:
        with open(path, "rb", buffering=2**20) as file, tarfile.open(fileobj=file, mode="r|") as tar:
            for member in tar:
                content = tar.extractfile(member)
                assert content is not None
                yield len(content.read())


def by_index(data: TarShards, indices: list[int]) -> Iterator[int]:
    data.about_to_read(indices[:AHEAD])
    for first in range(0, len(indices), MICRO_BATCH):
        data.about_to_read(indices[first + AHEAD : first + AHEAD + MICRO_BATCH])
        for index in indices[first : first + MICRO_BATCH]:
            sample = data[index]
            yield len(sample["jpg"]) + len(sample["cls"])


def throughput(folder: Path, gigabytes: float, rounds: int) -> dict[str, Any]:
    num = max(WINDOW_SHARDS * 2, round(gigabytes * 1e9 / SHARD_BYTES))
    paths = write_shards(folder / "real", num, SHARD_BYTES // (SAMPLE_BYTES + 2048), SAMPLE_BYTES)
    data = TarShards(folder / "real", index_dir=folder / "real_index")
    size, window = len(data), WINDOW_SHARDS * len(data) // num
    order = Order(size, 0, windows=Windows(window, data.block_starts))
    epochs = iter(range(10**6))

    def shuffled() -> Iterator[int]:
        first = next(epochs) * size  # another epoch each time, which has another order
        return by_index(data, order.indices(np.arange(first, first + size)).tolist())

    readers: dict[str, Callable[[], Iterator[int]]] = {
        "by index": lambda: by_index(data, list(range(size))),
        "shuffled in windows": shuffled,
        "tarfile, streamed": lambda: tarfile_stream(paths),
        "raw blocks": lambda: raw_stream(paths),
    }
    rows: list[dict[str, Any]] = []
    for cache in ("cold", "warm"):
        for number in range(rounds * (1 if cache == "cold" else WARM_ROUNDS) + 1):  # the first round only warms up
            names = list(readers)[:: -1 if number % 2 else 1]
            for name in names:
                if cache == "cold":
                    drop(paths)
                started = time.perf_counter()
                total = sum(readers[name]())
                if number:
                    speed = total / (time.perf_counter() - started) / 1e6
                    rows.append({"cache": cache, "round": number, "reader": name, "mb_per_s": speed})
    return {"bytes": sum(path.stat().st_size for path in paths), "samples": size, "shards": num, "window": window} | {
        "rows": rows,
        "ratios": {cache: ratio(rows, cache, "by index") for cache in ("cold", "warm")},
        "ratios_to_tarfile": {cache: ratio(rows, cache, "tarfile, streamed") for cache in ("cold", "warm")},
    }


def ratio(rows: list[dict[str, Any]], cache: str, than: str) -> dict[str, float]:
    """The speed of shuffled reading relative to another reader in the same round: median and extremes."""
    speeds = {(row["round"], row["reader"]): row["mb_per_s"] for row in rows if row["cache"] == cache}
    numbers = sorted({number for number, _ in speeds})
    ratios = [speeds[number, "shuffled in windows"] / speeds[number, than] for number in numbers]
    return {"median": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}


def as_page(result: dict[str, Any]) -> str:
    index, look, reading = result["index"], result["look_up"], result["throughput"]
    grown = look["after"]["VmRSS"] - look["before"]["VmRSS"]
    lines = [
        "# Datasets at scale",
        "",
        *depends_on(result),
        "",
        "| index | |",
        "|---|---|",
        f"| samples | {index['samples']:,} |",
        f"| bytes per sample | {index['bytes'] / index['samples']:.3f} |",
        f"| joining and storing the rows | {index['join_s']:.1f} s |",
        f"| reading headers of small local samples (two files each) | {result['indexed_per_s']:,.0f} samples/s |",
        f"| opening in a fresh process, with a check of all shards | {look['open_s']:.2f} s |",
        f"| memory of the process: before opening | {look['before']['VmRSS']:.0f} MiB |",
        f"| … opened | {look['opened']['VmRSS']:.0f} MiB |",
        f"| … after looking up {LOOKUPS:,} random samples | {look['after']['VmRSS']:.0f} MiB (+{grown:.0f}) |",
        f"| looking up a sample | {look['lookup_us']:.1f} µs |",
        "",
        f"The {index['shards']:,} shards of this index are sparse files without data, and the benchmark generates "
        "their index rows instead of reading tar headers. Storing, opening and querying the index use the normal code. "
        "All processes share the index's pages in the page cache.",
        "",
        "| reading, MB/s | cold | warm |",
        "|---|---|---|",
    ]
    for reader in dict.fromkeys(row["reader"] for row in reading["rows"]):
        cells = []
        for cache in ("cold", "warm"):
            speeds = [row["mb_per_s"] for row in reading["rows"] if (row["cache"], row["reader"]) == (cache, reader)]
            cells.append(f"{statistics.median(speeds):,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})")
        lines.append(f"| {reader} | {' | '.join(cells)} |")
    lines += [
        "",
        f"{reading['samples']:,} samples of {SAMPLE_BYTES // 1024} KiB in {reading['shards']} shards "
        f"({reading['bytes'] / 1e9:.2f} GB) are read by one process; medians and extremes of {result['rounds']} rounds "
        f"in turns (warm: {result['rounds'] * WARM_ROUNDS}). Windows have {reading['window']:,} samples "
        f"({WINDOW_SHARDS} shards). Cold: before each pass, the shards are removed from the page cache of this "
        "machine, and that is checked; the host of this virtual machine may still cache them. Warm: they are in it.",
        "",
    ]
    for cache in ("cold", "warm"):
        each, other = reading["ratios"][cache], reading["ratios_to_tarfile"][cache]
        verdict = "met" if each["median"] >= TARGET else "missed"
        lines += [
            f"Shuffled relative to by index, {cache} cache: {each['median']:.2f} (rounds {each['lowest']:.2f} to "
            f"{each['highest']:.2f}; target {TARGET}: {verdict}); relative to `tarfile`: {other['median']:.2f}.",
            "",
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=10**8)
    parser.add_argument("--gigabytes", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to put the shards, on the disk to measure")
    parser.add_argument("--output", type=Path, default=HERE / "results")
    parser.add_argument("--look-up", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.look_up is not None:
        print(json.dumps(open_and_look_up(options.look_up)))
        return
    result: dict[str, Any] = {
        "machine": machine(),
        "versions": versions(["numpy", "torch"]),
        "date": time.strftime("%Y-%m-%d"),
        "command": "python benchmarks/datasets_at_scale.py",
        "rounds": options.rounds,
        "target": TARGET,
    }
    with tempfile.TemporaryDirectory(prefix="unisono-", dir=options.folder) as name, contextlib.chdir(name):
        folder = Path(name)
        result["index"] = build_large_index(folder, options.samples)
        result["look_up"] = in_fresh_process(folder)
        result["indexed_per_s"] = index_speed(folder)
        result["throughput"] = throughput(folder, options.gigabytes, options.rounds)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "datasets.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.output / "datasets.md").write_text(as_page(result))
    print(as_page(result))


if __name__ == "__main__":
    main()
