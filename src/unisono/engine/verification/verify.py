"""Runs the same few steps with different numbers of ranks, micro-batches and strategies, and compares the results.

Each variant is an ordinary run in its own processes, forked from processes that have imported torch (`warm_ranks.py`).
`compare.py` compares the files of its run folder with the files of the first variant, the reference. The reference runs
twice: if a recipe is not repeatable, comparing numbers of ranks is meaningless.
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

from unisono.checkpoint.find import read_extra
from unisono.cluster.hangs.diagnosis import Limits
from unisono.cluster.hangs.heartbeat import read_heartbeats
from unisono.cluster.launch.job_folder import job_folder
from unisono.cluster.launch.warm_ranks import WarmRanks
from unisono.cluster.lifetime import LAUNCHER_PID
from unisono.cluster.outcome import Outcome, first_cause
from unisono.cluster.process_group import ATTEMPT
from unisono.config.resolve import Resolved
from unisono.devices import visible_gpus
from unisono.engine.batch import plan_batch
from unisono.engine.checks import check_context, check_settings
from unisono.engine.start.device_plan import DevicePlan, plan_devices
from unisono.engine.verification.compare import TOLERANCES, Differences, RunRecord, compare, different_metrics
from unisono.errors import ConfigError, TrainingFailed, UserError
from unisono.planning.choose import divisors
from unisono.settings import Settings

_ANNOUNCE_AFTER_S = 20.0  # seconds after which a run is announced even if it has not begun


@dataclass(frozen=True)
class VerifyPlan:
    """The runs to compare."""

    ranks: Sequence[int]
    steps: int
    strategies: Sequence[str]
    precision: str
    context: int = 1
    """Number of ranks that share a sample, in runs of several ranks."""

    def __post_init__(self) -> None:
        if self.precision not in TOLERANCES:
            raise ConfigError(f"--precision {self.precision}: expected {', '.join(TOLERANCES)}")
        for strategy in self.strategies:
            if strategy not in ("ddp", "fsdp", "hsdp"):
                raise ConfigError(f"--strategies {strategy}: expected ddp, fsdp or hsdp (one rank always runs single)")
        for ranks in self.ranks:
            check_context(self.context_of(ranks), ranks)

    def context_of(self, ranks: int) -> int:
        """Returns the number of ranks that share a sample in a run of `ranks` ranks; 1 if there is only one rank."""
        return self.context if ranks > 1 else 1

    @property
    def most_shares(self) -> int:
        """The largest number of shares that a run divides its global batch into."""
        return max(ranks // self.context_of(ranks) for ranks in self.ranks)


@dataclass(frozen=True)
class Variant:
    """A number of ranks, a strategy and a micro-batch size with which to execute the steps."""

    ranks: int
    strategy: str
    micro_batch: int
    micro_batches: int
    shard_size: int | str = "auto"  # number of ranks per copy of the weights, for fsdp and hsdp
    context: int = 1

    @property
    def layout(self) -> str:
        """The strategy, the number of ranks that hold one copy of the weights, and the number that share a sample."""
        shards = "" if self.shard_size == "auto" else f" {self.shard_size}"
        return f"{self.strategy}{shards}" + ("" if self.context == 1 else f", context {self.context}")

    @property
    def title(self) -> str:
        """A description of the variant."""
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}, {self.layout}, {self.micro_batches} x {self.micro_batch}"


class VariantFailed(TrainingFailed):
    """Raised for a run that did not finish."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


@dataclass(frozen=True)
class VariantResult:
    """The differences between a variant and the reference, or the reason why the variant failed."""

    variant: Variant
    role: str
    """The role of the run: "reference", "repeat" (the second run of the reference) or "variant"."""
    differences: Differences | None = None
    failure: VariantFailed | None = None

    @property
    def same(self) -> bool:
        """Whether this is the same run as the reference."""
        return self.differences is not None and self.differences.same


@dataclass(frozen=True)
class Verdict:
    """The results of all variants."""

    results: Sequence[VariantResult]
    drift: float
    """The tolerated difference of a weight whose gradient is only rounding error."""
    unrepeatable_metrics: frozenset[str] = frozenset()
    """Metrics that differ between two runs of the reference although losses and weights are the same."""

    @property
    def repeatable(self) -> bool:
        """Whether the two runs of the reference are the same."""
        return all(result.same for result in self.results if result.role == "repeat")


