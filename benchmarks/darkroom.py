"""Measures whether `unisono train darkroom` learns, and how fast.

    python benchmarks/darkroom.py learning               # a GPU: seeds of the full configuration, then other choices
    python benchmarks/darkroom.py speed                  # a GPU: ms per step of unisono and of hand-written loops
    python benchmarks/darkroom.py speed --end_to_end     # a GPU: 50,000 steps, including everything else
    python benchmarks/darkroom.py demo                   # the CPU: what `make demo` trains, on two ranks, five seeds
    python benchmarks/darkroom.py choices                # the CPU: the demo with one setting changed, one seed
    python benchmarks/darkroom.py figure                 # redraws the figure of `learning`
    python benchmarks/darkroom.py learning --quick       # smoke test on any machine; the numbers mean nothing

Every run is a separate process, started as a user does; all numbers come from its metrics.jsonl. The model of a run is
always the one selected on the validation tasks. Flags after `--` go to all runs. Files are rewritten after each run;
failed runs and runs that have not started have a row that says so. With `--keep` only such rows run again.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from darkroom_figure import draw_again
from darkroom_learning import choices, demo, learning
from darkroom_runs import ROOT, has_gpu
from darkroom_speed import speed

RESULTS = ROOT / "benchmarks" / "results"

PARTS: dict[str, Callable[[argparse.Namespace, Path], int]] = {
    "learning": learning,
    "speed": speed,
    "demo": demo,
    "choices": choices,
    "figure": draw_again,
}


def arguments() -> argparse.Namespace:
    words, _, flags = (list(part) for part in split_at(sys.argv[1:], "--"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--output", type=Path, help="folder for JSON, table and figure (default benchmarks/results)")
    parser.add_argument("--seeds", type=int, help="number of seeds (default 3, demo 5)")
    parser.add_argument("--at_once", type=int, default=1, help="learning: configurations that share the GPU")
    parser.add_argument("--rounds", type=int, help="speed: rounds per variant (default 3)")
    parser.add_argument("--steps", type=int, default=1000, help="speed: steps per round; 100 are warm-up")
    parser.add_argument(
        "--end_to_end",
        action="store_true",
        help="speed: measure a whole run of 50,000 steps",
    )
    parser.add_argument("--patience_s", type=float, default=1800, help="time limit of a run in seconds")
    parser.add_argument("--keep", action="store_true", help="run only rows that --output lacks (not for demo)")
    parser.add_argument("--quick", action="store_true", help="smoke test, also on the CPU; cannot write to results/")
    options = parser.parse_args(words)
    options.flags = flags
    if options.quick and options.output and options.output.resolve() == RESULTS:
        parser.error("--quick does not write to benchmarks/results; name another --output, or none")
    if options.output is None:
        quick = options.quick and options.part != "figure"
        options.output = Path(tempfile.mkdtemp(prefix="darkroom-quick-")) if quick else RESULTS
    options.seeds = options.seeds or (1 if options.quick else 5 if options.part == "demo" else 3)
    options.rounds = options.rounds or (1 if options.quick else 3)
    if min(options.seeds, options.at_once, options.rounds) < 1 or options.steps < 200:
        parser.error("--seeds, --at_once and --rounds: at least 1; --steps: at least 200")
    return options


def split_at(words: Sequence[str], mark: str) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
    at = words.index(mark) if mark in words else len(words)
    return words[:at], words[at : at + 1], words[at + 1 :]


def main() -> int:
    options = arguments()
    if options.part in ("learning", "speed") and not options.quick and not has_gpu():
        raise SystemExit(f"{options.part}: torch finds no GPU; --quick runs on the CPU")
    sys.path.insert(0, str(ROOT / "src"))  # the baselines import unisono, which may not be installed
    with tempfile.TemporaryDirectory(prefix="darkroom-") as scratch:
        return PARTS[options.part](options, Path(scratch))


if __name__ == "__main__":
    sys.exit(main())
