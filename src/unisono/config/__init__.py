"""Typed configuration from four sources: defaults, the recipe's defaults, YAML or JSON files, and flags.

Later sources override earlier ones. Fields are declared once, as dataclasses, and form one flat namespace for users. A
field's type parses its text, so the same text gives the same value on the command line and in a file.
"""

from __future__ import annotations

from unisono.config.fields import Field, fields_of
from unisono.config.file import as_yaml
from unisono.config.help import help_text
from unisono.config.resolve import Resolved, resolve

__all__ = ["Field", "Resolved", "as_yaml", "fields_of", "help_text", "resolve"]
