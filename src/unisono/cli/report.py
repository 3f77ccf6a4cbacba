"""`unisono report RUN`: writes one self-contained HTML page about a run."""

from __future__ import annotations

from pathlib import Path

from unisono.cli.arguments import Parser
from unisono.errors import EXIT_DONE


def main(argv: list[str]) -> int:
    """Runs the command."""
    parser = Parser(
        "report", "Write one self-contained HTML page about a run: curves, speed, memory, faults, previews."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run folder")
    parser.add_argument("--output", type=Path, metavar="FILE", help="file to write (default: RUN/report.html)")
    options = parser.parse(argv)
    from unisono.observe.report.write import write_report

    print(write_report(options.run, options.output))
    return EXIT_DONE
