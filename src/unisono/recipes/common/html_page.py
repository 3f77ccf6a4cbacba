"""Safe links, and the content security policy of a page that runs only its own script."""

from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path
from urllib.parse import quote


def relative_link(path: Path, folder: Path) -> str:
    """A link to a file relative to the page's folder; quoted, so that any file name is only a path."""
    relative = os.path.relpath(os.path.abspath(path), os.path.abspath(folder))
    return "./" + quote(os.fsencode(relative.replace(os.sep, "/")), safe="/")


def csp_hash(text: str) -> str:
    """The source expression of a style or script in a content security policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
