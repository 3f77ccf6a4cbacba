"""Writes a small JSON file into the run folder, for the next attempt to read."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.atomic_files import write_atomically

log = logging.getLogger(__name__)


def leave_note(file: Path, content: Mapping[str, Any]) -> None:
    """Replaces the content of the file atomically. If that fails, logs a warning."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(content))
    except OSError as error:
        log.warning("%s cannot be written (%s), so the next attempt cannot use %s", file, error.strerror, content)
