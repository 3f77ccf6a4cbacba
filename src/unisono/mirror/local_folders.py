"""Names the local folders of runs in object storage, below the user's cache folder."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path


def working_folder(address: str) -> Path:
    """Returns the run folder of `--output_dir ADDRESS`: the run writes there and is copied to the address."""
    return cache_folder() / "runs" / _name(address)


def checkpoint_folder(address: str) -> Path:
    """Returns the folder into which `--resume ADDRESS` downloads the checkpoint."""
    return cache_folder() / "downloads" / _name(address)


def cache_folder() -> Path:
    """Returns `$XDG_CACHE_HOME/unisono`, or ~/.cache/unisono if the variable is not set."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(os.path.abspath(base), "unisono")


def _name(address: str) -> str:
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", address.partition("://")[2])[-60:].strip("-.")
    return f"{readable}-{hashlib.sha256(address.encode()).hexdigest()[:8]}"
