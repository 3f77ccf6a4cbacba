"""`unisono export RUN FOLDER`: writes the trained weights in a format that other libraries load."""

from __future__ import annotations

from pathlib import Path

from unisono.cli.arguments import Parser
from unisono.errors import EXIT_DONE, UserError


def main(argv: list[str]) -> int:
    """Runs the command."""
    parser = Parser("export", "Write a run's trained weights to a folder, in the recipe's format.")
    parser.add_argument("run", metavar="RUN", help="the run folder, or its address in object storage (s3://…)")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="output folder, which must be new or empty")
    parser.add_checkpoint_arguments()
    parser.add_argument(
        "--format",
        metavar="NAME",
        help="format of the files, for recipes with several formats: wan-flow and wan-distill have diffusers, native "
        "(the Wan repository's) and comfyui (default: the recipe decides)",
    )
    options = parser.parse(argv)
    if options.folder.exists() and (not options.folder.is_dir() or any(options.folder.iterdir())):
        raise UserError(f"{options.folder} exists and is not an empty folder; export to a new or empty folder")
    from unisono.engine.export import export_run
    from unisono.mirror.copies import local_run

    choice = {"step": options.step, "weights": options.weights, "reference": options.recipe}
    with local_run(options.run, step=options.step) as run:
        description = export_run(run, options.folder, **choice, file_format=options.format)
    print(f"{description} written to {options.folder}")
    return EXIT_DONE
