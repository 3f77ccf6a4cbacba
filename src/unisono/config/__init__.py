"""Typed configuration: defaults < the recipe's defaults < YAML or JSON files < flags.

Fields are declared once, as dataclasses, and are flat wherever a person meets them. The type of a field decides what a
text means, whether it was typed in a shell or stands in a file, so the same words give the same value everywhere.
"""

from __future__ import annotations

from unisono.config.fields import Field, fields_of
from unisono.config.file import as_yaml
from unisono.config.help import help_text
from unisono.config.resolve import Resolved, resolve

__all__ = ["Field", "Resolved", "as_yaml", "fields_of", "help_text", "resolve"]
