"""`unisono COMMAND …`: finds the command's file and runs it."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

from unisono import __version__
from unisono.cli.stdout import Output, watched_stdout
from unisono.errors import EXIT_DONE, EXIT_FAILED, EXIT_USER_ERROR, UnisonoError
from unisono.typed_paths import shown

COMMANDS = {
    "train": "train a recipe on one device or many",
    "verify": "prove that a recipe trains the same on 1 and on N ranks",
    "export": "write a run's trained weights to a folder",
    "report": "write one HTML page about a run: curves, speed, faults survived",
    "clips": "score videos with a trained run, and cut out the best moments",
    "seo": "report on a site: rule-based checks of its pages, and learned scores",
    "doctor": "check that this machine can train, and say what to fix",
    "slurm": "write, submit and follow the batch script of a run under SLURM",
    "gpus": "list the GPUs, how busy they are, and which --gpus auto would use",
}

_PRINTING = {"-h", "--help", "--print_config"}
_HELP = """usage: unisono COMMAND [arguments]

One training run, any number of GPUs.

{commands}

Run `unisono COMMAND --help` for the options of a command.  Version: {version}"""


def main(arguments: list[str] | None = None) -> int:
    """Runs a command and returns the exit code; a user's mistake is one line on stderr."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["train"] and not _PRINTING & set(words):
        return _exit_code(words) or EXIT_DONE  # training survives a broken stdout, which belongs to the recipe
    with watched_stdout() as output:
        code = _exit_code(words, output)
        if output is None:
            return EXIT_DONE if code is None else code
        with suppress(OSError, ValueError):
            output.flush()
        if output.failure is None and code is not None:
            return code
        return _without_stdout(words, code, output)


def _without_stdout(words: list[str], code: int | None, output: Output) -> int:
    """The exit code of a command whose stdout broke; `code` is None if that interrupted the command."""
    output.give_up()
    assert output.failure is not None
    if isinstance(output.failure, BrokenPipeError):  # the reader closed the pipe: unisono train --help | head
        has_result = words[:1] in (["verify"], ["doctor"]) and not _PRINTING & set(words)
        return code if code is not None else EXIT_FAILED if has_result else EXIT_DONE
    _say(f"unisono: stdout cannot be written ({output.failure.strerror}); make room, or redirect it elsewhere")
    if words[:1] == ["export"] and not _PRINTING & set(words):
        return code or EXIT_DONE  # the weights were written before anything was printed
    return code or EXIT_USER_ERROR


def _exit_code(words: list[str], output: Output | None = None) -> int | None:
    """Runs a command; returns its exit code, or None if its output could not be written."""
    try:
        return _run(_without_local_rank(words))
    except UnisonoError as error:
        if not error.already_printed:
            _say(shown(f"unisono: {_who()}{error}"))
        return error.exit_code
    except KeyboardInterrupt:
        _say("unisono: stopped immediately, without saving")
        return 130
    except SystemExit as end:  # argparse after --help, or a recipe
        if end.code is None or isinstance(end.code, int):
            return end.code or EXIT_DONE
        _say(f"unisono: {_who()}{end.code}")
        return EXIT_FAILED
    except Exception as error:
        if output is not None and output.failure is error:
            return None
        _show_crash(error)
        return EXIT_FAILED


def _say(text: str) -> None:
    with suppress(OSError, ValueError):  # a full or closed stderr does not change how a command ends
        print(text, file=sys.stderr, flush=True)


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
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
        print(f"unisono: unknown command {command!r}; {hint}", file=sys.stderr)
        return EXIT_USER_ERROR
    code: int = import_module(f"unisono.cli.{command}").main(rest)
    return code


def _without_local_rank(words: list[str]) -> list[str]:
    """Drops the --local-rank=N that torch.distributed.launch adds; the environment holds the same number."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        name, has_value, _ = word.replace("-", "_").partition("=")
        if name != "__local_rank":
            kept.append(word)
        elif not has_value:
            next(rest, None)
    return kept


def _show_crash(error: Exception) -> None:
    """Prints the traceback of a bug, ours or the recipe's; when several ranks fail, only the first prints it."""
    from unisono import tracebacks
    from unisono.formatting import describe_exception

    tracebacks.keep_once(error)
    report = tracebacks.report_of(error)
    if report is None or report.is_first:
        _say(tracebacks.shown(error))
    else:
        _say(f"unisono: [rank {report.rank}] {describe_exception(error)}")


def _who() -> str:
    rank = os.environ.get("RANK", "0")
    return "" if rank == "0" else f"[rank {rank}] "


if __name__ == "__main__":
    program()
