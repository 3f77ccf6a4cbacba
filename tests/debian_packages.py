"""Installs programs that some tests need and that are not Python packages: SLURM, Open MPI."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest


def install(program: str, packages: list[str]) -> None:
    """Installs Debian packages if the program is missing; without apt, skips the test with a warning."""
    if shutil.which(program) is not None:
        return
    if shutil.which("apt-get") is None:
        pytest.skip(f"NOT TESTED: {program} is not installed and there is no apt-get")
    environ = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *packages]):
        subprocess.run(["apt-get", *words], env=environ, check=True, capture_output=True, timeout=280)
