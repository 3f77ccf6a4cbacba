"""The options of `unisono bench`: rank counts, kind of scaling, and numbers of steps and rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unisono.config.values import shown
from unisono.devices import num_cpu_cores, visible_gpus
from unisono.errors import ConfigError

SCALINGS = ("weak", "strong")
_MOST_RANKS = 4096


@dataclass(frozen=True)
class BenchOptions:
    """The options of a benchmark. Either `gpus` or `nproc` lists the rank counts; by default, `counts` chooses them."""

    gpus: object = None
    """Numbers of GPUs, as text such as "1,2,4", a number or a list of numbers."""
    nproc: object = None
    """Numbers of CPU ranks, in the same form."""
    scaling: str = "weak"
    """weak: the batch per rank stays the same, so the global batch grows; strong: the global batch stays the same."""
    steps: int = 10
    """Number of timed steps in a round."""
    warmup: int = 10
    """Number of steps before the first round, which are not timed."""
    rounds: int = 8
    """Number of rounds. In each round, unisono and the hand-written loop each train one block of steps."""
    overhead: bool = True
    """Whether to measure the hand-written loop."""

    def check(self) -> None:
        """Raises ConfigError if a value is invalid."""
        for name, least in (("steps", 1), ("warmup", 1), ("rounds", 1)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= 10**6:
                raise ConfigError(f"{name}: expected a whole number from {least} to 1,000,000, got {shown(value)}")
        if self.scaling not in SCALINGS:
            raise ConfigError(f"scaling: expected {' or '.join(SCALINGS)}, got {shown(self.scaling)}")
        if self.gpus is not None and self.nproc is not None:
            raise ConfigError("gpus and nproc: bench measures GPUs or CPU ranks; remove one of the two")

    @property
    def uses_gpus(self) -> bool:
        """Whether ranks run on GPUs; by default, they do if this machine has any."""
        return self.nproc is None and (self.gpus is not None or bool(visible_gpus()))

    @property
    def counts(self) -> list[int]:
        """The rank counts in ascending order; by default, powers of two up to the number of GPUs (CPU: 2)."""
        if self.uses_gpus:
            present = len(visible_gpus())
            if self.gpus is None:
                return [2**power for power in range(present.bit_length())]
            counts = parse_counts("gpus", self.gpus)
            if counts[-1] > present:
                on_cpu = "; --nproc measures CPU ranks" if not present else ""
                raise ConfigError(f"gpus {counts[-1]}: this machine has {present} GPU{'s' * (present != 1)}{on_cpu}")
            return counts
        if self.nproc is None:
            return [1, 2] if num_cpu_cores() > 1 else [1]
        return parse_counts("nproc", self.nproc)


def parse_counts(name: str, given: object) -> list[int]:
    """Parses rank counts; raises ConfigError if the list is empty or contains anything but positive numbers."""
    parts: Sequence[object] = given.split(",") if isinstance(given, str) else [given]
    if isinstance(given, list | tuple):
        parts = given
    counts = set()
    for part in parts:
        text = part.strip() if isinstance(part, str) else part
        number = int(text) if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < 6 else text
        if type(number) is not int or not 1 <= number <= _MOST_RANKS:
            raise ConfigError(f"{name}: expected numbers of ranks such as 1,2,4, got {shown(given)}")
        counts.add(number)
    if not counts:
        raise ConfigError(f"{name}: expected numbers of ranks such as 1,2,4, got an empty list")
    return sorted(counts)
