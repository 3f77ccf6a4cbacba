"""The settings that a plan compares: strategies, levels of recomputation, formats of frozen weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from unisono.config.resolve import Resolved
from unisono.engine.recipe import Recipe
from unisono.planning.choose import divisors
from unisono.planning.speed.gpus import Cluster
from unisono.settings import Settings

Flags = Mapping[str, Any]
STRATEGY_FLAGS = ("strategy", "shard_size", "context_parallel")
RECOMPUTE: tuple[Flags, ...] = (
    {"activation_checkpointing": False},
    {"activation_checkpointing": "selective"},
    {"activation_checkpointing": True, "recompute_every": 2},
    {"activation_checkpointing": True, "recompute_every": 1},
)
"""Levels of recomputation, the fastest first."""


@dataclass(frozen=True)
class Mesh:
    """How the ranks of a cluster share a run."""

    name: str
    flags: Flags
    shard_size: int = 1  # ranks that hold one copy of the weights
    context: int = 1  # ranks that process one sample together


def meshes(cluster: Cluster, recipe: Recipe, resolved: Resolved) -> Iterator[Mesh]:
    """Yields the meshes that the user's settings allow."""
    chosen = {name: resolved.values[name] for name in STRATEGY_FLAGS if resolved.explicit(name)}
    for mesh in _all_meshes(cluster, recipe):
        if all(_agrees(mesh, name, value, cluster) for name, value in chosen.items()):
            yield mesh


def _all_meshes(cluster: Cluster, recipe: Recipe) -> Iterator[Mesh]:
    ranks, per_node = cluster.ranks, cluster.gpus_per_node
    if ranks == 1:
        yield Mesh("single", {"strategy": "single"})
        return
    yield Mesh("ddp", {"strategy": "ddp"})
    yield Mesh("fsdp", {"strategy": "fsdp", "shard_size": "all"}, shard_size=ranks)
    if cluster.nodes > 1 and per_node > 1:
        yield Mesh("hsdp", {"strategy": "fsdp", "shard_size": "node"}, shard_size=per_node)
    elif cluster.nodes == 1:
        for size in divisors(ranks)[1:-1]:
            yield Mesh("hsdp", {"strategy": "fsdp", "shard_size": size}, shard_size=size)
    if recipe.supports_context_parallel:
        for size in divisors(per_node)[1:]:
            flags = {"context_parallel": size}
            yield Mesh("ddp", {"strategy": "ddp", **flags}, context=size)
            yield Mesh("fsdp", {"strategy": "fsdp", "shard_size": "all", **flags}, shard_size=ranks, context=size)


def _agrees(mesh: Mesh, name: str, value: Any, cluster: Cluster) -> bool:
    if name == "strategy":
        return bool(value in ("auto", "dp", mesh.flags["strategy"], mesh.name))
    if name == "context_parallel":
        return bool(mesh.context == value)
    sizes = {"all": cluster.ranks, "node": cluster.gpus_per_node}
    return bool(value == "auto" or mesh.shard_size == sizes.get(value, value))


def recompute_levels(resolved: Resolved, *, has_blocks: bool) -> list[Flags]:
    """Returns the levels of recomputation to compare; only the user's, if there is one."""
    if any(resolved.explicit(name) for name in ("activation_checkpointing", "recompute_every", "activation_memory_gb")):
        return [{}]
    return [level for level in RECOMPUTE if has_blocks or level.get("recompute_every") != 2]


def base_formats(resolved: Resolved, *, has_frozen_linears: bool) -> list[Flags]:
    """Returns the formats of frozen weights to compare: the user's, and 8 bits if there is anything to store."""
    if resolved.explicit("base_precision") or not has_frozen_linears:
        return [{}]
    return [{}, {"base_precision": "fp8"}]


def is_compiled(settings: Settings) -> bool:
    """Whether blocks are compiled."""
    return settings.precision.compile
