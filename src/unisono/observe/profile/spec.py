"""Reads `--profile`: which steps of a run are profiled, and whether memory is profiled as well."""

from __future__ import annotations

import re
from dataclasses import dataclass

from unisono.config.values import shown
from unisono.errors import ConfigError

MOST_STEPS = 100
"""Maximum number of profiled steps. A trace of more steps would be too large to open."""

_PART = re.compile(r"steps=(?P<steps>\d{1,9})|start=(?P<start>\d{1,15})|(?P<memory>memory)", re.ASCII)
_FORM = "steps=5[,memory][,start=N]"


@dataclass(frozen=True)
class ProfileSpec:
    """What to profile."""

    steps: int
    memory: bool = False
    start: int | None = None
    """The first step to profile, counted from 1 as in metrics.jsonl. None: a few steps after each start or resume."""


def parse_profile(text: str | None) -> ProfileSpec | None:
    """Parses the value of `profile`; None if nothing is profiled."""
    if text is None:
        return None
    fields: dict[str, str] = {}
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None or match.lastgroup is None:
            raise ConfigError(f"profile: cannot read {shown(part.strip())}; write {_FORM}, for instance steps=5,memory")
        if match.lastgroup in fields:
            raise ConfigError(f"profile: {match.lastgroup} occurs twice in {shown(text)}; write {_FORM}")
        fields[match.lastgroup] = match[match.lastgroup]
    if "steps" not in fields:
        raise ConfigError(f"profile: {shown(text)} needs a number of steps, as in steps=5,{text.strip()}")
    steps, start = int(fields["steps"]), int(fields["start"]) if "start" in fields else None
    if not 1 <= steps <= MOST_STEPS:
        raise ConfigError(f"profile: expected steps=1 to steps={MOST_STEPS}, got steps={steps}")
    if start == 0:
        raise ConfigError("profile: steps count from 1, got start=0")
    return ProfileSpec(steps, "memory" in fields, start)
