"""The timeline of a run describes the events of events.jsonl as sentences.

Saves and previews are only counted. Consecutive events of one kind on one rank are combined into one line.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from unisono.formatting import format_bytes, format_count, format_number, shorten
from unisono.observe.report.series import number

Tone = Literal["plain", "good", "fault", "bad", "injected"]

_FIRST, _LAST = 100, 200
_MAX_KINDS = 60
_REPEATING = {"nan", "overflow", "straggler", "bad_sample", "worker_died", "micro_batch", "save_failed"}
_BEGINS, _ENDS = {"start", "resume"}, {"done", "round", "stopped", "failed", "pruned", "restart"}
_COMMON = {"time", "kind", "step", "rank"}


@dataclass
class Event:
    """One line of the timeline: an event, or several consecutive events of the same kind."""

    kind: str
    event: dict[str, Any]
    when: datetime | None
    step: float | None
    rank: int | None
    last_step: float | None
    count: int = 1

    @property
    def tone(self) -> Tone:
        """The tone of the event, which determines its colour."""
        return _KINDS[self.kind][1] if self.kind in _KINDS else "plain"

    @property
    def title(self) -> str:
        """The event in a word or two."""
        return _KINDS[self.kind][0] if self.kind in _KINDS else self.kind

    @property
    def sentence(self) -> str:
        """The event as a sentence."""
        if self.kind in _KINDS:
            return shorten(_KINDS[self.kind][2](self.event))
        details = {name: value for name, value in self.event.items() if name not in _COMMON and value is not None}
        return shorten(", ".join(f"{name} {_as_text(value)}" for name, value in details.items()))


class Timeline:
    """Collects the events of a run, of which it shows at most a few hundred."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.damaged = 0
        self.save_seconds = self.save_bytes = 0.0
        self.began: datetime | None = None
        self.last_seen: datetime | None = None
        self.trained_seconds = 0.0
        """Total time from each start to its end, without the time between starts."""
        self.killed = 0
        """Number of starts that failed or were killed (no event marks their end) and that a later start continued."""
        self.repeated = 0
        """Number of steps repeated after a kill or a restart, because they came after the last checkpoint."""
        self.status: str | None = None
        """The kind of the last event among start, resume, restart, done, stopped, pruned and failed."""
        self._first: list[Event] = []
        self._last: deque[Event] = deque(maxlen=_LAST)
        self.num_hidden = 0
        """Number of events that are not shown because there are too many."""
        self._open_since: datetime | None = None
        self._last_step: Any = None

    def add(self, event: Mapping[str, Any]) -> None:
        """Adds one record of events.jsonl."""
        kind = event.get("kind")
        if not isinstance(kind, str):
            self.damaged += 1
            return
        kind = shorten(kind, 40)
        if kind in self.counts or len(self.counts) < _MAX_KINDS:
            self.counts[kind] += 1
        when = parse_time(event.get("time"))
        self._count_fault(kind, event)
        self._time(kind, when)
        if kind == "save":
            self.save_seconds += number(event.get("seconds")) or 0
            self.save_bytes = number(event.get("bytes")) or self.save_bytes
        self._last_step = event.get("step", self._last_step)
        if kind not in ("save", "preview"):
            self._show(kind, event, when)

    def events(self) -> tuple[list[Event], list[Event]]:
        """Returns the first events and the last events. Events between these are hidden."""
        return self._first, list(self._last)

    def all(self) -> list[Event]:
        """Returns all events that are shown."""
        return [*self._first, *self._last]

    @property
    def survived(self) -> int:
        """Number of faults after which the run continued."""
        in_place = sum(h.count for h in self.all() if h.kind == "oom" and h.event.get("in_place") is not False)
        others = ("restart", "nan", "worker_died", "bad_sample", "save_failed")
        return in_place + sum(self.counts[kind] for kind in others) + self.killed

    def stops(self) -> str:
        """Returns a sentence about requested stops (Ctrl-C, a time limit), which are not faults."""
        count = self.counts["stopped"]
        return f"A signal stopped the run {format_count(count, 'time')}, with a checkpoint." if count else ""

    def saves(self) -> str:
        """Returns a sentence about the saves."""
        count = self.counts["save"]
        if not count:
            return "No checkpoint was saved."
        size = f", {format_bytes(self.save_bytes)} each" if self.save_bytes else ""
        seconds = format_number(self.save_seconds / count, 2)
        saved = f"{format_count(count, 'checkpoint')} {'was' if count == 1 else 'were'} saved"
        return f"{saved}{size}, in {seconds} s on average."

    def _count_fault(self, kind: str, event: Mapping[str, Any]) -> None:
        """Counts a kill, which shows as two starts without an end event between them."""
        if kind not in _BEGINS:
            return
        if self.status in _BEGINS:
            self._show("killed", {"repeated": event.get("repeated"), "step": self._last_step}, self.last_seen)
        if self.status in _BEGINS or self.status == "failed":
            self.killed += 1
        if self.status in _BEGINS or self.status in ("failed", "restart"):
            self.repeated += int(number(event.get("repeated")) or 0)

    def _time(self, kind: str, when: datetime | None) -> None:
        if kind in _BEGINS | _ENDS:
            self.status = kind
        if when is None:
            return
        self.began = self.began or when
        if self._open_since is not None and kind in _BEGINS | _ENDS:
            # A start that was killed has no final event, so its time ends with its last recorded event.
            end = when if kind in _ENDS else self.last_seen or when
            self.trained_seconds += max((end - self._open_since).total_seconds(), 0.0)
            self._open_since = None
        if kind in _BEGINS:
            self._open_since = when
        self.last_seen = when

    def seconds(self, until: datetime | None) -> float:
        """Returns the training time in seconds. For a start that has not ended, counts the time up to `until`."""
        if self._open_since is None:
            return self.trained_seconds
        end = max(filter(None, (until, self.last_seen)), default=self._open_since)
        return self.trained_seconds + max((end - self._open_since).total_seconds(), 0.0)

    def _show(self, kind: str, event: Mapping[str, Any], when: datetime | None) -> None:
        step, rank = number(event.get("step")), event.get("rank")
        rank = rank if isinstance(rank, int) else None
        before = self._last[-1] if self._last else self._first[-1] if self._first else None
        if before is not None and kind in _REPEATING and (before.kind, before.rank) == (kind, rank):
            before.count += 1
            before.last_step = step
            return
        small = {shorten(name, 40): _small(value) for name, value in list(event.items())[:20]}
        new = Event(kind, small, when, step, rank, step)
        if len(self._first) < _FIRST:
            self._first.append(new)
            return
        self.num_hidden += len(self._last) == _LAST
        self._last.append(new)


