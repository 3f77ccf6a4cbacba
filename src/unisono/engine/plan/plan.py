"""Predicts memory and time of a recipe's step on a cluster, for every combination of settings worth comparing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unisono.config.resolve import Resolved
from unisono.engine.fit.choose import Card, Fitter
from unisono.engine.fit.sample import example_of
from unisono.engine.plan.options import Flags, Mesh, base_formats, is_compiled, meshes, recompute_levels
from unisono.engine.recipe import Recipe
from unisono.errors import ConfigError
from unisono.planning.memory.estimate import Estimate, card_memory
from unisono.planning.speed.collectives import ring_between, ring_of_all, ring_within
from unisono.planning.speed.gpus import Cluster
from unisono.planning.speed.step_time import Micro, StepTime, Traffic, step_time
from unisono.settings import Settings

_BYTES_PER_UPDATE = {"adamw": 28, "adam": 28, "sgd": 20, "adamw8bit": 16, "adamw4bit": 14, "muon": 24, "adafactor": 20}
"""Bytes of GPU memory that an optimizer reads and writes per trained weight."""

_DEFAULTS = (("activation_checkpointing", False), ("recompute_every", 1), ("shard_size", "all"))


@dataclass(frozen=True)
class Row:
    """One combination of settings, with its predicted memory and time."""

    mesh: Mesh
    flags: Flags  # all settings that differ from the user's
    micro_batch: int
    num_micro_batches: int
    memory: Estimate
    fits: bool
    time: StepTime
    samples_per_step: int
    flops: float  # operations of all ranks in one step, without recomputation
    peak: float  # sustained rate of all GPUs together, in FLOP/s
    default_micro_batch: int  # micro-batch size if the setting micro_batch is not set
    is_lossy: bool = False

    @property
    def effort(self) -> float:
        """The sort key: the time of a step plus 1 % per complication, so that simpler rows win if times are similar."""
        complications = {"hsdp": 2, "fsdp": 1}.get(self.mesh.name, 0) + 2 * (self.mesh.context > 1)
        return self.time.total * (1 + 0.01 * (complications + ("blocks_on_host" in self.flags)))

    @property
    def title(self) -> str:
        """The strategy in words."""
        shards = f" {self.mesh.shard_size}" if self.mesh.name == "hsdp" else ""
        return f"{self.mesh.name}{shards}" + (f", context {self.mesh.context}" if self.mesh.context > 1 else "")

    @property
    def changes(self) -> Flags:
        """The settings to pass on the command line: those that differ from their defaults."""
        changes = {name: value for name, value in self.flags.items() if (name, value) not in _DEFAULTS}
        return changes if self.micro_batch == self.default_micro_batch else {**changes, "micro_batch": self.micro_batch}

    @property
    def description(self) -> str:
        """The settings besides the strategy, in words."""
        level = {True: "recompute all blocks", "selective": "recompute what is cheap"}
        words = [level.get(self.flags.get("activation_checkpointing", False), "")]
        if self.flags.get("recompute_every", 1) > 1:
            words = [f"recompute every {self.flags['recompute_every']}nd block"]
        if "base_precision" in self.flags:
            words.append(f"frozen weights in {self.flags['base_precision']}")
        if "blocks_on_host" in self.flags:
            words.append(f"{self.flags['blocks_on_host']} blocks on the host")
        return ", ".join(word for word in words if word)

    @property
    def samples_per_s(self) -> float:
        """Samples per second of the whole cluster."""
        return self.samples_per_step / self.time.total

    @property
    def utilization(self) -> float:
        """Fraction of the sustained rate that the model's operations reach."""
        return self.flops / self.time.total / self.peak


@dataclass(frozen=True)
class Plan:
    """All rows, the best first: those that fit, by speed; then the others, by memory."""

    cluster: Cluster
    rows: Sequence[Row]

    @property
    def recommended(self) -> Row | None:
        """The fastest row that fits and does not change the result; if there is none, the fastest row that fits."""
        fitting = [row for row in self.rows if row.fits]
        return next((row for row in fitting if not row.is_lossy), fitting[0] if fitting else None)


