"""Prints the release notes of a version: its section of CHANGELOG.md.

python release/notes.py [0.1.0]        # without a version: the section Unreleased
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

CHANGELOG = Path(__file__).resolve().parent.parent / "CHANGELOG.md"


def notes(version: str, text: str) -> str:
    """The section of a version, without its heading; exits if there is none, or if it is empty."""
    sections = dict(re.findall(r"^## \[([^\]]+)\][^\n]*\n(.*?)(?=^## |\Z)", text, flags=re.DOTALL | re.MULTILINE))
    if version not in sections:
        sys.exit(f"CHANGELOG.md has no section [{version}]; it has {', '.join(sections)}")
    if not sections[version].strip():
        sys.exit(f"the section [{version}] of CHANGELOG.md is empty")
    return str(sections[version]).strip()


if __name__ == "__main__":
    print(notes(sys.argv[1] if len(sys.argv) > 1 else "Unreleased", CHANGELOG.read_text()))
