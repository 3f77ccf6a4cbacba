"""Exit codes, and exceptions whose messages are for the user.

A `UnisonoError` ends the command with one line on stderr and its exit code. Any other exception that escapes is a bug,
in unisono or in a recipe, and shows a traceback (`unisono.tracebacks`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

EXIT_DONE = 0
EXIT_DIFFERENCE = 1  # `verify` or `doctor` found a problem
EXIT_DIED = 1  # exit status of a rank that crashed; its launcher restarts all ranks
EXIT_USER_ERROR = 2
EXIT_FAILED = 3
EXIT_STOPPED = 75  # stopped by a signal, with a checkpoint (EX_TEMPFAIL); the same command continues the run


class UnisonoError(Exception):
    """An error whose message, but not its traceback, is meant for the user."""

    exit_code = EXIT_FAILED
    already_printed = False  # whether the message has been shown to the user


class UserError(UnisonoError):
    """A mistake of the user; the message says what happened, to which input, and what to do."""

    exit_code = EXIT_USER_ERROR


class ConfigError(UserError):
    """A setting that does not exist, has the wrong type, or contradicts another."""


class RecipeError(UserError):
    """A recipe that violates the contract: a missing method, a wrong return value, an empty dataset."""


class TrainingFailed(UnisonoError):
    """Training cannot continue, for instance after too many non-finite steps in a row; the message says why."""


class TryAgain(UnisonoError):
    """This attempt failed; the next one starts from the last checkpoint with changed settings."""

    exit_code = EXIT_DIED


class TrySmaller(TryAgain):
    """This attempt ran out of memory; the next one uses a smaller micro-batch and does not count as a restart.

    Each such attempt stores a smaller micro-batch size, down to one sample, so there can be only a few of them.
    """


def run_as_program(main: Callable[[], int]) -> NoReturn:
    """Runs the `main` of a module started with `python -m`, and exits. Prints a UnisonoError as one line."""
    try:
        sys.exit(main())
    except UnisonoError as error:
        print(f"unisono: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
