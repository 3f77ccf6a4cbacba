"""The rows of benchmarks/nccl.py, most important first; each compares a run over NCCL with a run of one rank."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

from nccl_runs import (
    CONTRAST,
    IN_FLOAT64,
    PROBE,
    ROUNDING,
    STEPS,
    Failed,
    Runs,
    check_all_checkpoints,
    compare_evaluations,
    compare_steps,
    compare_weights,
    events,
    expect,
    largest,
    step_lines,
)

from unisono.engine.verification.compare import TOLERANCES
from unisono.settings import ParallelSettings

STRATEGIES = ("ddp", "fsdp")
FAULTS = ("kill", "hang", "oom", "nan", "slow")
HANG_S = "10"
SLOW_S = 0.5
WAN = ("--model_config", "tiny", "--num_shapes", "32", "--eval_every", "-1", "--mixed_precision", "no")
WAN_STEPS = 4
WAN_ROUNDING = 1e-4  # of float32
GRAPH_ROUNDING = 1e-7  # recorded kernels read the learning rate as float32, also in a float64 run


@dataclass(frozen=True)
class Case:
    """One row. Its work returns the largest difference from a run of one rank, which must not exceed `tolerance`."""

    name: str
    text: str
    work: Callable[[Runs], float]
    expected_s: float
    """Approximate seconds on a GPU; each start or restart of ranks takes about 10 s."""
    tolerance: float = ROUNDING
    needs: str = ""
    """Requirement of this row: the name of a setting that must exist, or "gpu"."""
    quick: bool = False


def all_cases(ranks: Sequence[int]) -> list[Case]:
    """The rows for these numbers of ranks in order of importance."""
    few, more = ranks[0], ranks[1:]
    cases = [*_verify(few, "float64"), *_resume(ranks), *_faults_one_by_one(few)]
    for number in ranks:
        cases += [*_meshes(number)]
    cases += [*_other(few), *_verify(few, "bf16")]
    for number in more:
        cases += [*_verify(number, "float64"), *_faults_together(number), *_other(number), *_verify(number, "bf16")]
    return cases


def missing(case: Case, backend: str) -> str:
    """The reason why this row cannot run here; empty if it can."""
    if case.needs == "gpu":
        return "" if backend == "nccl" else "needs a GPU"
    if case.needs and case.needs not in {field.name for field in fields(ParallelSettings)}:
        return f"there is no --{case.needs}"
    return ""


# --- verify ---


def _verify(number: int, precision: str) -> Iterator[Case]:
    for strategy in STRATEGIES:
        flags = ("--strategies", strategy, "--precision", precision, "--steps", "4")
        yield Case(
            f"verify-{precision}-{strategy}-{number}",
            f"`verify --ranks 1,{number} --strategies {strategy} --precision {precision}`",
            partial(_verified, number=number, flags=flags),
            expected_s=25,
            tolerance=TOLERANCES[precision].loss,  # verify compares only losses in 16 bit
            quick=precision == "float64" and strategy == "fsdp",
        )


def _verified(runs: Runs, number: int, flags: Sequence[str], recipe: str = PROBE) -> float:
    return runs.verify(number, *flags, recipe=recipe)


# --- resume ---


def _resume(ranks: Sequence[int]) -> Iterator[Case]:
    way = [1, *ranks, *reversed(ranks[:-1]), 1]
    for strategy in STRATEGIES:
        yield Case(
            f"resume-{strategy}",
            f"resumed on {'→'.join(map(str, way))} ranks, {strategy}",
            partial(_resumed, way=way, strategy=strategy),
            expected_s=12 * len(way),
        )


def _resumed(runs: Runs, way: Sequence[int], strategy: str) -> float:
    """Each number of ranks trains two steps; the last one trains to the end."""
    reference, folder = runs.reference(*IN_FLOAT64), runs.new("resume")
    for position, number in enumerate(way):
        steps = STEPS if position == len(way) - 1 else 2 * (position + 1)
        flags = ["--strategy", "single" if number == 1 else strategy, *IN_FLOAT64]
        runs.train(folder, number, *flags, steps=steps)
    return runs.compare(folder, reference)


# --- faults ---


def _faults_one_by_one(number: int) -> Iterator[Case]:
    for kind in FAULTS:
        for strategy in STRATEGIES:
            yield Case(
                f"{kind}-{strategy}-{number}",
                f"`--inject {_fault(kind, number, strategy)}`, {strategy}, {number} ranks",
                partial(_disturbed, number=number, strategy=strategy, kinds=[kind]),
                expected_s=35 if kind == "hang" else 25,
                quick=(kind, strategy) == ("kill", "ddp"),
            )


def _faults_together(number: int) -> Iterator[Case]:
    kinds = ["oom", "kill", "hang", "nan"]
    for strategy in STRATEGIES:
        faults = ",".join(_fault(kind, number, strategy) for kind in kinds)
        yield Case(
            f"faults-{strategy}-{number}",
            f"`--inject {faults}`, {strategy}, {number} ranks",
            partial(_disturbed, number=number, strategy=strategy, kinds=kinds),
            expected_s=70,
        )


def _fault(kind: str, number: int, strategy: str) -> str:
    """A fault of this kind on the last rank; each kind has a different step."""
    # ddp recovers in place only in its first, guarded steps. fsdp restarts, so faults follow a checkpoint.
    step = {"oom": 2 if strategy == "ddp" else 4, "kill": 6, "hang": 8, "nan": 11, "slow": 3}[kind]
    return f"{kind}@rank{number - 1}:step{step}" + f":{SLOW_S}s" * (kind == "slow")


def _disturbed(runs: Runs, number: int, strategy: str, kinds: Sequence[str]) -> float:
    # A skipped step changes all later steps, so the undisturbed run of one rank skips the same step.
    skipped = ["--inject", _fault("nan", 1, strategy)] if "nan" in kinds else []
    reference, folder = runs.reference(*IN_FLOAT64, *skipped), runs.new("disturbed")
    faults = ",".join(_fault(kind, number, strategy) for kind in kinds)
    flags = ["--strategy", strategy, "--inject", faults, "--save_every", "2", "--max_restarts", "8"]
    runs.train(folder, number, *flags, "--hang_timeout", HANG_S, *IN_FLOAT64)
    for kind in kinds:
        _check_event(folder, kind, number - 1, strategy)
    return runs.compare(folder, reference)


def _check_event(folder: Path, kind: str, rank: int, strategy: str) -> None:
    """Raises unless the run noticed the fault and recovered the way it should."""
    causes = [event["cause"] for event in events(folder, "restart")]
    if kind == "kill":
        expect(any("SIGKILL" in cause for cause in causes), lambda: f"no restart after a SIGKILL: {causes}")
    elif kind == "slow" and strategy == "fsdp":
        # Ranks wait for each other in forward and backward passes, so all are equally slow and no rank is reported.
        slowed = statistics.median(line["step_ms"] for line in step_lines(folder)[4:] if "step_ms" in line)
        expect(slowed >= 1e3 * SLOW_S, lambda: f"the rank was not slowed down: {slowed:.0f} ms per step")
    elif kind == "oom":
        in_place = strategy == "ddp"
        seen = [event["in_place"] for event in events(folder, "oom")]
        expect(seen == [in_place], lambda: f"expected one oom event with in_place {in_place}, got {seen}")
    else:
        name = {"hang": "hang", "nan": "nan", "slow": "straggler"}[kind]
        seen = events(folder, name)
        # All ranks skip a step together, so the event of a nan names no rank.
        expect(
            bool(seen) and (kind == "nan" or all(event["rank"] == rank for event in seen)),
            lambda: f"expected {name} events of rank {rank}, got {seen}",
        )


# --- meshes ---


def _meshes(number: int) -> Iterator[Case]:
    if number >= 4:
        yield Case(
            f"hsdp-{number}",
            f"`--strategy fsdp --shard_size {number // 2}`, {number} ranks",
            partial(_sharded, number=number),
            expected_s=15,
            needs="shard_size",
        )
    if number <= 4:
        yield Case(
            f"context-{number}",
            f"`train wan-flow --model_config tiny --context_parallel 2`, {number} ranks, float32",
            partial(_split_samples, number=number),
            expected_s=60,
            tolerance=WAN_ROUNDING,
            needs="context_parallel",
        )


def _sharded(runs: Runs, number: int) -> float:
    reference, folder = runs.reference(*IN_FLOAT64), runs.new("hsdp")
    runs.train(folder, number, "--strategy", "fsdp", "--shard_size", str(number // 2), *IN_FLOAT64)
    return runs.compare(folder, reference)


def _split_samples(runs: Runs, number: int) -> float:
    reference = runs.reference(*WAN, "--log_every", "1", recipe="wan-flow", steps=WAN_STEPS)
    folder = runs.new("context")
    flags = ["--strategy", "ddp", "--context_parallel", "2", "--log_every", "1", *WAN]
    runs.train(folder, number, *flags, recipe="wan-flow", steps=WAN_STEPS)
    return compare_steps(folder, reference, WAN_STEPS)


# --- saves, contrastive losses, evaluation, CUDA graphs ---


def _other(number: int) -> Iterator[Case]:
    for strategy in STRATEGIES:
        yield Case(
            f"saves-{strategy}-{number}",
            f"a save in the background of every step, {strategy}, {number} ranks",
            partial(_saved, number=number, strategy=strategy),
            expected_s=15,
        )
    yield Case(
        f"contrastive-{number}",
        f"`verify` of a loss that compares samples, ddp and fsdp, 1 and {number} ranks",
        partial(
            _verified,
            number=number,
            flags=("--strategies", ",".join(STRATEGIES), "--steps", "3"),
            recipe=CONTRAST,
        ),
        expected_s=35,
    )
    yield Case(
        f"evaluation-{number}",
        f"evaluation of 13 samples and of 1, {number} ranks",
        partial(_evaluated, number=number),
        expected_s=25,
        quick=True,
    )
    yield Case(
        f"graph-ddp-{number}",
        f"`--cuda_graph`, ddp, {number} ranks",
        partial(_recorded, number=number),
        expected_s=15,
        tolerance=GRAPH_ROUNDING,
        needs="gpu",
    )


def _saved(runs: Runs, number: int, strategy: str) -> float:
    reference, folder = runs.reference(*IN_FLOAT64), runs.new("saves")
    runs.train(folder, number, "--strategy", strategy, "--save_every", "1", "--keep_last", "0", *IN_FLOAT64)
    check_all_checkpoints(folder, STEPS)
    at_each_step = [compare_weights(folder, reference, step) for step in range(1, STEPS + 1)]
    return largest([runs.compare(folder, reference), *at_each_step])


def _evaluated(runs: Runs, number: int) -> float:
    """With 13 samples, 2, 4 or 8 ranks have shares of different size; with 1 sample, only one rank has any."""
    differences = []
    for samples, strategy in ((13, "ddp"), (1, "fsdp")):
        flags = ["--eval_every", "2", "--num_eval", str(samples), *IN_FLOAT64]
        reference, folder = runs.reference(*flags, steps=4), runs.new("evaluation")
        runs.train(folder, number, "--strategy", strategy, *flags, steps=4)
        differences.append(compare_evaluations(folder, reference))
    return largest(differences)


def _recorded(runs: Runs, number: int) -> float:
    reference, folder = runs.reference("--fixed_length", *IN_FLOAT64), runs.new("graph")
    calls_file = runs.root / f"{folder.name}.calls"
    flags = ["--strategy", "ddp", "--cuda_graph", "--fixed_length", "--calls_file", str(calls_file), *IN_FLOAT64]
    runs.train(folder, number, *flags)
    for rank in range(number):
        calls = int(Path(f"{calls_file}.{rank}").read_text())
        if calls >= STEPS:
            raise Failed(f"rank {rank} called loss() {calls} times in {STEPS} steps: the graph was not replayed")
    return runs.compare(folder, reference)
