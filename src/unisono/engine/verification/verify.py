"""The proof: the same few steps on several numbers of ranks, micro-batches and strategies, compared.

Each variant is an ordinary run in processes of its own, forked from ones that have imported torch (`warm_ranks.py`),
and is compared by what it leaves behind (`compare.py`). The first variant is the reference. It runs twice: a
recipe that does not even repeat itself says nothing about ranks.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from unisono.cluster.hangs.diagnosis import Limits
from unisono.cluster.hangs.heartbeat import read_heartbeats
from unisono.cluster.launch.warm_ranks import WarmRanks
from unisono.cluster.lifetime import LAUNCHER_PID
from unisono.cluster.outcome import Outcome, first_cause
from unisono.cluster.process_group import ATTEMPT
from unisono.config.resolve import Resolved
from unisono.devices import visible_gpus
from unisono.engine.batch import plan_batch
from unisono.engine.checks import check_settings
from unisono.engine.start.run import DevicePlan, plan_devices
from unisono.engine.verification.compare import TOLERANCES, Differences, RunRecord, compare, different_metrics
from unisono.errors import ConfigError, TrainingFailed, UserError
from unisono.settings import Settings

_SILENT_S = 20.0  # a run that has not begun after so long is announced, although it may still be refused


@dataclass(frozen=True)
class Question:
    """What is to be compared."""

    ranks: Sequence[int]
    steps: int
    strategies: Sequence[str]
    precision: str

    def __post_init__(self) -> None:
        """Refuses what cannot be asked."""
        if self.precision not in TOLERANCES:
            raise ConfigError(f"--precision {self.precision}: expected {', '.join(TOLERANCES)}")
        for strategy in self.strategies:
            if strategy not in ("ddp", "fsdp"):
                raise ConfigError(f"--strategies {strategy}: expected ddp or fsdp (one rank always runs single)")


@dataclass(frozen=True)
class Variant:
    """One way of carrying out the same steps."""

    ranks: int
    strategy: str
    micro_batch: int
    micro_batches: int

    @property
    def title(self) -> str:
        """In words."""
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}, {self.strategy}, {self.micro_batches} x {self.micro_batch}"


class VariantFailed(TrainingFailed):
    """A run that did not come to its end."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


@dataclass(frozen=True)
class Answer:
    """A variant beside the reference: how far it is from it, or why it failed."""

    variant: Variant
    role: str
    """"reference", "repeat" (the reference once more) or "variant"."""
    differences: Differences | None = None
    failure: VariantFailed | None = None

    @property
    def same(self) -> bool:
        """Whether this is the same run as the reference."""
        return self.differences is not None and self.differences.same


@dataclass(frozen=True)
class Verdict:
    """All answers, and what else the user should know."""

    answers: Sequence[Answer]
    drift: float
    """How far two runs may move a weight apart whose gradient is nothing but rounding."""
    unrepeatable_metrics: frozenset[str] = frozenset()
    """Metrics that differ between two runs of the reference, whose losses and weights are the same."""

    @property
    def repeatable(self) -> bool:
        """Whether the reference repeats itself."""
        return all(answer.same for answer in self.answers if answer.role == "repeat")