def parse_time(text: object) -> datetime | None:
    """Parses a time from run.json or events.jsonl; returns None if it is not a time."""
    if not isinstance(text, str):
        return None
    try:
        time = datetime.fromisoformat(text)
        return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        return None


def _small(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float) else _as_text(value)


def _as_text(value: Any) -> str:
    return shorten(value if isinstance(value, str) else repr(value), 1000)


def _world(event: Mapping[str, Any]) -> str:
    world, strategy = event.get("world"), event.get("strategy")
    ranks = format_count(world, "rank") if isinstance(world, int) else "an unknown number of ranks"
    return f"{ranks}, {strategy}" if strategy else ranks


def _resumed(event: Mapping[str, Any]) -> str:
    repeated = number(event.get("repeated"))
    again = f"; {format_count(int(repeated), 'step')} repeated" if repeated else ""
    return f"from step {event.get('step')}: {_world(event)}{again}"


def _oom(event: Mapping[str, Any]) -> str:
    how = "repeated with the same samples" if event.get("in_place") is not False else "all ranks restart"
    size = event.get("micro_batch")
    return f"{how}{f', micro-batches of {size}' if size else ''}: {event.get('error', '')}"


def _nan(event: Mapping[str, Any]) -> str:
    return f"loss {event.get('loss')}, gradient norm {event.get('grad_norm')}: the step was skipped on all ranks"


def _straggler(event: Mapping[str, Any]) -> str:
    why = {"compute": "its computation takes longer", "data": "it waits longer for its data"}
    reason = str(event.get("reason"))
    return f"{event.get('slower_percent')} % slower than the others: {why.get(reason, reason)}"


def _hang(event: Mapping[str, Any]) -> str:
    return f"no progress in {event.get('phase')} for {event.get('seconds')} s"


def _machines(event: Mapping[str, Any]) -> str:
    changes = f"joined {event.get('joined')}, left {event.get('left')}"
    return f"{changes}; machines {event.get('machines')} continue from the last checkpoint"


def _pruned(event: Mapping[str, Any]) -> str:
    where = f"trial {event.get('trial')} of the study {event.get('study')}"
    return f"as {where}, at {event.get('objective')} {event.get('value')}: other trials were better at this step"


def _error(event: Mapping[str, Any]) -> str:
    return str(event.get("error") or "")


_KINDS: dict[str, tuple[str, Tone, Callable[[Mapping[str, Any]], str]]] = {
    "start": ("started", "plain", _world),
    "resume": ("resumed", "good", _resumed),
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
    "killed": ("killed", "fault", lambda e: "the run ended without an event: a kill, a power cut or a lost machine"),
    "signal": ("signal", "plain", lambda e: f"{e.get('signal', '')}: the ranks agree to save and stop"),
    "bad_sample": ("bad sample", "fault", lambda e: f"sample {e.get('index')} was skipped: {e.get('error', '')}"),
    "worker_died": ("worker died", "fault", lambda e: f"and was replaced: {e.get('what', '')}"),
    "save_failed": ("save failed", "fault", lambda e: f"training continued: {_error(e)}"),
    "preview_left_out": ("no preview", "fault", lambda e: f"training continued: {_error(e)}"),
    "machines": ("machines", "plain", _machines),
    "set_aside": ("set aside", "fault", lambda e: f"checkpoint {e.get('checkpoint')}: {e.get('why')}"),
    "micro_batch": ("micro-batch", "plain", lambda e: f"{e.get('micro_batch')} samples fit at once"),
    "compile": (
        "compiled",
        "plain",
        lambda e: f"{e.get('compiled')} graphs, and {e.get('cached')} came from the cache",
    ),
    "profile": ("profiled", "plain", lambda e: f"steps {e.get('first')} to {e.get('last')}: {e.get('folder')}"),
    "injected": ("injected fault", "injected", lambda e: str(e.get("fault", ""))),
    "tracker": ("tracker", "plain", lambda e: str(e.get("text", ""))),
    "stopped": ("stopped", "plain", lambda e: "with a checkpoint; run the same command to continue"),
    "pruned": ("pruned", "plain", _pruned),
    "round": ("round", "plain", lambda e: "of a federation: the weights were sent to the server"),
    "failed": ("failed", "bad", _error),
    "done": ("done", "good", lambda e: "the last step was trained and saved"),
}
