"""Checks that ranks that share one GPU over NCCL give the same results as one rank.

    python benchmarks/nccl.py --seconds 580 --at_once 4          # a GPU; run it again to continue with the other rows
    python benchmarks/nccl.py --backend gloo --ranks 2 --output /tmp/rehearsal    # a rehearsal on the CPU, without NCCL
    python benchmarks/nccl.py --only kill,verify-float64 --ranks 2                # rows with one of these in the name

`--backend nccl` gives every rank its own NCCL_HOSTID, so that NCCL connects ranks on one GPU by sockets. This is slow
and useless for timing, but it uses the real library with real streams. Each row trains a small run in float64 on
several ranks and disturbs it. It then compares the losses and metrics of every step, the weights and the optimizer's
state with an undisturbed run of one rank. NCCL's own log must show a communicator on each rank.

Rows that passed are kept in `nccl_so_far.json` and not run again, as long as the code is the same; when all rows have
run, that file is deleted. Rows that did not run are listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from machine import code, depends_on, machine, versions, without_folders
from nccl_cases import Case, all_cases, missing
from nccl_runs import Failed, OutOfTime, Runs

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PACKAGES = ("torch", "numpy", "safetensors")
NO_TIME = "no time left"
Row = dict[str, Any]


def carry_out(case: Case, runs: Runs) -> Row:
    """Runs one row; a row that fails does not stop the others."""
    row = _description(case)
    if reason := missing(case, runs.backend):
        return row | {"not_run": reason}
    if runs.seconds_left < case.expected_s:
        return row | {"not_run": NO_TIME}
    started = time.monotonic()
    try:
        row |= judged(case.work(runs), case.tolerance)
    except OutOfTime:
        row |= {"not_run": NO_TIME}
    except (Failed, OSError, ValueError, KeyError, IndexError) as error:
        row |= {"ok": False, "error": f"{type(error).__name__}: {error}"}
    return row | {"seconds": round(time.monotonic() - started, 1)}


def judged(difference: float, tolerance: float) -> Row:
    """Whether a difference is small enough; infinity becomes text, because JSON has no such number."""
    shown = difference if math.isfinite(difference) else str(difference)
    return {"ok": difference <= tolerance, "difference": shown}


def state_of(row: Row) -> str:
    """The state of a row in one word, or the reason why the row did not run."""
    if "not_run" in row:
        return f"not run: {row['not_run']}"
    return "passed" if row["ok"] else "FAILED"


def seen_in(row: Row) -> str:
    """The largest difference that a row measured, or its error message."""
    if "error" in row:
        return str(row["error"]).replace("|", "¦").replace("\n", " ")
    difference = row.get("difference", "")
    return f"{difference:.1e}" if isinstance(difference, float) and difference else str(difference)


def table(result: Row) -> str:
    """The result as Markdown."""
    rows = result["rows"]
    passed, failed, skipped = (
        sum(state_of(row).startswith(word) for row in rows) for word in ("passed", "FAILED", "not run")
    )
    over = "NCCL, ranks that share one GPU" if result["backend"] == "nccl" else "a rehearsal over gloo on the CPU"
    lines = [f"# {over[0].upper()}{over[1:]}", "", *depends_on(result), ""]
    if result["backend"] != "nccl":
        lines += ["**No NCCL was used**: this only shows that the benchmark itself works.", ""]
    lines += [f"**{passed} rows passed, {failed} failed, {skipped} did not run.** {result['seconds']:.0f} s."]
    lines += ["", "| row | | largest difference from one rank | tolerance | seconds | |", "|---|---|---|---|---|---|"]
    for row in rows:
        cells = (row["name"], row["text"], seen_in(row), f"{row['tolerance']:.0e}", row.get("seconds", ""))
        lines.append(f"| {' | '.join(map(str, cells))} | {state_of(row)} |")
    return "\n".join([*lines, ""])


class SoFar:
    """Rows that passed in this and in earlier calls with the same code, in a file."""

    def __init__(self, file: Path, backend: str) -> None:
        own = [HERE / f"{name}.py" for name in ("nccl", "nccl_cases", "nccl_runs", "nccl_recipe", "cuda_recipe")]
        self._file, self._key = file, [code(*own), backend, versions(PACKAGES)]
        self._writing = threading.Lock()
        stored = json.loads(file.read_text()) if file.exists() else {}
        self.rows: dict[str, Row] = stored["rows"] if stored.get("of") == self._key else {}

    def add(self, row: Row) -> None:
        with self._writing:
            if row.get("ok"):
                self.rows[row["name"]] = row
                self._file.write_text(json.dumps({"of": self._key, "rows": self.rows}, indent=1) + "\n")

    def forget(self) -> None:
        self._file.unlink(missing_ok=True)


def chosen(options: argparse.Namespace) -> list[Case]:
    """The rows that the flags select."""
    cases = all_cases(options.ranks)
    parts = [part for part in options.only.split(",") if part]
    if parts:
        return [case for case in cases if any(part in case.name for part in parts)]
    return [case for case in cases if case.quick] if options.quick else cases


def measure(options: argparse.Namespace, so_far: SoFar, write: Callable[[Sequence[Row]], None]) -> list[Row]:
    """Runs the chosen rows, several at once; prints each when it is done, and writes all."""
    cases = chosen(options)
    rows = {case.name: _description(case) | {"not_run": NO_TIME} for case in cases}
    with tempfile.TemporaryDirectory(prefix="unisono-nccl-") as temporary:
        runs = Runs(options.keep or Path(temporary), options.backend, options.seconds)

        def one(case: Case) -> Row:
            if (row := so_far.rows.get(case.name)) is None:
                row = carry_out(case, runs)
                so_far.add(row)
            print(f"{state_of(row):24s} {row.get('seconds', 0):6.1f} s  {row['name']}  {seen_in(row)}", flush=True)
            return row

        with ThreadPoolExecutor(options.at_once) as pool:
            for done in as_completed([pool.submit(one, case) for case in cases]):
                rows[done.result()["name"]] = done.result()
                write(list(rows.values()))
    return list(rows.values())


def _description(case: Case) -> Row:
    return {"name": case.name, "text": case.text, "tolerance": case.tolerance, "date": _now()}


def _ranks(text: str) -> list[int]:
    numbers = sorted({int(part) for part in text.split(",")})
    if not numbers or numbers[0] < 2 or len(numbers) > 3:
        raise argparse.ArgumentTypeError("expected up to three numbers from 2 on, for instance 2,4,8")
    return numbers


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl", help="gloo: CPU ranks, as a rehearsal")
    parser.add_argument("--ranks", type=_ranks, default=[2, 4, 8], metavar="2,4,8", help="numbers of ranks")
    parser.add_argument("--only", default="", metavar="NAME,NAME", help="only rows whose names contain one of these")
    parser.add_argument("--quick", action="store_true", help="a few rows; cannot write to results/")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after this many seconds")
    parser.add_argument("--at_once", type=int, default=1, help="number of rows to run in parallel")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--so_far", type=Path, help="file of the rows that passed (default: in --output)")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    parser.add_argument("--list", action="store_true", help="only print the names of the rows")
    options = parser.parse_args(words)
    if options.output.resolve() == RESULTS and (options.quick or options.backend != "nccl") and not options.list:
        parser.error("--quick and --backend gloo need --output, another folder than benchmarks/results")
    return options


def main() -> int:
    """Runs the rows; 0 if all that ran passed and some ran, 1 otherwise."""
    options = _options(sys.argv[1:])
    if options.list:
        print("\n".join(f"{case.name:28s} {case.text}" for case in chosen(options)))
        return 0
    if not chosen(options):
        raise SystemExit(f"no row is named like --only {options.only}; see --list")
    if options.backend == "nccl":
        from unisono.devices import visible_gpus

        if not visible_gpus():
            raise SystemExit("there is no GPU here; --backend gloo --output FOLDER rehearses with CPU ranks")
    started = time.monotonic()
    result: Row = {
        "backend": options.backend,
        "command": shlex.join(["python", "benchmarks/nccl.py", *without_folders(sys.argv[1:], "--keep", "--so_far")]),
        "date": _now(),
        "machine": machine(),
        "versions": versions(PACKAGES),
    }
    options.output.mkdir(parents=True, exist_ok=True)
    so_far = SoFar(options.so_far or options.output / "nccl_so_far.json", options.backend)

    def write(rows: Sequence[Row]) -> None:  # called after every row, because machine time may be limited
        result.update(rows=rows, seconds=round(time.monotonic() - started, 1))
        name = "nccl" if options.backend == "nccl" else "nccl_rehearsal"
        (options.output / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        (options.output / f"{name}.md").write_text(table(result))

    rows = measure(options, so_far, write)
    print("\n" + table(result))
    waiting = [row["name"] for row in rows if row.get("not_run") == NO_TIME]
    if waiting:
        print(f"Not run, because the time was over: {', '.join(waiting)}. Run the same command again to continue.")
    elif all(row.get("ok", True) for row in rows):
        so_far.forget()
    print(f"{result['seconds']:.0f} s in total.")
    return int(any(not row.get("ok", True) for row in rows) or not any(row.get("ok") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
