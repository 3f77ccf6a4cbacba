"""unisono export RUN FOLDER: the trained weights in the format the ecosystem loads."""

from __future__ import annotations

import argparse
from pathlib import Path

from unisono.errors import EXIT_DONE, UserError


def main(words: list[str]) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="unisono export", description="Write a run's trained weights to a folder, in the recipe's format."
    )
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("folder", type=Path, help="where to write; must be new or empty")
    parser.add_argument("--step", help="a step number, newest (default) or best")
    parser.add_argument(
        "--weights", choices=["auto", "ema", "model"], default="auto", help="auto: the moving average if there is one"
    )
    parser.add_argument("--recipe", help="file.py:Class, if the recipe has moved since the run")
    options = parser.parse_args(words)
    if options.folder.exists() and (not options.folder.is_dir() or any(options.folder.iterdir())):
        raise UserError(f"{options.folder} is not an empty folder; nothing there will be overwritten: choose another")
    from unisono.engine.export import export_run

    what = export_run(options.run, options.folder, step=options.step, weights=options.weights, words=options.recipe)
    print(f"{what} written to {options.folder}")
    return EXIT_DONE
