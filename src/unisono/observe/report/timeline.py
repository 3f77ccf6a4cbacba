"""What happened to a run, from events.jsonl to sentences.

Saves and previews are only counted, and the same thing happening again and again to the same rank is told once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from unisono.observe.report.series import number
from unisono.observe.report.words import a_count, bytes_text, clipped, compact

Tone = Literal["plain", "good", "fault", "bad", "rehearsed"]

_FIRST, _LAST = 100, 200
_MOST_KINDS = 60
_REPEATING = {"nan", "overflow", "straggler", "bad_sample", "worker_died", "micro_batch", "save_failed"}
_BEGINS, _ENDS = {"start", "resume"}, {"done", "stopped", "failed", "restart"}
_COMMON = {"time", "kind", "step", "rank"}


@dataclass
class Happening:
    """One line of the timeline: an event, or several of the same kind in a row."""

    kind: str
    event: dict[str, Any]
    when: datetime | None
    step: float | None
    rank: int | None
    last_step: float | None
    count: int = 1

    @property
    def tone(self) -> Tone:
        """How it is to be coloured."""
        return _KINDS[self.kind][1] if self.kind in _KINDS else "plain"

    @property
    def title(self) -> str:
        """What it is, in a word or two."""
        return _KINDS[self.kind][0] if self.kind in _KINDS else self.kind

    @property
    def sentence(self) -> str:
        """What happened."""
        if self.kind in _KINDS:
            return clipped(_KINDS[self.kind][2](self.event))
        details = {name: value for name, value in self.event.items() if name not in _COMMON and value is not None}
        return clipped(", ".join(f"{name} {_said(value)}" for name, value in details.items()))


class Timeline:
    """Collects the events of a run; however many there are, it keeps only some hundreds."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.damaged = 0
        self.save_seconds = self.save_bytes = 0.0
        self.began: datetime | None = None
        self.last_seen: datetime | None = None
        self.trained_seconds = 0.0
        """From each start to its end, without the time in between."""
        self.status: str | None = None
        """The last of start, resume, restart, done, stopped and failed."""
        self._first: list[Happening] = []
        self._last: deque[Happening] = deque(maxlen=_LAST)
        self._left_out = 0
        self._open_since: datetime | None = None

    def add(self, event: Mapping[str, Any]) -> None:
        """Takes one line of events.jsonl."""
        kind = event.get("kind")
        if not isinstance(kind, str):
            self.damaged += 1
            return
        kind = clipped(kind, 40)
        if kind in self.counts or len(self.counts) < _MOST_KINDS:
            self.counts[kind] += 1
        when = moment(event.get("time"))
        self._time(kind, when)
        if kind == "save":
            self.save_seconds += number(event.get("seconds")) or 0
            self.save_bytes = number(event.get("bytes")) or self.save_bytes
        if kind not in ("save", "preview"):
            self._keep(kind, event, when)

    @property
    def left_out(self) -> int:
        """Lines of the timeline that were too many."""
        return self._left_out

    def happenings(self) -> tuple[list[Happening], list[Happening]]:
        """The first of them and, after what was left out, the last."""
        return self._first, list(self._last)

    def all(self) -> list[Happening]:
        """Those that were kept."""
        return [*self._first, *self._last]

    @property
    def survived(self) -> int:
        """Faults after which the run went on."""
        in_place = sum(h.count for h in self.all() if h.kind == "oom" and h.event.get("in_place") is not False)
        others = ("restart", "nan", "worker_died", "bad_sample", "save_failed")
        went_on_after_a_signal = max(self.counts["stopped"] - (self.status == "stopped"), 0)
        return in_place + sum(self.counts[kind] for kind in others) + went_on_after_a_signal

    def saves(self) -> str:
        """The saves in a sentence."""
        count = self.counts["save"]
        if not count:
            return "No checkpoint was saved."
        size = f", {bytes_text(self.save_bytes)} each" if self.save_bytes else ""
        return f"{a_count(count, 'checkpoint')} saved{size}, {compact(self.save_seconds / count, 2)} s on average."

    def _time(self, kind: str, when: datetime | None) -> None:
        if kind in _BEGINS | _ENDS:
            self.status = kind
        if when is None:
            return
        self.began = self.began or when
        if self._open_since is not None and kind in _BEGINS | _ENDS:
            # A start that was killed says nothing at its end: the last thing it said counts.
            end = when if kind in _ENDS else self.last_seen or when
            self.trained_seconds += max((end - self._open_since).total_seconds(), 0.0)
            self._open_since = None
        if kind in _BEGINS:
            self._open_since = when
        self.last_seen = when

    def seconds(self, until: datetime | None) -> float:
        """How long the run was at work; of a start that has no end yet, `until` counts."""
        if self._open_since is None:
            return self.trained_seconds
        end = max(filter(None, (until, self.last_seen)), default=self._open_since)
        return self.trained_seconds + max((end - self._open_since).total_seconds(), 0.0)

    def _keep(self, kind: str, event: Mapping[str, Any], when: datetime | None) -> None:
        step, rank = number(event.get("step")), event.get("rank")
        rank = rank if isinstance(rank, int) else None
        before = self._last[-1] if self._last else self._first[-1] if self._first else None
        if before is not None and kind in _REPEATING and (before.kind, before.rank) == (kind, rank):
            before.count += 1
            before.last_step = step
            return
        small = {clipped(name, 40): _small(value) for name, value in list(event.items())[:20]}
        happening = Happening(kind, small, when, step, rank, step)
        if len(self._first) < _FIRST:
            self._first.append(happening)
            return
        self._left_out += len(self._last) == _LAST
        self._last.append(happening)


