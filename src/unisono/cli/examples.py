"""`unisono examples [copy NAME [FOLDER]]`: lists the examples that are installed with unisono, and copies one."""

from __future__ import annotations

import os
import shutil
import tempfile
from difflib import get_close_matches
from pathlib import Path

import unisono
from unisono.cli.arguments import Parser
from unisono.errors import EXIT_DONE, UserError

_DESCRIPTION = (
    "List the examples, or copy one to a folder of yours: scripts, configs, small data files and a README with the "
    "commands to run."
)
_NOT_COPIED = shutil.ignore_patterns("__pycache__", "runs", "checkpoints", ".gitignore")


def main(argv: list[str]) -> int:
    """Runs the command."""
    parser = Parser("examples", _DESCRIPTION)
    parser.add_argument(
        "action", nargs="?", choices=["list", "copy"], default="list", help="what to do (default: list)"
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="the example to copy")
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        metavar="FOLDER",
        help="where to copy it; FOLDER must be new or empty (default: examples/NAME, which the commands in its README "
        "use)",
    )
    options = parser.parse(argv)
    examples = _examples()
    if options.action == "list":
        if options.name is not None:
            raise UserError(f"examples list: unexpected argument {options.name!r}; to copy it: unisono examples copy …")
        for name, folder in examples.items():
            print(f"{name:12} {_title(folder)}")
        return EXIT_DONE
    if options.name is None:
        raise UserError(f"examples copy: name an example: {', '.join(examples)}")
    name = options.name.replace("-", "_")
    if name not in examples:
        nearest = get_close_matches(name, examples, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"the examples are {', '.join(examples)}"
        raise UserError(f"there is no example {options.name!r}; {hint}")
    folder = options.folder or Path("examples", name)
    _copy(examples[name], folder)
    print(f"{folder}: read {folder / 'README.md'}")
    return EXIT_DONE


def _examples() -> dict[str, Path]:
    """Returns the folder of each example: inside the installed package, or next to `src` in a checkout."""
    package = Path(unisono.__file__).resolve().parent
    for root in (package / "examples", package.parents[1] / "examples"):
        folders = {path.parent.name: path.parent for path in sorted(root.glob("*/README.md"))}
        if folders:
            return folders
    raise UserError("this installation of unisono has no examples; install it from a wheel or a checkout")


def _title(folder: Path) -> str:
    title = (folder / "README.md").read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
    return title.removeprefix(f"{folder.name.replace('_', '-')}: ").removeprefix(f"{folder.name}: ")


def _copy(source: Path, target: Path) -> None:
    """Copies an example; the target appears complete or not at all, and never replaces anything."""
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise UserError(f"{target} exists and is not empty; pass another folder: unisono examples copy NAME FOLDER")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unisono-", dir=target.parent) as place:
            copy = Path(place, target.name)
            shutil.copytree(source, copy, ignore=_NOT_COPIED)
            _make_writable(copy)
            os.rename(copy, target)  # replaces an empty folder only
    except OSError as error:
        raise UserError(f"{target}: cannot copy the example there ({error.strerror or error})") from None


def _make_writable(folder: Path) -> None:
    """Lets the user edit the copies of files that a system-wide installation made read-only."""
    for path in [folder, *folder.rglob("*")]:
        path.chmod(path.stat().st_mode | 0o200)
