"""`unisono report RUN [RUN ...]`: writes one self-contained HTML page about a run, or one that compares several."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from unisono.cli.arguments import Parser
from unisono.errors import EXIT_DONE
from unisono.storage.addresses import is_address


def main(argv: list[str]) -> int:
    """Runs the command."""
    parser = Parser(
        "report",
        "Write one self-contained HTML page about a run: curves, speed, memory, faults, previews. With several runs, "
        "the page compares them: their curves in the same charts, and the settings in which they differ.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="one to eight run folders or their addresses in object storage (s3://…), or the folder of a "
        "`unisono tune` study",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="file to write (default: RUN/report.html; in the current folder, report.html for an address and "
        "comparison.html for several runs)",
    )
    options = parser.parse(argv)
    from unisono.mirror.copies import local_run
    from unisono.observe.report.write import REPORT

    output = options.output
    if output is None and len(options.runs) == 1 and is_address(options.runs[0]):
        output = Path(REPORT)
    with ExitStack() as stack:
        print(_write([stack.enter_context(local_run(run, records=True)) for run in options.runs], output))
    return EXIT_DONE


def _write(folders: list[Path], output: Path | None) -> Path:
    from unisono.tuning.plan import STUDY

    if len(folders) == 1 and (folders[0] / STUDY).is_file():
        from unisono.tuning.page import write_page
        from unisono.tuning.study import read_trials

        return write_page(read_trials(folders[0]), output)
    from unisono.observe.report.write import write_comparison, write_report

    return write_report(folders[0], output) if len(folders) == 1 else write_comparison(folders, output)