def variants(
    plan: VerifyPlan, global_batch: int, shard_size: int | str = "auto", *, single_samples: bool = False
) -> list[Variant]:
    """Returns the runs to compare: each number of ranks, under each strategy, with one and with several micro-batches.

    With `single_samples`, all micro-batches have one sample, for settings whose result depends on the micro-batches.
    """
    all_variants = []
    for ranks in plan.ranks:
        context = plan.context_of(ranks)
        shares = ranks // context
        share = -(-global_batch // shares)
        for strategy in ("single",) if ranks == 1 else plan.strategies:
            for size in (1,) if single_samples else (share, *_smaller(global_batch, shares)):
                shards = _shard_size(strategy, ranks, shard_size)
                all_variants.append(Variant(ranks, strategy, size, -(-share // size), shards, context))
    return list(dict.fromkeys(all_variants))


def _shard_size(strategy: str, ranks: int, requested: int | str) -> int | str:
    """Returns a variant's shard_size: the user's value, or for hsdp one with two copies of the weights, if possible."""
    if strategy not in ("fsdp", "hsdp"):
        return "auto"
    return divisors(ranks)[-2] if strategy == "hsdp" and requested == "auto" else requested


def _smaller(global_batch: int, ranks: int) -> list[int]:
    """Returns a micro-batch size that splits a rank's share, if there is one, with uneven parts if possible.

    Equal parts would hide a loss that wrongly returns a mean: the mean of their means is the overall mean.
    """
    share = -(-global_batch // ranks)
    sizes = [size for parts in (3, 4, 5, 2) if share >= parts and (size := -(-share // parts)) < share]
    # Avoid micro-batches of a single sample, which batch norm rejects.
    return sorted(sizes, key=lambda size: (_is_even(global_batch, ranks, size), share // -(-share // size) < 2))[:1]


def _is_even(global_batch: int, ranks: int, size: int) -> bool:
    share = -(-global_batch // ranks)
    return global_batch % (ranks * -(-share // size)) == 0


def uneven_batch(global_batch: int, ranks: Sequence[int]) -> int:
    """Returns the next batch size that ranks, or one rank's micro-batches, cannot divide evenly; see `_smaller`."""
    if max(ranks) > 1:
        return global_batch + 1 if global_batch % max(ranks) == 0 else global_batch
    while not any(not _is_even(global_batch, 1, size) for size in _smaller(global_batch, 1)):
        global_batch += 1
    return global_batch


def verify(
    recipe: str, resolved: Resolved, plan: VerifyPlan, message: Callable[[str], None], warm: WarmRanks
) -> Verdict:
    """Runs all variants and compares each with the first.

    `message` prints progress; `warm` must have at least two processes, and one for each rank of the largest run.
    """
    settings = resolved.build(Settings)
    check_settings(settings)
    batch = plan_batch(settings.batch, resolved.explicit, devices=plan.most_shares).global_batch
    if not resolved.explicit("global_batch_size"):
        batch = uneven_batch(batch, [plan.most_shares])
    lossy = settings.precision.quantize_weight_gradient
    if lossy:
        message(
            "quantize_weight_gradient depends on the micro-batches by design: comparing micro-batches of one sample"
        )
    to_run = variants(plan, batch, settings.parallel.shard_size, single_samples=lossy)
    if len(to_run) == 1:
        raise ConfigError(
            f"--ranks {plan.ranks[0]} with global_batch_size {batch} leaves nothing to compare; "
            "use --ranks 1,2 or a larger batch"
        )
    with job_folder() as folder:
        runner = _Runner(recipe, resolved, plan, batch, folder, warm, message, len(to_run) + 1)
        return _compare_all(runner, to_run, plan.precision)


def _compare_all(runner: _Runner, to_run: Sequence[Variant], precision: str) -> Verdict:
    reference = runner.run(to_run[0])
    if "streams" in read_extra(reference.checkpoint):
        raise UserError(
            'verify compares numbers of ranks, and dataset("train") is a stream: each rank reads its own, so other '
            "ranks train on other samples by design; return a map-style dataset to verify the rest of the recipe"
        )
    results = [VariantResult(to_run[0], "reference", compare(reference, reference, precision))]
    # Run in another process, so that string hashes, which Python randomises when it starts, differ too.
    again = runner.run(to_run[0], first=1, remark=" again")
    ignored = frozenset[str]()
    differences = compare(reference, again, precision)
    if differences.trained_the_same and not differences.same:
        ignored = different_metrics(reference, again, precision)
        differences = compare(reference, again, precision, ignored)
    results.append(VariantResult(to_run[0], "repeat", differences))
    verdict = Verdict(results, reference.largest_drift(TOLERANCES[precision].epsilon), ignored)
    if not verdict.repeatable:
        return verdict
    for variant in to_run[1:]:
        try:
            record = runner.run(variant)
        except VariantFailed as error:
            results.append(VariantResult(variant, "variant", failure=error))
        else:
            results.append(VariantResult(variant, "variant", compare(reference, record, precision, ignored)))
    return verdict


class _Runner:
    """Runs variants one after the other, each in its own folder."""

    def __init__(
        self,
        recipe: str,
        resolved: Resolved,
        plan: VerifyPlan,
        global_batch: int,
        folder: Path,
        warm: WarmRanks,
        message: Callable[[str], None],
        total: int,
    ) -> None:
        self._recipe, self._resolved, self._plan, self._batch = recipe, resolved, plan, global_batch
        self._folder, self._warm, self._message, self._total, self._number = folder, warm, message, total, 0
        # All runs share the store; the name of the attempt prefixes each run's keys.
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def run(self, variant: Variant, *, first: int = 0, remark: str = "") -> RunRecord:
        """Runs one variant; a UserError is raised before the run is announced."""
        self._number += 1
        folder = self._folder / str(self._number)
        folder.mkdir()
        resolved = self._settings_of(variant, folder / "run")
        devices = plan_devices(resolved)
        try:
            return self._run(variant, resolved, devices, folder, first, remark)
        finally:
            if devices.lock is not None:  # the verdict may contain an exception whose frames keep the lock alive
                devices.lock.release()

    def _run(
        self, variant: Variant, resolved: Resolved, devices: DevicePlan, folder: Path, first: int, remark: str
    ) -> RunRecord:
        settings = resolved.build(Settings)
        job = {
            "recipe": self._recipe,
            "resolved": devices.applied_to(resolved).to_json(),
            "requested_devices": None,
            "remarks": devices.remarks,
        }
        (folder / "job.json").write_text(json.dumps(job))
        announce = self._announcement(folder, f"running {variant.title}{remark} ({self._number} of {self._total}) …")
        environs = [{**devices.environ, **self._environ(rank, variant, folder)} for rank in range(variant.ranks)]
        limits = Limits(settings.launch.hang_timeout, settings.launch.start_timeout)
        outcomes = self._warm.run(environs, folder, limits, first=first, on_poll=lambda: next(announce, None))
        cause = first_cause(outcomes)
        if cause is not None and cause.kind == "user_error":
            raise UserError(cause.message)
        if cause is not None or any(outcome.kind != "done" for outcome in outcomes):
            raise _failure(variant, cause, folder)
        return RunRecord(folder / "run", settings.optim)

    def _announcement(self, folder: Path, text: str) -> Iterator[None]:
        """Prints `text` once the run has begun, or after a while; each `next()` checks again."""
        started = time.monotonic()
        while time.monotonic() - started < _ANNOUNCE_AFTER_S:
            if any(beat.step > 0 or beat.phase == "prepare" for beat in read_heartbeats(folder)):
                break
            yield
        self._message(text)

    def _environ(self, rank: int, variant: Variant, folder: Path) -> dict[str, str]:
        """Returns the environment that a launcher gives a rank."""
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
        precision = self._plan.precision
        evaluates = self._resolved.values["eval_every"] != -1
        return self._resolved.with_values(
            "flag",
            output_dir=str(output),
            mirror=None,
            max_steps=self._plan.steps,
            num_epochs=None,
            global_batch_size=self._batch,
            gradient_accumulation_steps=None,
            batch_size=variant.micro_batch,
            micro_batch=None,
            strategy=variant.strategy,
            shard_size=variant.shard_size,
            nproc=variant.ranks,
            context_parallel=variant.context,
            gpus=_gpus(self._resolved, variant.ranks),
            mixed_precision=precision if precision in ("bf16", "fp16") else "no",
            quantize=self._resolved.build(Settings).precision.product_format or "no",
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
            handle, copy_path = tempfile.mkstemp(prefix="unisono-traceback-", suffix=".txt")
            with os.fdopen(handle, "wb") as copy:
                copy.write(file.read_bytes())
            trace = trace.replace(str(file), copy_path)
    return VariantFailed(f"{variant.title}: {cause.describe()}", trace)


def _gpus(resolved: Resolved, ranks: int) -> str:
    """Returns the setting gpus: one GPU per rank, or all GPUs if there are fewer than ranks, which then share GPUs."""
    if resolved.explicit("gpus") and resolved.values["gpus"] == "0":
        return "0"
    return str(min(ranks, len(visible_gpus())))
