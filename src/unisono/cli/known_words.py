"""Command lines of scripts that people know, read word by word: what such a script needs to be one of ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unisono.cli.train import split_words
from unisono.config import Resolved
from unisono.engine.recipe import Recipe
from unisono.engine.start.run import configure
from unisono.errors import ConfigError


class KnownWords:
    """The words of a command line, from left to right; whoever meets a flag takes the words that belong to it."""

    def __init__(self, words: Sequence[str]) -> None:
        self._rest = list(reversed(words))

    def __iter__(self) -> Iterator[str]:
        while self._rest:
            yield self._rest.pop()

    def values(self, word: str, most: int | None = None) -> list[str]:
        """What was given to the flag that was just read: after its =, or the words up to the next flag."""
        _, equals, value = word.partition("=")
        if equals:
            return [value]
        found: list[str] = []
        while self._rest and not self._rest[-1].startswith("--") and (most is None or len(found) < most):
            found.append(self._rest.pop())
        return found

    def value(self, word: str) -> str:
        """The one value of the flag that was just read."""
        found = self.values(word, most=1)
        if not found:
            raise ConfigError(f"--{flag_name(word)} needs a value")
        return found[0]


def flag_name(word: str) -> str:
    """Of a flag; nothing for other words."""
    return word.partition("=")[0].removeprefix("--").replace("-", "_") if word.startswith("--") else ""


def settings_of(recipe: type[Recipe], words: Sequence[str]) -> Resolved:
    """All settings of a run, as a command line in our words says them."""
    command = split_words(["recipe", *words])
    return configure(recipe, file=command.files, flags=command.flags)
