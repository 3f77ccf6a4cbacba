"""Shared code of benchmarks with several parts: each part runs on its own and rewrites its table after every row."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from machine import machine, versions, without_folders

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]


class Parts:
    """A program `python benchmarks/NAME.py PART`, which writes results/NAME_PART.json and .md."""

    def __init__(self, name: str, packages: Sequence[str]) -> None:
        """`packages`: packages whose versions are recorded with the results."""
        self._name, self._packages = name, packages
        self._tables: Mapping[str, Callable[[Row], list[str]]] = {}

    def begin(self, part: str, options: argparse.Namespace, suffix: str = "") -> Row:
        """A result without rows; `suffix` is appended to the names of its files."""
        return {
            "part": part,
            "file": f"{self._name}_{part}{suffix}",
            "command": shlex.join(["python", f"benchmarks/{self._name}.py", *without_folders(sys.argv[1:])]),
            "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            "machine": machine(),
            "versions": versions(self._packages),
            "quick": options.quick,
            "rows": {},
        }

    def write(self, result: Row, options: argparse.Namespace) -> None:
        """Writes the rows measured so far."""
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / f"{result['file']}.json").write_text(json.dumps(result, indent=1) + "\n")
        (options.output / f"{result['file']}.md").write_text("\n".join(self._tables[result["part"]](result)) + "\n")

    def main(
        self,
        parser: argparse.ArgumentParser,
        parts: Mapping[str, tuple[Callable[[argparse.Namespace, Path], Row], Callable[[Row], list[str]]]],
    ) -> int:
        """Measures one part, named on the command line; returns 1 if one of its rows failed."""
        self._tables = {name: table for name, (_, table) in parts.items()}
        parser.add_argument("part", choices=list(parts))
        parser.add_argument("--output", type=Path, default=RESULTS)
        parser.add_argument("--quick", action="store_true", help="smoke test with few steps; cannot write to results/")
        options = parser.parse_args()
        if options.quick and options.output.resolve() == RESULTS:
            parser.error("--quick needs --output, another folder than benchmarks/results")
        measure, table = parts[options.part]
        with tempfile.TemporaryDirectory() as place:
            result = measure(options, Path(place))
            self.write(result, options)
        print("\n".join(table(result)))
        return int(any(row.get("failed") for row in result["rows"].values()))


def unisono(words: Sequence[str], patience_s: float) -> str:
    """Runs a unisono command as a user does; returns the error message, or an empty string."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    try:
        command = [sys.executable, "-m", "unisono", *words]
        ended = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=patience_s)
    except subprocess.TimeoutExpired:
        return f"took more than {patience_s:.0f} s"
    return (ended.stderr.strip().splitlines() or ["no error message"])[-1][:300] if ended.returncode else ""


def verdict(met: bool) -> str:
    """The word with which a table reports whether a target was met."""
    return "met" if met else "**missed**"
