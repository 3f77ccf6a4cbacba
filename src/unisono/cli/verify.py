"""unisono verify RECIPE --ranks 1,2: proves that a recipe trains the same on 1 and on N ranks."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from unisono.cli.train import split_words
from unisono.engine.registry import load_recipe
from unisono.engine.run import configure
from unisono.errors import EXIT_DIFFERENCE, EXIT_DONE, ConfigError, UserError

if TYPE_CHECKING:
    from unisono.engine.verify import Answer, Question

_USAGE = """usage: unisono verify RECIPE [--ranks 1,2] [--steps 5] [--strategies ddp,fsdp] [--precision float64] [flags]

Trains the same few steps on each number of ranks, with one and with several micro-batches, under each strategy, and
compares losses and weights. Dropout is switched off (it is drawn per rank). On a machine with fewer GPUs than ranks
the ranks share them. Exit code 1 when runs differ.

  --ranks 1,2              numbers of ranks; the first is what the others are compared with
  --steps 5                optimizer steps
  --strategies ddp         strategies for more than one rank: ddp, fsdp or both
  --precision float64      float64 (differences are real, not rounding), float32, bf16 or fp16. Default: what the recipe
                           names, such as float32 for wan-flow, whose model casts to it by itself; float64 otherwise
  --gpus 0                 on the CPU although there are GPUs

All settings of `unisono train` can be given too."""


def main(words: list[str]) -> int:
    """Runs the command; 1 when a run differs."""
    words, own = _own_options(words)
    recipe, config, flags, wants_help, _ = split_words(words)
    if wants_help:
        print(_USAGE)
        return EXIT_DONE
    if recipe is None:
        raise UserError("verify: which recipe? for instance: unisono verify my_file.py:MyRecipe --ranks 1,2")
    kind = load_recipe(recipe)
    resolved = configure(kind, file=config, flags=flags)
    from unisono.engine.verify import Question, verify

    question = Question(
        ranks=_numbers(own["ranks"], "ranks"),
        steps=_numbers(own["steps"], "steps")[0],
        strategies=tuple(own["strategies"].split(",")),
        precision=own["precision"] or kind.verify_precision,
    )
    answers = verify(recipe, resolved, question, tell=lambda text: print(text, file=sys.stderr, flush=True))
    return EXIT_DONE if print_answers(answers, question) else EXIT_DIFFERENCE


def _own_options(words: list[str]) -> tuple[list[str], dict[str, str]]:
    found = {"ranks": "1,2", "steps": "5", "strategies": "ddp", "precision": ""}
    rest: list[str] = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        name, has_value, value = word.partition("=")
        key = name.removeprefix("--").replace("-", "_")
        if not name.startswith("--") or key not in found:
            rest.append(word)
            continue
        if not has_value and not waiting:
            raise ConfigError(f"--{key}: expected a value")
        found[key] = value if has_value else waiting.pop(0)
    return rest, found


def _numbers(text: str, name: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"--{name}: expected whole numbers from 1 on, for instance 1,2; got {text!r}")
    return numbers


def print_answers(answers: Sequence[Answer], question: Question) -> bool:
    """The table, and whether all runs were the same."""
    from rich.console import Console
    from rich.table import Table

    from unisono.engine.verify import TOLERANCES

    loss_limit, weight_limit = TOLERANCES[question.precision]
    table = Table(title=f"{question.steps} steps in {question.precision}: largest difference from the first run")
    for column in ("ranks", "strategy", "micro-batches", "loss", "weights", "verdict"):
        table.add_column(column, justify="left" if column in ("strategy", "verdict") else "right")
    for number, answer in enumerate(answers):
        variant = answer.variant
        verdict = (
            "reference" if number == 0 else "same" if answer.same else f"DIFFERS ({answer.first_different or 'loss'})"
        )
        table.add_row(
            str(variant.ranks),
            variant.strategy,
            f"{variant.micro_batches} x {variant.micro_batch}",
            f"{answer.loss_difference:.1e}",
            f"{answer.weight_difference:.1e}",
            verdict,
        )
    console = Console()
    console.print(table)
    same = all(answer.same for answer in answers)
    bad = next((answer for answer in answers if not answer.same), None)
    if bad is not None:
        where = (
            f"the first weight that differs is {bad.first_different}" if bad.first_different else "the losses differ"
        )
        console.print(
            f"Not the same run: {bad.variant.title}: {where}. Usual causes: batch norm, a loss that is a mean instead "
            "of a sum, random numbers that do not come from `noise`, a loss cast to float32 (use --precision float32)."
        )
    else:
        weights = f"{weight_limit:.0e} for weights" if math.isfinite(weight_limit) else "weights not judged in 16 bit"
        console.print(f"Same run (tolerance {loss_limit:.0e} for losses, {weights}; dropout off).")
    return same
