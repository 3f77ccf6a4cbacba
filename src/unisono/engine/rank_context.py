"""This rank with its connections to the other ranks, to stop requests and to hang detection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from unisono.cluster.agree import Agreement
from unisono.cluster.environment import World
from unisono.cluster.hangs.heartbeat import Heartbeat
from unisono.cluster.signals import StopRequest
from unisono.errors import UserError
from unisono.observe.watch.rank_status import RankStatus

T = TypeVar("T")


@dataclass(frozen=True)
class RankContext:
    """The objects that a rank uses throughout a run."""

    world: World
    agreement: Agreement  # exchanges small values with other ranks
    stop: StopRequest  # set by a signal or by the launcher
    heartbeat: Heartbeat  # reports the step and phase that this rank is in
    status: RankStatus | None = None  # writes what this rank is doing to the run folder, for `unisono watch`

    def main_decides(self, decide: Callable[[], T]) -> T:
        """Calls `decide` on the main rank; returns its result, or raises its UserError, on every rank.

        Every rank must call this at the same point.
        """
        answer: tuple[bool, Any] = (True, None)
        if self.world.is_main:
            try:
                answer = (True, decide())
            except UserError as error:
                answer = (False, str(error))
        succeeded, value = self.agreement.broadcast(answer)
        if not succeeded:
            raise UserError(value)
        return value  # type: ignore[no-any-return]

    def main_decides_with(self, work: Callable[..., Any], decide: Callable[[Callable[..., Any]], T]) -> T:
        """Like main_decides, for a decision that needs all ranks.

        `decide` gets a function that calls `work`, which may contain collectives, on every rank with its arguments.
        """
        if self.world.is_main:

            def on_every_rank(*arguments: Any) -> Any:
                self.agreement.broadcast((True, arguments))
                return work(*arguments)

            def decide_and_release() -> T:
                try:
                    return decide(on_every_rank)
                finally:
                    self.agreement.broadcast((False, ()))

            return self.main_decides(decide_and_release)
        while (request := self.agreement.broadcast((False, ())))[0]:
            work(*request[1])
        return self.main_decides(lambda: None)  # type: ignore[return-value]  # the main rank's result

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether a signal or the launcher has asked this rank to stop."""
        return self.stop.requested is not None
