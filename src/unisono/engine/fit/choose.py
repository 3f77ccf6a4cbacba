"""Chooses the settings of a run by its predicted memory, and explains the choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from unisono.config.resolve import Resolved, with_recipe_defaults
from unisono.engine.fit.model_memory import ModelMemory
from unisono.engine.recipe import Recipe
from unisono.engine.run_folder.stored_settings import FIXED
from unisono.errors import ConfigError
from unisono.formatting import format_bytes
from unisono.planning.memory.estimate import USABLE
from unisono.planning.memory.ladder import NAMES, Choice, Flags, Situation, choose, command
from unisono.planning.memory.trace import CannotTrace
from unisono.settings import Settings

SOURCE = "fit"
"""The source of the settings that were chosen, in run.json and in the output of --print_config."""


@dataclass(frozen=True)
class Card:
    """The devices of a run."""

    memory: float  # bytes that torch can allocate on each of them
    ranks: int = 1
    is_in_use: bool = False  # the run has started, so it is too late to create a process group

    @property
    def room(self) -> float:
        """The bytes that a prediction may fill."""
        return USABLE * self.memory


class Fitter:
    """Chooses settings for one run."""

    def __init__(
        self,
        recipe: Recipe,
        resolved: Resolved,
        sample: Callable[[Recipe], Any],
        *,
        micro_batch: int,
        share: int,
        earlier_sources: Mapping[str, str] | None = None,
        fp8_products: bool = True,
    ) -> None:
        """`share`: samples per device and step. `earlier_sources`: the sources of a resumed run's settings."""
        self._fixed = _fixed_settings(resolved, earlier_sources)
        self._resolved = _without_earlier_choices(resolved, type(recipe), earlier_sources)
        self._micro_batch, self._share = micro_batch, share
        self.memory = ModelMemory(recipe, sample, fp8_products=fp8_products)

    def least(self) -> int:
        """Returns a lower bound on the memory per device without changes, by arithmetic only.

        Raises CannotTrace if the model cannot be examined.
        """
        return self.memory.least(self._settings({}))

    def choose(self, card: Card, *, allows_lossy: bool) -> Choice:
        """Returns the settings that fit into the card's memory at the least cost in speed.

        Raises CannotTrace if memory cannot be predicted.
        """
        settings = self._settings({})
        memory = self.memory
        parallel, is_recorded = settings.parallel, settings.precision.cuda_graph
        may_shard = parallel.strategy in ("auto", "fsdp") and not (is_recorded or parallel.find_unused_parameters)
        situation = Situation(
            fixed=self._fixed,
            allows_lossy=allows_lossy,
            micro_batch=self._micro_batch,
            has_blocks=memory.has_blocks(settings),
            has_frozen_linears=memory.has_frozen_linears(settings),
            is_recorded=is_recorded,
            may_swap=parallel.strategy in ("auto", "single", "ddp") and parallel.shard_size == "auto",
            may_shard=may_shard and card.ranks > 1 and parallel.blocks_on_host == 0,
            # fsdp on one GPU needs a process group, which a single process creates at its start.
            may_offload=may_shard and parallel.blocks_on_host == 0 and (card.ranks > 1 or not card.is_in_use),
            optimizer="" if memory.has_own_optimizer(settings) else settings.optim.optimizer.lower(),
            fewest_blocks=lambda flags, room: self.fewest_blocks(flags, room, card),
        )
        return choose(situation, card.room, lambda flags: self._estimate(flags, card))

    def _estimate(self, flags: Flags, card: Card) -> Any:
        size = int(flags.get("micro_batch", self._micro_batch))
        return self.memory.estimate(
            self._settings(flags), micro_batch=size, ranks=card.ranks, accumulates=self._share > size
        )

    def fewest_blocks(self, flags: Flags, room: float, card: Card) -> int:
        """Returns the fewest blocks on the host with which these flags fit into `room` bytes; 0 if no number helps."""
        blocks = self.memory.blocks(self._settings(flags))
        others = self._estimate(flags, card).total - sum(blocks.movable_bytes)
        fewest = blocks.fewest(room - others)
        return fewest.num if fewest.saved_bytes > 0 else 0

    def _settings(self, flags: Flags) -> Settings:
        return self.applied(flags).build(Settings)

    def applied(self, flags: Flags) -> Resolved:
        """Returns the settings of the run with these changes."""
        return self._resolved.with_values(SOURCE, **flags) if flags else self._resolved


def _fixed_settings(resolved: Resolved, earlier_sources: Mapping[str, str] | None) -> Mapping[str, Any]:
    """Returns the settings that `--fit` must not change: set by the user, now or earlier, or fixed within a run."""
    earlier = earlier_sources or {}
    fixed = {
        name
        for name in NAMES
        if resolved.explicit(name) or (resolved.sources[name] == "run" and earlier.get(name) in ("file", "flag"))
    }
    fixed |= set(FIXED).intersection(NAMES) if earlier_sources is not None else set()
    return {name: resolved.values[name] for name in fixed}


def _without_earlier_choices(
    resolved: Resolved, recipe_class: type[Recipe], earlier_sources: Mapping[str, str] | None
) -> Resolved:
    """Resets the settings that `--fit` chose when the run last started, except those that cannot change in a run."""
    defaults = with_recipe_defaults((Settings, recipe_class.Config), recipe_class.defaults).values
    chosen_before = {
        name: defaults[name]
        for name in set(NAMES) - set(FIXED)
        if resolved.sources[name] == "run" and (earlier_sources or {}).get(name) == SOURCE
    }
    return resolved.with_values("default", **chosen_before) if chosen_before else resolved


def remarks_on(choice: Choice, setting: str) -> list[str]:
    """Returns notes for the user about a choice; raises ConfigError if nothing fits."""
    room = format_bytes(choice.room)
    if not choice.fits:
        raise ConfigError(f"fit {setting}: {refusal(choice)}")
    if not choice.flags:
        return [f"fit {setting}: the run is predicted to take {choice.estimate}, and {room} are available"]
    remarks = [
        f"fit {setting}: the run would take {format_bytes(choice.unchanged.total)}, and {room} are available; using "
        f"{choice.command}, predicted {choice.estimate}; pass these flags instead of fit to keep them on any GPU"
    ]
    if choice.lossy:
        lossy = command({name: choice.flags[name] for name in choice.lossy})
        remarks.append(
            f"fit {setting}: {lossy} CHANGES THE RESULT beyond rounding, and the run keeps it; --fit exact avoids that"
        )
    return remarks


def refusal(choice: Choice) -> str:
    """Returns why no setting makes a run fit."""
    least = f" even with {choice.command}" if choice.flags else ""
    return (
        f"the run does not fit into {format_bytes(choice.room)} of GPU memory{least}: predicted {choice.estimate}; use "
        "a larger GPU, more GPUs or smaller samples"
    )


def advice_of(choice: Choice) -> str | None:
    """Returns the flags that make a run fit, in a few words; None if there are none."""
    if not choice.flags:
        return None
    if not choice.fits:
        return f"no flags would make it fit ({choice.command} would still take {format_bytes(choice.estimate.total)})"
    lossy = " (which changes the result)" if choice.lossy else ""
    predicted = format_bytes(choice.estimate.total)
    return f"{choice.command}{lossy} is predicted to fit, with {predicted} (--fit auto chooses such flags)"


def cannot_fit(setting: str, error: CannotTrace) -> str:
    """Returns the note for a model whose memory cannot be predicted."""
    return f"fit {setting}: the memory of this model cannot be predicted ({error}); settings are unchanged"
