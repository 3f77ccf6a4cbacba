"""unisono report RUN: one self-contained HTML page of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from unisono.errors import EXIT_DONE


def main(words: list[str]) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="unisono report",
        description="Write one self-contained HTML page of a run: curves, speed, memory, faults survived, previews.",
    )
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--output", type=Path, help="the file to write (default: report.html in the run's folder)")
    options = parser.parse_args(words)
    from unisono.observe.report.writing import write_report

    print(write_report(options.run, options.output))
    return EXIT_DONE
