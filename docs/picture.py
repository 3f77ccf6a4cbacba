"""Renders docs/images/train.svg, the README's picture, from the real output of real commands, with rich.

.venv/bin/python docs/picture.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).resolve().parent
RECIPE = "examples/own_model/recipe.py:TwoMoons"


def output(*words: str) -> list[str]:
    command = [sys.executable, "-m", "unisono", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent, check=True)
    return (done.stderr + done.stdout).splitlines()


def main() -> None:
    console = Console(record=True, width=104, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with tempfile.TemporaryDirectory() as folder:
        run = f"{folder}/moons"
        lines = output("train", RECIPE, "--nproc", "2", "--num_epochs", "3", "--log_every", "24", "--output_dir", run)
        lines = [line.replace(folder, "runs") for line in lines]
        verified = [line for line in output("verify", RECIPE, "--ranks", "1,2") if not line.startswith("running")]
    console.print(Text(f"$ unisono train {RECIPE} --nproc 2 --num_epochs 3", style="bold green"))
    console.print(Text("\n".join(lines)))
    console.print(Text(f"\n$ unisono verify {RECIPE} --ranks 1,2", style="bold green"))
    console.print(Text("\n".join(verified)))
    (HERE / "images" / "train.svg").write_text(console.export_svg(title="unisono"))


if __name__ == "__main__":
    main()
