"""Helps the scripts in examples/ to accept the flags of an original script and pass the rest to `unisono train`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unisono.cli.train import parse_command
from unisono.config import Resolved
from unisono.engine.recipe import Recipe
from unisono.engine.start.run import configure
from unisono.errors import ConfigError


class ArgumentReader:
    """Iterates over a command line. After each flag, call `value` or `values` to consume the flag's arguments."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._remaining = list(reversed(argv))

    def __iter__(self) -> Iterator[str]:
        while self._remaining:
            yield self._remaining.pop()

    def values(self, flag: str, most: int | None = None) -> list[str]:
        """Returns the values of the flag that was just read.

        These are the text after its =, or the arguments up to the next flag, but at most `most` of them.
        """
        _, equals, value = flag.partition("=")
        if equals:
            return [value]
        values: list[str] = []
        while self._remaining and not self._remaining[-1].startswith("--") and (most is None or len(values) < most):
            values.append(self._remaining.pop())
        return values

    def value(self, flag: str) -> str:
        """Returns the single value of the flag that was just read."""
        values = self.values(flag, most=1)
        if not values:
            raise ConfigError(f"--{flag_name(flag)} needs a value")
        return values[0]


def flag_name(argument: str) -> str:
    """Returns the name of a flag, with underscores; empty if the argument is not a flag."""
    is_flag = argument.startswith("--")
    return argument.partition("=")[0].removeprefix("--").replace("-", "_") if is_flag else ""


def resolve_settings(recipe: type[Recipe], argv: Sequence[str]) -> Resolved:
    """Returns the settings of a run that result from these arguments of `unisono train`."""
    command = parse_command(["recipe", *argv])
    return configure(recipe, file=command.files, flags=command.flags)
