"""Shows runs in the terminal: one run with its ranks, loss and events, or a list of runs with one of them in detail."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from unisono.formatting import format_duration, format_number, printable, shorten
from unisono.observe.report.charts import is_smoothed
from unisono.observe.report.parts import as_text, event_row, tiles
from unisono.observe.watch.dot_chart import dot_chart
from unisono.observe.watch.folder_of_runs import Runs
from unisono.observe.watch.live_run import LiveRun
from unisono.observe.watch.rank_rows import rank_rows, used_columns

_DRAW_EVERY_S = 0.5
_STATES = {
    "running": "bold cyan",
    "done": "bold green",
    "failed": "bold red",
    "starting": "cyan",
    "gone": "dim",
}
_TONES = {"good": "green", "fault": "yellow", "bad": "red", "injected": "magenta"}
_CHART_ROWS = 12
_LIST_ROWS = 12


def show_once(runs: Runs) -> None:
    """Prints the current state of all runs."""
    read: list[float] = []
    while True:
        runs.update()
        before, read = read, [run.fraction_read for run in runs.by_name.values()]
        # A huge metrics.jsonl is read in pieces. An incomplete last line is never read.
        if read == before or all(fraction == 1 for fraction in read):
            break
    console = Console(highlight=False)
    screen = Screen(runs, console)
    if not runs.is_one_run:
        console.print(screen.list_of_runs(most=len(runs.by_name)))
        return
    for run in runs.by_name.values():
        console.print(screen.details(run, height=200))


def show(runs: Runs) -> None:
    """Redraws the terminal until the user presses q or Ctrl-C."""
    console = Console(highlight=False)
    screen = Screen(runs, console)
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                runs.update()
                live.update(screen.draw(), refresh=True)
                for key in pressed(_DRAW_EVERY_S):
                    if key in ("q", "Q", "\x03", "\x04"):
                        return
                    screen.press(key)
        except KeyboardInterrupt:
            return


class Screen:
    """What the terminal shows."""

    def __init__(self, runs: Runs, console: Console) -> None:
        self._runs, self._console = runs, console
        self._selected: str | None = None
        self._braille = "utf" in console.encoding.lower()

    def press(self, key: str) -> None:
        """Selects another run with the arrow keys, or with j and k."""
        names = list(self._runs.by_name)
        if not names or key not in ("up", "down", "j", "k"):
            return
        at = names.index(self._selected) if self._selected in names else 0
        self._selected = names[min(max(at + (1 if key in ("down", "j") else -1), 0), len(names) - 1)]

    def draw(self) -> RenderableType:
        """Returns the whole screen."""
        names, height = list(self._runs.by_name), self._console.height
        if not names:
            return Text("no run in this folder yet; q quits")
        if self._selected not in names:
            self._selected = names[0]
        if self._runs.is_one_run:
            return self.details(self._runs.by_name[names[0]], height)
        most = min(len(names), _LIST_ROWS, max(2, height // 3))
        runs = self.list_of_runs(most, names.index(self._selected))
        keys = Text("↑ ↓ select a run, q quits" if self._braille else "j k select a run, q quits", style="dim")
        return Group(runs, keys, self.details(self._runs.by_name[self._selected], height - most - 4))

    def list_of_runs(self, most: int, selected: int | None = None) -> RenderableType:
        """Returns a line per run; with more than `most` runs, only the lines around the selected run."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), expand=False)
        for column in ("run", "state", "step", "loss", "left", "ranks"):
            table.add_column(column, no_wrap=True, header_style="dim", justify="left")
        names = list(self._runs.by_name)
        start = max(0, min((selected or 0) - most // 2, len(names) - most))
        for place, name in enumerate(names[start : start + most], start):
            run = self._runs.by_name[name]
            loss, left, (state, _) = run.run.metrics.series.get("loss"), run.seconds_left, run.state
            total = f" of {run.total_steps:,}" if run.total_steps else ""
            table.add_row(
                Text(shorten(printable(name), 60), overflow="ellipsis"),
                Text(state, style=_STATES.get(state, "yellow")),
                Text(f"{run.step:,}{total}"),
                Text(format_number(loss.last[1]) if loss is not None and loss.last is not None else ""),
                Text("" if left is None else format_duration(left)),
                Text(str(len(run.ranks)) if run.ranks else ""),
                style="reverse" if place == selected else "",
            )
        hidden = len(names) - most + self._runs.num_omitted
        return Group(table, Text(f"… {hidden} more", style="dim")) if hidden > 0 else table

    def details(self, run: LiveRun, height: int) -> RenderableType:
        """Draws one run in at most `height` lines."""
        width, record = self._console.width, run.run
        state, sentence = run.state
        title = Text.assemble(
            (f"{printable(as_text(record.record.get('recipe')))}  ", "bold"),
            (f"{state} ", _STATES.get(state, "bold yellow")),
            (printable(sentence), ""),
            (f"  {printable(str(run.folder))}", "dim"),
            no_wrap=True,
            overflow="ellipsis",
        )
        parts: list[RenderableType] = [title, self._progress(run), self._numbers(run)]
        room = height - 4
        ranks, num_rows = self._ranks(run, max(3, room // 2), width)
        events = self._events(run, max(2, min(8, room - num_rows - _CHART_ROWS - 1)))
        room -= num_rows + len(events) + (1 if events else 0)
        if room >= 4:
            parts += self._chart(run, width, min(_CHART_ROWS, room - 1))
        if ranks is not None:
            parts.append(ranks)
        if events:
            parts += [Text("events", style="dim"), *events]
        return Group(*parts)

    def _progress(self, run: LiveRun) -> RenderableType:
        total, left = run.total_steps, run.seconds_left
        text = f"step {run.step:,}" + (f" of {total:,}" if total else "")
        text += "" if left is None else f"   {format_duration(left)} left"
        text += "" if run.fraction_read >= 1 else f"   reading metrics.jsonl: {run.fraction_read:.0%}"
        if not total:
            return Text(text)
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_row(Text(text), ProgressBar(total=total, completed=min(run.step, total)))
        return grid

    def _numbers(self, run: LiveRun) -> RenderableType:
        series = run.run.metrics.series
        shown = [(label, value) for label, value, _ in tiles(run.run) if label != "steps"]
        for name, label in (("lr", "lr"), ("grad_norm", "gradient norm")):
            values = series.get(name)
            if values is not None and values.last is not None:
                shown.append((label, format_number(values.last[1], 3)))
        line = Text(no_wrap=True, overflow="ellipsis")
        for label, value in shown:
            line.append(f"{printable(label)} ", style="dim")
            line.append(f"{value}   ")
        return line

    def _chart(self, run: LiveRun, width: int, height: int) -> list[RenderableType]:
        loss = run.run.metrics.series.get("loss")
        if loss is None:
            return []
        smoothed = is_smoothed(loss)
        points = loss.trend() if smoothed else loss.points()
        lines = dot_chart(points, min(width - 1, 160), height, braille=self._braille)
        if not lines:
            return []
        title = f"loss{', smoothed' if smoothed else ''}, steps {points[0][0]:,.0f} to {points[-1][0]:,.0f}"
        return [Text(title, style="dim"), *(Text(line, style="cyan", no_wrap=True) for line in lines)]

    def _ranks(self, run: LiveRun, most: int, width: int) -> tuple[RenderableType | None, int]:
        rows, hidden = rank_rows(run.ranks, most)
        if not rows:
            return None, 0
        columns = used_columns(rows)
        widths = [max(len(head), *(len(str(getattr(row, name))) for row in rows)) + 2 for name, head in columns]
        while len(columns) > 3 and sum(widths) + 18 > width:  # drops the least important columns
            columns.pop()
            widths.pop()
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name, head in columns:
            table.add_column(head, no_wrap=True, header_style="dim", justify="left" if name == "phase" else "right")
        table.add_column("", no_wrap=True)
        for row in rows:
            cells = [Text(printable(str(getattr(row, name)))) for name, _ in columns]
            table.add_row(*cells, Text(row.problem), style="yellow" if row.problem else "")
        more = f"… {hidden:,} more ranks without a problem"
        shown = Group(table, Text(more, style="dim")) if hidden else table
        return Padding(shown, (1, 0)), len(rows) + 3 + bool(hidden)

    def _events(self, run: LiveRun, most: int) -> list[RenderableType]:
        timeline, lines = run.run.timeline, list[RenderableType]()
        for event in timeline.all()[-most:]:
            row = event_row(event, timeline.began)
            rank = f"rank {row['rank']} " if row["rank"] is not None else ""
            text = Text(no_wrap=True, overflow="ellipsis")
            text.append(f"{row['after']:>9}  {row['step']:<12}  ", style="dim")
            text.append(f"{printable(row['title'])} ", style=_TONES.get(row["tone"], "bold"))
            text.append(printable(f"{rank}{row['sentence']}"))
            lines.append(text)
        return lines


class _Ended(KeyboardInterrupt):
    """A signal asks this program to end; the terminal is restored first."""


@contextmanager
def _keys() -> Iterator[_Pressed]:
    """A context in which keys are read one by one, without waiting for the end of a line."""

    def end(signum: int, frame: FrameType | None) -> None:
        raise _Ended

    before = termios.tcgetattr(sys.stdin)
    handlers = {each: signal.signal(each, end) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        tty.setcbreak(sys.stdin)
        yield _Pressed()
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        for each, handler in handlers.items():
            signal.signal(each, handler)


class _Pressed:
    """The keys that were pressed during the last seconds."""

    def __call__(self, seconds: float) -> Sequence[str]:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([sys.stdin], [], [], left)[0]:
                text = os.read(sys.stdin.fileno(), 64).decode(errors="ignore")
                if not text:  # the terminal is gone
                    return ["q"]
                arrows = {"\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down"}
                return [arrows[text]] if text in arrows else list(text)
        return []
