"""What every HTML page of ours needs: links that are nothing but paths, and the right to run its own script only."""

from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path
from urllib.parse import quote


def relative_link(path: Path, folder: Path) -> str:
    """The file as an address relative to the page's folder; whatever its name holds, nothing but a path comes out."""
    relative = os.path.relpath(os.path.abspath(path), os.path.abspath(folder))
    return "./" + quote(os.fsencode(relative.replace(os.sep, "/")), safe="/")


def allowed(text: str) -> str:
    """A style or script as a content security policy names it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
