"""Times `unisono verify` and compares it with an older version.

    python benchmarks/verify.py --before OTHER_CHECKOUT/src [--rounds 5] [--output FOLDER]

Runs `unisono verify` on the own-model example on the CPU, alternating the older source and this one, so that other load
on the machine affects both. Wall-clock time is what a user waits for; the CPU time of all processes depends less on
other load.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import depends_on, machine, versions

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FORMS = {
    "default": [],
    "ddp and fsdp": ["--ranks", "1,2", "--strategies", "ddp,fsdp"],
}


def measure(source: Path, words: list[str]) -> dict[str, float]:
    """Wall-clock and CPU seconds of one command."""
    recipe = ROOT / "examples" / "own_model" / "recipe.py"
    environ = {**os.environ, "PYTHONPATH": str(source), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "unisono", "verify", f"{recipe}:TwoMoons", *words]
    before, start = _processor(), time.perf_counter()
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    wall = time.perf_counter() - start
    if done.returncode != 0 or "Same run" not in done.stdout:
        raise SystemExit(f"{shlex.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return {"wall_s": wall, "processor_s": _processor() - before}


def _processor() -> float:
    """CPU time of all children that have ended, including grandchildren that they waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def page(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    rows = []
    for form, sides in result["seconds"].items():
        for kind, title in (("wall_s", "wall clock"), ("processor_s", "CPU")):
            before, now = (statistics.median(each[kind] for each in sides[side]) for side in ("before", "now"))
            rows.append(f"| {form} | {title} | {before:.1f} s | {now:.1f} s | {before / now:.1f} x |")
    return "\n".join(
        [
            "# How long `unisono verify` takes",
            "",
            *depends_on(result),
            f"- Measured: {result['rounds']} rounds, alternating; medians. *Before* starts Python for each rank of "
            "each run; *now* forks ranks and does one more run (the reference is repeated).",
            "",
            "| form | time | before | now | speed-up |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="source folder of the older version")
    parser.add_argument("--rounds", type=int, default=5, help="runs per command")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder for verify.json and verify.md")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "machine": machine(),
        "versions": versions(["torch", "numpy"]),
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "command": f"python benchmarks/verify.py --before OTHER_CHECKOUT/src --rounds {options.rounds}",
        "rounds": options.rounds,
        "seconds": {form: {"before": [], "now": []} for form in FORMS},
    }
    for _ in range(options.rounds):
        for form, words in FORMS.items():
            for side, source in (("before", options.before.resolve()), ("now", ROOT / "src")):
                seconds = measure(source, words)
                result["seconds"][form][side].append({name: round(value, 2) for name, value in seconds.items()})
                print(f"{form}, {side}: {seconds['wall_s']:.1f} s", flush=True)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "verify.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.output / "verify.md").write_text(page(result))


if __name__ == "__main__":
    main()
