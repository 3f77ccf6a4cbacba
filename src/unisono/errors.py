"""What can go wrong, in two kinds: the user's mistake and a run that failed.

Both end in one line on stderr and an exit code. Anything else that escapes is a bug, ours or a
recipe's, and shows a traceback (`unisono.tracebacks`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

EXIT_DONE = 0
EXIT_DIFFERENCE = 1  # `verify` or `doctor` found something
EXIT_DIED = 1  # a rank alone, as python ends after a traceback: whoever started the ranks starts them all again
EXIT_USER_ERROR = 2
EXIT_FAILED = 3
EXIT_STOPPED = 75  # stopped by a signal with a checkpoint; EX_TEMPFAIL: run again to go on


class UnisonoError(Exception):
    """An error whose message is meant for the user and whose traceback is not."""

    exit_code = EXIT_FAILED
    already_told = False  # whether the user has seen the message


class UserError(UnisonoError):
    """The user's mistake: the message says what happened, to which input, and what to do about it."""

    exit_code = EXIT_USER_ERROR


class ConfigError(UserError):
    """A setting that does not exist, does not have the right type, or contradicts another."""


class RecipeError(UserError):
    """A recipe that does not keep the contract (missing method, wrong return value, empty data set)."""


class TrainingFailed(UnisonoError):
    """Training cannot go on (for instance too many non-finite steps in a row); the message says why."""


class TryAgain(UnisonoError):
    """This attempt failed, and the next one, from the last checkpoint, will do something differently."""

    exit_code = EXIT_DIED


def end_as_program(main: Callable[[], int]) -> NoReturn:
    """Runs a module of its own as a program (`python -m`): an error is one line, and its exit code."""
    try:
        sys.exit(main())
    except UnisonoError as told:
        print(f"unisono: {told}", file=sys.stderr)
        sys.exit(told.exit_code)