def variants(question: Question, global_batch: int) -> list[Variant]:
    """The runs to make: each number of ranks with one micro-batch per rank and with several, under each strategy."""
    found = []
    for ranks in question.ranks:
        share = -(-global_batch // ranks)
        for strategy in ("single",) if ranks == 1 else question.strategies:
            found += [
                Variant(ranks, strategy, size, -(-share // size)) for size in (share, *_smaller(global_batch, ranks))
            ]
    return list(dict.fromkeys(found))


def _smaller(global_batch: int, ranks: int) -> list[int]:
    """A size for several micro-batches, where there is one: best uneven ones.

    The mean of equal parts' means would hide a loss that is a mean.
    """
    share = -(-global_batch // ranks)
    sizes = [size for parts in (3, 4, 5, 2) if share >= parts and (size := -(-share // parts)) < share]
    # Batch norm refuses a single sample, so rather none of them.
    return sorted(sizes, key=lambda size: (_is_even(global_batch, ranks, size), share // -(-share // size) < 2))[:1]


def _is_even(global_batch: int, ranks: int, size: int) -> bool:
    share = -(-global_batch // ranks)
    return global_batch % (ranks * -(-share // size)) == 0


def uneven_batch(global_batch: int, ranks: Sequence[int]) -> int:
    """A batch that does not divide by the ranks, nor on one rank into equal micro-batches, for the same reason."""
    if max(ranks) > 1:
        return global_batch + 1 if global_batch % max(ranks) == 0 else global_batch
    while not any(not _is_even(global_batch, 1, size) for size in _smaller(global_batch, 1)):
        global_batch += 1
    return global_batch


def verify(
    recipe: str, resolved: Resolved, question: Question, tell: Callable[[str], None], warm: WarmRanks
) -> Verdict:
    """Runs every variant and compares it with the first; `warm` has as many processes as the most ranks, and two."""
    settings = resolved.build(Settings)
    check_settings(settings)
    plan = plan_batch(settings.batch, resolved.explicit, devices=max(question.ranks))
    batch = plan.global_batch
    if not resolved.explicit("global_batch_size"):
        batch = uneven_batch(batch, question.ranks)
    asked = variants(question, batch)
    if len(asked) == 1:
        raise ConfigError(
            f"--ranks {question.ranks[0]} with global_batch_size {batch} leaves nothing to compare; "
            "use --ranks 1,2 or a larger batch"
        )
    with tempfile.TemporaryDirectory(prefix="unisono-verify-") as folder:
        runner = _Runner(recipe, resolved, question, batch, Path(folder), warm, tell, len(asked) + 1)
        return _judge(runner, asked, question.precision)


def _judge(runner: _Runner, asked: Sequence[Variant], precision: str) -> Verdict:
    reference = runner.run(asked[0])
    answers = [Answer(asked[0], "reference", compare(reference, reference, precision))]
    # Not from the same process: what python draws when it starts (hashes of strings) must differ too.
    again = runner.run(asked[0], first=1, remark=" again")
    ignored = frozenset[str]()
    differences = compare(reference, again, precision)
    if differences.trained_the_same and not differences.same:
        ignored = different_metrics(reference, again, precision)
        differences = compare(reference, again, precision, ignored)
    answers.append(Answer(asked[0], "repeat", differences))
    verdict = Verdict(answers, reference.largest_drift(TOLERANCES[precision].epsilon), ignored)
    if not verdict.repeatable:
        return verdict
    for variant in asked[1:]:
        try:
            record = runner.run(variant)
        except VariantFailed as error:
            answers.append(Answer(variant, "variant", failure=error))
        else:
            answers.append(Answer(variant, "variant", compare(reference, record, precision, ignored)))
    return verdict


class _Runner:
    """Makes runs, one after the other, each in a folder of its own."""

    def __init__(
        self,
        recipe: str,
        resolved: Resolved,
        question: Question,
        global_batch: int,
        folder: Path,
        warm: WarmRanks,
        tell: Callable[[str], None],
        total: int,
    ) -> None:
        self._recipe, self._resolved, self._question, self._batch = recipe, resolved, question, global_batch
        self._folder, self._warm, self._tell, self._total, self._number = folder, warm, tell, total, 0
        # The ranks of a run meet here, as they do at the launcher's; the name of the attempt keeps runs apart.
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def run(self, variant: Variant, *, first: int = 0, remark: str = "") -> RunRecord:
        """Makes one run. A user's mistake is raised before the run is announced."""
        self._number += 1
        folder = self._folder / str(self._number)
        folder.mkdir()
        resolved = self._settings_of(variant, folder / "run")
        plan = plan_devices(resolved)
        try:
            return self._run(variant, resolved, plan, folder, first, remark)
        finally:
            if plan.lock is not None:  # a failure that is kept for the verdict would keep its GPUs too
                plan.lock.release()

    def _run(
        self, variant: Variant, resolved: Resolved, plan: DevicePlan, folder: Path, first: int, remark: str
    ) -> RunRecord:
        settings = resolved.build(Settings)
        if not plan.environ.get("CUDA_VISIBLE_DEVICES"):
            resolved = resolved.with_values(resolved.sources["gpus"], gpus="0")
        job = {
            "recipe": self._recipe,
            "resolved": resolved.to_json(),
            "requested_devices": None,
            "remarks": plan.remarks,
        }
        (folder / "job.json").write_text(json.dumps(job))
        announce = self._announcement(folder, f"running {variant.title}{remark} ({self._number} of {self._total}) …")
        environs = [{**plan.environ, **self._environ(rank, variant, folder)} for rank in range(variant.ranks)]
        limits = Limits(settings.launch.hang_timeout, settings.launch.start_timeout)
        outcomes = self._warm.run(environs, folder, limits, first=first, on_poll=lambda: next(announce, None))
        cause = first_cause(outcomes)
        if cause is not None and cause.kind == "user_error":
            raise UserError(cause.message)
        if cause is not None or any(outcome.kind != "done" for outcome in outcomes):
            raise _failure(variant, cause, folder)
        return RunRecord(folder / "run", settings.optim)

    def _announcement(self, folder: Path, text: str) -> Iterator[None]:
        """Tells the text once the run has begun, or takes long to; looks each time it is asked for the next value."""
        started = time.monotonic()
        while time.monotonic() - started < _SILENT_S:
            if any(beat.step > 0 or beat.phase == "prepare" for beat in read_heartbeats(folder)):
                break
            yield
        self._tell(text)

    def _environ(self, rank: int, variant: Variant, folder: Path) -> dict[str, str]:
        """What the launcher would tell a rank."""
        environ = {
            "RANK": rank,
            "WORLD_SIZE": variant.ranks,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": variant.ranks,
            "GROUP_RANK": 0,
            "GROUP_WORLD_SIZE": 1,
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": self._store.port,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": 0,
            ATTEMPT: f"run{self._number}",
            "UNISONO_JOB": folder,
            LAUNCHER_PID: os.getpid(),
        }
        if variant.ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
            environ["OMP_NUM_THREADS"] = max(1, len(os.sched_getaffinity(0)) // variant.ranks)
        return {name: str(value) for name, value in environ.items()}

    def _settings_of(self, variant: Variant, output: Path) -> Resolved:
        precision = self._question.precision
        evaluates = self._resolved.values["eval_every"] != -1
        return self._resolved.with_values(
            "flag",
            output_dir=str(output),
            max_steps=self._question.steps,
            num_epochs=None,
            global_batch_size=self._batch,
            gradient_accumulation_steps=None,
            batch_size=variant.micro_batch,
            micro_batch=None,
            strategy=variant.strategy,
            nproc=variant.ranks,
            gpus=_gpus(self._resolved, variant.ranks),
            mixed_precision=precision if precision in ("bf16", "fp16") else "no",
            lr_schedule="constant",
            warmup_steps=0,
            dtype="float64" if precision == "float64" else "float32",
            disable_dropout=True,
            resume="never",
            log_every=1,
            save_every=0,
            eval_every=0 if evaluates else -1,
            preview_every=-1,
            tensorboard=False,
            max_restarts=0,
        )


def _failure(variant: Variant, cause: Outcome | None, folder: Path) -> VariantFailed:
    if cause is None:
        return VariantFailed(f"{variant.title}: stopped before its last step")
    trace = cause.traceback.rstrip()
    for file in (folder / "run" / "tracebacks").glob("*.txt"):
        if str(file) in trace:  # the folder of this run is temporary
            handle, kept = tempfile.mkstemp(prefix="unisono-traceback-", suffix=".txt")
            with os.fdopen(handle, "wb") as copy:
                copy.write(file.read_bytes())
            trace = trace.replace(str(file), kept)
    return VariantFailed(f"{variant.title}: {cause.describe()}", trace)


def _gpus(resolved: Resolved, ranks: int) -> str:
    """As many GPUs as ranks, or as there are: then ranks share them."""
    if resolved.explicit("gpus") and resolved.values["gpus"] == "0":
        return "0"
    return str(min(ranks, len(visible_gpus())))
