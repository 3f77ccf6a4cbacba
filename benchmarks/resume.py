"""Measures how long ranks take to resume from a checkpoint, and how many files each of them opens.

    PYTHONPATH=src python benchmarks/resume.py [--megabytes 600] [--ranks 1,8,64] [--real 8 --before OTHER_CHECKOUT/src]

Writes a checkpoint of a sharded model with as many shards as ranks. Then each rank hashes its share of the files, reads
their headers, plans what it loads and loads it. The ranks do this one after another in this process, without a network,
so 64 ranks do not need 64 cores; a run with one core per rank would take as long as the slowest of them. `--real` also
starts that many real ranks of `unisono train`, of this version and of an older one, and measures how they resume.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import depends_on, machine, versions
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from unisono.checkpoint.commit import begin, check_shard, commit
from unisono.checkpoint.examination import Examination, share_of_files
from unisono.checkpoint.find import hash_all
from unisono.checkpoint.load import load
from unisono.checkpoint.manifest import read_manifest
from unisono.checkpoint.shards import SHARDING_INFO, shard_name

HERE = Path(__file__).resolve().parent
LAYERS, SLOTS = 48, ("model.{}", "optimizer.{}.exp_avg", "optimizer.{}.exp_avg_sq")
NAMES = [slot.format(f"blocks.{layer}.weight") for layer in range(LAYERS) for slot in SLOTS]
STEPS = [f"optimizer.blocks.{layer}.weight.step" for layer in range(LAYERS)]  # not sharded: stored by rank 0

opens: Counter[str] = Counter()


def count_opens(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str | os.PathLike) and "/step_" in str(arguments[0]):
        opens[Path(arguments[0]).name] += 1


def rows_of(rank: int, world: int, rows: int) -> range:
    each = -(-rows // world)
    return range(min(rank * each, rows), min((rank + 1) * each, rows))


def write_checkpoint(folder: Path, world: int, width: int) -> Path:
    """Writes a checkpoint like `world` ranks with sharded weights."""
    staging, shards = begin(folder, world), {}
    for rank in range(world):
        rows = rows_of(rank, world, width)
        tensors = {name: torch.randn(len(rows), width) for name in NAMES}
        offsets = {name: {"saved_offsets": [rows.start, 0]} for name in NAMES}
        if rank == 0:
            tensors |= {name: torch.ones(()) for name in STEPS}
            offsets |= {name: {"saved_offsets": []} for name in STEPS}
        file = staging / shard_name(rank, world)
        save_file(tensors, file, metadata={SHARDING_INFO: json.dumps(offsets), "format": "pt"})
        shards |= check_shard(file)
    return commit(staging, step=world, world=world, identity={"recipe": "resume"}, extra="{}", shards=shards)


def targets(rank: int, world: int, width: int, mesh: DeviceMesh | None) -> dict[str, torch.Tensor]:
    """The tensors that a rank loads."""
    local = torch.zeros(len(rows_of(rank, world, width)), width)
    tensors: dict[str, torch.Tensor] = {name: torch.zeros(()) for name in STEPS}
    for name in NAMES:
        part = torch.zeros_like(local)
        tensors[name] = part
        if mesh is not None:
            tensors[name] = DTensor.from_local(
                part, mesh, [Shard(0)], run_check=False, shape=torch.Size((width, width)), stride=(width, 1)
            )
    return tensors


def measure(folder: Path, world: int, width: int) -> dict[str, Any]:
    """Resumes on each rank in turn; returns the seconds of the slowest rank, and the number of files opened."""
    path = write_checkpoint(folder, world, width)
    files = read_manifest(path).files
    start = time.perf_counter()
    assert hash_all(path, files) is None
    alone_s = time.perf_counter() - start
    ranks: list[dict[str, float]] = [{} for _ in range(world)]
    shares: list[dict[str, Any]] = []
    for rank in range(world):  # first pass: computes the data that each rank sends to the others
        opens.clear()
        start = time.perf_counter()
        Examination(rank, world, lambda mine: shares.append(mine) or [_nothing(files), mine]).damage(path, files)
        ranks[rank] |= {"examine_s": time.perf_counter() - start, "examined": sum(opens.values())}
    for rank in range(world):  # second pass: each rank processes the data that it has received
        examination = Examination(rank, world, lambda mine: shares)
        examination._findings[path] = {name: finding for share in shares for name, finding in share.items()}
        mesh = None
        if world > 1:
            dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
            mesh = init_device_mesh("cpu", (world,))
        tensors = targets(rank, world, width, mesh)
        opens.clear()
        start = time.perf_counter()
        contents = examination.contents(path)
        planned = time.perf_counter()
        load(path, tensors, group=None, world=1, contents=contents)
        ranks[rank] |= {"plan_s": planned - start, "load_s": time.perf_counter() - planned}
        ranks[rank] |= {"loaded_from": len(opens), "loads": sum(opens.values())}
        del tensors
        if world > 1:
            dist.destroy_process_group()
        gc.collect()
    shutil.rmtree(path)
    slowest = {key: max(each[key] for each in ranks) for key in ranks[0]}
    return {
        "ranks": world,
        "bytes": sum(entry.bytes for entry in files.values()),
        "largest_share_bytes": max(
            sum(files[name].bytes for name in share_of_files(files, rank, world)) for rank in range(world)
        ),
        "alone_s": alone_s,
        **slowest,
        "opens_per_rank": max(each["examined"] + each["loads"] for each in ranks),
        "opens": sum(each["examined"] + each["loads"] for each in ranks),
    }


def _nothing(files: Any) -> dict[str, Any]:
    """The results of ranks that have not been simulated: they found no damage."""
    from unisono.checkpoint.examination import _Finding

    return dict.fromkeys(files, _Finding())


def watch_real_ranks(source: Path, world: int, width: int, folder: Path) -> dict[str, Any]:
    """Trains one step on `world` real ranks and resumes; returns the number of files opened, and the time it took."""
    records = folder / "records"
    words = [sys.executable, "-m", "unisono", "train", f"{HERE / 'resume_recipe.py'}:Wide", "--nproc", str(world)]
    words += ["--strategy", "fsdp", "--output_dir", str(folder / "run"), "--width", str(width), "--gpus", "0"]
    environ = {**os.environ, "PYTHONPATH": str(source), "RESUME_RECORDS": str(records), "OMP_NUM_THREADS": "1"}
    for steps in (1, 2):
        shutil.rmtree(records, ignore_errors=True)
        records.mkdir(parents=True)
        done = subprocess.run([*words, "--max_steps", str(steps)], env=environ, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"a run of {source} failed:\n{done.stderr}")
    ranks = [json.loads(file.read_text()) for file in sorted(records.iterdir())]
    assert len(ranks) == world, f"{len(ranks)} of {world} ranks left a record"
    return {
        "ranks": world,
        "shard_opens_per_rank": max(rank["shards"] for rank in ranks),
        "shard_opens": sum(rank["shards"] for rank in ranks),
        "find_s": max(rank["find_s"] for rank in ranks),
        "restore_s": max(rank["restore_s"] for rank in ranks),
    }


def page(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    rows = [
        f"| {row['ranks']} | {row['bytes'] / 1e6:,.0f} MB | {row['largest_share_bytes'] / 1e6:,.1f} MB | "
        f"{row['alone_s']:.2f} s | {row['examine_s']:.3f} s | {row['plan_s']:.3f} s | {row['load_s']:.3f} s | "
        f"{row['opens_per_rank']:.0f} | {row['opens']:.0f} |"
        for row in result["rows"]
    ]
    lines = [
        "# Resuming",
        "",
        *depends_on(result),
        f"- Checkpoints of {len(NAMES)} sharded tensors with as many shards as ranks, in the page cache. The ranks run "
        "one after another in one process without a network; times are those of the slowest rank.",
        "- *Hashed by one*: one rank hashes all files, which all ranks waited for in earlier versions. *Hash and "
        "headers*: a rank's share of the files. *Plan*: finding the tensors in the headers of all shards. *Load*: "
        "reading its rows. *Opens*: how often a rank (at most) and all ranks together open a file of the checkpoint.",
        "",
        "| ranks | checkpoint | largest share | hashed by one | hash, headers | plan | load | opens per rank | all |",
        "|---|---|---|---|---|---|---|---|---|",
        *rows,
        "",
    ]
    if result["real"]:
        lines += [
            "Real ranks of `unisono train` with fsdp, one step, saved and resumed; all ranks share the cores "
            "(so that hashing cannot be faster than on as many ranks as cores). *Find*: "
            "until a checkpoint is chosen. *Restore*: until its tensors are loaded.",
            "",
            "| version | ranks | find | restore | shard opens per rank | shard opens |",
            "|---|---|---|---|---|---|",
            *(
                f"| {name} | {row['ranks']} | {row['find_s']:.2f} s | {row['restore_s']:.2f} s | "
                f"{row['shard_opens_per_rank']} | {row['shard_opens']} |"
                for name, row in result["real"].items()
            ),
            "",
        ]
    return "\n".join(lines)


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=600, help="size of a checkpoint")
    parser.add_argument("--ranks", default="1,8,64", help="numbers of simulated ranks")
    parser.add_argument("--real", type=int, default=0, help="number of real ranks; 0: none")
    parser.add_argument("--before", type=Path, help="folder src of another version, for the real ranks")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder for resume.json and resume.md")
    options = parser.parse_args()
    sys.addaudithook(count_opens)
    width = 64 * max(1, round((options.megabytes * 1e6 / 4 / len(NAMES)) ** 0.5 / 64))  # even shards on 64 ranks
    result: dict[str, Any] = {
        "machine": machine(),
        "versions": versions(["torch", "safetensors"]),
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "command": " ".join(
            ["python benchmarks/resume.py", f"--megabytes {options.megabytes:g} --ranks {options.ranks}"]
            + ([f"--real {options.real}"] if options.real else [])
            + (["--before OTHER_CHECKOUT/src"] if options.before else [])
        ),
        "rows": [],
        "real": {},
    }
    with tempfile.TemporaryDirectory() as name:
        for world in map(int, options.ranks.split(",")):
            result["rows"].append(measure(Path(name), world, width))
            print(result["rows"][-1], flush=True)
        sources = {"this version": HERE.parent / "src"} | ({"before": options.before} if options.before else {})
        for number, (label, source) in enumerate(sources.items() if options.real else ()):
            result["real"][label] = watch_real_ranks(source, options.real, width, Path(name, f"real{number}"))
            print(label, result["real"][label], flush=True)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "resume.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.output / "resume.md").write_text(page(result))


if __name__ == "__main__":
    main()
