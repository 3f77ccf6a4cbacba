"""Renders docs/images/train.svg, the README's picture, from the output of the commands that it shows.

.venv/bin/python docs/picture.py
"""

from __future__ import annotations

import io
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "examples/own_model/recipe.py:TwoMoons"
COMMANDS = [
    f"unisono train {RECIPE} --nproc 2 --log_every 80 --output_dir runs/moons",
    f"unisono verify {RECIPE} --ranks 1,2",
]


def main() -> None:
    console = Console(record=True, width=106, force_terminal=True, file=io.StringIO())
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            arguments = shlex.split(command.replace("runs/", f"{folder}/"))[1:]
            process = [sys.executable, "-m", "unisono", *arguments]
            done = subprocess.run(process, capture_output=True, text=True, cwd=ROOT, check=True)
            lines = (done.stderr + done.stdout).replace(f"{folder}/", "runs/").splitlines()
            console.print(Text(f"$ {command}", style="bold green"))
            console.print(Text("\n".join(line for line in lines if not line.startswith("running")) + "\n"))
    (ROOT / "docs/images/train.svg").write_text(console.export_svg(title="unisono"))


if __name__ == "__main__":
    main()
