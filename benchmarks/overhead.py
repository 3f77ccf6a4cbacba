"""Measures the overhead of unisono, Accelerate and Lightning Fabric over a hand-written loop.

    python benchmarks/overhead.py [--device cuda] [--size gpt2] [--ranks 1,2] [--quick]
    python benchmarks/overhead.py --guard          # guarded steps (out-of-memory) on 2 ranks, next to plain DDP

Every variant has one process per rank; all are started together. They take turns in rotating order, one round of steps
each, while the others are idle. So all run under the same conditions, and a ratio compares rounds that ran next to each
other. "hand" runs twice: the second ratio's distance from 1 shows the noise.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from gate import Rounds
from machine import depends_on, machine, versions, without_folders

HERE = Path(__file__).resolve().parent
NEEDS = {"accelerate": ["accelerate"], "fabric": ["lightning", "lightning_fabric"]}
VARIANTS = ["hand", "unisono", "accelerate", "fabric", "hand again"]
# unisono guards the first steps against out-of-memory (--guard_steps 3). The variants here guard no step, or all steps.
GUARD = ["hand", "unisono", "never guarded", "always guarded", "hand again"]
LAUNCHER_PREFIXES = ("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "ACCELERATE_")
LAUNCHER_VARIABLES = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "UNISONO_JOB"}
PATIENCE_S = 600.0


@dataclass(frozen=True)
class Case:
    """Number of ranks, and whether they use DDP."""

    ranks: int
    ddp: bool

    @classmethod
    def parse(cls, words: str) -> Case:
        """Parses a case: `1` is one process without DDP, `1ddp` one process in DDP, `2` and more processes in DDP."""
        ranks = int(words.removesuffix("ddp"))
        return cls(ranks, ddp=ranks > 1 or words.endswith("ddp"))

    def __str__(self) -> str:
        return f"{self.ranks} rank{'s' if self.ranks > 1 else ''}{', ddp' if self.ddp else ''}"


@dataclass
class Variant:
    """The processes of one variant and their reports."""

    name: str
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)
    store: Any = None  # the store runs in this process, as in torchrun's agent, to avoid guessing a port
    rounds_ms: list[float] = field(default_factory=list)
    rounds_busy_ms: list[float] = field(default_factory=list)
    peak_mib: float = 0.0

    def start(self, case: Case, job: dict[str, Any]) -> None:
        self.folder.mkdir()
        if case.ddp:
            from torch.distributed import TCPStore

            self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        job = {**job, "ddp": case.ddp, "folder": str(self.folder)}
        for rank in range(case.ranks):
            ours, theirs = Pipe()
            command = [sys.executable, str(HERE / "loops.py"), self.name, str(theirs.fileno()), json.dumps(job)]
            with (self.folder / f"{rank}.log").open("wb") as log:
                self.processes.append(
                    subprocess.Popen(
                        command,
                        env=self._environment(case, rank, job["threads"]),
                        pass_fds=[theirs.fileno()],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
            theirs.close()
            self.pipes.append(ours)

    def _environment(self, case: Case, rank: int, threads: int) -> dict[str, str]:
        environment = {
            name: text
            for name, text in os.environ.items()
            if name not in LAUNCHER_VARIABLES and not name.startswith(LAUNCHER_PREFIXES)
        }
        environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        if not case.ddp:
            return environment
        number, ranks = str(rank), str(case.ranks)
        return environment | {
            "RANK": number,
            "LOCAL_RANK": number,
            "ROLE_RANK": number,
            "GROUP_RANK": "0",
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
            "ROLE_WORLD_SIZE": ranks,
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_RUN_ID": "overhead",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def report(self, *, note: bool) -> None:
        """Waits until every rank has finished a round, and records the slowest rank's milliseconds per step."""
        left, reports = list(self.pipes), []
        while left:
            ready = wait(left, PATIENCE_S)
            if not ready:
                self._fail(f"no answer in {PATIENCE_S:.0f} s")
            for pipe in ready:
                try:
                    reports.append(json.loads(pipe.recv_bytes()))  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    self._fail("a process ended")
                left.remove(pipe)  # type: ignore[arg-type]
        self.peak_mib = max(report["peak_mib"] for report in reports)
        if note:
            self.rounds_ms.append(max(report["step_ms"] for report in reports))
            self.rounds_busy_ms.append(max(report["busy_ms"] for report in reports))

    def go(self) -> None:
        """Lets the variant run to its next gate."""
        for pipe in self.pipes:
            pipe.send_bytes(b"go")

    def finish(self) -> None:
        """Lets the last step run and waits until the weights are written."""
        self.go()
        for process in self.processes:
            if process.wait(PATIENCE_S) != 0:
                self._fail(f"exit status {process.returncode}")

    def _fail(self, why: str) -> None:
        time.sleep(1)  # waits for the last lines of the output
        logs = [f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}" for log in self.folder.glob("*.log")]
        raise SystemExit("\n".join([f"{self.name}: {why}", *logs]))

    def end(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def run_case(case: Case, names: Sequence[str], job: dict[str, Any], rounds: Rounds) -> dict[str, Any]:
    """Interleaves all variants of a case; returns the results of each."""
    print(f"{case}: {', '.join(names)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="overhead-") as scratch:
        variants = [Variant(name, Path(scratch) / name.replace(" ", "-")) for name in names]
        try:
            for variant in variants:
                variant.start(case, job)
            for variant in variants:
                variant.report(note=False)  # the variant is built and waits at its first step
            for number in range(1 + rounds.rounds):
                turn = number % len(variants)
                for variant in variants[turn:] + variants[:turn]:
                    variant.go()
                    variant.report(note=number > 0)
                if number > 0:
                    times = "  ".join(f"{variant.name} {variant.rounds_ms[-1]:.2f}" for variant in variants)
                    print(f"  round {number}/{rounds.rounds}, ms per step:  {times}", flush=True)
            for variant in variants:
                variant.finish()
            return {variant.name: numbers_of(variant, variants[0]) for variant in variants}
        finally:
            for variant in variants:
                variant.end()


def numbers_of(variant: Variant, hand: Variant) -> dict[str, Any]:
    """Compares a variant with the hand-written loop, round by round, so that both run under the same conditions."""
    ratios = _ratios(variant.rounds_ms, hand.rounds_ms)
    quarters = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return {
        "step_ms": statistics.median(variant.rounds_ms),
        "fastest_ms": min(variant.rounds_ms),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [quarters[0], quarters[2]],
        "busy_ms": statistics.median(variant.rounds_busy_ms),
        "busy_ratio": statistics.median(_ratios(variant.rounds_busy_ms, hand.rounds_busy_ms)),
        "peak_mib": variant.peak_mib,
        "weights_max_difference": difference(variant.folder, hand.folder),
        "rounds_ms": variant.rounds_ms,
        "rounds_busy_ms": variant.rounds_busy_ms,
    }


def _ratios(mine: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(mine, theirs, strict=True)]


def difference(folder: Path, other: Path) -> float:
    """The largest difference between the weights that two variants ended with."""
    from safetensors.torch import load_file

    mine, theirs = load_file(folder / "weights.safetensors"), load_file(other / "weights.safetensors")
    if mine.keys() != theirs.keys():
        raise SystemExit(f"{folder.name} and {other.name} trained different models")
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine)


def missing(names: Sequence[str]) -> dict[str, str]:
    """The variants that cannot run here, with the reason."""
    return {
        name: f"{packages[0]} is not installed"
        for name, packages in NEEDS.items()
        if name in names and not any(find_spec(package) for package in packages)
    }


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    settings = result["settings"]
    memory = "peak CUDA memory" if settings["device"] == "cuda" else "peak memory (RSS) above the start"
    lines = [
        f"# {'Guarded steps' if 'never guarded' in settings['variants'] else 'Overhead'} on {settings['device']}",
        "",
        *depends_on(result),
        f"- Model: GPT `{settings['size']}` ({settings['shape']}), {settings['precision']}, "
        f"{settings['workers']} loader workers, {settings['threads']} thread(s) per rank, "
        f"TensorBoard {'on' if settings['tensorboard'] else 'off'} in unisono",
        f"- Measured: {settings['rounds']} rounds of {settings['steps']} steps per variant, interleaved; the first "
        f"{settings['dropped']} steps of each round are not timed. Ratios are medians over the rounds, with quartiles; "
        "*hand again* is the same program a second time and shows the noise. The fastest round of each variant is the "
        "one that other programs on the machine disturbed least.",
        "",
    ]
    for case in result["cases"]:
        lines += [f"## {case['case']}", ""]
        if "skipped" in case:
            lines += [f"Not measured: {case['skipped']}.", ""]
            continue
        lines += [
            "| variant | ms per step | ratio to hand | quartiles | fastest round | its ratio "
            f"| {memory} | weights differ by |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for name, row in case["variants"].items():
            if "missing" in row:
                lines.append(f"| {name} | {row['missing']} | | | | | | |")
                continue
            low, high = row["ratio_quartiles"]
            lines.append(
                f"| {name} | {row['step_ms']:.2f} | {row['ratio']:.4f} | {low:.4f} – {high:.4f} "
                f"| {row['fastest_ms']:.2f} | {row['fastest_ms'] / case['variants']['hand']['fastest_ms']:.4f} "
                f"| {row['peak_mib']:.0f} MiB | {row['weights_max_difference']:.1e} |"
            )
        lines.append("")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, help="timed rounds per variant (default 40)")
    parser.add_argument("--steps", type=int, help="steps per round (default 12)")
    parser.add_argument("--drop", type=int, default=2, help="steps at the start of a round that are not timed")
    parser.add_argument("--ranks", help="cases: 1, 1ddp, 2, ... (default 1,2 on the CPU; 1,1ddp,2 on CUDA)")
    parser.add_argument("--size", help="tiny, small (default on the CPU), gpt2 (default on CUDA), gpt2-medium")
    parser.add_argument("--variants", help="separated by commas; hand must be the first")
    parser.add_argument("--guard", action="store_true", help="compare guarded with unguarded steps on 2 ranks")
    parser.add_argument("--workers", type=int, default=2, help="loader workers per rank (default 2, as in unisono)")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads per rank")
    parser.add_argument(
        "--no-tensorboard", action="store_true", help="unisono without TensorBoard (it is on by default)"
    )
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder for the JSON and the table")
    parser.add_argument("--quick", action="store_true", help="smoke test, at most a minute; the numbers mean little")
    options = parser.parse_args()
    quick, cuda = options.quick, options.device == "cuda"
    options.rounds = options.rounds or (2 if quick else 40)
    options.steps = options.steps or 12
    options.ranks = options.ranks or (("1ddp,2" if cuda else "2") if options.guard else "1,1ddp,2" if cuda else "1,2")
    options.size = options.size or ("tiny" if quick else "gpt2" if cuda else "small")
    variants = GUARD if options.guard else VARIANTS
    options.variants = (options.variants or ",".join(variants[:-1] if quick else variants)).split(",")
    if options.variants[0] != "hand" or not set(options.variants) <= set(variants):
        parser.error(f"--variants: hand first, then any of {', '.join(variants[1:])}")
    if not 0 <= options.drop < options.steps:
        parser.error("--drop must be smaller than --steps")
    return options


def main() -> None:
    options = arguments()
    import torch
    from gpt import GPT, SIZES

    if options.size not in SIZES:
        raise SystemExit(f"--size {options.size}: expected one of {', '.join(SIZES)}")
    devices = torch.cuda.device_count() if options.device == "cuda" else None
    if devices == 0:
        raise SystemExit("--device cuda: torch finds no GPU")
    rounds = Rounds(options.rounds, options.steps, options.drop)
    absent = missing(options.variants)
    job = {
        "size": options.size,
        "device": options.device,
        "workers": options.workers,
        "threads": options.threads,
        "tensorboard": not options.no_tensorboard,
        "rounds": asdict(rounds),
    }
    size = SIZES[options.size]
    with torch.device("meta"):
        weights = sum(parameter.numel() for parameter in GPT(size).parameters())
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "command": shlex.join(["python", "benchmarks/overhead.py", *without_folders(sys.argv[1:])]),
        "machine": machine(),
        "versions": versions(["unisono", "torch", "accelerate", "lightning"]),
        "settings": {
            **{name: value for name, value in job.items() if name != "rounds"},
            **asdict(rounds),
            "variants": options.variants,
            "precision": "bf16 autocast" if options.device == "cuda" else "fp32",
            "shape": f"{weights / 1e6:.1f} M weights, sequence {size.sequence}, batch {size.batch} per rank",
        },
        "cases": [],
    }
    for case in [Case.parse(words) for words in options.ranks.split(",")]:
        if devices is not None and case.ranks > devices:
            result["cases"].append({"case": str(case), "skipped": f"needs {case.ranks} GPUs, results {devices}"})
            continue
        left_out = dict(absent)
        if case.ddp and case.ranks == 1:
            left_out["accelerate"] = "does not use DDP in one process"
        results = run_case(case, [name for name in options.variants if name not in left_out], job, rounds)
        rows = {name: results.get(name, {"missing": left_out.get(name)}) for name in options.variants}
        result["cases"].append({"case": str(case), "ranks": case.ranks, "ddp": case.ddp, "variants": rows})
    options.output.mkdir(parents=True, exist_ok=True)
    file = options.output / f"{'guard' if options.guard else 'overhead'}_{options.device}"
    file.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
    file.with_suffix(".md").write_text(table(result))
    print(table(result))
    print(f"wrote {file}.json, {file}.md")


if __name__ == "__main__":
    main()
