"""A process's share of the work that a recipe does outside of training steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from unisono.observe.progress import Advance


class Part(NamedTuple):
    """The part of a stream of samples that one rank reads."""

    number: int  # from 0
    of: int  # number of parts


@dataclass(frozen=True)
class Work:
    """This process's part of the work in `prepare` and `refresh`: a folder to write to, and a share of the items."""

    folder: Path
    _part: int = 0
    _parts: int = 1
    _asked_to_stop: Callable[[], bool] = bool
    device: str = "cpu"
    """The device to compute on."""
    _say: Callable[[str], None] = lambda text: None
    seed: int = 0
    """The run's seed, for random numbers."""
    _gather: Callable[[Any], list[Any]] = lambda value: [value]
    shows_progress: bool = False
    """Whether progress() draws a bar on this process's stderr; else it sends plain lines to message()."""

    def meet(self) -> bool:
        """Waits for all processes (a barrier). Returns True if the run is stopping; then return from prepare()."""
        return any(self.gather(self.stopping))

    def gather(self, value: Any) -> list[Any]:
        """All-gathers a plain object: returns the values of all processes, which must all call this, in rank order."""
        return self._gather(value)

    def message(self, text: str) -> None:
        """Prints a line for the user, on the main process only."""
        self._say(text)

    def progress(
        self, what: str, total: int | None = None, unit: str = "", *, of: int | None = None
    ) -> AbstractContextManager[Advance]:
        """Shows progress: `with work.progress("encoding videos", len(mine)) as advance:`, then `advance()` per item.

        The main rank draws a bar on a terminal, or prints a line now and then elsewhere. `total` is the number of
        items on this rank, and `of` on all ranks; without a total it shows the elapsed time. It shows nothing once the
        run is stopping.
        """
        from unisono.observe.progress import progress

        sink = None if self.shows_progress else self._say
        return progress(what, total, unit, of=of, enabled=self._part == 0 and not self.stopping, sink=sink)

    @property
    def stopping(self) -> bool:
        """Whether the run is stopping: finish the current item and return; a resumed run continues the work."""
        return self._asked_to_stop()

    def share(self, items: Sequence[Any]) -> Sequence[Any]:
        """Returns this process's share of the items; each item is in the share of exactly one process."""
        return items[self._part :: self._parts]

    def largest_share(self, items: Sequence[Any]) -> int:
        """Returns the size of the largest share, for work that all processes must do the same number of times."""
        return -(-len(items) // self._parts)
