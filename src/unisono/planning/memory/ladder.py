"""Chooses settings for which a run fits into memory, beginning with the settings that slow it down least.

A ladder lists rungs; each rung adds settings to those of the rungs above it, until the predicted memory fits. A rung is
skipped if it would change a setting that the user has chosen. To support another setting, add a rung.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unisono.planning.memory.estimate import Estimate

Flags = Mapping[str, Any]


@dataclass(frozen=True)
class Situation:
    """The properties of a run that determine which rungs it can use."""

    fixed: Flags  # settings that must not change, with their values
    allows_lossy: bool
    micro_batch: int
    has_blocks: bool = True
    has_frozen_linears: bool = False  # frozen linear layers that base_precision can convert
    is_recorded: bool = False  # cuda_graph is set, which is incompatible with recomputation and block swap
    may_swap: bool = True  # the strategy allows blocks_on_host
    may_shard: bool = False  # there are several GPUs, and no setting excludes fsdp
    may_offload: bool = False  # fsdp_cpu_offload is possible
    optimizer: str = "adamw"  # name of the optimizer; "" if the recipe creates its own
    fewest_blocks: Callable[[Flags, float], int] = lambda flags, room: 0
    """Returns the smallest number of blocks on the host for which a run fits into `room` bytes; all if none does."""


@dataclass(frozen=True)
class Rung:
    """Settings to try next if the run does not fit yet."""

    candidates: Callable[[Situation, Flags, float], Iterable[Flags]]
    """Yields settings to try in turn, given the settings of the rungs above and the room in bytes."""
    applies: Callable[[Situation], bool] = lambda situation: True
    is_lossy: bool = False  # whether the settings change the result by more than rounding
    replaces: Collection[str] = ()  # settings of rungs above that this rung removes


def _fixed(**flags: Any) -> Callable[[Situation, Flags, float], Iterable[Flags]]:
    return lambda situation, above, room: [flags]


def _smaller(situation: Situation, above: Flags, room: float) -> Iterable[Flags]:
    size = situation.micro_batch
    while size > 1:
        size = -(-size // 2)
        yield {"micro_batch": size}


def _fewest(situation: Situation, above: Flags, room: float) -> Iterable[Flags]:
    before = 0
    for part in (1.0, 0.95, 0.9, 0.0):  # try smaller targets too, because the estimate without swapping is not exact
        num = situation.fewest_blocks({**above, "blocks_on_host": 0}, part * room)
        if num > before:
            yield {"blocks_on_host": num}
        before = max(num, before)


def _can_recompute(situation: Situation) -> bool:
    return not situation.is_recorded


def _has_blocks(situation: Situation) -> bool:
    return situation.has_blocks and not situation.is_recorded


def _can_swap(situation: Situation) -> bool:
    return situation.may_swap and _has_blocks(situation)


LADDER = (
    Rung(_smaller),
    Rung(_fixed(activation_checkpointing=True, recompute_every=2), _has_blocks),
    Rung(_fixed(activation_checkpointing=True, recompute_every=1), _can_recompute),
    Rung(_fixed(base_precision="fp8"), lambda it: it.has_frozen_linears, is_lossy=True),
    Rung(_fewest, _can_swap),
    Rung(_fixed(base_precision="nf4"), lambda it: it.has_frozen_linears, is_lossy=True, replaces=("blocks_on_host",)),
    Rung(_fewest, _can_swap),
    Rung(_fixed(strategy="fsdp"), lambda it: it.may_shard, replaces=("blocks_on_host",)),
    Rung(_fixed(optimizer="adamw8bit"), lambda it: it.optimizer == "adamw", is_lossy=True),
    Rung(_fixed(strategy="fsdp", fsdp_cpu_offload=True), lambda it: it.may_offload, replaces=("blocks_on_host",)),
)
"""The rungs, ordered by their cost in speed. A smaller micro-batch costs nothing as long as the GPU stays busy."""
NAMES = (
    *("micro_batch", "activation_checkpointing", "recompute_every", "base_precision", "blocks_on_host", "strategy"),
    *("optimizer", "fsdp_cpu_offload"),
)
"""All settings that the rungs change."""
LOSSY = ("base_precision", "optimizer")
"""Settings that change the result by more than rounding."""


@dataclass(frozen=True)
class Choice:
    """The settings of the first rung that fits, or, if none fits, of the rung with the lowest prediction."""

    flags: Flags
    estimate: Estimate
    unchanged: Estimate  # without these settings
    room: float
    lossy: Collection[str] = field(default_factory=tuple)  # settings that change the result by more than rounding

    @property
    def fits(self) -> bool:
        """Whether the prediction fits into the room."""
        return self.estimate.total <= self.room

    @property
    def command(self) -> str:
        """The settings as command-line flags."""
        return command(self.flags)


def command(flags: Flags) -> str:
    """Formats settings as command-line flags."""
    return " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in flags.items())


def choose(situation: Situation, room: float, estimate: Callable[[Flags], Estimate]) -> Choice:
    """Tries the rungs in order until the `estimate` for their settings fits into `room` bytes.

    Also tries the ladder without its first rung (a smaller micro-batch), because several micro-batches per step need
    memory for the gradients of earlier micro-batches.
    """
    choice = _descend(LADDER, situation, room, estimate)
    if "micro_batch" not in choice.flags or (choice.fits and not choice.lossy):
        return choice
    other = _descend(LADDER[1:], situation, room, estimate)
    return min((choice, other), key=lambda it: (not it.fits, len(it.lossy) if it.fits else it.estimate.total))


def _descend(
    ladder: Sequence[Rung], situation: Situation, room: float, estimate: Callable[[Flags], Estimate]
) -> Choice:
    unchanged = estimate({})
    best = Choice({}, unchanged, unchanged, room)
    flags: dict[str, Any] = {}
    for rung in ladder:
        if best.fits:
            break
        if rung.is_lossy and not situation.allows_lossy:
            continue
        if not rung.applies(situation):
            continue
        above = {name: value for name, value in flags.items() if name not in rung.replaces}
        for candidate in rung.candidates(situation, above, room):
            if any(situation.fixed.get(name, value) != value for name, value in candidate.items()):
                break
            flags = above | {name: value for name, value in candidate.items() if name not in situation.fixed}
            lossy = [name for name in flags if name in LOSSY]
            tried = Choice(_without_defaults(flags), estimate(flags), unchanged, room, lossy)
            if tried.estimate.total < best.estimate.total:
                best = tried
            if best.fits:
                break
    return best


def _without_defaults(flags: Flags) -> Flags:
    return {name: value for name, value in flags.items() if (name, value) != ("recompute_every", 1)}
