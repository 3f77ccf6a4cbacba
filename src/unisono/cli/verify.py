"""`unisono verify RECIPE --ranks 1,2`: proves that a recipe trains the same on 1 and on N ranks."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from unisono.cli.arguments import TrainingParser
from unisono.cluster.launch.warm_ranks import WarmRanks
from unisono.devices import num_cpu_cores
from unisono.engine.start.registry import load_recipe
from unisono.engine.start.run import configure
from unisono.engine.start.warm_rank import COMMAND
from unisono.engine.turns.group import check_groups
from unisono.errors import EXIT_DIFFERENCE, EXIT_DONE, EXIT_FAILED, ConfigError

if TYPE_CHECKING:
    from unisono.config.resolve import Resolved
    from unisono.engine.recipe import Recipe
    from unisono.engine.verification.verify import VariantFailed, VariantResult, Verdict, VerifyPlan

_DEFAULT_STEPS = 5
_DESCRIPTION = """Prove that a recipe trains the same on 1 and on N ranks.

Trains the same few steps on each number of ranks, with one and with several micro-batches, under each strategy, and
compares losses, metrics and weights with the first of these runs, the reference. The reference runs twice, to
distinguish a recipe that is not repeatable from one that depends on the number of ranks. Dropout is off, because
dropout masks differ between ranks. On a machine with fewer GPUs than ranks, several ranks share a GPU.

Every setting of `unisono train` is also a flag here: --gpus 0 verifies on the CPU, and --eval_every -1 skips the
evaluation at the end of each run and the comparison of its metrics.

Exit codes: 0 all runs are the same, 1 a run differs, 2 user error, 3 a run failed."""


def _parser() -> TrainingParser:
    parser = TrainingParser(
        "verify", "RECIPE [--ranks 1,2] [--steps 5] [--strategies ddp,fsdp,hsdp] [settings]", _DESCRIPTION
    )
    parser.add_argument(
        "--ranks",
        default="1,2",
        metavar="N,N",
        help="numbers of ranks to compare; the first is the reference. A single number compares micro-batches only "
        "(default: 1,2)",
    )
    parser.add_argument(
        "--steps",
        default=None,
        metavar="N",
        help="optimizer steps of each run (default: 5; more if the recipe trains groups of weights in turn and needs "
        "more than 5 steps to train every group and then start over)",
    )
    parser.add_argument(
        "--strategies",
        default="ddp",
        metavar="S,S",
        help="strategies for more than one rank: ddp, fsdp, hsdp, or several of them. hsdp is fsdp with --shard_size, "
        "by default the largest that leaves several copies of the weights (default: ddp)",
    )
    parser.add_argument(
        "--precision",
        default="",
        metavar="P",
        help="precision of all runs: float64, float32, bf16 or fp16. In float64, a difference is a bug and not "
        "rounding (default: the recipe's verify_precision: float64, or float32 for the Wan recipes, whose models "
        "always compute some layers in float32)",
    )
    return parser


def main(argv: list[str]) -> int:
    """Runs the command; returns 1 if a run differs, 3 if a run failed."""
    parser = _parser()
    recipe, config, flags, options = parser.parse_training(argv)
    if options.help:
        parser.print_help()
        return EXIT_DONE
    if any(flag.partition("=")[0] == "--strategy" for flag in flags):
        raise ConfigError("verify compares strategies and ignores --strategy; pass --strategies, for instance ddp,fsdp")
    ranks = _numbers(options.ranks, "ranks")
    steps = _DEFAULT_STEPS if options.steps is None else _numbers(options.steps, "steps")[0]
    max_ranks = max(64, 8 * num_cpu_cores())
    if max(ranks) > max_ranks:
        raise ConfigError(
            f"--ranks {max(ranks)}: this machine cannot run one process for each rank; use at most {max_ranks}"
        )
    # Start at least two processes, because the reference is repeated in a second one. They import torch while this
    # process does.
    with WarmRanks(COMMAND, max(2, *ranks)) as warm:
        kind = load_recipe(recipe)
        resolved = configure(kind, file=config, flags=flags)
        from unisono.engine.verification.verify import VariantFailed, VerifyPlan, verify

        if options.steps is None:
            steps = max(steps, _steps_of_all_turns(kind, resolved))
        precision = options.precision or kind.verify_precision
        context = max(1, resolved.values["context_parallel"])  # verify() rejects others
        plan = VerifyPlan(ranks, steps, tuple(options.strategies.split(",")), precision, context)
        try:
            verdict = verify(recipe, resolved, plan, lambda text: print(text, file=sys.stderr, flush=True), warm)
        except VariantFailed as error:
            _print_failure(error)
            return error.exit_code
    return print_verdict(verdict, plan)


def _steps_of_all_turns(kind: type[Recipe], resolved: Resolved) -> int:
    """Returns the number of steps that train each group once, plus one step that trains the first group again."""
    groups = check_groups(kind(resolved.build(kind.Config)).groups())
    return 1 + sum(group.steps for group in groups) if groups else 0


def _print_failure(failure: VariantFailed) -> None:
    if failure.trace:
        print(failure.trace, file=sys.stderr)
    print(f"unisono: {failure}", file=sys.stderr, flush=True)


def _numbers(text: str, name: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"--{name}: expected whole numbers from 1 on, for instance 1,2; got {text!r}")
    return numbers


def print_verdict(verdict: Verdict, plan: VerifyPlan) -> int:
    """Prints the table and the conclusion; returns the exit code."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{plan.steps} steps in {plan.precision}: largest difference from the reference")
    for column in ("ranks", "strategy", "micro-batches", "loss", "metrics", "weights", "verdict"):
        table.add_column(column, justify="left" if column in ("strategy", "verdict") else "right")
    for result in verdict.results:
        table.add_row(*_cells(result))
    console = Console()
    console.print(table)
    for result in verdict.results:
        if result.failure is not None:
            _print_failure(result.failure)
    if verdict.unrepeatable_metrics:
        names = ", ".join(sorted(verdict.unrepeatable_metrics))
        console.print(f"These metrics differ between two runs of the reference and are not compared: {names}.")
    differing = next((each for each in verdict.results if each.differences is not None and not each.same), None)
    if differing is not None:
        console.print(_why(differing, verdict.results, plan))
        return EXIT_DIFFERENCE
    failed = sum(result.failure is not None for result in verdict.results)
    if failed:
        console.print(f"{failed} of {len(verdict.results)} runs failed; the others agree with the reference.")
        return EXIT_FAILED
    console.print(f"Same run ({_tolerances(verdict, plan.precision)}; dropout off).")
    return EXIT_DONE


