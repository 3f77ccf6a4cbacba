"""Parses the command line of every command with argparse.

All commands follow the same rules. A flag may be written with hyphens or underscores, and cannot be abbreviated. An
error is one line that suggests the nearest flag (exit code 2). `train`, `verify` and `slurm` treat all flags except
their own as settings of the run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from unisono.errors import ConfigError, UserError

_SIMILAR = 0.7
_VERY_SIMILAR = 0.85  # an unknown flag that is this similar to one of the command's own flags is probably a typo


class Parser(argparse.ArgumentParser):
    """Parses the command line of one command."""

    def __init__(self, command: str, description: str, **options: Any) -> None:
        self._spellings: dict[str, str] = {}  # name with underscores -> name as declared
        self._command = command
        super().__init__(prog=f"unisono {command}", description=description, allow_abbrev=False, **options)

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """Adds an argument that may be written with hyphens or underscores."""
        action = super().add_argument(*names, **options)
        self._spellings.update({_underscored(name): name for name in action.option_strings})
        return action

    def add_checkpoint_arguments(self) -> None:
        """Adds --step, --weights and --recipe, which select the trained weights of a run."""
        self.add_argument("--step", metavar="N", help="checkpoint: a step number, newest or best (default: newest)")
        self.add_argument(
            "--weights",
            choices=["auto", "ema", "model"],
            default="auto",
            help="ema: the moving average of the weights; model: the weights themselves; auto: the moving average if "
            "the run has one (default: auto)",
        )
        self.add_argument(
            "--recipe", metavar="FILE.PY:CLASS", help="new location of the recipe, if it has moved since the run"
        )

    def error(self, message: str) -> NoReturn:
        """Raises a one-line ConfigError, where argparse would print the usage and exit."""
        raise ConfigError(f"{message.removeprefix('argument ')}; see unisono {self._command} --help")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parses the whole command line; raises ConfigError for an unknown argument."""
        options, rest = self.parse_own(argv)
        if not rest:
            return options
        flags = [argument.partition("=")[0] for argument in rest if argument.startswith("--")]
        if not flags:
            self.error(f"unexpected argument {rest[0]!r}")
        hint = self._nearest(flags[0], _SIMILAR)
        if not hint:
            self.error(f"unknown flag {flags[0]}")
        raise ConfigError(f"unknown flag {flags[0]}{hint}")

    def parse_own(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Parses the command's own arguments; also returns all other arguments, unchanged and in order."""
        return self.parse_known_args([self._as_declared(argument) for argument in argv])

    def reject_typos(self, flags: Sequence[str]) -> None:
        """Raises ConfigError for a flag that is not a setting but resembles one of this command's own flags."""
        from unisono.config.fields import fields_by_name
        from unisono.settings import Settings

        settings = fields_by_name((Settings,))
        for flag in (argument.partition("=")[0] for argument in flags if argument.startswith("--")):
            name = _underscored(flag).removeprefix("__")
            if name not in settings and (hint := self._nearest(flag, _VERY_SIMILAR)):
                raise ConfigError(f"unknown flag {flag}{hint}")

    def _as_declared(self, argument: str) -> str:
        if not argument.startswith("--"):
            return argument
        name, equals, value = argument.partition("=")
        return self._spellings.get(_underscored(name), name) + equals + value

    def _nearest(self, flag: str, cutoff: float) -> str:
        names = {spelling.removeprefix("__"): name for spelling, name in self._spellings.items()}
        nearest = get_close_matches(_underscored(flag).removeprefix("__"), names, n=1, cutoff=cutoff)
        return f"; did you mean {names[nearest[0]]}?" if nearest else ""


class StoreOnce(argparse.Action):
    """Stores one value and rejects a second one."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest) != self.default:
            raise argparse.ArgumentError(self, "is set twice")
        setattr(namespace, self.dest, values)


class TrainingCommand(NamedTuple):
    """The parsed command line of `train`, `verify` or `slurm`."""

    recipe: str  # empty only with --help
    files: list[Path]
    flags: list[str]  # settings of the run, not yet parsed
    options: argparse.Namespace  # the command's own options


OPTION_FOR = {"gpus": "gpus-per-node", "nnodes": "nodes", "node_rank": "nodes", "rdzv_endpoint": "nodes"}
"""Settings of the launcher -> the option that replaces them in commands that write a job for several machines."""


class TrainingParser(Parser):
    """Parses command lines such as that of `train`: a recipe, config files, options, settings as flags."""

    def __init__(self, command: str, usage: str, description: str) -> None:
        super().__init__(
            command,
            description,
            usage=f"unisono {command} {usage}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=False,  # with a recipe, the help also lists its settings
        )
        self.add_argument("-h", "--help", action="store_true", help="show this help message and exit")
        self.add_argument(
            "--config",
            type=Path,
            action="append",
            default=[],
            metavar="FILE",
            help="YAML or JSON file with settings; later files override earlier ones, and flags override all files. "
            "The key `include` names files to read first: `include: base.yaml`, or a list",
        )

    def add_option(self, flag: str, metavar: str, help: str, **options: Any) -> None:
        """Adds an option that may be given once."""
        self.add_argument(flag, metavar=metavar, help=help, **{"action": StoreOnce, **options})

    def add_repeatable(self, flag: str, metavar: str, help: str) -> None:
        """Adds an option that may be given several times; its value is a list."""
        self.add_argument(flag, metavar=metavar, help=f"{help}; repeatable", action="append", default=[])

    def parse_training(self, argv: Sequence[str]) -> TrainingCommand:
        """Parses the command line; the recipe is the first argument."""
        has_recipe = bool(argv) and not argv[0].startswith("-")
        options, flags = self.parse_own(argv[1:] if has_recipe else argv)
        self.reject_typos(flags)
        if not has_recipe and not options.help:
            command = f"unisono {self._command}"
            raise UserError(f"{self._command}: the recipe is missing; for instance: {command} my_file.py:MyRecipe")
        return TrainingCommand(argv[0] if has_recipe else "", options.config, flags, options)


def _underscored(name: str) -> str:
    return name.replace("-", "_")
