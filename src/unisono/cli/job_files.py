"""Functions shared by `slurm`, `k8s` and `skypilot`, the commands that write a job for a scheduler."""

from __future__ import annotations

import argparse
from pathlib import Path

from unisono.errors import ConfigError, UserError
from unisono.observe.redaction import is_secret_name, redacted_text


def whole_number(text: str) -> int:
    """Parses the value of a flag, for argparse."""
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}")
    return int(text)


def variable(text: str) -> tuple[str, str]:
    """Parses NAME=VALUE of --env."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"env: expected NAME=VALUE, got {text!r}")
    return name, value


def public_variable(text: str, instead: str) -> tuple[str, str]:
    """Parses NAME=VALUE of --env; `instead` says what to do with a secret, which does not belong in a file."""
    name, value = variable(text)
    if is_secret_name(name) or redacted_text(value) != value:
        raise ConfigError(f"env: {name} is a secret, which anybody who sees the file could read; {instead}")
    return name, value


def write_new(path: Path, text: str, *, option: str, overwrite: bool) -> None:
    """Writes a file that must not exist yet; `option` is the flag that names it."""
    try:
        with path.open("w" if overwrite else "x") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{path} already exists; pass --force to overwrite it, or another {option}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); pass another {option}") from None
