"""`unisono COMMAND …`: finds the command's file and runs it."""

from __future__ import annotations

import os
import sys
import traceback
from importlib import import_module
from typing import NoReturn

from unisono import __version__
from unisono.errors import EXIT_DONE, EXIT_FAILED, EXIT_USER_ERROR, UnisonoError

COMMANDS = {
    "train": "train a recipe on one device or many",
    "verify": "prove that a recipe trains the same on 1 and on N ranks",
    "export": "write a run's trained weights to a folder",
    "report": "write one HTML page of a run: curves, speed, faults survived",
    "clips": "find the moments of a video worth cutting out, by what a run has learnt, and cut them",
    "seo": "report on a site: its pages by what a run has learnt, and what plain rules find",
    "doctor": "what this machine can do, and what is wrong with it",
    "slurm": "write, submit and follow the batch script of a run under SLURM",
    "gpus": "the GPUs, how free they are, and which would be taken",
}

_HELP = """usage: unisono COMMAND …

One training run, any number of GPUs.

{commands}

unisono COMMAND --help says more.  unisono --version: {version}"""


def main(arguments: list[str] | None = None) -> int:
    """Runs a command and returns the exit code; a user's mistake is one line on stderr."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        return _run(_without_local_rank(words))
    except UnisonoError as error:
        if not error.already_told:
            print(f"unisono: {_who()}{error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("unisono: stopped at once, without saving", file=sys.stderr)
        return 130
    except Exception as error:
        # Somebody has read enough: unisono train --help | head. In training it may be a connection to another rank.
        if isinstance(error, BrokenPipeError) and {"-h", "--help", "--print_config"} & set(words):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_DONE
        from unisono.cluster.outcome import bearable

        print(bearable(traceback.format_exc()), file=sys.stderr)  # a bug, ours or the recipe's: show where
        return EXIT_FAILED


def program() -> NoReturn:
    """The program `unisono`: runs a command and ends the process with its exit code."""
    code = main()
    from unisono.cluster.lifetime import end_process

    end_process(code)


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        commands = "\n".join(f"  {name:8} {what}" for name, what in COMMANDS.items())
        print(_HELP.format(commands=commands, version=__version__))
        return 0
    if words[0] == "--version":
        print(__version__)
        return 0
    command, *rest = words
    if command not in COMMANDS:
        from difflib import get_close_matches

        near = get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        print(f"unisono: unknown command {command!r}; {hint}", file=sys.stderr)
        return EXIT_USER_ERROR
    code: int = import_module(f"unisono.cli.{command}").main(rest)
    return code


def _without_local_rank(words: list[str]) -> list[str]:
    """torch.distributed.launch puts --local-rank=N before a program's own words; the environment says it too."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        name, has_value, _ = word.replace("-", "_").partition("=")
        if name != "__local_rank":
            kept.append(word)
        elif not has_value:
            next(rest, None)
    return kept


def _who() -> str:
    rank = os.environ.get("RANK", "0")
    return "" if rank == "0" else f"[rank {rank}] "


if __name__ == "__main__":
    program()
