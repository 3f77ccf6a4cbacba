"""Builds the sdist and the wheel, installs the wheel into a fresh environment, and uses it outside of the checkout.

python release/package.py [--output dist]

The wheel is built from the unpacked sdist, so an incomplete sdist is noticed. The fresh environment sees the installed
dependencies of this Python, but not its unisono: a .pth file names this Python's site-packages, and .pth files inside a
folder that is named so, such as the one of an editable install, are not read. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOT_SHIPPED = {"__pycache__", "runs", "checkpoints"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("dist"), help="folder for the sdist and the wheel")
    output = parser.parse_args().output.resolve()
    with tempfile.TemporaryDirectory(prefix="unisono-package-") as place:
        sdist, wheel = build(Path(place))
        check_files(wheel)
        unisono = install(wheel, Path(place, "environment"))
        print(f"installed {wheel.name} ({wheel.stat().st_size / 1e6:.1f} MB)", flush=True)
        smoke_suite(unisono, Path(place, "elsewhere"))
        output.mkdir(parents=True, exist_ok=True)
        for file in (sdist, wheel):
            shutil.copy2(file, output)
            print(f"{output / file.name}")


def build(place: Path) -> tuple[Path, Path]:
    """Builds the sdist from the checkout, and the wheel from the sdist."""
    hatch(ROOT, "sdist", place)
    [sdist] = place.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(place / "source", filter="data")
    [source] = (place / "source").iterdir()
    hatch(source, "wheel", place)
    [wheel] = place.glob("*.whl")
    return sdist, wheel


def hatch(source: Path, target: str, output: Path) -> None:
    run([sys.executable, "-m", "hatchling", "build", "-t", target, "-d", output], cwd=source)


def check_files(wheel: Path) -> None:
    """Fails if a file of the package or of an example is missing in the wheel, or if it has files of neither."""
    expected = {
        f"{prefix}/{path.relative_to(folder).as_posix()}"
        for folder, prefix in ((ROOT / "src/unisono", "unisono"), (ROOT / "examples", "unisono/examples"))
        for path in folder.rglob("*")
        if path.is_file() and not NOT_SHIPPED.intersection(path.relative_to(folder).parts)
    }
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    ignored = expected - names
    if ignored and shutil.which("git") and (ROOT / ".git").exists():  # files that .gitignore names
        listed = subprocess.run(["git", "ls-files", "src", "examples"], cwd=ROOT, capture_output=True, text=True)
        tracked = {f"unisono/{name.removeprefix('src/unisono/')}" for name in listed.stdout.splitlines()}
        ignored &= tracked
    assert not ignored, f"missing in the wheel: {sorted(ignored)}"
    assert names <= expected, f"not expected in the wheel: {sorted(names - expected)}"


def install(wheel: Path, environment: Path) -> Path:
    """Installs the wheel into a new environment; returns its `unisono`."""
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin/python"
    run([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel])
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    (environment / "lib" / version / "site-packages/dependencies.pth").write_text("\n".join(packages) + "\n")
    return environment / "bin/unisono"


def smoke_suite(unisono: Path, place: Path) -> None:
    """Does what a new user does, in an empty folder."""
    place.mkdir()
    code = "import unisono; from importlib.metadata import version; print(unisono.__file__, version('unisono'))"
    where = run([unisono.parent / "python", "-c", code], cwd=place)
    assert where.startswith(str(unisono.parent.parent)), f"another unisono was imported: {where}"

    def command(*words: object, shows: str = "") -> str:
        started = time.monotonic()
        text = run([unisono, *words], cwd=place)
        print(f"  {time.monotonic() - started:5.1f} s  unisono {' '.join(map(str, words))}", flush=True)
        assert shows in text, f"{words}: {shows!r} is missing in\n{text}"
        return text

    command("--help", shows="examples")
    assert command("--version").strip() == where.split()[-1]
    for recipe in ("darkroom", "wan-flow", "wan-distill", "clips", "seo"):
        command("train", recipe, "--help", shows="--max_steps")
    command("examples", shows="darkroom")
    command("examples", "copy", "own_model")
    command("examples", "copy", "darkroom", "room")
    assert os.access(place / "room/train_multi_gpu.sh", os.X_OK)
    train = ["train", "examples/own_model/recipe.py:TwoMoons", "--nproc", 2, "--output_dir", "run"]
    train += ["--save_every", 2, "--log_every", 1]
    command(*train, "--max_steps", 4)
    command(*train, "--max_steps", 6)
    steps = [json.loads(line) for line in (place / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if "loss" in line] == [1, 2, 3, 4, 5, 6]
    kinds = [json.loads(line)["kind"] for line in (place / "run/events.jsonl").read_text().splitlines()]
    assert "resume" in kinds, kinds
    command("report", "run", shows="report.html")
    page = (place / "run/report.html").read_text()
    assert "<svg" in page and "<style" in page, "the page lacks its charts or its styles"
    command("watch", "run", "--once", shows="6")
    command("export", "run", "weights", shows="weights")
    assert any((place / "weights").glob("*.safetensors"))
    # A recipe with a data file inside the package: the tiny autoencoder of wan-flow.
    small = ["--max_steps", 1, "--num_shapes", 8, "--preview_every", -1, "--eval_every", -1, "--nproc", 1]
    command("train", "wan-flow", "--model_config", "tiny", *small, "--output_dir", "images")
    print("the wheel works outside of the checkout")


def run(words: list[object], cwd: Path | None = None) -> str:
    """Runs a program; returns its output, and ends with its errors if it failed."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(word) for word in words], cwd=cwd, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"exit code {done.returncode}: {' '.join(map(str, words))}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