class Planner:
    """Plans the runs of one recipe on one cluster."""

    def __init__(self, recipe: Recipe, resolved: Resolved, cluster: Cluster) -> None:
        self._recipe, self._resolved, self._cluster = recipe, resolved, cluster
        settings = resolved.build(Settings)
        batch = settings.batch
        accumulation = batch.gradient_accumulation_steps or 1
        context = settings.parallel.context_parallel
        self._global = batch.global_batch_size or batch.batch_size * accumulation * (cluster.ranks // context)
        self._settings = settings
        self._fitter = Fitter(
            recipe, resolved, example_of, micro_batch=1, share=self._global, fp8_products=cluster.gpu.has_fp8
        )
        self._card = Card(card_memory(cluster.memory_gb), cluster.ranks)

    def plan(self) -> Plan:
        """Compares all combinations. Raises CannotTrace if the model cannot be traced."""
        memory = self._fitter.memory
        levels = recompute_levels(self._resolved, has_blocks=memory.has_blocks(self._settings))
        formats = base_formats(self._resolved, has_frozen_linears=memory.has_frozen_linears(self._settings))
        rows = [
            row
            for mesh in meshes(self._cluster, self._recipe, self._resolved)
            for base in formats
            for level in levels
            if (row := self._row(mesh, {**mesh.flags, **base, **level}, is_lossy=bool(base))) is not None
        ]
        if not rows:
            raise ConfigError(f"the settings allow no strategy on {self._cluster}; remove strategy or shard_size")
        order = sorted(rows, key=lambda row: (not row.fits, row.effort if row.fits else row.memory.total))
        return Plan(self._cluster, order)

    def _row(self, mesh: Mesh, flags: Flags, *, is_lossy: bool) -> Row | None:
        data_ranks = self._cluster.ranks // mesh.context
        share = -(-self._global // data_ranks)
        cap = self._settings.batch.micro_batch
        limit = min(share, cap if isinstance(cap, int) else self._settings.batch.batch_size)
        size, flags, estimate = self._largest_that_fits(mesh, flags, limit, share)
        fits = estimate.total <= self._card.room
        settings = self._built(flags)
        micro_batches = -(-share // size)
        work = self._fitter.memory.work(settings, size)
        plain = self._fitter.memory.work(self._built({**flags, "activation_checkpointing": False}), size)
        blocks = self._fitter.memory.swapped(settings)
        host = float(blocks.host_bytes if blocks.num else 0)
        per_micro = (3 if blocks.is_trained else 2) * host * (0.5 if blocks.is_trained else 1.0)
        micro = Micro(
            work * (1 / mesh.context),
            compiled=is_compiled(settings),
            recorded=settings.precision.cuda_graph,
            tf32=settings.precision.tf32,
            copied_bytes=per_micro,
        )
        trained = self._fitter.memory.trained_weights(settings)
        time = step_time(
            self._cluster.gpu,
            micro,
            num_micro_batches=micro_batches,
            traffic=self._traffic(mesh, settings, work.attended_bytes / mesh.context),
            update_bytes=trained / mesh.shard_size * _BYTES_PER_UPDATE.get(settings.optim.optimizer.lower(), 28),
            update_copies=2 * host if blocks.is_trained else 0.0,
        )
        samples = min(self._global, size * micro_batches * data_ranks)
        peak = self._cluster.ranks * self._cluster.gpu.rate(self._product_rate(settings))
        flops = plain.flops * micro_batches * data_ranks
        return Row(mesh, flags, size, micro_batches, estimate, fits, time, samples, flops, peak, limit, is_lossy)

    @staticmethod
    def _product_rate(settings: Settings) -> str:
        if settings.precision.mixed_precision == "no":
            return "tf32" if settings.precision.tf32 else "fp32"
        return "bf16"

    def _largest_that_fits(self, mesh: Mesh, flags: Flags, limit: int, share: int) -> tuple[int, Flags, Estimate]:
        """Returns the largest micro-batch size that fits, its flags (with blocks_on_host if needed), and the memory."""
        room = self._card.room

        def estimate(size: int, more: Flags = {}) -> Estimate:  # noqa: B006
            return self._fitter.memory.estimate(
                self._built({**flags, **more}), micro_batch=size, ranks=self._cluster.ranks, accumulates=share > size
            )

        size, whole = limit, estimate(limit)
        if whole.total <= room:
            return size, flags, whole
        one = estimate(1)
        if one.total <= room:
            per_sample = (whole.total - one.total) / max(limit - 1, 1)
            size = max(1, min(limit - 1, int(1 + (room - one.total) / max(per_sample, 1))))
            size = -(-share // -(-share // size))  # equal micro-batches
            chosen = estimate(size)
            while chosen.total > room and size > 1:
                size = -(-size // 2)
                chosen = estimate(size)
            return size, flags, chosen
        if flags["strategy"] in ("single", "ddp") and mesh.context == 1:
            host = self._fitter.fewest_blocks({**flags, "micro_batch": 1}, room, self._card)
            if host:
                swapped = {**flags, "blocks_on_host": host}
                return 1, swapped, estimate(1, {"blocks_on_host": host})
        return 1, flags, one

    def _traffic(self, mesh: Mesh, settings: Settings, attended: float) -> Traffic:
        cluster, memory = self._cluster, self._fitter.memory
        if cluster.ranks == 1:
            return Traffic()
        trained = 4.0 * memory.trained_weights(settings)
        exposed = ring_within(cluster, mesh.context).all_to_all(attended / 2) if mesh.context > 1 else 0.0
        num_blocks = max(1, memory.num_blocks(settings))
        if mesh.shard_size == 1:
            ring = ring_of_all(cluster)
            bucket = min(trained, settings.parallel.bucket_cap_mb * 2**20)
            return Traffic(per_step=ring.all_reduce(trained), exposed=exposed, tail=ring.all_reduce(bucket))
        inner = ring_within(cluster, mesh.shard_size)
        gathers = 2 if settings.parallel.fsdp_reshard_after_forward else 1
        gather = num_blocks * inner.gather(memory.gathered_bytes(settings) / num_blocks)
        scatter = num_blocks * inner.gather(trained / num_blocks)
        between = 0.0
        if mesh.shard_size < cluster.ranks:
            between = num_blocks * ring_between(cluster, mesh.shard_size).all_reduce(
                trained / mesh.shard_size / num_blocks
            )
        exposed += gather / num_blocks
        if settings.parallel.fsdp_sync == "last":
            return Traffic(gathers * gather, scatter + between, exposed, scatter / num_blocks)
        return Traffic(gathers * gather + scatter + between, 0.0, exposed, scatter / num_blocks)

    def _built(self, flags: Flags) -> Settings:
        values: dict[str, Any] = dict(flags)
        return self._fitter.applied(values).build(Settings)


def fastest_by_mesh(plan: Plan, *, everything: bool = False) -> list[Row]:
    """Returns the best row for each mesh and format of frozen weights, or all rows."""
    if everything:
        return list(plan.rows)
    best: dict[Any, Row] = {}
    for row in plan.rows:
        best.setdefault((row.title, row.flags.get("base_precision")), row)
    return list(best.values())
