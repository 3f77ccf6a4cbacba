"""The Dockerfile: a user other than root, signals reach unisono, and its steps install a program that works."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from unisono.cluster.kubernetes.job import KubernetesJob

ROOT = Path(__file__).resolve().parent.parent


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile and their arguments, without comments; continued lines are joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    pairs = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [(name, " ".join(argument.split())) for name, argument in pairs]


def last(name: str) -> str:
    return [argument for each, argument in instructions() if each == name][-1]


def test_the_image_runs_unisono_as_the_user_of_the_manifests_and_without_a_shell() -> None:
    steps = instructions()
    assert steps[0][0] == "FROM" and {name for name, _ in steps} <= {
        *("FROM", "ARG", "RUN", "WORKDIR", "COPY", "USER", "STOPSIGNAL", "ENTRYPOINT", "CMD")
    }
    user = KubernetesJob.user
    assert last("USER") == f"{user}:{user}" and f"--uid {user}" in steps[2][1]
    assert [name for name, _ in steps].index("USER") > max(i for i, (name, _) in enumerate(steps) if name == "RUN")
    assert json.loads(last("ENTRYPOINT")) == ["unisono"] and json.loads(last("CMD")) == ["--help"]
    assert last("STOPSIGNAL") == "SIGTERM" and last("WORKDIR") == "/data"


def test_the_build_context_contains_what_is_copied_and_nothing_of_the_users() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ignored[0] == "*"
    allowed = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    copied = {source for name, argument in instructions() if name == "COPY" for source in argument.split()[:-1]}
    assert copied == allowed and all((ROOT / source).exists() for source in copied)
    again = [line.removeprefix("**/") for line in ignored if line.startswith("**/")]
    assert all(any(fnmatch.fnmatch(name, pattern) for pattern in again) for name in ("__pycache__", "runs"))


def test_the_extras_and_the_version_of_python_are_supported() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    default = last("ARG").partition("=")[2]
    assert all(re.search(rf"^{extra} = \[", project, flags=re.MULTILINE) for extra in default.split(","))
    version = re.fullmatch(r"python:(3\.\d+)-slim", last("FROM"))
    assert version is not None and f"Programming Language :: Python :: {version[1]}" in project


@pytest.mark.slow
def test_the_steps_that_copy_and_install_give_a_program_that_works(tmp_path: Path) -> None:
    context, prefix = tmp_path / "context", tmp_path / "venv"
    context.mkdir()
    # Like the image, but with the packages of this environment instead of downloads.
    venv.create(prefix, with_pip=True)
    site = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    [ours] = prefix.glob("lib/python*/site-packages")
    (ours / "here.pth").write_text(f"{site}\n")
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environ |= {"PATH": f"{prefix / 'bin'}:{os.environ['PATH']}", "EXTRAS": last("ARG").partition("=")[2]}
    environ |= {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_FORCE_REINSTALL": "1"}
    for name, argument in instructions():
        if name == "COPY":
            *sources, target = argument.split()
            for source in sources:
                copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
                copy(ROOT / source, context / target / (source if target == "./" else ""))
        elif name == "RUN" and argument.startswith("pip "):
            install = argument.replace("pip install", "pip install --no-build-isolation", 1)
            done = subprocess.run(install, shell=True, cwd=context, env=environ, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
    program = prefix / "bin" / json.loads(last("ENTRYPOINT"))[0]
    shown = subprocess.run(
        [program, *json.loads(last("CMD"))], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    assert "usage: unisono COMMAND" in shown.stdout
    examples = subprocess.run(
        [program, "examples"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    assert "own_model" in examples.stdout, "the examples are in the image"
    where = [prefix / "bin/python", "-P", "-c", "import unisono; print(unisono.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).is_relative_to(prefix), "it is the installed copy that was tested"