def _cells(result: VariantResult) -> list[str]:
    variant, differences = result.variant, result.differences
    cells = [str(variant.ranks), variant.layout, f"{variant.micro_batches} x {variant.micro_batch}"]
    if differences is None:
        return [*cells, "", "", "", "FAILED"]
    gaps = (differences.loss, differences.metric, differences.weight)
    verdict = {"reference": "reference", "repeat": "repeatable", "variant": "same"}[result.role]
    if not differences.same:
        verdict = f"DIFFERS ({differences.different_weight or differences.different_metric or 'loss'})"
    return [*cells, *(f"{gap:.1e}" for gap in gaps), verdict]


def _why(result: VariantResult, results: Sequence[VariantResult], plan: VerifyPlan) -> str:
    """Describes what differs and the possible causes, most likely first."""
    assert result.differences is not None
    differences = result.differences.describe()
    if result.role == "repeat":
        return (
            f"Not repeatable: two runs of {result.variant.title} with the same seed differ: {differences}. The recipe "
            "depends on something that changes whenever it starts: the time, os.urandom, a generator without a seed, "
            "the order of a set, a file that it writes itself. Fix this first: until then, runs on different numbers "
            "of ranks cannot be compared."
        )
    causes = []
    buffers = list(
        dict.fromkeys(name for each in results if each.differences for name in each.differences.different_buffers)
    )
    if buffers:
        shown = ", ".join(buffers[:3]) + (f" and {len(buffers) - 3} more" if len(buffers) > 3 else "")
        causes.append(
            f"state that the forward pass changes once per micro-batch (here {shown}; batch norm, spectral norm and "
            "counters do this)"
        )
    causes += ["a loss that is a mean instead of a sum with its count", "random numbers that do not come from `noise`"]
    if result.differences.trained_the_same:
        causes = ["a metric that is a mean of means: return a sum, or a sum with its own count"]
    elif plan.precision == "float64":
        causes.append("a loss or a layer that casts to float32 (then use --precision float32)")
    else:
        causes.append(f"rounding in {plan.precision} (--precision float64 would rule it out)")
    return f"Not the same run: {result.variant.title}: {differences}. Usual causes: {'; '.join(causes)}."


def _tolerances(verdict: Verdict, precision: str) -> str:
    from unisono.engine.verification.compare import TOLERANCES

    limit = TOLERANCES[precision]
    if not math.isfinite(limit.weight_floor):
        return f"tolerance {limit.loss:.0e} for losses; metrics and weights are not compared in 16 bit"
    text = (
        f"tolerance {limit.loss:.0e} for losses, {limit.metric:.0e} for metrics, {limit.weight_floor:.0e} for weights"
    )
    if verdict.drift > limit.weight_floor:
        text += f", up to {limit.weight_floor + verdict.drift:.0e} for weights whose gradient is only rounding error"
    return text
