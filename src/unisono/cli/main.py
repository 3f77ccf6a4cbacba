"""`unisono COMMAND …`: runs the command's module and returns its exit code."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

from unisono import __version__
from unisono.cli.stdout import Output, watched_stdout
from unisono.errors import EXIT_DONE, EXIT_FAILED, EXIT_USER_ERROR, UnisonoError, UserError
from unisono.typed_paths import as_typed

COMMANDS = {
    "train": "train a recipe on one device or many",
    "plan": "predict memory, speed and cost of a run under each strategy; needs no GPU",
    "verify": "prove that a recipe trains the same on 1 and on N ranks",
    "bench": "measure speed, scaling and overhead on several numbers of GPUs or CPU ranks",
    "tune": "search for good settings of a recipe with Optuna",
    "federate": "train one model on clients that keep their data, with Flower",
    "export": "write a run's trained weights to a folder",
    "watch": "show runs while they train: ranks, loss, events, time left; in the terminal or the browser",
    "report": "write one HTML page about a run, or one that compares runs",
    "clips": "score videos, and cut out the best moments",
    "seo": "report on a web site: rule-based checks of its pages, and learned scores",
    "doctor": "check that this machine can train, and show what to fix",
    "slurm": "write, submit and follow the batch script of a run under SLURM",
    "k8s": "write the manifests of a run on Kubernetes, for JobSet or Kubeflow Trainer",
    "skypilot": "write a run as a task of SkyPilot, for spot machines of any cloud",
    "gpus": "list the GPUs, how busy they are, and which --gpus auto would use",
    "examples": "list the examples that come with unisono, and copy one to a folder of yours",
}

_HELP = """usage: unisono COMMAND [arguments]

One training run, any number of GPUs.

{commands}

Run `unisono COMMAND --help` for the options of a command.  Version: {version}"""


def main(arguments: list[str] | None = None) -> int:
    """Runs a command and returns the exit code; a user error is one line on stderr."""
    argv = sys.argv[1:] if arguments is None else arguments
    if argv[:1] == ["train"] and not _only_prints(argv):
        return _exit_code(argv) or EXIT_DONE  # only the recipe prints to stdout; training continues if that fails
    with watched_stdout() as output:
        code = _exit_code(argv, output)
        if output is None:
            return EXIT_DONE if code is None else code
        with suppress(OSError, ValueError):
            output.flush()
        if output.failure is None and code is not None:
            return code
        return _exit_code_without_stdout(argv, code, output)


def program() -> NoReturn:
    """Runs the program `unisono` and ends the process with the command's exit code."""
    code = main()
    from unisono.cluster.lifetime import end_process

    end_process(code)


def _only_prints(argv: list[str]) -> bool:
    return not {"-h", "--help", "--print_config", "--print-config"}.isdisjoint(argv)


def _exit_code_without_stdout(argv: list[str], code: int | None, output: Output) -> int:
    """Returns the exit code of a command that could not write to stdout; `code` is None if this interrupted it."""
    output.discard_rest()
    assert output.failure is not None
    if isinstance(output.failure, BrokenPipeError):  # the reader closed the pipe: unisono train --help | head
        has_result = argv[:1] in (["verify"], ["doctor"]) and not _only_prints(argv)
        return code if code is not None else EXIT_FAILED if has_result else EXIT_DONE
    _print_error(f"unisono: stdout cannot be written ({output.failure.strerror}); free some space, or redirect it")
    if argv[:1] == ["export"] and not _only_prints(argv):
        return code or EXIT_DONE  # the weights were written before anything was printed
    return code or EXIT_USER_ERROR


def _exit_code(argv: list[str], output: Output | None = None) -> int | None:
    """Runs a command; returns its exit code, or None if its output could not be written."""
    try:
        return _run(_without_local_rank(argv))
    except UnisonoError as error:
        if not error.already_printed:
            _print_error(as_typed(f"unisono: {_rank_prefix()}{error}"))
        return error.exit_code
    except KeyboardInterrupt:
        _print_error("unisono: stopped immediately, without saving")
        return 130
    except SystemExit as exit_:  # argparse after --help, or a recipe
        if exit_.code is None or isinstance(exit_.code, int):
            return exit_.code or EXIT_DONE
        _print_error(f"unisono: {_rank_prefix()}{exit_.code}")
        return EXIT_FAILED
    except Exception as error:
        if output is not None and output.failure is error:
            return None
        _print_traceback(error)
        return EXIT_FAILED


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        commands = "\n".join(f"  {name:8} {purpose}" for name, purpose in COMMANDS.items())
        print(_HELP.format(commands=commands, version=__version__))
        return EXIT_DONE
    if argv[0] == "--version":
        print(__version__)
        return EXIT_DONE
    command, *rest = argv
    if command not in COMMANDS:
        from difflib import get_close_matches

        nearest = get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"the commands are {', '.join(COMMANDS)}"
        raise UserError(f"unknown command {command!r}; {hint}")
    code: int = import_module(f"unisono.cli.{command}").main(rest)
    return code


def _without_local_rank(argv: list[str]) -> list[str]:
    """Drops the --local-rank=N that torch.distributed.launch adds; the environment contains the same number."""
    remaining: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        name, has_value, _ = argument.replace("-", "_").partition("=")
        if name != "__local_rank":
            remaining.append(argument)
        elif not has_value:
            next(arguments, None)
    return remaining


def _print_traceback(error: Exception) -> None:
    """Prints the traceback of a bug in unisono or in a recipe. If several ranks fail, only the first one prints it."""
    from unisono import tracebacks
    from unisono.formatting import describe_exception

    tracebacks.save_if_unreported(error)
    report = tracebacks.report_of(error)
    if report is None or report.is_first:
        _print_error(tracebacks.format_short(error))
    else:
        _print_error(f"unisono: [rank {report.rank}] {describe_exception(error)}")


def _print_error(text: str) -> None:
    with suppress(OSError, ValueError):  # a full or closed stderr does not change the exit code
        print(text, file=sys.stderr, flush=True)


def _rank_prefix() -> str:
    rank = os.environ.get("RANK", "0")
    return "" if rank == "0" else f"[rank {rank}] "


if __name__ == "__main__":
    program()
