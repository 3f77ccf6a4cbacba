"""Requests the machines of a run from Ray, and waits until Ray has placed them.

All machines of a run are bundles of one placement group, so that two runs cannot deadlock with half of their machines
each. Ray spreads the bundles over the nodes, and moves the bundles of a lost node to another node. If a run accepts
fewer machines (`--nnodes 1:4`) and Ray has no room for all of them, the group contains only the minimum. Each further
machine is then a group of its own, which Ray places as soon as a node has room.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from unisono.config.resolve import Resolved
from unisono.errors import ConfigError, TrainingFailed
from unisono.formatting import format_count
from unisono.settings import Settings

_ALL_S = 30.0  # seconds to wait for all machines before a run begins with fewer, the same limit as without Ray
_MESSAGE_AFTER_S = 10.0


@dataclass(frozen=True)
class Needs:
    """The resources that one machine of a run needs."""

    ranks: int
    gpus: int

    @property
    def bundle(self) -> dict[str, float]:
        """Returns the resources as a Ray bundle: one CPU per rank, and the GPUs."""
        return {"CPU": float(self.ranks), **({"GPU": float(self.gpus)} if self.gpus else {})}

    def describe(self) -> str:
        """Describes the resources in words."""
        return format_count(self.ranks, "CPU") + (f" and {format_count(self.gpus, 'GPU')}" if self.gpus else "")


@dataclass(frozen=True)
class Place:
    """A placement-group bundle for one machine."""

    group: Any
    bundle: int


def needs_of(resolved: Resolved, fewest: int) -> Needs:
    """Returns the resources that a machine needs, from --gpus and --nproc; by default, all GPUs of a node."""
    settings = resolved.build(Settings)
    launch, text = settings.launch, settings.launch.gpus.strip()
    if launch.nproc is not None and not resolved.explicit("gpus"):
        gpus = 0
    elif text in ("auto", "all"):
        gpus = _gpus_per_node(fewest)
    elif text.isascii() and text.isdecimal():
        gpus = int(text)
    else:
        raise ConfigError(f"gpus {text}: Ray chooses the GPUs; pass the number of GPUs per machine, such as --gpus 8")
    if settings.parallel.strategy in ("single", "dp"):
        return Needs(1, gpus)
    return Needs(launch.nproc or gpus or 1, gpus)


def _gpus_per_node(machines: int) -> int:
    """Returns the largest number of GPUs that each of `machines` nodes can provide."""
    import ray

    counts = sorted((int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]), reverse=True)
    return counts[min(machines, len(counts)) - 1] if counts else 0


@contextmanager
def placed(
    needs: Needs, fewest: int, most: int, limit_s: float, print_line: Callable[[str], None]
) -> Iterator[list[Place]]:
    """Waits until Ray has room for at least `fewest` machines, at most `limit_s` seconds (0: no limit).

    Yields a place for each of `most` machines; Ray may assign a node to some of them later.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    groups: list[Any] = []

    def request(machines: int) -> Any:
        groups.append(placement_group([needs.bundle] * machines, strategy="SPREAD"))
        return groups[-1]

    try:
        group = request(most)
        if fewest < most and not _is_placed_within(group, _ALL_S):
            remove_placement_group(groups.pop())
            group = request(fewest)
        _wait(group, needs, limit_s, print_line)
        places = [Place(group, bundle) for bundle in range(group.bundle_count)]
        places += [Place(request(1), 0) for _ in range(most - len(places))]
        yield places
    finally:
        for each in groups:
            with suppress(Exception):  # the cluster may be gone
                remove_placement_group(each)


def _is_placed_within(group: Any, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not group.wait(1):
        if time.monotonic() > deadline:
            return False
    return True


def _wait(group: Any, needs: Needs, limit_s: float, print_line: Callable[[str], None]) -> None:
    machines = format_count(group.bundle_count, "machine")
    if _is_placed_within(group, min(_MESSAGE_AFTER_S, limit_s or _MESSAGE_AFTER_S)):
        return
    nodes = _free()
    print_line(f"waiting for Ray to place {machines} with {needs.describe()} each; free now: {nodes}")
    if not _is_placed_within(group, limit_s - _MESSAGE_AFTER_S if limit_s else float("inf")):
        raise TrainingFailed(
            f"Ray did not place {machines} with {needs.describe()} each within {limit_s:.0f} s (--join_timeout)"
        )


def _free() -> str:
    import ray

    resources: Mapping[str, float] = ray.available_resources()
    amounts = [f"{resources.get(name, 0):g} {name}s" for name in ("CPU", "GPU") if name == "CPU" or name in resources]
    return f"{', '.join(amounts)} on {format_count(sum(node['Alive'] for node in ray.nodes()), 'node')}"
