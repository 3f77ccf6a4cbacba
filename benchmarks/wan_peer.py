"""LoRA training of Wan 2.1 on one GPU: unisono next to musubi-tuner.

    python benchmarks/wan_peer.py --musubi FOLDER                  # all variants, the most important first
    python benchmarks/wan_peer.py --musubi FOLDER --budget_s 540   # starts nothing that would end later
    python benchmarks/wan_peer.py --loss                           # the loss on a base in fp8, int8 and nf4
    python benchmarks/wan_peer.py --list                           # the variants, their flags and expected seconds
    python benchmarks/wan_peer.py --musubi FOLDER --tiny --output /tmp/rehearsal    # a rehearsal on any machine

FOLDER is a checkout of https://github.com/kohya-ss/musubi-tuner; the packages it imports must be installed (av and cv2
are replaced if they are not). Both programs read one file of random weights and the same latents and text embeddings,
and run in processes of their own, in turns, with the same hook after each optimizer step.

Finished rows are stored in `wan_peer_so_far.json`, and the same command continues with the others, as long as the code
that the rows depend on is the same. Failed ones run again, unless they ran out of memory.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import wan_peer_loss
from machine import code, machine, versions, without_folders
from wan_peer_runs import Failed, Row, Workplace
from wan_peer_table import ms, page
from wan_peer_variants import MUSUBI, SHAPE, TINY_SHAPE, VARIANTS, Variant

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PACKAGES = ("torch", "triton", "accelerate", "transformers", "diffusers", "peft", "safetensors")
OWN = [HERE / f"wan_peer{part}.py" for part in ("_files", "_process", "_runs", "_variants")]


class SoFar:
    """Rows of this and of earlier calls, in a file; rows of other code or another GPU are dropped."""

    def __init__(self, file: Path, tiny: bool, musubi: str) -> None:
        stored = json.loads(file.read_text()) if file.exists() else {}
        # A call without --musubi keeps the rows of an earlier call with it.
        self.musubi = musubi or stored.get("musubi", {}).get("of", [""])[0]
        facts = [machine()["gpus"], versions(PACKAGES), tiny]
        own = sha256(b"".join(part.read_bytes() for part in OWN)).hexdigest()[:16]
        self._file = file
        self._keys = {
            "musubi": [self.musubi, own, *facts],
            "unisono": [code(*OWN), *facts],
            "loss": [code(*OWN, HERE / "wan_peer_loss.py"), *facts],
        }
        self.parts: dict[str, dict[str, Any]] = {
            part: stored[part]["rows"] if stored.get(part, {}).get("of") == key else {}
            for part, key in self._keys.items()
        }

    def row(self, variant: Variant) -> Row:
        """The rounds of a variant so far."""
        empty: Row = {"failed": "", "rounds": []}
        row: Row = self.parts[variant.program].setdefault(variant.name, empty)
        return row

    def write(self) -> None:
        """Stores all rows."""
        stored = {part: {"of": key, "rows": self.parts[part]} for part, key in self._keys.items()}
        draft = self._file.with_suffix(".new")
        draft.write_text(json.dumps(stored, indent=1) + "\n")
        draft.replace(self._file)


def add_round(row: Row, measured: Row) -> None:
    """Adds a run to the row of its variant; a failure counts only if no run has succeeded."""
    if measured["failed"]:
        if not any("step_ms" in each for each in row["rounds"]):
            row.update(failed=measured["failed"], rounds=[measured])
        return
    row.update(failed="", rounds=[each for each in row["rounds"] if "step_ms" in each] + [measured])


def needs_round(row: Row, number: int) -> bool:
    """Whether a variant must run in this round."""
    if row["failed"]:
        return row["failed"] != "out of memory"
    return len(row["rounds"]) < number


def chosen(options: argparse.Namespace) -> list[Variant]:
    """The variants that the flags select."""
    wanted = [part.strip() for part in options.only.split(";") if part.strip()]
    if options.loss:
        return [variant for variant in VARIANTS if any(part in variant.name for part in wanted)] if wanted else []
    return [variant for variant in VARIANTS if not wanted or any(part in variant.name for part in wanted)]


def commit_of(musubi: Path | None) -> str:
    """Version and commit of musubi-tuner, as far as the folder shows them."""
    if musubi is None:
        return ""
    lines = (musubi / "pyproject.toml").read_text().splitlines()
    number = next((line.split('"')[1] for line in lines if line.startswith("version")), "unknown version")
    words = ["git", "-C", str(musubi), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(words, capture_output=True, text=True) if (musubi / ".git").exists() else None
    return f"{number} ({done.stdout.strip()})" if done and done.returncode == 0 else number


class Bench:
    """Measures what is missing, and writes the result after every run: the machine may be lent for a limited time."""

    def __init__(self, options: argparse.Namespace, so_far: SoFar, result: Row) -> None:
        self._options, self._so_far, self._result = options, so_far, result
        self._has_gpu = bool(result["machine"]["gpus"])
        self._started = time.monotonic()
        self._place = Workplace.at(options.work, options.musubi, options.tiny)

    @property
    def seconds_left(self) -> float:
        return float(self._options.budget_s - (time.monotonic() - self._started))

    def run(self, variants: Sequence[Variant]) -> None:
        """All rounds, and the losses."""
        runnable = [each for each in variants if self._can_run(each)]
        missing = [each for each in runnable if needs_round(self._so_far.row(each), self._options.rounds)]
        models = {each.model for each in missing} | ({wan_peer_loss.MODEL} if self._options.loss else set())
        if models:
            self._place.prepare(sorted(models))
        if self._options.loss:
            self._measure_losses()
        for number in range(1, self._options.rounds + 1):
            for variant in runnable:
                row = self._so_far.row(variant)
                if needs_round(row, number) and self.seconds_left > variant.expected_s:
                    self._measure(variant, row)
        self.write()

    def write(self) -> None:
        """Writes the rows so far and the result."""
        self._so_far.write()
        rows = self._so_far.parts["musubi"] | self._so_far.parts["unisono"]
        rows = {name: row for name, row in rows.items() if row["rounds"]}
        not_run = [each.name for each in chosen(self._options) if each.name not in rows]
        self._result.update(rows=rows, loss=self._so_far.parts["loss"], not_run=not_run)
        name = "wan_peer_rehearsal" if self._options.tiny else "wan_peer"
        (self._options.output / f"{name}.json").write_text(json.dumps(self._result, indent=1) + "\n")
        (self._options.output / f"{name}.md").write_text(page(self._result))

    def _can_run(self, variant: Variant) -> bool:
        has_program = variant.program != MUSUBI or self._options.musubi
        return bool(has_program and (self._has_gpu or not variant.needs_gpu))

    def _measure(self, variant: Variant, row: Row) -> None:
        patience_s = min(2.5 * variant.expected_s + 60, self.seconds_left)
        measured = self._place.measure(variant, patience_s) | {"date": now()}
        add_round(row, measured)
        self.write()
        memory = f"{measured.get('peak_gib') or 0:.1f} GiB, host {measured.get('host_gib') or 0:.1f} GiB"
        outcome = f"FAILED: {measured['failed']}" if measured["failed"] else f"{ms(row):.1f} ms"
        print(
            f"{self.seconds_left:5.0f} s left  {variant.name}: {outcome}, {memory}, {measured['seconds']} s", flush=True
        )

    def _measure_losses(self) -> None:
        if self.seconds_left > wan_peer_loss.EXPECTED_S:
            steps, at_once = self._options.loss_steps, self._options.at_once
            rows = self._so_far.parts["loss"]
            wan_peer_loss.measure(self._place, steps, at_once, rows, self.seconds_left, self.write)


def now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--musubi", type=Path, help="folder with musubi-tuner's source; without it, only unisono runs")
    parser.add_argument("--only", default="", metavar="TEXT;TEXT", help="variants whose names contain one of these")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each variant, interleaved with the others")
    parser.add_argument("--budget_s", type=float, default=math.inf, help="start no run that would end after so long")
    parser.add_argument("--loss", action="store_true", help="compare losses (and run only the variants of --only)")
    parser.add_argument("--loss_steps", type=int, default=200, help="optimizer steps of each run of --loss")
    parser.add_argument("--at_once", type=int, default=3, help="number of runs of --loss to run in parallel")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "unisono-wan-peer",
        help="folder for data, compiled code, logs, and the weights (31 GB) unless /dev/shm has room",
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for wan_peer.json and wan_peer.md")
    parser.add_argument("--so_far", type=Path, help="file of the rows so far (default: in --output)")
    parser.add_argument("--list", action="store_true", help="only print the variants")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal with tiny models, on the CPU without a GPU")
    options = parser.parse_args(words)
    if options.tiny and options.output.resolve() == RESULTS and not options.list:
        parser.error("--tiny needs --output, another folder than benchmarks/results")
    if options.musubi and not (options.musubi / "src" / "musubi_tuner" / "wan_train_network.py").exists():
        parser.error(f"--musubi {options.musubi} has no src/musubi_tuner/wan_train_network.py; give a checkout of it")
    return options


def main() -> int:
    """Runs the variants; 0 if none of the chosen ones failed for another reason than memory."""
    options = _options(sys.argv[1:])
    variants = chosen(options)
    if not variants and not options.loss:
        raise SystemExit(f"no variant is named like --only {options.only}; see --list")
    if options.list:
        for variant in variants:
            cap = f"  (torch: {variant.cap_gib:g} GiB)" if variant.cap_gib else ""
            print(f"{variant.name:50s} ~{variant.expected_s:3.0f} s  {' '.join(variant.flags)}{cap}")
        print(f"about {sum(variant.expected_s for variant in variants):.0f} s per round")
        return 0
    if not options.tiny:
        from unisono.devices import visible_gpus

        if not visible_gpus():
            raise SystemExit("there is no GPU here; --tiny --output FOLDER rehearses on the CPU")
    options.output.mkdir(parents=True, exist_ok=True)
    file = options.so_far or options.output / (
        "wan_peer_rehearsal_so_far.json" if options.tiny else "wan_peer_so_far.json"
    )
    so_far = SoFar(file, options.tiny, commit_of(options.musubi))
    words = without_folders(sys.argv[1:], "--work", "--so_far")
    words = ["FOLDER" if before == "--musubi" else word for before, word in zip(["", *words], words, strict=False)]
    result: Row = {
        "command": shlex.join(["python", "benchmarks/wan_peer.py", *words]),
        "date": now(),
        "machine": machine(),
        "versions": versions(PACKAGES),
        "musubi": so_far.musubi,
        "latent": (TINY_SHAPE if options.tiny else SHAPE).latent,
        "loss_steps": options.loss_steps,
        "tiny": options.tiny,
    }
    bench = Bench(options, so_far, result)
    try:
        bench.run(variants)
    except Failed as error:
        raise SystemExit(str(error)) from None
    print("\n" + page(result))
    failures = [row["failed"] for row in [*result["rows"].values(), *result["loss"].values()]]
    return int(any(failed not in ("", "out of memory") for failed in failures))


if __name__ == "__main__":
    sys.exit(main())