def moment(text: object) -> datetime | None:
    """A point in time as run.json and events.jsonl write it; None for anything else."""
    if not isinstance(text, str):
        return None
    try:
        found = datetime.fromisoformat(text)
        return found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        return None


def _small(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float) else _said(value)


def _said(value: Any) -> str:
    return clipped(value if isinstance(value, str) else repr(value), 1000)


def _world(event: Mapping[str, Any]) -> str:
    world, strategy = event.get("world"), event.get("strategy")
    ranks = a_count(world, "rank") if isinstance(world, int) else "an unknown number of ranks"
    return f"{ranks}, {strategy}" if strategy else ranks


def _oom(event: Mapping[str, Any]) -> str:
    how = "the same samples again" if event.get("in_place") is not False else "all ranks start again"
    size = event.get("micro_batch")
    return f"{how}{f', {size} at once' if size else ''}: {event.get('error', '')}"


def _nan(event: Mapping[str, Any]) -> str:
    return f"loss {event.get('loss')}, gradient norm {event.get('grad_norm')}: the step was skipped on all ranks"


def _straggler(event: Mapping[str, Any]) -> str:
    why = {"compute": "it computes longer", "data": "it waits longer for its data"}
    reason = str(event.get("reason"))
    return f"{event.get('slower_percent')} % slower than the others: {why.get(reason, reason)}"


def _hang(event: Mapping[str, Any]) -> str:
    return f"stood still in {event.get('phase')} for {event.get('seconds')} s"


def _error(event: Mapping[str, Any]) -> str:
    return str(event.get("error") or "")


_KINDS: dict[str, tuple[str, Tone, Callable[[Mapping[str, Any]], str]]] = {
    "start": ("started", "plain", _world),
    "resume": ("went on", "good", lambda e: f"from step {e.get('step')}: {_world(e)}"),
    "restart": (
        "restart",
        "fault",
        lambda e: f"of all ranks from the last checkpoint, because of {e.get('cause', '')}",
    ),
    "oom": ("out of memory", "fault", _oom),
    "nan": ("not finite", "fault", _nan),
    "overflow": ("overflow", "plain", lambda e: "fp16 overflowed: the loss scale was lowered and the step skipped"),
    "hang": ("hang", "fault", _hang),
    "straggler": ("slow rank", "fault", _straggler),
    "signal": ("signal", "fault", lambda e: f"{e.get('signal', '')}: the ranks agree to save and stop"),
    "bad_sample": ("bad sample", "fault", lambda e: f"sample {e.get('index')} was left out: {e.get('error', '')}"),
    "worker_died": ("worker died", "fault", lambda e: f"and was replaced: {e.get('what', '')}"),
    "save_failed": ("save failed", "fault", lambda e: f"training went on: {_error(e)}"),
    "set_aside": ("set aside", "fault", lambda e: f"checkpoint {e.get('checkpoint')}: {e.get('why')}"),
    "micro_batch": ("micro-batch", "plain", lambda e: f"{e.get('micro_batch')} samples at once fit"),
    "injected": ("rehearsal", "rehearsed", lambda e: f"a fault on purpose: {e.get('fault', '')}"),
    "stopped": ("stopped", "plain", lambda e: "with a checkpoint; the same command goes on"),
    "failed": ("failed", "bad", _error),
    "done": ("done", "good", lambda e: "the last step is trained and saved"),
}
