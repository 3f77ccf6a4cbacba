"""`unisono report RUN [RUN ...]`: writes one self-contained HTML page about a run, or one that compares several."""

from __future__ import annotations

from pathlib import Path

from unisono.cli.arguments import Parser
from unisono.errors import EXIT_DONE


def main(argv: list[str]) -> int:
    """Runs the command."""
    parser = Parser(
        "report",
        "Write one self-contained HTML page about a run: curves, speed, memory, faults, previews. With several runs, "
        "the page compares them: their curves in the same charts, and the settings in which they differ.",
    )
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="one to eight run folders, or the folder of a `unisono tune` study",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="file to write (default: RUN/report.html; with several runs, comparison.html in the current folder)",
    )
    options = parser.parse(argv)
    from unisono.tuning.plan import STUDY

    if len(options.runs) == 1 and (options.runs[0] / STUDY).is_file():
        from unisono.tuning.page import write_page
        from unisono.tuning.study import read_trials

        print(write_page(read_trials(options.runs[0]), options.output))
        return EXIT_DONE
    from unisono.observe.report.write import write_comparison, write_report

    if len(options.runs) == 1:
        print(write_report(options.runs[0], options.output))
    else:
        print(write_comparison(options.runs, options.output))
    return EXIT_DONE
